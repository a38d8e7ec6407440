"""faiss, loaded on use, with the device it was asked for or not at all."""

import errno
import os
from math import gcd
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from embeddings.common.errors import OptionError, pip_install, require
from embeddings.common.io import check_vectors
from embeddings.common.jobs import progress_bar


def load_faiss(gpu: bool = False) -> ModuleType:
    """The module faiss, with the device checked: its CPU build accepts `gpu=True` silently and runs on the CPU."""
    faiss = require("faiss", "gpu" if gpu else "cpu")
    if gpu and not hasattr(faiss, "StandardGpuResources"):
        hint = f"{pip_install('gpu')} in place of faiss-cpu"
        raise OptionError("gpu", True, "needs a build of faiss for GPUs", hint)
    if gpu and faiss.get_num_gpus() == 0:
        raise OptionError("gpu", True, "needs a CUDA device, and faiss sees none", "leave it out, or check the driver")
    return faiss


def faiss_version() -> str:
    """The installed faiss's version, for manifests: another version may order equal scores or train otherwise."""
    return str(require("faiss", "cpu").__version__)


def new_lists(quantizer: Any, num_lists: int) -> Any:
    """Empty inverted lists whose centroids are a quantizer's, by inner product."""
    faiss = load_faiss()
    lists = faiss.IndexIVFFlat(quantizer, quantizer.d, num_lists, faiss.METRIC_INNER_PRODUCT)
    lists.is_trained = True
    return lists


def write_lists(lists: Any, path: Path) -> None:
    """Write inverted lists to exactly this path, and see that all of them arrived; an `OSError` where they did not.

    faiss itself raises a RuntimeError, and none where closing the file fails.
    """
    try:
        load_faiss().write_index(lists, str(path))
        map_lists(path)
    except RuntimeError as error:
        # The reason is in faiss's text alone.
        number = next((number for number in errno.errorcode if os.strerror(number) in str(error)), errno.EIO)
        raise OSError(number, os.strerror(number), str(path)) from None


def map_lists(path: Path) -> Any:
    """Inverted lists, mapped into memory; a RuntimeError where the file holds none, or not all of them.

    faiss would start 32 threads at each search that read its lists ahead. They still read after the search has
    returned, when the file may have been replaced; and where it is in memory already, they double a search's time.
    """
    faiss = load_faiss()
    lists = faiss.read_index(str(path), faiss.IO_FLAG_MMAP | faiss.IO_FLAG_READ_ONLY)
    faiss.downcast_InvertedLists(lists.invlists).prefetch_nthread = 0
    return lists


NUM_ITERATIONS, NUM_RUNS = 100, 3
# faiss gives run r of a best-of-n this much more than its seed.
_SEED_STEP = 15_486_557
_ITERATIONS_A_CALL = 10


class KMeans(NamedTuple):
    """The unit centroids of one run, (k, d), and the mean cosine of the vectors with theirs in the last iteration."""

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
) -> KMeans:
    """The best of `num_runs` runs of k-means by cosine, of equal ones the first (see `kmeans_run`)."""
    if num_runs < 1:
        raise OptionError("num_runs", num_runs, "must be >= 1", "the paper takes the best of 3")
    runs = [kmeans_run(vectors, num_clusters, run, num_iterations, seed, gpu) for run in range(num_runs)]
    return max(runs, key=lambda run: run.objective)


def kmeans_run(
    vectors: NDArray[np.float32],
    num_clusters: int,
    run: int = 0,
    num_iterations: int = NUM_ITERATIONS,
    seed: int = 0,
    gpu: bool = False,
    where: str = "vectors",
) -> KMeans:
    """One run of k-means by cosine over all vectors, which are unit rows in memory; `run` is its place in a best-of-n.

    By default faiss trains on 256 vectors a cluster and says nothing, and gives a cluster that ends up empty a copy
    of another's centroid, moved by a thousandth. Here every vector counts, and `num_duplicates` tells of the copies.

    Determinism: (vectors, arguments) → the same bits on one machine with one number of threads. Run r begins with the
    vectors that run r of `faiss.Kmeans(nredo=…)` with the same seed begins with.

    Precision: float32 products and sums, as faiss computes them.
    Source: Morris & Rush 2024 (CDE), arXiv:2410.02525, §4.1 and appendix: spherical, 100 iterations, best of 3.
    Differs: their code sets `max_points_per_centroid` after construction, where faiss does not look, and so trains on
    256 vectors a cluster.
    """
    check_num_clusters(num_clusters, len(vectors))
    if num_iterations < 1:
        raise OptionError("num_iterations", num_iterations, "must be >= 1", "the paper takes 100")
    check_vectors(vectors, where)
    faiss = load_faiss(gpu)
    if num_clusters == len(vectors):
        return KMeans(vectors.copy(), 1.0)
    # A call has no progress of its own, so a run is several; each begins with the centroids of the one before.
    num_a_call = gcd(num_iterations, _ITERATIONS_A_CALL)
    kmeans = faiss.Kmeans(
        vectors.shape[1], num_clusters, niter=num_a_call, nredo=1, spherical=True, gpu=gpu,
        seed=(seed + _SEED_STEP * run + 2**31) % 2**32 - 2**31,
        max_points_per_centroid=-(-len(vectors) // num_clusters), min_points_per_centroid=1,
    )  # fmt: skip
    centroids = None
    with progress_bar(num_iterations, f"k-means, run {run + 1}", "iteration") as bar:
        for _ in range(num_iterations // num_a_call):
            kmeans.train(vectors, init_centroids=centroids)
            centroids = kmeans.centroids
            bar.update(num_a_call)
    return KMeans(np.ascontiguousarray(centroids, dtype=np.float32), float(kmeans.obj[-1]) / len(vectors))


def check_num_clusters(num_clusters: int, num_vectors: int) -> None:
    """Refuse a number of clusters that is not positive or exceeds that of the vectors."""
    if num_clusters < 1:
        raise OptionError("num_clusters", num_clusters, "must be >= 1", "leave it out and give cluster_size")
    if num_clusters > num_vectors:
        rule = f"must not exceed the {num_vectors} rows"
        raise OptionError("num_clusters", num_clusters, rule, "lower it, or give cluster_size")


def num_duplicates(centroids: NDArray[np.float32]) -> int:
    """How many centroids repeat another to five decimals: what faiss makes where different vectors are too few."""
    return len(centroids) - len(np.unique(np.round(centroids, 5), axis=0))


_BLOCK = 16_384


def nearest_centroids(
    vectors: NDArray[np.float32], centroids: NDArray[np.float32], gpu: bool = False
) -> NDArray[np.int32]:
    """The centroid with the largest inner product with each vector, exactly: its number, (n,) int32."""
    _, found_N1 = _index(centroids, gpu).search(np.ascontiguousarray(vectors, dtype=np.float32), 1)
    return np.asarray(found_N1[:, 0], dtype=np.int32)


def neighbour_lists(centroids: NDArray[np.float32], num_neighbours: int, gpu: bool = False) -> NDArray[np.int32]:
    """Each centroid's nearest others by inner product, nearest first, (k, n) int32, n at most `num_neighbours`.

    All are compared with all: k² products, where an iteration of k-means takes k for each vector.
    """
    num_centroids = len(centroids)
    wanted = min(num_neighbours, num_centroids - 1)
    lists = np.empty((num_centroids, wanted), dtype=np.int32)
    if not wanted:
        return lists
    index = _index(centroids, gpu)
    for start in range(0, num_centroids, _BLOCK):
        block = centroids[start : start + _BLOCK]
        found = index.search(block, wanted + 1)[1]
        is_itself = found == start + np.arange(len(found))[:, None]
        # Where a copy is found in a centroid's place, the last one goes.
        is_itself[~is_itself.any(axis=1), -1] = True
        lists[start : start + _BLOCK] = found[~is_itself].reshape(len(found), -1)
    return lists


def _index(centroids: NDArray[np.float32], gpu: bool) -> Any:
    """An index by inner product that compares with all centroids."""
    faiss = load_faiss(gpu)
    index = faiss.IndexFlatIP(centroids.shape[1])
    if gpu:
        index = faiss.index_cpu_to_all_gpus(index)
    index.add(centroids)
    return index
