"""Search is exact, whatever the tiles."""

import numpy as np
import pytest

from embeddings.common import OptionError
from embeddings.inference import search
from embeddings.inference.search import search_top_k
from embeddings.inference.vectors import unit_rows


def whole_numbers(rows, width=4, seed=0, largest=3):
    """Vectors whose inner products are exact in float32, with many ties."""
    return np.random.default_rng(seed).integers(-largest, largest + 1, (rows, width)).astype(np.float32)


def by_hand(query_QD, document_ND, top_k):
    """The reference: every inner product, sorted by score, then by row."""
    found = []
    for query in query_QD:
        scores = [(-float(np.dot(query, document)), row) for row, document in enumerate(document_ND)]
        found.append(sorted(scores)[:top_k])
    return [[-score for score, _ in row] for row in found], [[row for _, row in best] for best in found]


@pytest.mark.parametrize("tile", [1, 3, 50, 1000])
@pytest.mark.parametrize("top_k", [1, 2, 7, 50, 60])
def test_every_tile_and_k_gives_the_sorted_list_with_ties_by_row(tile, top_k, monkeypatch):
    monkeypatch.setattr(search, "DOCUMENT_TILE", tile)
    monkeypatch.setattr(search, "QUERY_TILE", max(1, tile // 2))
    query_QD, document_ND = whole_numbers(9), whole_numbers(50, seed=1)
    found = search_top_k(query_QD, document_ND, top_k)
    scores, rows = by_hand(query_QD, document_ND, top_k)
    assert found.score_QK.dtype == np.float32
    assert found.index_QK.dtype == np.int64
    assert found.index_QK.tolist() == rows
    assert found.score_QK.tolist() == scores


def test_one_score_for_all_documents_gives_the_first_ones():
    found = search_top_k(np.ones((2, 3), np.float32), np.ones((40, 3), np.float32), 5)
    assert found.index_QK.tolist() == [[0, 1, 2, 3, 4]] * 2


def test_pieces_that_follow_one_another_are_one_corpus():
    query_QD, document_ND = whole_numbers(5), whole_numbers(23, seed=1)
    pieces = [document_ND[:7], document_ND[7:7], document_ND[7:8], document_ND[8:]]
    whole, parts = search_top_k(query_QD, document_ND, 6), search_top_k(query_QD, iter(pieces), 6)
    np.testing.assert_array_equal(whole.index_QK, parts.index_QK)
    np.testing.assert_array_equal(whole.score_QK, parts.score_QK)


def test_memory_mapped_documents_are_searched(tmp_path):
    document_ND = whole_numbers(11)
    np.save(tmp_path / "vectors.npy", document_ND)
    found = search_top_k(document_ND[:2], np.load(tmp_path / "vectors.npy", mmap_mode="r"), 3)
    np.testing.assert_array_equal(found.index_QK, search_top_k(document_ND[:2], document_ND, 3).index_QK)


@pytest.mark.parametrize(("num_queries", "num_documents"), [(0, 5), (0, 0), (3, 0)])
def test_nothing_to_search_gives_empty_rows(num_queries, num_documents):
    found = search_top_k(whole_numbers(num_queries), whole_numbers(num_documents), 4)
    assert found.score_QK.shape == found.index_QK.shape == (num_queries, min(4, num_documents))


@pytest.mark.parametrize("top_k", [0, -1])
def test_k_must_be_positive(top_k):
    with pytest.raises(OptionError, match="top_k must be >= 1"):
        search_top_k(whole_numbers(1), whole_numbers(1), top_k)


def test_unit_rows_have_length_one_and_zero_stays_zero():
    vectors = np.array([[3.0, 4.0], [0.0, 0.0], [-2.0, 0.0]], np.float32)
    np.testing.assert_allclose(unit_rows(vectors), [[0.6, 0.8], [0.0, 0.0], [-1.0, 0.0]], rtol=1e-6)
    assert vectors[0, 0] == 3.0
