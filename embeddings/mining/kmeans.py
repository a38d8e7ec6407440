"""Spherical k-means and nearest centroids: on a CPU by torch and grouped lists, on a GPU by torch or faiss."""

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from embeddings.common.io import check_vectors
from embeddings.common.progress import progress_bar
from embeddings.mining import torch_kmeans
from embeddings.mining.faiss_library import load_faiss, new_lists
from embeddings.mining.lists import Lists
from embeddings.mining.search import Floats, Rows, require_gpu

GpuLibrary = Literal["torch", "faiss"]

NUM_ITERATIONS, NUM_RUNS = 100, 3
# Only the nearest groups are compared if there are more centroids; to find one, and to find several.
MAX_COMPARED, MAX_UNGROUPED = 8192, 4096
CENTROIDS_PER_GROUP, GROUP_PROBES = 128, 32
GROUP_ITERATIONS = 10
# In a best-of-n, faiss adds r times this to the seed of run r.
_SEED_STEP = 15_486_557
# Scores of vectors and centroids, and on a CPU multiplications, that one call computes: at most about a second, which
# Ctrl-C does not interrupt.
_BLOCK_SCORES, _BLOCK_PRODUCTS = 1 << 27, 1 << 34
# Scores of one product, which stay in the processor's cache.
_PRODUCT_SCORES = 1 << 20
# Parts in which the means of the clusters are computed, for the same reason.
_MEAN_PARTS = 16


class KMeans(NamedTuple):
    """The unit centroids of one run, (k, d), and the mean cosine of vectors and centroids in the last iteration."""

    centroids: Floats
    objective: float


def kmeans_run(
    vectors: Floats,
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
        on a CPU, more than 8,192 centroids are compared in groups (see `NearestCentroids`).
    """
    check_vectors(vectors, where)
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
        return KMeans(*torch_kmeans.device_kmeans(vectors, centroids, num_iterations, "cuda", title))
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


def _mean_directions(vectors: Floats, nearest_N: NDArray[np.int32], num_clusters: int) -> Any:
    """The unit mean of each cluster, (k, d) float32."""
    from scipy.sparse import csr_array

    count_K = np.bincount(nearest_N, minlength=num_clusters)
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(count_K)])
    ones, order_N = np.ones(len(vectors), np.float32), np.argsort(nearest_N, kind="stable")
    members_KN = csr_array((ones, order_N, ends), shape=(num_clusters, len(vectors)))
    step = -(-num_clusters // _MEAN_PARTS)
    sum_KD = np.concatenate([members_KN[start : start + step] @ vectors for start in range(0, num_clusters, step)])
    return torch_kmeans.unit_means(sum_KD, count_K)


def check_gpu(gpu: GpuLibrary | None) -> None:
    """Load faiss, and check the device if k-means runs on a GPU."""
    load_faiss(gpu == "faiss")
    if gpu == "torch":
        require_gpu()


def num_duplicates(centroids: Floats) -> int:
    """Number of centroids that equal another to five decimals, which faiss makes if distinct vectors are too few."""
    return len(centroids) - len(np.unique(np.round(centroids, 5), axis=0))


def nearest_centroids(blocks: Iterable[Floats], centroids: Floats, gpu: GpuLibrary | None = None) -> NDArray[np.int32]:
    """The index of the centroid with the largest inner product with each vector of consecutive arrays, (n,) int32.

    Exact on a GPU and for up to 8,192 centroids; more are compared in groups (see `NearestCentroids`).
    """
    index, size = _index(centroids, gpu), _block_rows(centroids, gpu)
    parts = (block[start : start + size] for block in blocks for start in range(0, len(block), size))
    return np.concatenate([index.search(part, 1)[1][:, 0] for part in parts]).astype(np.int32)


def neighbour_lists(centroids: Floats, num_neighbours: int, gpu: GpuLibrary | None = None) -> NDArray[np.int32]:
    """The nearest other centroids of each by inner product, nearest first, (k, n) int32, n at most `num_neighbours`.

    Exact on a GPU and for up to 4,096 centroids; more are compared in groups (see `NearestCentroids`).
    """
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


def _block_rows(centroids: Floats, gpu: GpuLibrary | None) -> int:
    """The number of vectors that are compared with the centroids in one call."""
    num_centroids, width = centroids.shape
    if gpu:
        rows: int = _BLOCK_SCORES // num_centroids
    else:
        num_compared = min(num_centroids, MAX_COMPARED)
        rows = min(_BLOCK_SCORES, _BLOCK_PRODUCTS // width) // num_compared
    # Blocks of faiss and of matrix products stay full, so that the sums do not depend on the size.
    return rows // 4096 * 4096 or max(512, min(rows, 2048) // 512 * 512)


def _index(centroids: Floats, gpu: GpuLibrary | None) -> Any:
    if gpu == "torch":
        return torch_kmeans.DeviceCentroids(centroids, "cuda")
    if gpu == "faiss":
        faiss = load_faiss(gpu=True)
        index = faiss.index_cpu_to_all_gpus(faiss.IndexFlatIP(centroids.shape[1]))
        index.add(centroids)
        return index
    return NearestCentroids(centroids)


class NearestCentroids:
    """The centroids nearest to vectors: of all, or of many, those in the 32 nearest groups.

    A group has 128 centroids on average, so that the products of a vector hardly grow with the number of centroids. One
    centroid is found in groups if there are more than 8,192, several if there are more than 4,096.
    """

    def __init__(self, centroid_CD: Floats) -> None:
        faiss, (num_centroids, width) = load_faiss(), centroid_CD.shape
        self.all = faiss.IndexFlatIP(width)
        self.all.add(centroid_CD)
        self._centroid_CD = centroid_CD
        if num_centroids > MAX_UNGROUPED:
            self._groups, number = faiss.IndexFlatIP(width), num_centroids // CENTROIDS_PER_GROUP
            self._groups.add(kmeans_run(centroid_CD, number, num_iterations=GROUP_ITERATIONS).centroids)
            members = new_lists(self._groups, number)
            members.add(centroid_CD)
            self._members = Lists([members])

    def search(self, vector_ND: Floats, number: int) -> tuple[Floats, Rows]:
        """Scores and numbers of the nearest centroids of each vector, (N, `number`), nearest first."""
        if number == 1 and len(self._centroid_CD) <= MAX_COMPARED:
            return _nearest(vector_ND, torch.from_numpy(self._centroid_CD).T)
        if len(self._centroid_CD) <= MAX_UNGROUPED:
            score_NP, centroid_NP = self.all.search(vector_ND, number)
            return score_NP, centroid_NP
        group_NP = self._groups.search(vector_ND, min(GROUP_PROBES, self._groups.ntotal))[1]
        if number == 1:
            score_NP, centroid_NP = self._members.best(vector_ND, group_NP)
        else:
            found = self._members.search(vector_ND, group_NP, number)
            # The nearest groups may have fewer centroids.
            missing = ((0, 0), (0, number - found.index_QK.shape[1]))
            score_NP, centroid_NP = np.pad(found.score_QK, missing), np.pad(found.index_QK, missing, constant_values=-1)
        if len(few := np.flatnonzero((centroid_NP < 0).any(axis=1))):
            score_NP[few], centroid_NP[few] = self.all.search(vector_ND[few], number)
        return score_NP, centroid_NP


def _nearest(vector_ND: Floats, centroid_DC: torch.Tensor) -> tuple[Floats, Rows]:
    """Score and number of the centroid nearest to each vector, (N, 1) each; faiss takes several times as long."""
    score_N1, centroid_N1 = np.empty((len(vector_ND), 1), np.float32), np.empty((len(vector_ND), 1), np.int64)
    size = max(128, _PRODUCT_SCORES // centroid_DC.shape[1])
    for start in range(0, len(vector_ND), size):
        block = slice(start, start + size)
        # A copy: memory-mapped vectors are read-only, which torch does not support.
        score_nC = torch.tensor(vector_ND[block]).mm(centroid_DC).numpy()
        # torch takes twice as long to find a maximum and its place.
        score_nC.argmax(axis=1, out=centroid_N1[block, 0])
        score_N1[block] = np.take_along_axis(score_nC, centroid_N1[block], axis=1)
    return score_N1, centroid_N1
