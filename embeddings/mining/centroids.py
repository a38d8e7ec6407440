"""What is asked of centroids: the nearest one of each vector, and those nearest to each other."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from embeddings.common.errors import InputError
from embeddings.mining.faiss_library import load_faiss

BLOCK = 16_384
# Comparing all with all costs k² products: up to here minutes on two cores.
MAX_EXACT = 131_072
_NUM_PROBES = 32


def nearest_centroids(
    vectors: NDArray[np.float32], centroids: NDArray[np.float32], gpu: bool = False
) -> NDArray[np.int32]:
    """The centroid with the largest inner product with each vector, exactly.

    Args:
        vectors: (n, d) float32.
        centroids: (k, d) float32.
        gpu: Whether faiss runs on the GPUs.

    Returns:
        Its number, (n,) int32.

    Raises:
        InputError: If the widths differ.
        OptionError: If there is no GPU.
    """
    if vectors.shape[1] != centroids.shape[1]:
        what = f"vectors of width {vectors.shape[1]} do not go with centroids of width {centroids.shape[1]}"
        raise InputError("clusters", what, "make the clusters again")
    index = _flat_index(centroids, gpu)
    found = np.empty(len(vectors), dtype=np.int32)
    for start in range(0, len(vectors), BLOCK):
        block = np.ascontiguousarray(vectors[start : start + BLOCK], dtype=np.float32)
        found[start : start + BLOCK] = index.search(block, 1)[1][:, 0]
    return found


def neighbour_lists(
    centroids: NDArray[np.float32], num_neighbours: int, gpu: bool = False, max_exact: int = MAX_EXACT
) -> NDArray[np.int32]:
    """Each centroid's nearest others by inner product, nearest first.

    Exact up to `max_exact` centroids. Of more, each is compared with those in the nearest 32 of 4·√k groups: a tour
    that goes by these lists is approximate anyway.

    Args:
        centroids: Unit vectors, (k, d) float32.
        num_neighbours: Most neighbours of a centroid.
        gpu: Whether faiss runs on the GPUs.
        max_exact: Most centroids that are all compared with each other.

    Returns:
        (k, n) int32, n the smaller of `num_neighbours` and k - 1.

    Raises:
        OptionError: If there is no GPU.
    """
    num_centroids = len(centroids)
    wanted = min(num_neighbours, num_centroids - 1)
    lists = np.empty((num_centroids, wanted), dtype=np.int32)
    if not wanted:
        return lists
    exact = _flat_index(centroids, gpu)
    index = exact if num_centroids <= max_exact else _grouped_index(centroids, gpu)
    for start in range(0, num_centroids, BLOCK):
        block = centroids[start : start + BLOCK]
        found = index.search(block, wanted + 1)[1]
        short = np.flatnonzero((found < 0).any(axis=1))
        if len(short):
            found[short] = exact.search(block[short], wanted + 1)[1]
        lists[start : start + BLOCK] = _without_itself(found, start)
    return lists


def _without_itself(found: NDArray[np.int64], first: int) -> NDArray[np.int64]:
    """The lists of centroids `first`, `first` + 1, … without themselves; the last goes where a copy hid itself."""
    is_itself = found == first + np.arange(len(found))[:, None]
    is_itself[~is_itself.any(axis=1), -1] = True
    return np.asarray(found[~is_itself].reshape(len(found), -1))


def _flat_index(centroids: NDArray[np.float32], gpu: bool) -> Any:
    faiss = load_faiss(gpu)
    index = faiss.IndexFlatIP(centroids.shape[1])
    if gpu:
        index = faiss.index_cpu_to_all_gpus(index)
    index.add(centroids)
    return index


def _grouped_index(centroids: NDArray[np.float32], gpu: bool) -> Any:
    faiss = load_faiss(gpu)
    num_groups = int(4 * len(centroids) ** 0.5)
    width = centroids.shape[1]
    index = faiss.IndexIVFFlat(faiss.IndexFlatIP(width), width, num_groups, faiss.METRIC_INNER_PRODUCT)
    index.cp.min_points_per_centroid = 1
    index.nprobe = _NUM_PROBES
    if gpu:
        index = faiss.index_cpu_to_all_gpus(index)
    index.train(centroids)
    index.add(centroids)
    return index
