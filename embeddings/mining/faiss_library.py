"""faiss, loaded on use: device checks, inverted lists, k-means, nearest centroids; on a GPU the last two in torch."""

import errno
import os
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from embeddings.common.errors import OptionError, pip_install, require
from embeddings.common.io import check_vectors
from embeddings.common.progress import progress_bar


def load_faiss(gpu: bool = False) -> ModuleType:
    """The faiss module; a GPU is checked, because the CPU build would ignore `gpu=True` silently."""
    faiss = require("faiss", "gpu" if gpu else "cpu")
    if gpu and not hasattr(faiss, "StandardGpuResources"):
        hint = f"{pip_install('gpu')} in place of faiss-cpu"
        raise OptionError("gpu", True, "needs a build of faiss for GPUs", hint)
    if gpu and faiss.get_num_gpus() == 0:
        raise OptionError("gpu", True, "needs a CUDA device, and faiss finds none", "leave it out, or check the driver")
    return faiss


GpuLibrary = Literal["torch", "faiss"]


def check_gpu(gpu: GpuLibrary | None) -> None:
    """Load faiss, and check the device if k-means runs on a GPU."""
    load_faiss(gpu == "faiss")
    if gpu == "torch":
        from embeddings.mining.search import require_gpu

        require_gpu()


def faiss_version() -> str:
    """The version of faiss, for manifests: another version may order ties or train differently."""
    return str(require("faiss", "cpu").__version__)


def new_lists(quantizer: Any, num_lists: int) -> Any:
    faiss = load_faiss()
    lists = faiss.IndexIVFFlat(quantizer, quantizer.d, num_lists, faiss.METRIC_INNER_PRODUCT)
    lists.is_trained = True
    return lists


def write_lists(lists: Any, path: Path) -> None:
    """Write inverted lists and check that the file is complete; an `OSError` if it is not."""
    try:
        load_faiss().write_index(lists, str(path))
        map_lists(path)
    except RuntimeError as error:
        # Only the text of faiss's error has the reason.
        number = next((number for number in errno.errorcode if os.strerror(number) in str(error)), errno.EIO)
        raise OSError(number, os.strerror(number), str(path)) from None


def map_lists(path: Path) -> Any:
    """Inverted lists, memory-mapped; a RuntimeError if the file has none or is incomplete."""
    faiss = load_faiss()
    lists = faiss.read_index(str(path), faiss.IO_FLAG_MMAP | faiss.IO_FLAG_READ_ONLY)
    # By default threads prefetch lists after the search has returned, when the file may have been replaced.
    faiss.downcast_InvertedLists(lists.invlists).prefetch_nthread = 0
    return lists


NUM_ITERATIONS, NUM_RUNS = 100, 3
# In a best-of-n, faiss adds r times this to the seed of run r.
_SEED_STEP = 15_486_557
# Scores of vectors and centroids, and on a CPU multiplications, that one call of faiss computes: about a second, which
# Ctrl-C does not interrupt.
_BLOCK_SCORES, _BLOCK_PRODUCTS = 1 << 27, 1 << 34
# Parts in which the means of the clusters are computed, for the same reason.
_MEAN_PARTS = 16
# Relative distance from its copy of a centroid that is placed in a large cluster, because its own had no vectors.
_MOVE = 1 / 1024


class KMeans(NamedTuple):
    """The unit centroids of one run, (k, d), and the mean cosine of vectors and centroids in the last iteration."""

    centroids: NDArray[np.float32]
    objective: float


def spherical_kmeans(
    vectors: NDArray[np.float32],
    num_clusters: int,
    *,
    num_iterations: int = NUM_ITERATIONS,
    num_runs: int = NUM_RUNS,
    seed: int = 0,
    gpu: bool = False,
    gpu_library: GpuLibrary = "torch",
) -> KMeans:
    """The best of `num_runs` runs of spherical k-means (see `kmeans_run`), on request on a GPU."""
    if num_runs < 1:
        raise OptionError("num_runs", num_runs, "must be >= 1", "the paper uses the best of 3")
    numbers = progress_bar(None, "k-means", "run", iterable=range(num_runs))
    library = gpu_library if gpu else None
    runs = [kmeans_run(vectors, num_clusters, run, num_iterations, seed, library) for run in numbers]
    return max(runs, key=lambda run: run.objective)


def kmeans_run(
    vectors: NDArray[np.float32],
    num_clusters: int,
    run: int = 0,
    num_iterations: int = NUM_ITERATIONS,
    seed: int = 0,
    gpu: GpuLibrary | None = None,
    where: str = "vectors",
) -> KMeans:
    """One run of spherical k-means over all vectors, unit rows in memory; `run` is its index in a best-of-n.

    The centroid of an empty cluster becomes a copy of the largest cluster's, moved by a thousandth. On a GPU it starts
    from the same centroids as on a CPU, and `gpu` names the library: torch on the first GPU, or faiss on all.

    Source: Morris & Rush 2024 (CDE), arXiv:2410.02525, §4.1 and appendix: spherical, 100 iterations, best of 3.
        Differs: their code sets `max_points_per_centroid` too late for faiss, and so trains on 256 vectors per cluster;
        on a CPU, more than 4,096 centroids are compared in groups (see `NearestCentroids`).
    """
    check_num_clusters(num_clusters, len(vectors))
    if num_iterations < 1:
        raise OptionError("num_iterations", num_iterations, "must be >= 1", "the paper uses 100")
    check_vectors(vectors, where)
    check_gpu(gpu)
    faiss = load_faiss()
    num_vectors = len(vectors)
    if num_clusters == num_vectors:
        return KMeans(vectors.copy(), 1.0)
    order_N = np.empty(num_vectors, np.int32)
    faiss.rand_perm(faiss.swig_ptr(order_N), num_vectors, (seed + 1 + _SEED_STEP * run) % 2**32)
    centroids = vectors[order_N[:num_clusters]]
    faiss.normalize_L2(centroids)
    title = f"k-means, run {run + 1}"
    if gpu == "torch":
        from embeddings.mining.torch_kmeans import device_kmeans

        return KMeans(*device_kmeans(vectors, centroids, num_iterations, _unit_means, "cuda", title))
    nearest_N, cosine_N = np.empty(num_vectors, np.int32), np.empty(num_vectors, np.float32)
    size = _block_rows(centroids, gpu)
    with progress_bar(num_iterations * num_vectors, title, "vector", unit_scale=True) as bar:
        for _ in range(num_iterations):
            with bar.item(0):
                index = _index(centroids, gpu)
            for start in range(0, num_vectors, size):
                block = slice(start, min(start + size, num_vectors))
                score_n1, nearest_n1 = index.search(vectors[block], 1)
                nearest_N[block], cosine_N[block] = nearest_n1[:, 0], score_n1[:, 0]
                bar.update(block.stop - start)
            centroids = _mean_directions(vectors, nearest_N, num_clusters)
    return KMeans(centroids, float(cosine_N.mean(dtype=np.float64)))


def _mean_directions(vectors: NDArray[np.float32], nearest_N: NDArray[np.int32], num_clusters: int) -> Any:
    """The unit mean of each cluster, (k, d) float32."""
    from scipy.sparse import csr_array

    count_K = np.bincount(nearest_N, minlength=num_clusters)
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(count_K)])
    ones, order_N = np.ones(len(vectors), np.float32), np.argsort(nearest_N, kind="stable")
    members_KN = csr_array((ones, order_N, ends), shape=(num_clusters, len(vectors)))
    step = -(-num_clusters // _MEAN_PARTS)
    sum_KD = np.concatenate([members_KN[start : start + step] @ vectors for start in range(0, num_clusters, step)])
    return _unit_means(sum_KD, count_K)


def _unit_means(sum_KD: NDArray[np.float32], count_K: NDArray[np.int64]) -> Any:
    """The unit mean of each cluster, (k, d) float32, from its sum and its size; changes the sizes."""
    centroids = sum_KD * (np.float32(1) / np.maximum(count_K, 1).astype(np.float32))[:, None]
    # As in faiss, neighbouring values move in opposite directions.
    moves_D = np.where(np.arange(sum_KD.shape[1]) % 2, -_MOVE, _MOVE).astype(np.float32)
    for empty in np.flatnonzero(count_K == 0).tolist():
        largest = int(count_K.argmax())
        centroids[empty] = centroids[largest] * (1 + moves_D)
        centroids[largest] *= 1 - moves_D
        count_K[empty] = count_K[largest] // 2
        count_K[largest] -= count_K[empty]
    load_faiss().normalize_L2(centroids)
    return centroids


def check_num_clusters(num_clusters: int, num_vectors: int) -> None:
    if num_clusters < 1:
        raise OptionError("num_clusters", num_clusters, "must be >= 1", "leave it out and give cluster_size")
    if num_clusters > num_vectors:
        rule = f"must not exceed the {num_vectors} rows"
        raise OptionError("num_clusters", num_clusters, rule, "lower it, or give cluster_size")


def num_duplicates(centroids: NDArray[np.float32]) -> int:
    """Number of centroids that equal another to five decimals, which faiss makes if distinct vectors are too few."""
    return len(centroids) - len(np.unique(np.round(centroids, 5), axis=0))


def nearest_centroids(
    vectors: NDArray[np.float32], centroids: NDArray[np.float32], gpu: GpuLibrary | None = None
) -> NDArray[np.int32]:
    """The index of the centroid with the largest inner product with each vector, (n,) int32.

    Exact on a GPU and for up to 4,096 centroids; more are compared in groups (see `NearestCentroids`).
    """
    index, size = _index(centroids, gpu), _block_rows(centroids, gpu)
    vectors = np.ascontiguousarray(vectors, dtype=np.float32)
    nearest = [index.search(vectors[start : start + size], 1)[1][:, 0] for start in range(0, len(vectors), size)]
    return np.concatenate([np.empty(0, np.int64), *nearest]).astype(np.int32)


def neighbour_lists(
    centroids: NDArray[np.float32], num_neighbours: int, gpu: GpuLibrary | None = None
) -> NDArray[np.int32]:
    """The nearest other centroids of each by inner product, nearest first, (k, n) int32, n at most `num_neighbours`."""
    num_centroids = len(centroids)
    width = min(num_neighbours, num_centroids - 1)
    lists = np.empty((num_centroids, width), dtype=np.int32)
    if not width:
        return lists
    index, size = _index(centroids, gpu), _block_rows(centroids, gpu)
    starts = range(0, num_centroids, size)
    for start in progress_bar(None, "comparing centroids", "block", iterable=starts):
        block = centroids[start : start + size]
        nearest = index.search(block, width + 1)[1]
        is_itself = nearest == start + np.arange(len(nearest))[:, None]
        # If copies displace a centroid from its own list, the last entry is dropped.
        is_itself[~is_itself.any(axis=1), -1] = True
        lists[start : start + size] = nearest[~is_itself].reshape(len(nearest), -1)
    return lists


def _block_rows(centroids: NDArray[np.float32], gpu: GpuLibrary | None) -> int:
    """The number of vectors that are compared with the centroids in one call."""
    num_centroids, width = centroids.shape
    if gpu:
        rows: int = _BLOCK_SCORES // num_centroids
    else:
        from embeddings.mining.lists import MAX_UNGROUPED

        num_compared = min(num_centroids, MAX_UNGROUPED)
        rows = min(_BLOCK_SCORES, _BLOCK_PRODUCTS // width) // num_compared
    # Blocks of faiss and of matrix products stay full, so that the sums do not depend on the size.
    return rows // 4096 * 4096 or max(512, min(rows, 2048) // 512 * 512)


def _index(centroids: NDArray[np.float32], gpu: GpuLibrary | None) -> Any:
    if gpu == "torch":
        from embeddings.mining.torch_kmeans import DeviceCentroids

        return DeviceCentroids(centroids, "cuda")
    if gpu == "faiss":
        faiss = load_faiss(gpu=True)
        index = faiss.index_cpu_to_all_gpus(faiss.IndexFlatIP(centroids.shape[1]))
        index.add(centroids)
        return index
    from embeddings.mining.lists import NearestCentroids

    return NearestCentroids(centroids)
