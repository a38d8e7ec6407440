"""The exact search is the brute-force search, whatever the shards, tiles, ties and copies."""

import numpy as np
import pytest
import torch

from embeddings.common import InputError, OptionError
from embeddings.common.jobs import ArrayTask
from embeddings.mining import search as knn
from embeddings.mining.search import CoarseSearch, ExactSearch, build_ivf, rounding_error, sample_rows, topk_per_row
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
    # Fewer queries are compared at once than there are.
    monkeypatch.setattr(knn, "QUERY_CHUNK", 3)
    monkeypatch.setattr(knn, "_PRODUCT_SCORES", 80)
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
    assert len(COPIES) > knn.SLACK
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 8, 100, 384])
def test_no_document_scores_above_the_bound_of_its_score(dtype, width):
    queries, documents = unit_vectors(20, width), unit_vectors(600, width, seed=1)
    scan = CoarseSearch(queries, dtype)
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
    assert max(looseness) < (0.02 if dtype == torch.bfloat16 else 3 * rounding_error(width))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 5, 16, 47, 160, 1000, 1003])
@pytest.mark.parametrize("top_k", [1, 4, 30])
def test_the_largest_values_and_their_places(dtype, width, top_k):
    # bfloat16 makes many of them equal.
    score_QT = torch.randn(20, width, generator=torch.Generator().manual_seed(0)).to(dtype)
    top_k = min(top_k, width)
    values, places = map(torch.as_tensor, topk_per_row(score_QT, top_k))
    assert torch.equal(values.sort(descending=True).values, score_QT.float().sort(descending=True).values[:, :top_k])
    assert torch.equal(score_QT.float().gather(1, places), values)
    assert all(len(set(row)) == top_k for row in places.tolist())


@pytest.mark.parametrize("order", ["rising", "falling", "equal", "one column", "the rest"])
def test_wherever_the_largest_lie(order):
    width, top_k = 16 * 40 + 7, 9
    score_T = torch.zeros(width) if order == "equal" else torch.arange(float(width))
    if order == "falling":
        score_T = score_T.flip(0)
    elif order == "one column":
        score_T[3 : 16 * 40 : 40] += 1000
    elif order == "the rest":
        score_T[-7:] += 1000
    values, places = topk_per_row(score_T[None], top_k)
    assert sorted(values[0].tolist()) == score_T.sort().values[-top_k:].tolist()
    assert score_T[torch.as_tensor(places[0])].tolist() == values[0].tolist()
    assert len(set(places[0].tolist())) == top_k


def clustered(count, seed=0, width=16, centres=20):
    """Vectors around a few centres, as those of texts are."""
    centre = unit_vectors(centres, width)[np.random.default_rng(seed).integers(0, centres, count)]
    vectors = centre + 0.6 * unit_vectors(count, width, seed=seed + 1)
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def recall(found, exact):
    return np.mean([len(set(a) & set(b)) / len(b) for a, b in zip(found.tolist(), exact.tolist(), strict=True)])


def test_recall_at_10_rises_with_the_probes_and_reaches_all(tmp_path):
    documents, queries = shards(tmp_path / "documents", clustered(2000), 700), clustered(100, seed=5)
    exact = ExactSearch(documents).search(queries, 10)
    reached = []
    for num_probes in (1, 4, 16):
        search = build_ivf(documents, tmp_path / "ivf", num_probes=num_probes, num_lists=16)
        found = search.search(queries, 10)
        reached.append(recall(found.index_QK, exact.index_QK))
    assert reached[0] > 0.4
    assert reached[1] > 0.9
    np.testing.assert_array_equal(found.index_QK, exact.index_QK)
    np.testing.assert_array_equal(found.score_QK, exact.score_QK)


def test_tasks_and_tiles_change_nothing(tmp_path, monkeypatch):
    documents, queries = shards(tmp_path / "documents", clustered(500), 64), clustered(20, seed=5)
    whole = build_ivf(documents, tmp_path / "whole", num_probes=3, num_lists=10).search(queries, 5)
    for index in (1, 0):
        parts = build_ivf(documents, tmp_path / "parts", num_probes=3, num_lists=10, task=ArrayTask(index, 2))
    for name in ("centroids", "lists"):
        for path in (tmp_path / "whole" / name).glob("*.npy"):
            assert path.read_bytes() == (tmp_path / "parts" / name / path.name).read_bytes()
    monkeypatch.setattr(knn, "TILE_BYTES", 64 * 100)
    monkeypatch.setattr(knn, "QUERY_CHUNK", 7)
    found = parts.search(queries, 5)
    np.testing.assert_array_equal(found.index_QK, whole.index_QK)
    np.testing.assert_array_equal(found.score_QK, whole.score_QK)


def test_a_gpu_returns_so_many_documents_of_lists(tmp_path):
    search = build_ivf(shards(tmp_path / "documents", clustered(100), 50), tmp_path / "ivf")
    search.gpu = True
    with pytest.raises(OptionError, match="top_k must be <= 2032 on a GPU, got 2033"):
        search.search(clustered(2), 2033)


def test_where_the_lists_hold_too_few_the_rest_is_minus_one(tmp_path):
    documents = shards(tmp_path / "documents", clustered(30), 30)
    found = build_ivf(documents, tmp_path / "ivf", num_probes=1, num_lists=10).search(clustered(5, seed=5), 20)
    missing = found.index_QK < 0
    assert missing.any()
    assert np.isneginf(found.score_QK[missing]).all()
    assert (np.diff(missing.astype(int), axis=1) >= 0).all()
    assert np.isfinite(found.score_QK[~missing]).all()


@pytest.mark.parametrize(("count", "lists"), [(10, 1), (200, 5), (2000, 51)])
def test_the_default_number_of_lists_suits_the_documents(count, lists, tmp_path):
    documents = shards(tmp_path / "documents", clustered(count), 512)
    search = build_ivf(documents, tmp_path / "ivf")
    assert len(search.centroid_CD) == lists
    assert search.num_probes == min(lists, knn.PROBES)
    np.testing.assert_allclose(np.linalg.norm(search.centroid_CD, axis=1), 1, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"num_lists": 31}, "num_lists must lie in 1 … 30"),
        ({"num_lists": 4, "num_probes": 5}, "num_probes must lie in"),
    ],
)
def test_impossible_numbers_are_refused_before_anything_is_written(options, says, tmp_path):
    with pytest.raises(OptionError, match=says):
        build_ivf(shards(tmp_path / "documents", clustered(30), 8), tmp_path / "ivf", **options)
    assert not (tmp_path / "ivf").exists()


def test_a_vector_without_direction_is_named_even_if_it_is_in_no_sample(tmp_path):
    vectors = clustered(300)
    sampled = set(sample_rows(300, 1, 0).tolist())
    row = next(row for row in range(8, 300) if row not in sampled)
    vectors[row] = np.nan
    with pytest.raises(InputError, match=rf"vectors-{row // 8:05d}\.npy:{row % 8}: the vector is not finite"):
        build_ivf(shards(tmp_path / "documents", vectors, 8), tmp_path / "ivf", num_lists=1)
