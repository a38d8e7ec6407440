"""A GPU's search finds what the CPU's does, in any pieces, and states what they take; on the device "cpu" here."""

from pathlib import Path

import numpy as np
import pytest
import torch

from embeddings.common import InputError, OptionError
from embeddings.inference.vectors import VectorShards
from embeddings.mining import gpu_search
from embeddings.mining.gpu_search import GpuSearch, exact_products, search_sizes
from embeddings.mining.search import ExactSearch
from tests.mining.vectors import brute_force, shards, unit_vectors

CPU = torch.device("cpu")


def assert_same(found, expected):
    """The same rows, and the same bits of the scores."""
    np.testing.assert_array_equal(found.index_QK, expected.index_QK)
    np.testing.assert_array_equal(found.score_QK, expected.score_QK)


def cut(monkeypatch, tile_rows, pass_queries, product_queries, num_pairs, is_resident):
    """Searches are cut so."""
    sizes = gpu_search.SearchSizes(is_resident, tile_rows, pass_queries, product_queries, num_pairs, 0)
    monkeypatch.setattr(gpu_search, "search_sizes", lambda *_: sizes)


@pytest.mark.parametrize("is_resident", [True, False], ids=["kept", "streamed"])
@pytest.mark.parametrize(("tile_rows", "queries", "at_once", "pairs"), [(1, 1, 1, 1), (7, 5, 2, 3), (64, 7, 7, 9999)])
def test_any_pieces_find_what_a_loop_over_all_pairs_finds(
    tile_rows, queries, at_once, pairs, is_resident, tmp_path, monkeypatch
):
    documents, query_QD = unit_vectors(64, copies=[(5, 9), (63, 0)]), unit_vectors(7, seed=1)
    stored = shards(tmp_path, documents, 9)
    cut(monkeypatch, tile_rows, queries, at_once, pairs, is_resident)
    search = GpuSearch(stored, device=CPU)
    for top_k in (1, 5, 30, 64, 100):
        found = search.search(query_QD, top_k)
        assert found.index_QK.tolist() == brute_force(query_QD, documents, top_k)[1]
        assert_same(found, ExactSearch(stored).search(query_QD, top_k))


@pytest.mark.parametrize("top_k", [1, 3, 40, 400])
def test_more_equal_documents_than_are_kept_are_ordered_by_row(top_k, tmp_path, monkeypatch):
    copies = [(row, 3) for row in range(10, 300, 2)]
    documents = shards(tmp_path, unit_vectors(500, 16, copies=copies), 77)
    query_QD = np.concatenate([documents.take(np.array([3])), unit_vectors(20, 16, seed=2)])
    cut(monkeypatch, 150, 8, 3, 50, True)
    among_all = []
    again = ExactSearch._among_all
    monkeypatch.setattr(ExactSearch, "_among_all", lambda self, q, *a: among_all.append(len(q)) or again(self, q, *a))
    assert_same(
        GpuSearch(documents, device=CPU).search(query_QD, top_k), ExactSearch(documents).search(query_QD, top_k)
    )
    assert among_all or top_k == 400


def test_float16_leaves_few_queries_in_doubt(tmp_path, monkeypatch):
    documents, query_QD = shards(tmp_path, unit_vectors(3000, 64), 999), unit_vectors(50, 64, seed=1)
    scanned = []
    scan = GpuSearch._scanned
    monkeypatch.setattr(
        GpuSearch, "_scanned", lambda self, of, q, k: scanned.append((of, len(q))) or scan(self, of, q, k)
    )
    assert_same(GpuSearch(documents, device=CPU).search(query_QD, 20), ExactSearch(documents).search(query_QD, 20))
    assert scanned[0] == (torch.float16, 50)
    assert sum(count for _, count in scanned[1:]) < 10


@pytest.mark.parametrize("is_resident", [True, False], ids=["kept", "streamed"])
def test_vectors_stored_in_float16_stay_so(is_resident, tmp_path, monkeypatch):
    halves = unit_vectors(300, 32).astype(np.float16)
    shards(tmp_path, halves, 40)
    documents = VectorShards(tmp_path, 300, 32, 40, "float16")
    cut(monkeypatch, 64, 9, 4, 100, is_resident)
    search, query_QD = GpuSearch(documents, device=CPU), unit_vectors(9, 32, seed=1)
    assert_same(search.search(query_QD, 12), ExactSearch(documents).search(query_QD, 12))
    assert [tile.dtype for tile in search._kept] == [torch.float16] * (5 if is_resident else 0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("width", [1, 8, 384])
def test_no_document_scores_above_the_bound_of_its_score(dtype, width):
    query_QD, document_ND = unit_vectors(20, width), unit_vectors(600, width, seed=1)
    quick_QN = (torch.from_numpy(query_QD).to(dtype) @ torch.from_numpy(document_ND).to(dtype).T).float().numpy()
    lost = gpu_search._most_lost(width) if dtype == torch.float16 else 0.0
    for vectors in (query_QD, document_ND):
        assert np.linalg.norm(vectors - vectors.astype(np.float16).astype(np.float32), axis=1).max() <= max(lost, 1e-3)
    true_QN = query_QD.astype(np.float64) @ document_ND.T.astype(np.float64)
    excess_QN = gpu_search.score_bound(quick_QN, lost, lost, width, dtype) - true_QN
    assert excess_QN.min() >= 0
    assert excess_QN.max() < 0.004


@pytest.mark.parametrize("row", [3, 250])
@pytest.mark.parametrize(("value", "kind"), [(0, "zero"), (np.nan, "not finite"), (2, "of length")])
def test_a_document_without_direction_is_named(value, kind, row, tmp_path):
    documents = unit_vectors(300)
    documents[row] = value
    with pytest.raises(InputError, match=rf"vectors-{row // 40:05d}\.npy:{row % 40}: the vector is {kind}"):
        GpuSearch(shards(tmp_path, documents, 40), device=CPU).search(unit_vectors(2), 3)


def test_products_are_exact_inside_only():
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
    takes, documents = f"{sizes.num_bytes / 2**30:.1f} GiB", "stay" if stays else "stream"
    row = f"| {millions}M, {dtype} | {vectors / 1e9:.1f} GB | {memory} GiB | {takes} | {documents} |"
    assert row in (Path(__file__).parents[2] / "docs" / "mining.md").read_text().splitlines()


@pytest.mark.parametrize("width", [17, 266, 5000])
@pytest.mark.parametrize("memory", [0.03, 0.2, 1, 16, 70])
def test_pieces_fit_any_memory_that_is_accepted(memory, width):
    sizes = search_sizes(10**6, 1024, 4, width, 50_000, memory)
    assert sizes.num_bytes <= memory * 2**30
    assert min(sizes.tile_rows, sizes.pass_queries, sizes.product_queries, sizes.num_pairs) >= 1


def test_too_little_memory_is_refused_with_what_would_do(tmp_path):
    documents = shards(tmp_path, unit_vectors(300, 64), 100)
    with pytest.raises(OptionError, match="gpu_memory_gib must be >= ") as refused:
        GpuSearch(documents, 1e-5, CPU).search(unit_vectors(2, 64), 20)
    least = float(str(refused.value).split(">= ")[1].split()[0])
    found = GpuSearch(documents, least, CPU).search(unit_vectors(2, 64), 20)
    assert_same(found, ExactSearch(documents).search(unit_vectors(2, 64), 20))
    with pytest.raises(OptionError, match="gpu_memory_gib"):
        GpuSearch(documents, 0.99 * least, CPU).search(unit_vectors(2, 64), 20)


def test_a_gpu_that_is_not_there_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(OptionError, match="gpu needs a CUDA device"):
        GpuSearch(shards(tmp_path, unit_vectors(10), 4))


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
