"""The exact search is the brute-force search, whatever the shards, tiles, ties and copies."""

import numpy as np
import pytest

from embeddings.common import InputError, OptionError
from embeddings.inference.vectors import save_vectors
from embeddings.mining import search as knn
from embeddings.mining.search import ExactSearch, pair_scores, tiles
from tests.mining.vectors import brute_force, shards, unit_vectors

COPIES = [(row, 3) for row in range(10, 60, 2)]


@pytest.fixture(params=[True, False], ids=["bfloat16", "float32"], autouse=True)
def has_bfloat16(request, monkeypatch):
    """Whether the processor seems to multiply bfloat16."""
    monkeypatch.setattr(knn, "has_native_bfloat16", lambda device: request.param)
    return request.param


@pytest.mark.parametrize(
    ("shard_size", "tile_bytes"), [(1, 32 * 7), (9, 1), (9, 32 * 7), (64, 32 * 7), (1000, 48 << 20)]
)
def test_the_search_equals_a_loop_over_all_pairs(shard_size, tile_bytes, tmp_path, monkeypatch):
    monkeypatch.setattr(knn, "TILE_BYTES", tile_bytes)
    documents, queries = unit_vectors(64, copies=[(5, 9), (63, 0)]), unit_vectors(7, seed=1)
    search = ExactSearch(shards(tmp_path, documents, shard_size))
    for top_k in (1, 5, 48, 64, 100):
        found = search.search(queries, top_k)
        scores, rows = brute_force(queries, documents, top_k)
        assert found.index_QK.tolist() == rows
        np.testing.assert_array_equal(found.score_QK, np.array(scores, np.float32))


@pytest.mark.parametrize("top_k", [1, 3, 20, 40])
def test_more_equal_documents_than_the_slack_holds_are_ordered_by_row(top_k, tmp_path, monkeypatch):
    documents = unit_vectors(70, copies=COPIES)
    assert len(COPIES) > knn.GPU_SLACK
    queries = np.concatenate([documents[3:4], -documents[3:4], unit_vectors(70, seed=2)])
    found, among_all = [], []
    again = ExactSearch._among_all
    monkeypatch.setattr(ExactSearch, "_among_all", lambda self, q, *a: among_all.append(len(q)) or again(self, q, *a))
    for shard_size, tile_bytes in ((70, 48 << 20), (4, 32 * 5)):
        monkeypatch.setattr(knn, "TILE_BYTES", tile_bytes)
        search = ExactSearch(shards(tmp_path / str(shard_size), documents, shard_size))
        found.append(search.search(queries, top_k))
    assert among_all or top_k >= 20
    assert found[0].index_QK.tolist() == found[1].index_QK.tolist() == brute_force(queries, documents, top_k)[1]
    np.testing.assert_array_equal(found[0].score_QK, found[1].score_QK)


def test_both_scans_lead_to_the_same_bits_without_a_second_look_at_most_queries(tmp_path, monkeypatch, has_bfloat16):
    documents, queries = shards(tmp_path, unit_vectors(3000, 64), 999), unit_vectors(50, 64, seed=1)
    scanned = []
    scan = ExactSearch._scanned
    monkeypatch.setattr(ExactSearch, "_scanned", lambda self, of, q, k: scanned.append(len(q)) or scan(self, of, q, k))
    found = ExactSearch(documents).search(queries, 20)
    assert scanned[0] == 50
    assert sum(scanned[1:]) < 10
    all_scores = (queries.astype(np.float64) @ np.concatenate(list(documents)).T.astype(np.float64)).astype(np.float32)
    np.testing.assert_array_equal(found.score_QK, -np.sort(-all_scores, axis=1)[:, :20])
    np.testing.assert_array_equal(np.take_along_axis(all_scores, found.index_QK, axis=1), found.score_QK)


def test_a_query_alone_has_the_scores_it_has_among_others(tmp_path):
    documents, queries = unit_vectors(300, 33), unit_vectors(65, 33, seed=1)
    search = ExactSearch(shards(tmp_path, documents, 128))
    together = search.search(queries, 10)
    for query in (0, 31, 64):
        alone = search.search(queries[query : query + 1], 10)
        np.testing.assert_array_equal(alone.score_QK[0], together.score_QK[query])
        np.testing.assert_array_equal(alone.index_QK[0], together.index_QK[query])


def test_more_queries_than_a_call_of_faiss_takes(tmp_path, monkeypatch):
    monkeypatch.setattr(knn, "QUERY_CHUNK", 3)
    documents, queries = unit_vectors(40), unit_vectors(8, seed=1)
    found = ExactSearch(shards(tmp_path, documents, 16)).search(queries, 4)
    assert found.index_QK.tolist() == brute_force(queries, documents, 4)[1]


def test_a_gpu_is_asked_in_its_own_call(tmp_path, monkeypatch):
    documents, queries = unit_vectors(40), unit_vectors(3, seed=1)
    calls = []

    class Build:
        METRIC_INNER_PRODUCT = 0
        StandardGpuResources = object

        @staticmethod
        def knn_gpu(resources, queries, documents, top_k, metric):
            calls.append(len(documents))
            assert type(resources) is object
            order = np.argsort(-queries @ documents.T, axis=1)[:, :top_k]
            return np.take_along_axis(queries @ documents.T, order, axis=1), order

    monkeypatch.setattr(knn, "load_faiss", lambda gpu: Build if gpu else pytest.fail("the processor was asked"))
    search = ExactSearch(shards(tmp_path, documents, 16), gpu=True)
    assert search.search(queries, 4).index_QK.tolist() == brute_force(queries, documents, 4)[1]
    assert calls == [40]
    with pytest.raises(OptionError, match="top_k must be <= 2032 on a GPU, got 2033"):
        search.search(queries, 2033)


@pytest.mark.parametrize("size", [1, 3, 100])
def test_tiles_hold_all_rows_once_in_order(size, tmp_path, monkeypatch):
    monkeypatch.setattr(knn, "TILE_BYTES", 32 * size)
    documents = unit_vectors(11)
    found = [(first, tile.copy()) for first, tile in tiles(shards(tmp_path, documents, 4))]
    assert [first for first, _ in found] == list(range(0, 11, size))
    np.testing.assert_array_equal(np.concatenate([tile for _, tile in found]), documents)


def test_pairs_are_scored_in_the_order_given(tmp_path):
    documents, queries = unit_vectors(30), unit_vectors(4, seed=1)
    generator = np.random.default_rng(0)
    query, row = generator.integers(0, 4, 1200), generator.integers(0, 30, 1200)
    expected = np.einsum("pd,pd->p", queries[query].astype(np.float64), documents[row]).astype(np.float32)
    np.testing.assert_array_equal(pair_scores(queries, query, row, shards(tmp_path, documents, 7)), expected)
    assert pair_scores(queries, query[:0], row[:0], shards(tmp_path, documents, 7)).shape == (0,)


@pytest.mark.parametrize(
    ("value", "kind"), [(0, "zero"), (np.nan, "not finite"), (np.inf, "not finite"), (2, "of length")]
)
def test_a_document_without_direction_is_named(value, kind, tmp_path):
    documents = unit_vectors(10)
    documents[5] = value
    with pytest.raises(InputError, match=rf"vectors-00001\.npy:1: the vector is {kind}"):
        ExactSearch(shards(tmp_path, documents, 4)).search(unit_vectors(2), 3)


def test_queries_that_do_not_fit_are_refused(tmp_path):
    search = ExactSearch(shards(tmp_path, unit_vectors(10), 4))
    with pytest.raises(InputError, match="holds vectors of width 8, the queries' is 5"):
        search.search(unit_vectors(2, 5), 3)
    with pytest.raises(InputError, match="query vectors:1: the vector is zero"):
        search.search(unit_vectors(2) * np.array([[1], [0]], np.float32), 3)
    with pytest.raises(OptionError, match="top_k must be >= 1"):
        search.search(unit_vectors(2), 0)


def test_an_empty_shard_is_refused(tmp_path):
    documents = shards(tmp_path, unit_vectors(10), 4)
    save_vectors(documents.path(1), np.empty((0, 8), np.float32))
    with pytest.raises(InputError, match=r"vectors-00001\.npy"):
        ExactSearch(documents).search(unit_vectors(2), 3)
