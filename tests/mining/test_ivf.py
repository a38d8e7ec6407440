"""A search of all lists equals the exact search; a damaged index, or one of other vectors, is refused."""

import errno
import json
import resource
from itertools import pairwise

import faiss
import numpy as np
import pytest
import torch

from embeddings.common import InputError, OptionError
from embeddings.common.jobs import ArrayTask, save_array
from embeddings.inference.encoder import unit_rows
from embeddings.inference.search import search_top_k
from embeddings.inference.vector_folder import VectorFolder, stored_rows
from embeddings.mining import ivf, kmeans, lists
from embeddings.mining.ivf import INDEX_FILE, build_index, build_ivf, recall_of, sample_rows
from embeddings.mining.ivf import VectorIndex as Index
from embeddings.mining.search import ExactSearch
from tests.helpers.disks import fake_disk
from tests.helpers.refusals import refused
from tests.mining.vectors import shards, unit_vectors


def vector_folder(path, vectors, shard_size=130, vector_format="float32"):
    """A finished folder of vectors of any length, without documents."""
    found = shards(path, vectors, shard_size)
    for shard in range(found.num_shards):
        save_array(found.path(shard), stored_rows(np.array(found.load(shard)), vector_format, "here"))
    sizes = {"num_documents": len(vectors), "embedding_dim": vectors.shape[1], "shard_size": shard_size}
    fields = {"kind": "vectors", "complete": True, **sizes, "vector_format": vector_format, "versions": {"a": 1}}
    (path / "manifest.json").write_text(json.dumps(fields))
    return VectorFolder.open(path)


@pytest.fixture
def vectors():
    lengths = np.random.default_rng(1).uniform(0.5, 2, (600, 1)).astype(np.float32)
    return unit_vectors(600, copies=[(9, 4), (300, 4)]) * lengths


@pytest.fixture
def folder(tmp_path, vectors):
    return vector_folder(tmp_path / "vectors", vectors)


def test_searching_all_lists_equals_the_exact_search(folder, vectors):
    index = build_index(folder, num_lists=12, num_probes=12)
    queries = unit_rows(vectors[::7])
    found, exact = index.search(queries, 10), search_top_k(queries, unit_rows(vectors), 10)
    np.testing.assert_allclose(found.score_QK, exact.score_QK, rtol=0, atol=1e-6)
    same = found.index_QK == exact.index_QK
    # Rows may be swapped if their scores differ only by rounding.
    assert same.mean() > 0.98
    assert (np.abs(np.diff(exact.score_QK, axis=1)).min(axis=1)[~same.all(axis=1)] < 1e-6).all()
    assert recall_of(index, folder) == 1.0


def test_the_default_sizes_are_those_of_mining_and_recall_is_measured(folder, vectors):
    index = build_index(folder)
    assert (index.num_lists, index.num_probes) == (15, 15)
    index = build_index(folder, num_probes=2)
    assert (index.num_lists, index.num_probes) == (15, 2)
    few = recall_of(index, folder, num_queries=50)
    assert 0.2 < few < 0.95
    queries = np.unique(np.linspace(0, 599, 50).astype(np.int64))
    unit = unit_rows(vectors).astype(np.float64)
    hits = 0
    for row in queries.tolist():
        scores = unit @ unit[row]
        scores[row] = -2
        found = [other for other in index.search(unit_rows(vectors[row : row + 1]), 11).index_QK[0] if other != row]
        hits += len(set(np.argsort(-scores)[:10].tolist()) & set(found[:10]))
    assert few == pytest.approx(hits / (10 * len(queries)), abs=0.01)


def test_scores_are_in_order_and_missing_rows_come_last(folder, vectors):
    index = build_index(folder, num_lists=15, num_probes=1)
    found = index.search(unit_rows(vectors[:20]), 600)
    for scores, rows in zip(found.score_QK.tolist(), found.index_QK.tolist(), strict=True):
        count = rows.index(-1)
        assert 0 < count < 600
        assert set(rows[count:]) == {-1}
        assert set(scores[count:]) == {-np.inf}
        assert len(set(rows[:count])) == count
        for (score, row), (after, later) in pairwise(zip(scores[:count], rows[:count], strict=True)):
            assert (-score, row) < (-after, later)


def test_other_vectors_or_a_damaged_file_are_refused(folder, vectors):
    refused(InputError, r"ivf\.faiss: there is no index of these vectors; make it with the", Index.open, folder)
    build_index(folder)
    path, before = folder.path / INDEX_FILE, (folder.path / INDEX_FILE).read_bytes()
    for content in (before[:-9], bytes(200) + before[200:], b""):
        path.write_bytes(content)
        refused(InputError, r"ivf\.faiss: is damaged: .*; make it with the command index", Index.open, folder)
    path.write_bytes(before)
    Index.open(folder)
    manifest = json.loads((folder.path / "manifest.json").read_text())
    (folder.path / "manifest.json").write_text(json.dumps({**manifest, "corpus_sha256": "other"}))
    refused(InputError, "field 'vectors_xxh3_128' differs", Index.open, folder)


# The last bytes are written when the file is closed, and faiss does not report the reason of a failure.
@pytest.mark.parametrize(("missing", "code"), [(20_000, errno.EFBIG), (1, errno.EIO)])
def test_a_failed_write_preserves_the_existing_index(missing, code, folder, vectors):
    made = build_index(folder, num_lists=8)
    size, before = (folder.path / INDEX_FILE).stat().st_size, sorted(folder.path.iterdir())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size - missing, hard))
    try:
        with pytest.raises(OSError, match="Errno") as failure:
            build_index(folder, num_lists=8, seed=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (failure.value.errno, failure.value.filename.endswith(".tmp")) == (code, True)
    assert sorted(folder.path.iterdir()) == before
    again = Index.open(folder)
    assert again.num_lists == 8
    np.testing.assert_array_equal(made.search(vectors[:9], 5).index_QK, again.search(vectors[:9], 5).index_QK)


def test_no_lists_are_trained_on_a_full_disk(folder, monkeypatch):
    monkeypatch.setattr("embeddings.mining.ivf.train_centroids", None)
    fake_disk(monkeypatch, 600 * (4 * 8 + 8))
    with pytest.raises(OSError, match="bytes are needed and 24,000 available"):
        build_index(folder)


def test_a_single_vector_has_an_index(tmp_path):
    folder = vector_folder(tmp_path / "one", unit_vectors(1))
    index = build_index(folder)
    assert index.search(unit_vectors(1), 10**12).index_QK.tolist() == [[0]]
    assert recall_of(index, folder) == 1.0


def test_float16_vectors_can_be_indexed_and_smaller_ones_cannot(tmp_path, vectors):
    half = vector_folder(tmp_path / "half", vectors, vector_format="float16")
    found = build_index(half, num_lists=12, num_probes=12).search(unit_rows(vectors[::7]), 10)
    exact = search_top_k(unit_rows(vectors[::7]), half.directions(), 10)
    np.testing.assert_allclose(found.score_QK, exact.score_QK, rtol=0, atol=1e-6)
    for vector_format in ("int8", "binary"):
        folder = vector_folder(tmp_path / vector_format, vectors, vector_format=vector_format)
        before = sorted(folder.path.iterdir())
        for use in (build_index, Index.open):
            says = f"has {vector_format} vectors, but an index, .*, needs float32 or float16; encode into another"
            refused(InputError, says, use, folder)
        assert sorted(folder.path.iterdir()) == before


def clustered(count, seed=0, width=16, centres=20):
    """Vectors around a few centres, like those of texts."""
    centre = unit_vectors(centres, width)[np.random.default_rng(seed).integers(0, centres, count)]
    vectors = centre + 0.6 * unit_vectors(count, width, seed=seed + 1)
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def test_grouped_lists_find_nearly_the_same_documents_and_all_if_all_are_searched(tmp_path, monkeypatch):
    documents, queries = shards(tmp_path / "documents", clustered(4000), 700), clustered(100, seed=5)
    exact = ExactSearch(documents).search(queries, 10)

    def recall(folder, num_probes):
        found = build_ivf(documents, tmp_path / folder, num_probes=num_probes, num_lists=100).search(queries, 10)
        assert len(found.index_QK[0]) == len(set(found.index_QK[0].tolist()))
        pairs = zip(found.index_QK.tolist(), exact.index_QK.tolist(), strict=True)
        return np.mean([len(set(rows) & set(best)) / 10 for rows, best in pairs])

    ungrouped = recall("one", 8)
    for module in (ivf, kmeans):
        monkeypatch.setattr(module, "MAX_UNGROUPED", 50)
    for module in (ivf, kmeans):
        monkeypatch.setattr(module, "CENTROIDS_PER_GROUP", 10)
    monkeypatch.setattr(kmeans, "MAX_COMPARED", 50)
    monkeypatch.setattr(kmeans, "GROUP_PROBES", 4)
    assert recall("grouped", 8) > ungrouped - 0.05 > 0.7
    assert recall("grouped", 100) == 1.0
    centroids = ivf.train_centroids(clustered(4000), 100, seed=0)
    assert centroids.shape == (100, 16)
    nearest = kmeans.NearestCentroids(centroids)
    score_Q1, first_Q1 = nearest.search(queries, 1)
    assert np.mean(first_Q1 == nearest.all.search(queries, 1)[1]) > 0.95
    np.testing.assert_array_equal(first_Q1[:, 0], nearest.search(queries, 2)[1][:, 0])
    np.testing.assert_allclose(score_Q1[:, 0], np.einsum("qd,qd->q", queries, centroids[first_Q1[:, 0]]), atol=1e-6)
    # Four groups have fewer than 100 lists: all are compared.
    np.testing.assert_array_equal(np.sort(nearest.search(queries, 100)[1]), np.tile(np.arange(100), (100, 1)))


def test_tasks_and_parts_change_nothing_and_lists_are_written_once(tmp_path, monkeypatch):
    documents, queries = shards(tmp_path / "documents", clustered(500), 64), clustered(20, seed=5)
    one_file = build_ivf(documents, tmp_path / "one", num_probes=3, num_lists=10).search(queries, 5)
    monkeypatch.setattr(ivf, "PART_BYTES", 64 * 100)
    build_ivf(documents, tmp_path / "whole", num_probes=3, num_lists=10)
    for index in (1, 0):
        parts = build_ivf(documents, tmp_path / "parts", num_probes=3, num_lists=10, task=ArrayTask(index, 2))
    files = [path for path in (tmp_path / "whole").rglob("*") if path.suffix in (".npy", ".faiss")]
    # The centroids, the nearest lists of eight shards of documents, and five parts of the lists.
    assert len(files) == 14
    for path in files:
        assert path.read_bytes() == (tmp_path / "parts" / path.relative_to(tmp_path / "whole")).read_bytes()
    for name in ("new_lists", "write_lists"):
        monkeypatch.setattr(ivf, name, None)
    for name, value in (("_LIST_QUERIES", 1), ("_BLOCK_SCORES", 700), ("_PAIRS", 5), ("_CHOSEN_TOGETHER", 3)):
        monkeypatch.setattr(lists, name, value)
    for search in (parts, build_ivf(documents, tmp_path / "parts", num_probes=3, num_lists=10)):
        np.testing.assert_array_equal(search.search(queries, 5).index_QK, one_file.index_QK)


def test_each_list_is_whole_in_one_part_and_threads_and_parts_change_no_result(tmp_path, monkeypatch):
    documents, queries = shards(tmp_path / "documents", clustered(500), 64), clustered(40, seed=5)
    expected = build_ivf(documents, tmp_path / "one", num_probes=4, num_lists=40).search(queries, 20)
    monkeypatch.setattr(ivf, "PART_BYTES", 64 * 60)
    search = build_ivf(documents, tmp_path / "ivf", num_probes=4, num_lists=40)
    parts = [ivf.map_lists(path) for path in sorted((tmp_path / "ivf" / "lists").glob("*.faiss"))]
    size_PC = np.array([[part.invlists.list_size(number) for number in range(40)] for part in parts])
    assert len(parts) == 9
    assert (np.count_nonzero(size_PC, axis=0) <= 1).all()
    # As many documents as a part may have, and at most one list more.
    assert size_PC.sum() == 500
    assert size_PC.sum(axis=1).max() <= 60 + size_PC.max()
    for threads in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        found = search.search(queries, 20)
        np.testing.assert_array_equal(found.index_QK, expected.index_QK)
        np.testing.assert_array_equal(found.score_QK, expected.score_QK)


@pytest.mark.parametrize("part_vectors", [30, 500])
def test_a_search_of_lists_equals_that_of_faiss(part_vectors, tmp_path, monkeypatch):
    monkeypatch.setattr(ivf, "PART_BYTES", 64 * part_vectors)
    documents, queries = shards(tmp_path / "documents", clustered(500), 64), clustered(40, seed=5)
    # 40 lists of about 12 documents, of which a part of 30 has two or three; 30 are more than a list has.
    search = build_ivf(documents, tmp_path / "ivf", num_probes=4, num_lists=40)
    quantizer = faiss.IndexFlatIP(16)
    quantizer.add(search.centroid_CD)
    peer = faiss.IndexIVFFlat(quantizer, 16, 40, faiss.METRIC_INNER_PRODUCT)
    peer.is_trained, peer.nprobe = True, 4
    peer.add(np.concatenate(list(documents)))
    found, (score_QK, row_QK) = search.search(queries, 30), peer.search(queries, 30)
    np.testing.assert_array_equal(found.index_QK, row_QK)
    is_found = row_QK >= 0
    assert 0 < is_found.sum() <= is_found.size
    np.testing.assert_allclose(found.score_QK[is_found], score_QK[is_found], atol=1e-6)
    assert np.isneginf(found.score_QK[~is_found]).all()


def test_a_top_k_beyond_the_limit_of_faiss_on_a_gpu_is_refused(tmp_path):
    search = build_ivf(shards(tmp_path / "documents", clustered(100), 50), tmp_path / "ivf")
    search.gpu = True
    refused(OptionError, "top_k must be <= 2048 on a GPU, got 2049", search.search, clustered(2), 2049)


def test_the_number_of_lists_grows_with_the_root_of_the_documents_and_then_in_proportion():
    sizes = (10, 200, 2000, 10_000, 1_000_000, 10_000_000)
    found = [(1, 1), (5, 5), (51, 32), (256, 32), (7812, 48), (78_125, 48)]
    assert [ivf.ivf_sizes(number) for number in sizes] == found


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
