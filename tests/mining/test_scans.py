"""A scan's bound holds for every document that it leaves out, and is not much wider than it must be."""

import numpy as np
import pytest

from embeddings.mining.faiss_library import load_faiss
from embeddings.mining.search import Bfloat16Scan, FaissScan, rounding_error
from tests.mining.vectors import unit_vectors

SCANS = {"float32": lambda queries: FaissScan(load_faiss(), None, queries), "bfloat16": Bfloat16Scan}


@pytest.mark.parametrize("name", SCANS)
@pytest.mark.parametrize("width", [1, 8, 100, 384])
def test_no_document_scores_above_the_bound_of_its_score(name, width):
    queries, documents = unit_vectors(20, width), unit_vectors(600, width, seed=1)
    scan = SCANS[name](queries)
    true_QN = queries.astype(np.float64) @ documents.T.astype(np.float64)
    looseness = []
    for first_row in (0, 300):
        scores, rows = scan(slice(0, 20), first_row, documents[first_row : first_row + 300], 300)
        assert (np.sort(rows, axis=1) == np.arange(first_row, first_row + 300)).all()
        for place in range(300):
            excess = (
                scan.bound(scores[:, place]) - np.take_along_axis(true_QN, rows[:, place : place + 1], axis=1)[:, 0]
            )
            assert excess.min() >= 0
            looseness.append(excess.max())
    assert max(looseness) < (0.02 if name == "bfloat16" else 3 * rounding_error(width))


@pytest.mark.parametrize("name", SCANS)
def test_a_tile_gives_its_best_documents_for_each_chunk(name):
    queries, documents = unit_vectors(9, 32), unit_vectors(200, 32, seed=1)
    scan = SCANS[name](queries)
    for chunk in (slice(0, 4), slice(4, 9)):
        scores, rows = scan(chunk, 1000, documents, 30)
        exact = queries[chunk] @ documents.T
        best = np.sort(exact, axis=1)[:, -20]
        for query, found in enumerate(rows - 1000):
            assert set(np.flatnonzero(exact[query] > best[query] + 0.01)) <= set(found.tolist())
            np.testing.assert_allclose(scores[query], exact[query][found], atol=0.01)
    assert scan.width(10) > 10
