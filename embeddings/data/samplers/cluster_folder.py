"""The clusters of one source on disk: four bytes a row to train by, written once, checked when opened."""

import hashlib
from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embeddings.common.errors import InputError
from embeddings.common.io import atomic_path, check_manifest, file_sha256, load_array

KIND = "clusters"
IDS_FILE, ROWS_FILE, OFFSETS_FILE = "cluster_ids.npy", "rows_by_cluster.npy", "offsets.npy"
CENTROIDS_FILE, NEIGHBOURS_FILE = "centroids.npy", "neighbours.npy"
MAX_ROWS = 2**32
_FILES = (IDS_FILE, ROWS_FILE, OFFSETS_FILE, CENTROIDS_FILE, NEIGHBOURS_FILE)
_AGAIN = "make the clusters again"
_BLOCK_BYTES = 1 << 22


class ClusterFolder:
    """A folder that `cluster` wrote, memory-mapped.

    Attributes:
        num_clusters: Clusters, k; some may be empty.
        source_key: Content key of the source that was clustered (`CachedSource.key`).
        key: Content key of the clusters.
        rows_by_cluster: Rows sorted by cluster, each cluster's in their order, (rows,) uint32.
        offsets: Where each cluster starts in them, and their number, (k+1,) int64.
        centroids: Unit vectors, (k, d) float32.
        neighbours: Each cluster's n nearest others, nearest first, (k, n) int32.

    Cost: opening reads and checks rows, neighbours and centroids once, in blocks of 4 MiB.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = Path(path)
        fields = check_manifest(path, {"kind": KIND, "complete": True})
        self.num_rows, self.num_clusters = (fields.integer(name, least=1) for name in ("num_rows", "num_clusters"))
        self.source_key: str = fields["source_key"]
        self.key: str = fields["clusters_key"]
        sizes = fields["num_bytes"]
        k, width = self.num_clusters, fields.integer("embedding_dim", least=1)
        self.rows_by_cluster = self._load(ROWS_FILE, sizes, np.uint32, (self.num_rows,))
        self.offsets = self._load(OFFSETS_FILE, sizes, np.int64, (k + 1,))
        self.centroids = self._load(CENTROIDS_FILE, sizes, np.float32, (k, width))
        self.neighbours = self._load(NEIGHBOURS_FILE, sizes, np.int32, (k, fields.integer("num_neighbours")))
        if self.offsets[0] != 0 or self.offsets[-1] != self.num_rows or (np.diff(self.offsets) < 0).any():
            raise self._damaged(OFFSETS_FILE)
        not_a_row, not_a_cluster = f"is none of the {self.num_rows} rows", f"is not of the {k} clusters"
        self._check(ROWS_FILE, self.rows_by_cluster, lambda row_n: row_n < self.num_rows, not_a_row)
        # A negative number is a large one without its sign.
        self._check(NEIGHBOURS_FILE, self.neighbours, lambda x_nK: np.all(x_nK.view(np.uint32) < k, 1), not_a_cluster)
        self._check(
            CENTROIDS_FILE, self.centroids, lambda x_nD: np.isfinite(np.einsum("nd,nd->n", x_nD, x_nD)), "is not finite"
        )

    def _check(self, name: str, array: NDArray[Any], are_good: Callable[[NDArray[Any]], Any], what: str) -> None:
        """Check every entry of an array, block by block."""
        size = max(1, _BLOCK_BYTES // max(1, array[:1].nbytes))
        for start in range(0, len(array), size):
            is_good_N = are_good(np.asarray(array[start : start + size]))
            if not is_good_N.all():
                raise InputError(f"{self.path / name}:{start + int(is_good_N.argmin())}", what, _AGAIN)

    def _load(self, name: str, sizes: Any, dtype: type, shape: tuple[int, ...]) -> NDArray[Any]:
        path = self.path / name
        if not path.is_file() or not isinstance(sizes, dict) or path.stat().st_size != sizes.get(name):
            raise self._damaged(name)
        try:
            array: NDArray[Any] = load_array(path, _AGAIN, mapped=bool(shape[0] * shape[-1]))
        except InputError as error:
            raise self._damaged(name) from error
        if array.dtype != dtype or array.shape != shape:
            raise self._damaged(name)
        return array

    def _damaged(self, name: str) -> InputError:
        return InputError(str(self.path / name), "is missing or not what was written", _AGAIN)


def write_cluster_files(
    folder: Path,
    assignments: Sequence[NDArray[np.int32]],
    centroids: NDArray[np.float32],
    neighbours: NDArray[np.int32],
) -> dict[str, Any]:
    """Write the files of a cluster folder, each whole or not at all; returns the manifest's fields about them.

    The rows are sorted by counting, shard by shard, into a memory-mapped file: memory grows with the largest shard and
    the number of clusters, not with the rows. `assignments` holds the cluster of each row and is read twice.
    """
    num_rows, num_clusters = sum(map(len, assignments)), len(centroids)
    assert 0 < num_rows <= MAX_ROWS
    offsets = np.zeros(num_clusters + 1, dtype=np.int64)
    for shard in assignments:
        offsets[1:] += np.bincount(shard, minlength=num_clusters)
    np.cumsum(offsets, out=offsets)
    with atomic_path(folder / IDS_FILE) as ids_path, atomic_path(folder / ROWS_FILE) as rows_path:
        ids = np.lib.format.open_memmap(ids_path, "w+", np.int32, (num_rows,))
        rows = np.lib.format.open_memmap(rows_path, "w+", np.uint32, (num_rows,))
        _sort_by_cluster(assignments, offsets, ids, rows)
        ids.flush()
        rows.flush()
    for name, array in ((OFFSETS_FILE, offsets), (CENTROIDS_FILE, centroids), (NEIGHBOURS_FILE, neighbours)):
        with atomic_path(folder / name) as temporary, open(temporary, "wb") as file:
            np.save(file, array)
    hashes = [file_sha256(folder / name) for name in (IDS_FILE, CENTROIDS_FILE, NEIGHBOURS_FILE)]
    return {
        "num_rows": num_rows,
        "num_clusters": num_clusters,
        "num_neighbours": neighbours.shape[1],
        "embedding_dim": centroids.shape[1],
        "num_bytes": {name: (folder / name).stat().st_size for name in _FILES},
        "clusters_key": hashlib.sha256("".join(hashes).encode()).hexdigest()[:32],
    }


def _sort_by_cluster(
    assignments: Sequence[NDArray[np.int32]],
    offsets: NDArray[np.int64],
    ids: NDArray[np.int32],
    rows: NDArray[np.uint32],
) -> None:
    """Fill `ids` with the assignments and `rows` with the rows of cluster 0, then of cluster 1, …, in their order."""
    free, first = offsets[:-1].copy(), 0
    for shard in assignments:
        ids[first : first + len(shard)] = shard
        by_cluster = np.argsort(shard, kind="stable")
        counts = np.bincount(shard, minlength=len(free))
        # The place of a row: its cluster's first free place, and as many further as rows of the cluster come before it.
        shift = np.repeat(free - (np.cumsum(counts) - counts), counts)
        rows[np.arange(len(shard)) + shift] = first + by_cluster
        free += counts
        first += len(shard)
