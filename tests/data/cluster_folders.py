"""Cluster folders of a few rows."""

import numpy as np

from embeddings.common.io import write_manifest
from embeddings.data.samplers.clustered import KIND, ClusterFolder, write_cluster_files


def unit_vectors(count, width=8, seed=0):
    """Random unit vectors."""
    drawn = np.random.default_rng(seed).standard_normal((count, width))
    return np.asarray(drawn / np.linalg.norm(drawn, axis=1, keepdims=True), dtype=np.float32)


def nearest_lists(centroids, count):
    """The nearest other vectors of each vector by inner product, nearest first, (k, count)."""
    products = centroids @ centroids.T
    np.fill_diagonal(products, -np.inf)
    return np.argsort(-products, axis=1, kind="stable")[:, :count].astype(np.int32)


def write_clusters(folder, ids, num_clusters, source_key="key", num_neighbours=4):
    """Write a folder with these clusters and random centroids."""
    folder.mkdir(parents=True)
    centroids = unit_vectors(num_clusters)
    lists = nearest_lists(centroids, min(num_neighbours, num_clusters - 1))
    fields = write_cluster_files(folder, [np.array(ids, dtype=np.int32)], centroids, lists)
    write_manifest(folder, {"kind": KIND, "complete": True, "source_key": source_key, **fields})
    return ClusterFolder(folder)
