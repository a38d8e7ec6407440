"""An index that searches all lists equals the exact search, and is refused for other vectors."""

import errno
import json
import resource
from itertools import pairwise

import numpy as np
import pytest

from embeddings.common import InputError
from embeddings.common.jobs import save_array
from embeddings.inference.search import search_top_k
from embeddings.inference.vector_folder import VectorFolder
from embeddings.inference.vectors import stored_rows, unit_rows
from embeddings.mining.vector_index import INDEX_FILE, MANIFEST_FILE, build_index, folder_sha256, recall_of
from embeddings.mining.vector_index import VectorIndex as Index
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


def test_a_saved_index_is_opened_unchanged(folder, vectors):
    made = build_index(folder, num_lists=8, num_probes=3, seed=5)
    again = Index.open(folder)
    assert (again.num_lists, again.num_probes) == (8, 3)
    for one, other in zip(made.search(vectors[:9], 5), again.search(vectors[:9], 5), strict=True):
        np.testing.assert_array_equal(one, other)
    assert sorted(path.name for path in folder.path.iterdir() if "ivf" in path.name) == [INDEX_FILE, MANIFEST_FILE]
    other = build_index(folder, num_lists=8, num_probes=3, seed=6)
    assert (other.search(vectors[:9], 600).index_QK != made.search(vectors[:9], 600).index_QK).any()


def test_other_vectors_or_a_damaged_file_are_refused(folder, vectors):
    refused(InputError, r"ivf\.faiss: there is no index of these vectors; make it with the", Index.open, folder)
    build_index(folder)
    path, before = folder.path / INDEX_FILE, (folder.path / INDEX_FILE).read_bytes()
    for content in (before[:-9], bytes(200) + before[200:], b""):
        path.write_bytes(content)
        refused(InputError, r"ivf\.faiss: is damaged: .*; make it with the command index", Index.open, folder)
    path.write_bytes(before)
    Index.open(folder)
    save_array(folder.shards.path(1), unit_vectors(130, seed=3))
    refused(InputError, "field 'vectors_sha256' differs", Index.open, folder)
    folder.shards.path(4).unlink()
    refused(InputError, r"vectors-00004\.npy: is missing", Index.open, folder)


def test_a_flipped_bit_in_the_file_is_detected_on_opening(folder):
    build_index(folder, num_lists=8, num_probes=8)
    path, rng = folder.path / INDEX_FILE, np.random.default_rng(0)
    before = path.read_bytes()
    for _ in range(20):
        damaged, place = bytearray(before), int(rng.integers(len(before)))
        damaged[place] ^= 1 << int(rng.integers(8))
        path.write_bytes(bytes(damaged))
        refused(InputError, "is damaged", Index.open, folder)
    path.write_bytes(before)
    Index.open(folder)


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
    monkeypatch.setattr("embeddings.mining.vector_index.train_centroids", None)
    fake_disk(monkeypatch, 600 * (4 * 8 + 8))
    with pytest.raises(OSError, match="bytes are needed and 24,000 available"):
        build_index(folder)


def test_the_folders_hash_ignores_versions(folder, tmp_path, vectors):
    first = folder_sha256(folder)
    manifest = json.loads((folder.path / "manifest.json").read_text())
    (folder.path / "manifest.json").write_text(json.dumps({**manifest, "versions": {"a": 2}}))
    assert folder_sha256(folder) == first
    (folder.path / "manifest.json").write_text(json.dumps({**manifest, "corpus_sha256": "other"}))
    assert folder_sha256(folder) != first


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
