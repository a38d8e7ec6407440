"""The exact search equals brute force for all shards, tiles and devices, and stays within its memory."""

from pathlib import Path

import numpy as np
import pytest
import torch

from embeddings.common import InputError, OptionError
from embeddings.inference.search import SLACK, largest, num_candidates
from embeddings.inference.vector_folder import VectorShards
from embeddings.mining import search as knn
from embeddings.mining.search import ExactSearch, search_sizes
from tests.helpers.refusals import refused
from tests.mining.vectors import brute_force, shards, unit_vectors


@pytest.fixture(params=[torch.bfloat16, torch.float16, torch.float32], ids=["bfloat16", "float16", "float32"])
def exact(request):
    """The exact search with products in each dtype, here on the CPU."""

    def made(documents, **options):
        search = ExactSearch(documents, **options)
        search._dtype = request.param
        return search

    return made


def assert_best(found, queries, documents, top_k):
    """The scores are the best ones, and each is that of its row; rows of equal scores may be in any order."""
    scores, _ = brute_force(queries, documents, top_k)
    np.testing.assert_allclose(found.score_QK, np.array(scores, np.float32), atol=3e-7)
    for query, row_K, score_K in zip(queries, found.index_QK, found.score_QK, strict=True):
        assert len(set(row_K.tolist())) == len(row_K)
        np.testing.assert_allclose(documents[row_K] @ query, score_K, atol=3e-7)


# Each shape with a dtype that needs candidates, and each dtype with tiles smaller than shards and as large.
@pytest.mark.parametrize(
    ("exact", "shard_size", "tile", "at_once"),
    [
        (torch.bfloat16, 1, 7, 3),
        (torch.bfloat16, 9, 7, 3),
        (torch.bfloat16, 64, 64, 7),
        (torch.float16, 9, 1, 1),
        (torch.float16, 64, 64, 7),
        (torch.float32, 9, 7, 3),
        (torch.float32, 1, 7, 3),
    ],
    indirect=["exact"],
)
def test_the_search_equals_a_loop_over_all_pairs(shard_size, tile, at_once, exact, tmp_path, monkeypatch):
    sizes = knn.SearchSizes(True, tile, at_once, max(1, at_once - 1), 5, 0)
    monkeypatch.setattr(knn, "search_sizes", lambda *_: sizes)
    documents, queries = unit_vectors(64, copies=[(5, 9), (63, 0)]), unit_vectors(7, seed=1)
    search = exact(shards(tmp_path, documents, shard_size))
    for top_k in (1, 5, 48, 64, 100):
        assert_best(search.search(queries, top_k), queries, documents, top_k)


@pytest.mark.parametrize("top_k", [1, 3, 20, 40])
def test_copies_of_a_document_are_found(top_k, exact, tmp_path):
    documents = unit_vectors(70, copies=[(row, 3) for row in range(10, 10 + 2 * SLACK, 2)])
    queries = np.concatenate([documents[3:4], -documents[3:4], unit_vectors(70, seed=2)])
    for shard_size in (70, 4):
        found = exact(shards(tmp_path / str(shard_size), documents, shard_size)).search(queries, top_k)
        assert_best(found, queries, documents, top_k)


def test_products_in_a_lower_dtype_change_no_result(exact, tmp_path):
    documents, queries = shards(tmp_path, unit_vectors(3000, 64), 999), unit_vectors(50, 64, seed=1)
    found = exact(documents, memory_gib=0.02).search(queries, 20)
    score_QN = queries.astype(np.float64) @ np.concatenate(list(documents)).T.astype(np.float64)
    np.testing.assert_array_equal(found.index_QK, np.argsort(-score_QN, axis=1)[:, :20])
    np.testing.assert_allclose(found.score_QK, np.take_along_axis(score_QN, found.index_QK, axis=1), atol=3e-7)


def test_no_bit_of_a_score_depends_on_the_other_queries(exact, tmp_path):
    search, queries = exact(shards(tmp_path, unit_vectors(300, 40), 99)), unit_vectors(50, 40, seed=1)
    whole = search.search(queries, 20)
    for size in (1, 3, 7):
        parts = [search.search(queries[start : start + size], 20) for start in range(0, 50, size)]
        np.testing.assert_array_equal(np.concatenate([part.score_QK for part in parts]), whole.score_QK)
        np.testing.assert_array_equal(np.concatenate([part.index_QK for part in parts]), whole.index_QK)


@pytest.mark.parametrize(("value", "kind"), [(0, "zero"), (np.nan, "not finite"), (2, "of length")])
def test_an_invalid_document_vector_is_named(value, kind, tmp_path):
    documents = unit_vectors(10)
    documents[5] = value
    with pytest.raises(InputError, match=rf"vectors-00001\.npy:1: the vector is {kind}"):
        ExactSearch(shards(tmp_path, documents, 4)).search(unit_vectors(2), 3)


def test_invalid_queries_are_refused(tmp_path):
    search = ExactSearch(shards(tmp_path, unit_vectors(10), 4))
    refused(InputError, "contains vectors of width 8, the queries' is 5", search.search, unit_vectors(2, 5), 3)
    with pytest.raises(InputError, match="query vectors:1: the vector is zero"):
        search.search(unit_vectors(2) * np.array([[1], [0]], np.float32), 3)
    refused(OptionError, "top_k must be >= 1", search.search, unit_vectors(2), 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 5, 16, 47, 160, 1000, 1003])
@pytest.mark.parametrize("top_k", [1, 4, 30])
def test_the_largest_values_and_their_places(dtype, width, top_k):
    # In bfloat16 many of them are equal.
    score_QT = torch.randn(20, width, generator=torch.Generator().manual_seed(0)).to(dtype)
    top_k = min(top_k, width)
    values, places = largest(score_QT, top_k)
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
    values, places = largest(score_T[None], top_k)
    assert sorted(values[0].tolist()) == score_T.sort().values[-top_k:].tolist()
    assert len(set(places[0].tolist())) == top_k


def test_float16_vectors_are_searched(exact, tmp_path):
    halves = unit_vectors(300, 32).astype(np.float16)
    shards(tmp_path, halves, 40)
    documents, query_QD = VectorShards(tmp_path, 300, 32, 40, "float16"), unit_vectors(9, 32, seed=1)
    assert_best(exact(documents).search(query_QD, 12), query_QD, halves.astype(np.float32), 12)


@pytest.mark.parametrize(
    ("millions", "dtype", "memory", "stays"),
    [(10, "float16", 16, False), (10, "float16", 20, True), (10, "float32", 40, True), (100, "float16", 64, False)],
)
def test_the_sizes_that_the_documentation_states(millions, dtype, memory, stays):
    """100M documents of width 768 take 154 GB in float16."""
    size, width = np.dtype(dtype).itemsize, num_candidates(200)
    vectors = millions * 10**6 * 768 * size
    sizes = search_sizes(millions * 10**6, 768, size, width, 65_536, memory)
    assert sizes.is_resident == stays
    assert vectors * stays < sizes.num_bytes <= memory * 2**30
    takes, documents = f"{sizes.num_bytes / 2**30:.1f} GiB", "on the device" if stays else "streamed"
    row = f"| {millions}M, {dtype} | {vectors / 1e9:.1f} GB | {memory} GiB | {takes} | {documents} |"
    assert row in (Path(__file__).parents[2] / "docs" / "mining.md").read_text().splitlines()


@pytest.mark.parametrize("width", [17, 266, 5000])
@pytest.mark.parametrize("memory", [0.04, 0.2, 1, 16, 70])
def test_block_sizes_fit_any_accepted_memory(memory, width):
    sizes = search_sizes(10**6, 1024, 4, width, 50_000, memory)
    assert sizes.num_bytes <= memory * 2**30
    assert min(sizes.tile_rows, sizes.pass_queries, sizes.product_queries, sizes.num_pairs) >= 1


def test_too_little_memory_is_refused_with_the_minimum(tmp_path):
    documents = shards(tmp_path, unit_vectors(300, 64), 100)
    for memory in (0, 1e-5):
        search = ExactSearch(documents, memory_gib=memory).search
        message = refused(OptionError, "gpu_memory_gib must be >= ", search, unit_vectors(2, 64), 20)
    minimum = float(message.split(">= ")[1].split()[0])
    found = ExactSearch(documents, memory_gib=minimum).search(unit_vectors(2, 64), 20)
    assert_best(found, unit_vectors(2, 64), np.concatenate(list(documents)), 20)


def test_a_missing_gpu_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refused(OptionError, "gpu needs a CUDA device", ExactSearch, shards(tmp_path, unit_vectors(10), 4), "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("memory", [0.01, 4])
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_finds_the_same_within_its_memory(memory, tmp_path):
    documents, query_QD = shards(tmp_path, unit_vectors(30_000, 64), 999), unit_vectors(500, 64, seed=1)
    search = ExactSearch(documents, "cuda", memory)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = search.search(query_QD, 20)
    assert torch.cuda.max_memory_allocated() - before <= search.sizes(500, 20).num_bytes <= memory * 2**30
    np.testing.assert_array_equal(found.index_QK, ExactSearch(documents).search(query_QD, 20).index_QK)
