"""Cluster folders of a few rows."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from embeddings.common.io import write_manifest
from embeddings.data.samplers.cluster_folder import KIND, ClusterFolder, write_cluster_files


def unit_vectors(count: int, width: int = 8, seed: int = 0) -> NDArray[np.float32]:
    """Random directions."""
    drawn = np.random.default_rng(seed).standard_normal((count, width))
    return np.asarray(drawn / np.linalg.norm(drawn, axis=1, keepdims=True), dtype=np.float32)


def nearest_lists(centroids: NDArray[np.float32], count: int) -> NDArray[np.int32]:
    """Each vector's nearest others by inner product, nearest first, (k, count)."""
    products = centroids @ centroids.T
    np.fill_diagonal(products, -np.inf)
    return np.argsort(-products, axis=1, kind="stable")[:, :count].astype(np.int32)


def write_clusters(
    folder: Path, ids: Sequence[int], num_clusters: int, source_key: str = "key", num_neighbours: int = 4
) -> ClusterFolder:
    """A folder with these clusters, their centroids random."""
    folder.mkdir(parents=True)
    centroids = unit_vectors(num_clusters)
    lists = nearest_lists(centroids, min(num_neighbours, num_clusters - 1))
    fields = write_cluster_files(folder, [np.array(ids, dtype=np.int32)], centroids, lists)
    write_manifest(folder, {"kind": KIND, "complete": True, "source_key": source_key, **fields})
    return ClusterFolder(folder)
