"""The exact search equals brute force for all shards, tiles, ties, copies and devices."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from embeddings.common import InputError, OptionError
from embeddings.common.jobs import ArrayTask
from embeddings.inference.vectors import VectorShards
from embeddings.mining import gpu_search
from embeddings.mining import search as knn
from embeddings.mining.gpu_search import GpuSearch, exact_products, search_sizes
from embeddings.mining.search import CoarseSearch, ExactSearch, build_ivf, rounding_error, sample_rows, topk_per_row
from tests.helpers.refusals import refused
from tests.mining.vectors import brute_force, shards, unit_vectors

CPU = torch.device("cpu")
COPIES = [(row, 3) for row in range(10, 60, 2)]


@pytest.fixture(params=["bfloat16", "float32", "gpu"])
def exact(request, monkeypatch):
    """The exact search on a CPU with and without bfloat16, and the GPU's search, here on the CPU."""
    monkeypatch.setattr(knn, "has_native_bfloat16", lambda device: request.param == "bfloat16")
    return partial(GpuSearch, device=CPU) if request.param == "gpu" else ExactSearch


def assert_same(found, expected):
    """The same rows, and the same bits of the scores."""
    np.testing.assert_array_equal(found.index_QK, expected.index_QK)
    np.testing.assert_array_equal(found.score_QK, expected.score_QK)


@pytest.mark.parametrize(
    ("shard_size", "tile_bytes"), [(1, 32 * 7), (9, 1), (9, 32 * 7), (64, 32 * 7), (1000, 48 << 20)]
)
def test_the_search_equals_a_loop_over_all_pairs(shard_size, tile_bytes, exact, tmp_path, monkeypatch):
    monkeypatch.setattr(knn, "TILE_BYTES", tile_bytes)
    # The queries need several chunks.
    monkeypatch.setattr(knn, "QUERY_CHUNK", 3)
    monkeypatch.setattr(knn, "_PRODUCT_SCORES", 80)
    documents, queries = unit_vectors(64, copies=[(5, 9), (63, 0)]), unit_vectors(7, seed=1)
    search = exact(shards(tmp_path, documents, shard_size))
    for top_k in (1, 5, 48, 64, 100):
        found = search.search(queries, top_k)
        scores, rows = brute_force(queries, documents, top_k)
        assert found.index_QK.tolist() == rows
        np.testing.assert_array_equal(found.score_QK, np.array(scores, np.float32))


@pytest.mark.parametrize("top_k", [1, 3, 20, 40])
def test_more_equal_documents_than_the_slack_are_ordered_by_row(top_k, exact, tmp_path, monkeypatch):
    documents = unit_vectors(70, copies=COPIES)
    assert len(COPIES) > knn.SLACK
    queries = np.concatenate([documents[3:4], -documents[3:4], unit_vectors(70, seed=2)])
    found, among_all = [], []
    again = ExactSearch._among_all
    monkeypatch.setattr(ExactSearch, "_among_all", lambda self, q, *a: among_all.append(len(q)) or again(self, q, *a))
    for shard_size, tile_bytes in ((70, 48 << 20), (4, 32 * 5)):
        monkeypatch.setattr(knn, "TILE_BYTES", tile_bytes)
        search = exact(shards(tmp_path / str(shard_size), documents, shard_size))
        found.append(search.search(queries, top_k))
    assert among_all or top_k >= 20
    assert found[0].index_QK.tolist() == brute_force(queries, documents, top_k)[1]
    assert_same(found[0], found[1])


def test_a_quick_scan_leaves_few_queries_in_doubt_and_changes_no_bit(exact, tmp_path, monkeypatch):
    documents, queries = shards(tmp_path, unit_vectors(3000, 64), 999), unit_vectors(50, 64, seed=1)
    search, scanned = exact(documents), []
    scan = search._scanned
    monkeypatch.setattr(search, "_scanned", lambda of, q, k: scanned.append(len(q)) or scan(of, q, k))
    found = search.search(queries, 20)
    assert scanned[0] == 50
    assert sum(scanned[1:]) < 10
    all_scores = (queries.astype(np.float64) @ np.concatenate(list(documents)).T.astype(np.float64)).astype(np.float32)
    np.testing.assert_array_equal(found.score_QK, -np.sort(-all_scores, axis=1)[:, :20])
    np.testing.assert_array_equal(np.take_along_axis(all_scores, found.index_QK, axis=1), found.score_QK)


@pytest.mark.parametrize(("value", "kind"), [(0, "zero"), (np.nan, "not finite"), (2, "of length")])
def test_an_invalid_document_vector_is_named(value, kind, exact, tmp_path):
    documents = unit_vectors(10)
    documents[5] = value
    with pytest.raises(InputError, match=rf"vectors-00001\.npy:1: the vector is {kind}"):
        exact(shards(tmp_path, documents, 4)).search(unit_vectors(2), 3)


def test_invalid_queries_are_refused(exact, tmp_path):
    search = exact(shards(tmp_path, unit_vectors(10), 4))
    refused(InputError, "contains vectors of width 8, the queries' is 5", search.search, unit_vectors(2, 5), 3)
    with pytest.raises(InputError, match="query vectors:1: the vector is zero"):
        search.search(unit_vectors(2) * np.array([[1], [0]], np.float32), 3)
    refused(OptionError, "top_k must be >= 1", search.search, unit_vectors(2), 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 8, 100, 384])
def test_no_document_scores_above_the_bound_of_its_score(dtype, width):
    queries, documents = unit_vectors(20, width), unit_vectors(600, width, seed=1)
    scan = CoarseSearch(queries, dtype)
    true_QN = queries.astype(np.float64) @ documents.T.astype(np.float64)
    looseness = []
    for first_row in (0, 300):
        scores, rows = scan(first_row, documents[first_row : first_row + 300])(slice(0, 20), 300)
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
    # In bfloat16 many of them are equal.
    score_QT = torch.randn(20, width, generator=torch.Generator().manual_seed(0)).to(dtype)
    top_k = min(top_k, width)
    values, places = map(torch.as_tensor, topk_per_row(score_QT, top_k))
    assert torch.equal(values.sort(descending=True).values, score_QT.float().sort(descending=True).values[:, :top_k])
    assert torch.equal(score_QT.float().gather(1, places), values)
    assert all(len(set(row)) == top_k for row in places.tolist())


@pytest.mark.parametrize("order", ["rising", "falling", "equal", "one column", "the rest"])
def test_the_largest_values_are_found_at_any_position(order):
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
    """Vectors around a few centres, like those of texts."""
    centre = unit_vectors(centres, width)[np.random.default_rng(seed).integers(0, centres, count)]
    vectors = centre + 0.6 * unit_vectors(count, width, seed=seed + 1)
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def test_recall_at_10_rises_with_the_probes_and_reaches_all(tmp_path):
    documents, queries = shards(tmp_path / "documents", clustered(2000), 700), clustered(100, seed=5)
    exact = ExactSearch(documents).search(queries, 10)
    reached = []
    for num_probes in (1, 4, 16):
        found = build_ivf(documents, tmp_path / "ivf", num_probes=num_probes, num_lists=16).search(queries, 10)
        pairs = zip(found.index_QK.tolist(), exact.index_QK.tolist(), strict=True)
        reached.append(np.mean([len(set(rows) & set(best)) / 10 for rows, best in pairs]))
    assert reached[0] > 0.4
    assert reached[1] > 0.9
    assert_same(found, exact)


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
    assert_same(parts.search(queries, 5), whole)


def test_a_top_k_beyond_the_limit_of_faiss_on_a_gpu_is_refused(tmp_path):
    search = build_ivf(shards(tmp_path / "documents", clustered(100), 50), tmp_path / "ivf")
    search.gpu = True
    refused(OptionError, "top_k must be <= 2032 on a GPU, got 2033", search.search, clustered(2), 2033)


def test_missing_documents_are_minus_one(tmp_path):
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
        ({"num_lists": 31}, "num_lists must be between 1 and the 30 documents"),
        ({"num_lists": 4, "num_probes": 5}, "num_probes must be between"),
    ],
)
def test_invalid_numbers_are_refused_before_anything_is_written(options, says, tmp_path):
    refused(OptionError, says, build_ivf, shards(tmp_path / "documents", clustered(30), 8), tmp_path / "ivf", **options)
    assert not (tmp_path / "ivf").exists()


def test_an_invalid_vector_outside_the_sample_is_named(tmp_path):
    vectors = clustered(300)
    sampled = set(sample_rows(300, 1, 0).tolist())
    row = next(row for row in range(8, 300) if row not in sampled)
    vectors[row] = np.nan
    with pytest.raises(InputError, match=rf"vectors-{row // 8:05d}\.npy:{row % 8}: the vector is not finite"):
        build_ivf(shards(tmp_path / "documents", vectors, 8), tmp_path / "ivf", num_lists=1)


def set_sizes(monkeypatch, tile_rows, pass_queries, product_queries, num_pairs, is_resident):
    """Set the block sizes of searches."""
    sizes = gpu_search.SearchSizes(is_resident, tile_rows, pass_queries, product_queries, num_pairs, 0)
    monkeypatch.setattr(gpu_search, "search_sizes", lambda *_: sizes)


@pytest.mark.parametrize("is_resident", [True, False], ids=["kept", "streamed"])
@pytest.mark.parametrize(("tile_rows", "queries", "at_once", "pairs"), [(1, 1, 1, 1), (7, 5, 2, 3), (64, 7, 7, 9999)])
def test_all_block_sizes_give_the_results_of_a_loop_over_all_pairs(
    tile_rows, queries, at_once, pairs, is_resident, tmp_path, monkeypatch
):
    documents, query_QD = unit_vectors(64, copies=[(5, 9), (63, 0)]), unit_vectors(7, seed=1)
    stored = shards(tmp_path, documents, 9)
    set_sizes(monkeypatch, tile_rows, queries, at_once, pairs, is_resident)
    search = GpuSearch(stored, device=CPU)
    for top_k in (1, 5, 30, 64, 100):
        found = search.search(query_QD, top_k)
        assert found.index_QK.tolist() == brute_force(query_QD, documents, top_k)[1]
        assert_same(found, ExactSearch(stored).search(query_QD, top_k))


@pytest.mark.parametrize("is_resident", [True, False], ids=["kept", "streamed"])
def test_float16_vectors_stay_float16_on_the_device(is_resident, tmp_path, monkeypatch):
    halves = unit_vectors(300, 32).astype(np.float16)
    shards(tmp_path, halves, 40)
    documents = VectorShards(tmp_path, 300, 32, 40, "float16")
    set_sizes(monkeypatch, 64, 9, 4, 100, is_resident)
    search, query_QD = GpuSearch(documents, device=CPU), unit_vectors(9, 32, seed=1)
    assert_same(search.search(query_QD, 12), ExactSearch(documents).search(query_QD, 12))
    assert [tile.dtype for tile in search._resident] == [torch.float16] * (5 if is_resident else 0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("width", [1, 8, 384])
def test_no_document_scores_above_the_bound_of_a_gpus_score(dtype, width):
    query_QD, document_ND = unit_vectors(20, width), unit_vectors(600, width, seed=1)
    quick_QN = (torch.from_numpy(query_QD).to(dtype) @ torch.from_numpy(document_ND).to(dtype).T).float().numpy()
    error = gpu_search._float16_error(width) if dtype == torch.float16 else 0.0
    for vectors in (query_QD, document_ND):
        assert np.linalg.norm(vectors - vectors.astype(np.float16).astype(np.float32), axis=1).max() <= max(error, 1e-3)
    true_QN = query_QD.astype(np.float64) @ document_ND.T.astype(np.float64)
    excess_QN = gpu_search.score_bound(quick_QN, error, error, width, dtype) - true_QN
    assert excess_QN.min() >= 0
    assert excess_QN.max() < 0.004


def test_products_are_exact_inside_the_context_only():
    matmul = torch.backends.cuda.matmul
    torch.set_float32_matmul_precision("high")
    try:
        with exact_products():
            assert torch.get_float32_matmul_precision() == "highest"
            assert not matmul.allow_fp16_reduced_precision_reduction
        assert torch.get_float32_matmul_precision() == "high"
        assert matmul.allow_fp16_reduced_precision_reduction
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize(
    ("millions", "dtype", "memory", "stays"),
    [(10, "float16", 16, False), (10, "float16", 20, True), (10, "float32", 40, True), (100, "float16", 64, False)],
)
def test_the_sizes_that_the_documentation_states(millions, dtype, memory, stays):
    """100M documents of width 768 take 154 GB in float16."""
    size, width = np.dtype(dtype).itemsize, gpu_search.kept_documents(200)
    vectors = millions * 10**6 * 768 * size
    sizes = search_sizes(millions * 10**6, 768, size, width, 65_536, memory)
    assert sizes.is_resident == stays
    assert vectors * stays < sizes.num_bytes <= memory * 2**30
    assert 2000 < sizes.product_queries < 65_535
    takes, documents = f"{sizes.num_bytes / 2**30:.1f} GiB", "on the device" if stays else "streamed"
    row = f"| {millions}M, {dtype} | {vectors / 1e9:.1f} GB | {memory} GiB | {takes} | {documents} |"
    assert row in (Path(__file__).parents[2] / "docs" / "mining.md").read_text().splitlines()


@pytest.mark.parametrize("width", [17, 266, 5000])
@pytest.mark.parametrize("memory", [0.03, 0.2, 1, 16, 70])
def test_block_sizes_fit_any_accepted_memory(memory, width):
    sizes = search_sizes(10**6, 1024, 4, width, 50_000, memory)
    assert sizes.num_bytes <= memory * 2**30
    assert min(sizes.tile_rows, sizes.pass_queries, sizes.product_queries, sizes.num_pairs) >= 1


def test_too_little_memory_is_refused_with_the_minimum(tmp_path):
    documents = shards(tmp_path, unit_vectors(300, 64), 100)
    search = GpuSearch(documents, 1e-5, CPU).search
    message = refused(OptionError, "gpu_memory_gib must be >= ", search, unit_vectors(2, 64), 20)
    minimum = float(message.split(">= ")[1].split()[0])
    found = GpuSearch(documents, minimum, CPU).search(unit_vectors(2, 64), 20)
    assert_same(found, ExactSearch(documents).search(unit_vectors(2, 64), 20))
    with pytest.raises(OptionError, match="gpu_memory_gib"):
        GpuSearch(documents, 0.99 * minimum, CPU).search(unit_vectors(2, 64), 20)


def test_a_missing_gpu_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refused(OptionError, "gpu needs a CUDA device", GpuSearch, shards(tmp_path, unit_vectors(10), 4))


@pytest.mark.gpu
@pytest.mark.parametrize("memory", [0.01, 4])
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_finds_the_same_within_its_memory(memory, tmp_path):
    documents, query_QD = shards(tmp_path, unit_vectors(30_000, 64), 999), unit_vectors(500, 64, seed=1)
    search = GpuSearch(documents, memory)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = search.search(query_QD, 20)
    assert torch.cuda.max_memory_allocated() - before <= search.sizes(500, 20).num_bytes <= memory * 2**30
    assert_same(found, ExactSearch(documents).search(query_QD, 20))
