"""Cluster folders: counting sort, reading, and refusal of damaged files."""

import json

import numpy as np
import pytest

from embeddings.common import InputError
from embeddings.data.samplers import clustered as cluster_folder
from embeddings.data.samplers.clustered import ClusterFolder, write_cluster_files
from tests.data.cluster_folders import nearest_lists, unit_vectors, write_clusters
from tests.helpers.interrupts import interrupted_at
from tests.helpers.manifests import rewrite_manifest
from tests.helpers.refusals import refused


@pytest.mark.parametrize("cuts", [[], [1], [7], [3, 4, 11], [0, 12]])
def test_the_files_contain_the_rows_of_each_cluster_in_order_for_any_shards(cuts, tmp_path):
    ids = np.array([2, 0, 2, 4, 0, 2, 1, 1, 4, 2, 0, 4], dtype=np.int32)
    centroids = unit_vectors(5)
    fields = write_cluster_files(tmp_path, np.split(ids, cuts), centroids, nearest_lists(centroids, 3))
    loaded = {name: np.load(tmp_path / name) for name in fields["num_bytes"]}
    assert loaded["cluster_ids.npy"].tolist() == ids.tolist()
    assert loaded["offsets.npy"].tolist() == [0, 3, 5, 9, 9, 12]
    rows = loaded["rows_by_cluster.npy"]
    assert rows.dtype == np.uint32
    assert rows.tolist() == [row for cluster in range(5) for row in range(12) if ids[row] == cluster]
    whole = write_cluster_files(tmp_path, [ids], centroids, nearest_lists(centroids, 3))
    assert whole == fields


def test_a_folder_is_read_back_memory_mapped_and_its_key_depends_on_its_content(tmp_path):
    folder = write_clusters(tmp_path / "clusters", [1, 0, 1, 1], 3)
    assert (folder.num_rows, folder.num_clusters, folder.source_key) == (4, 3, "key")
    assert folder.rows_by_cluster.tolist() == [1, 0, 2, 3]
    assert folder.offsets.tolist() == [0, 1, 4, 4]
    assert isinstance(folder.rows_by_cluster, np.memmap)
    assert folder.centroids.shape == (3, 8)
    assert folder.neighbours.shape == (3, 2)
    same, other = write_clusters(tmp_path / "same", [1, 0, 1, 1], 3), write_clusters(tmp_path / "c", [1, 1, 0, 1], 3)
    assert folder.key == same.key != other.key


@pytest.mark.parametrize("name", ["rows_by_cluster.npy", "offsets.npy", "centroids.npy", "neighbours.npy"])
@pytest.mark.parametrize("damage", ["cut", "gone", "shape", "dtype", "garbage"])
def test_a_damaged_file_is_named_in_one_line(name, damage, tmp_path):
    write_clusters(tmp_path / "clusters", [1, 0, 1, 1, 2, 2, 0], 3)
    path = tmp_path / "clusters" / name
    content, array = path.read_bytes(), np.load(path)
    if damage == "cut":
        path.write_bytes(content[:-3])
    elif damage == "gone":
        path.unlink()
    elif damage == "garbage":
        path.write_bytes(b"x" * len(content))
    else:
        np.save(path, array[..., None] if damage == "shape" else array.view(np.uint8))
        manifest = json.loads((path.parent / "manifest.json").read_text())
        manifest["num_bytes"][name] = path.stat().st_size
        (path.parent / "manifest.json").write_text(json.dumps(manifest))
    refused(InputError, f"{name}: is missing or damaged; make", ClusterFolder, path.parent)


@pytest.mark.parametrize("block_bytes", [1, 1 << 22])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("rows_by_cluster.npy", value) for value in (7, 2**32 - 1)),
        *(("neighbours.npy", value) for value in (3, -1)),
        *(("centroids.npy", value) for value in (np.nan, np.inf)),
    ],
)
def test_an_invalid_entry_is_named_by_its_row(name, value, block_bytes, tmp_path, monkeypatch):
    monkeypatch.setattr(cluster_folder, "_BLOCK_BYTES", block_bytes)
    path = write_clusters(tmp_path / "clusters", [1, 0, 1, 1, 2, 2, 0], 3).path / name
    array = np.load(path)
    array[2, ...] = value
    np.save(path, array)
    rewrite_manifest(path.with_name("manifest.json"))
    refused(InputError, rf"clusters/{name}:2: is not .*; make", ClusterFolder, path.parent)


def test_a_folder_that_is_not_there_of_another_kind_or_unfinished_is_refused(tmp_path):
    refused(InputError, "no manifest", ClusterFolder, tmp_path / "clusters")
    path = write_clusters(tmp_path / "clusters", [0, 1], 2).path / "manifest.json"
    fields = json.loads(path.read_text())
    for name, value in (("kind", "vectors"), ("complete", False)):
        path.write_text(json.dumps({**fields, name: value}))
        refused(InputError, f"field '{name}'", ClusterFolder, path.parent)


@pytest.mark.parametrize("offsets", [[1, 1, 4], [0, 1, 3], [0, 5, 4]])
def test_offsets_that_do_not_cover_the_rows_are_refused(offsets, tmp_path):
    folder = write_clusters(tmp_path / "clusters", [1, 0, 1, 1], 2).path
    np.save(folder / "offsets.npy", np.array(offsets, dtype=np.int64))
    refused(InputError, r"offsets\.npy", ClusterFolder, folder)


def test_a_kill_while_writing_leaves_no_half_file(tmp_path, monkeypatch):
    monkeypatch.setattr(cluster_folder, "_sort_by_cluster", interrupted_at(None))
    with pytest.raises(KeyboardInterrupt):
        write_clusters(tmp_path / "clusters", [0, 1], 2)
    assert list((tmp_path / "clusters").iterdir()) == []
