"""P11: packing the clusters of 10M rows takes at most 3 s, and at most 8 bytes of memory a row besides the files.

A whole epoch is timed: the order of the clusters and all rows of all batches. The peer packs as CDE does, with a Python
list of rows for each cluster. Both use the same order of clusters, so each batch must have the same number of rows of
each cluster.
"""

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness import compare, options, peak_growth_bytes, record
from embeddings.common.io import write_manifest
from embeddings.data.samplers.clustered import (
    KIND,
    ClusterFolder,
    PackedClusters,
    nearest_order,
    random_order,
    write_cluster_files,
)

ROWS_A_CLUSTER, WIDTH, NUM_NEIGHBOURS, BATCH_SIZE = 512, 64, 32, 1024
NUM_TIMED = 3


def write_folder(path: Path, num_rows: int) -> ClusterFolder:
    """Random clusters of about equal size around a random walk; the neighbours are the nearest steps of the walk."""
    generator = np.random.default_rng(0)
    num_clusters = num_rows // ROWS_A_CLUSTER
    steps = generator.standard_normal((num_clusters, WIDTH), dtype=np.float32)
    walk = np.cumsum(steps, axis=0) + 4 * generator.standard_normal(steps.shape, dtype=np.float32)
    centroids = walk / np.linalg.norm(walk, axis=1, keepdims=True)
    nearby = (np.arange(num_clusters)[:, None] + np.arange(-16, 17)) % num_clusters
    others = nearby[nearby != np.arange(num_clusters)[:, None]].reshape(num_clusters, NUM_NEIGHBOURS)
    products = np.einsum("knd,kd->kn", centroids[others], centroids)
    neighbours = np.take_along_axis(others, np.argsort(-products, axis=1), axis=1).astype(np.int32)
    ids = generator.integers(0, num_clusters, num_rows, dtype=np.int32)
    fields = write_cluster_files(path, np.array_split(ids, 8), centroids, neighbours)
    write_manifest(path, {"kind": KIND, "complete": True, "source_key": "none", **fields})
    return ClusterFolder(path)


def packed_epoch(folder: ClusterFolder, key: int) -> Iterator[NDArray[np.int64]]:
    """Ours: the batches of one epoch."""
    order = random_order(folder.num_clusters, key)
    packed = PackedClusters(folder.rows_by_cluster, folder.offsets, order, BATCH_SIZE, key)
    for number in range(packed.num_batches):
        yield packed.batch(number)


def listed_epoch(cluster_ids: NDArray[np.int32], key: int) -> Iterator[list[int]]:
    """The peer: lists of rows, concatenated, split into batches and shuffled."""
    rows_of: dict[int, list[int]] = defaultdict(list)
    for row, cluster in enumerate(cluster_ids.tolist()):
        rows_of[cluster].append(row)
    draw, packed = Random(key), []
    for cluster in random_order(int(cluster_ids.max()) + 1, key).tolist():
        members = rows_of[cluster]
        draw.shuffle(members)
        packed += members
    for start in range(0, len(packed) - BATCH_SIZE + 1, BATCH_SIZE):
        batch = packed[start : start + BATCH_SIZE]
        draw.shuffle(batch)
        yield batch


def check_equal(folder: ClusterFolder, cluster_ids: NDArray[np.int32]) -> None:
    """Refuse to time two packings unless each batch has as many rows of each cluster in both, and each row once."""
    seen = np.zeros(folder.num_rows, dtype=bool)
    for found, expected in zip(packed_epoch(folder, 0), listed_epoch(cluster_ids, 0), strict=True):
        if not (np.sort(cluster_ids[found]) == np.sort(cluster_ids[expected])).all() or seen[found].any():
            raise RuntimeError("the packings differ: nothing to compare")
        seen[found] = True
    if not seen.all():
        raise RuntimeError("a row is in no batch: nothing to compare")


def measured(path: str, is_ours: bool) -> Iterator[None]:
    """One epoch in a child process. Opening the folder has read its files, so their pages are not counted."""
    folder, ids = ClusterFolder(path), np.load(Path(path) / "cluster_ids.npy", mmap_mode="r")
    yield
    for _ in packed_epoch(folder, 0) if is_ours else listed_epoch(ids, 0):
        pass


def record_greedy_order(chosen: argparse.Namespace, folder: ClusterFolder) -> None:
    """Record the time of the greedy order of clusters, which an epoch needs in addition if it is chosen."""
    times = []
    for key in range(NUM_TIMED):
        start = time.perf_counter()
        nearest_order(folder.centroids, folder.neighbours, key)
        times.append((time.perf_counter() - start) / folder.num_clusters * 1e6)
    claim = f"P11 greedy order of {folder.num_clusters} clusters of width {WIDTH}"
    record(chosen, claim, statistics.median(times), "us a cluster", "none", "numpy")


def main() -> None:
    """Check that both packings agree, then time an epoch of each and measure their memory."""
    chosen = options(__doc__)
    # A multiple of the batch size: of a remainder, each would leave out different rows.
    num_rows = BATCH_SIZE * (16 if chosen.tiny else 9766)
    with TemporaryDirectory() as temporary:
        folder = write_folder(Path(temporary), num_rows)
        ids = np.load(folder.path / "cluster_ids.npy", mmap_mode="r")
        check_equal(folder, ids)
        seconds = []
        for key in range(NUM_TIMED):
            start = time.perf_counter()
            for _ in packed_epoch(folder, key):
                pass
            seconds.append(time.perf_counter() - start)
        record(
            chosen, f"P11 packing an epoch of {num_rows} rows, ours", statistics.median(seconds), "s", "<=3", "numpy"
        )
        record_greedy_order(chosen, folder)
        for name, is_ours, target in (("ours", True, "<=8"), ("lists", False, "none")):
            growth = peak_growth_bytes(chosen, measured, temporary, is_ours) / num_rows
            record(chosen, f"P11 memory of packing beside the files, {name}", growth, "bytes a row", target, "numpy")
        ratio = compare(lambda: list(packed_epoch(folder, 0)), lambda: list(listed_epoch(ids, 0)), chosen)
        record(chosen, f"P11 packing an epoch of {num_rows} rows over lists", ratio, "ratio", "none", "numpy")


if __name__ == "__main__":
    main()
