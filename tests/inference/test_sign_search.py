"""A search by signs finds what a loop over all bits finds, whatever the tiles and shards."""

import numpy as np
import pytest

from embeddings.common import InputError, OptionError
from embeddings.inference import search as module
from embeddings.inference.search import nearest_signs, search_signs
from embeddings.inference.vectors import VectorShards, save_vectors, sign_bits, unit_rows


def some_vectors(rows, width=24, seed=0):
    return unit_rows(np.random.default_rng(seed).standard_normal((rows, width)).astype(np.float32))


def shards(folder, vectors, shard_size=7):
    found = VectorShards(folder, len(vectors), vectors.shape[1], shard_size, "binary")
    for shard in range(found.num_shards):
        save_vectors(found.path(shard), sign_bits(vectors[shard * shard_size : (shard + 1) * shard_size]))
    return found


def nearest_by_hand(query, documents, top_k):
    """Every document's differing signs, counted one by one, sorted by their number, then by row."""
    keys = [(sum((a > 0) != (b > 0) for a, b in zip(query, row, strict=True)), n) for n, row in enumerate(documents)]
    return sorted(keys)[:top_k]


def search_by_hand(query, documents, top_k, multiplier):
    scored = []
    for _, row in nearest_by_hand(query, documents, top_k * multiplier):
        dot = sum(float(number) * (1 if other > 0 else -1) for number, other in zip(query, documents[row], strict=True))
        scored.append((-float(np.float32(dot / len(query) ** 0.5)), row))
    best = sorted(scored)[:top_k]
    return [-score for score, _ in best], [row for _, row in best]


@pytest.mark.parametrize("width", [8, 24, 64, 136])
@pytest.mark.parametrize(("tile", "top_k"), [(1, 1), (3, 7), (3, 40), (50, 7), (50, 60), (1000, 40)])
def test_distances_and_ties_equal_a_count_by_hand(width, tile, top_k, monkeypatch):
    monkeypatch.setattr(module, "DOCUMENT_TILE", tile)
    monkeypatch.setattr(module, "_QUERIES", max(1, tile // 2))
    queries, documents = some_vectors(6, width, 1), some_vectors(50, width)
    documents[40:44] = documents[3]
    pieces = [sign_bits(documents[start:stop]) for start, stop in ((0, 11), (11, 11), (11, 50))]
    found = nearest_signs(sign_bits(queries), iter(pieces), top_k)
    assert (found.distance_QK.dtype, found.index_QK.dtype) == (np.int64, np.int64)
    for query, distances, rows in zip(queries, found.distance_QK.tolist(), found.index_QK.tolist(), strict=True):
        assert list(zip(distances, rows, strict=True)) == nearest_by_hand(query, documents, top_k)


@pytest.mark.parametrize("shard_size", [1, 7, 100])
@pytest.mark.parametrize(("top_k", "multiplier"), [(1, 1), (5, 1), (5, 4), (3, 100), (60, 4)])
def test_scores_and_order_equal_a_loop_by_hand(shard_size, top_k, multiplier, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_QUERIES", 4)
    queries, documents = some_vectors(9, seed=1), some_vectors(40)
    documents[[30, 20]] = documents[10]
    found = search_signs(queries, shards(tmp_path, documents, shard_size), top_k, multiplier)
    assert (found.score_QK.dtype, found.index_QK.dtype) == (np.float32, np.int64)
    assert found.index_QK.shape == (9, min(top_k, 40))
    for query, scores, rows in zip(queries, found.score_QK.tolist(), found.index_QK.tolist(), strict=True):
        by_hand = search_by_hand(query, documents, top_k, multiplier)
        assert rows == by_hand[1]
        np.testing.assert_allclose(scores, by_hand[0], rtol=1e-6)


def test_rescoring_more_candidates_comes_nearer_to_scoring_all(tmp_path):
    queries, documents = some_vectors(50, 64, 1), some_vectors(2000, 64)
    exact = np.argsort(-(queries @ (np.sign(documents).T / 8)), axis=1)[:, :10]
    kept = []
    for multiplier in (1, 4, 200):
        found = search_signs(queries, shards(tmp_path, documents, 900), 10, multiplier).index_QK
        kept.append(np.mean([len(set(a) & set(b)) for a, b in zip(found.tolist(), exact.tolist(), strict=True)]) / 10)
    assert kept[0] < kept[1] < kept[2] == 1.0


def test_documents_with_the_same_signs_come_in_their_order(tmp_path):
    documents = np.repeat(some_vectors(1), 40, axis=0)
    found = search_signs(some_vectors(3, seed=1), shards(tmp_path, documents), 5, 2)
    assert found.index_QK.tolist() == [[0, 1, 2, 3, 4]] * 3


def test_edges_one_row_no_query_no_document_and_a_query_of_zeros(tmp_path):
    one = shards(tmp_path, some_vectors(1))
    assert search_signs(some_vectors(2), one, 10).index_QK.tolist() == [[0], [0]]
    assert search_signs(some_vectors(0), one, 10).score_QK.shape == (0, 1)
    assert search_signs(some_vectors(3), shards(tmp_path, some_vectors(0)), 10).index_QK.shape == (3, 0)
    documents = -np.abs(some_vectors(9))
    zeros = search_signs(np.zeros((1, 24), np.float32), shards(tmp_path, documents), 3)
    assert (zeros.score_QK.tolist(), zeros.index_QK.tolist()) == ([[0, 0, 0]], [[0, 1, 2]])


def test_numbers_that_are_not_positive_are_refused_and_a_damaged_shard_is_named(tmp_path):
    documents = shards(tmp_path, some_vectors(9))
    with pytest.raises(OptionError, match=r"top_k must be >= 1, got -1"):
        search_signs(some_vectors(1), documents, -1)
    with pytest.raises(OptionError, match="rescore_multiplier must be >= 1, got 0; leave it out for 4"):
        search_signs(some_vectors(1), documents, 1, 0)
    with pytest.raises(OptionError, match="top_k must be >= 1"):
        nearest_signs(sign_bits(some_vectors(1)), [], 0)
    np.save(documents.path(1), np.zeros((2, 24), np.float32))
    with pytest.raises(InputError, match=r"vectors-00001\.npy: holds float32 of shape \(2, 24\), expected uint8 of"):
        search_signs(some_vectors(1), documents, 1)
