"""Spherical k-means by faiss, with what faiss does in silence said aloud."""

from math import gcd
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from embeddings.common.directions import require_directions
from embeddings.common.errors import OptionError
from embeddings.mining.faiss_library import load_faiss

NUM_ITERATIONS, NUM_RUNS = 100, 3
# faiss gives run r of a best-of-n this much more than its seed.
_SEED_STEP = 15_486_557
_ITERATIONS_A_CALL = 10
_DUPLICATE_DECIMALS = 5
_PROGRESS_DELAY_SECONDS = 2.0


class KMeans(NamedTuple):
    """What one run found.

    Attributes:
        centroids: Unit vectors, (k, d) float32.
        objective: Mean cosine of the vectors with their centroids in the last iteration; larger is better.
    """

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
    """The best of several runs of k-means by cosine, each from other random vectors; of equal ones the first.

    See `kmeans_run` for the arguments and errors.

    Args:
        vectors: Unit rows, (n, d) float32.
        num_clusters: Number of clusters, k.
        num_iterations: Lloyd iterations of a run.
        num_runs: Number of runs.
        seed: Decides the vectors each run begins with.
        gpu: Whether faiss runs on the GPUs.
    """
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
    """One run of k-means by cosine over all vectors.

    Left to itself faiss trains on 256 vectors a cluster and says nothing, and gives a cluster that ends up empty a copy
    of another's centroid, moved by a thousandth. Here every vector counts, and `num_duplicates` tells of the copies.

    Determinism: (vectors, arguments) → the same bits on one machine with one number of threads. Run r begins with the
    vectors that run r of `faiss.Kmeans(nredo=…)` with the same seed begins with.

    Args:
        vectors: Unit rows, (n, d) float32, all in memory.
        num_clusters: Number of clusters, k.
        run: Which run of a best-of-n.
        num_iterations: Lloyd iterations.
        seed: Any integer.
        gpu: Whether faiss runs on the GPUs.
        where: What the vectors are, for messages.

    Precision: float32 products and sums, as faiss computes them.
    Raises:
        InputError: If a vector is zero, NaN or infinite; the message names its row.
        OptionError: If there are more clusters than vectors, a number is not positive, or there is no GPU.

    Source: Morris & Rush 2024 (CDE), arXiv:2410.02525, §4.1 and appendix: spherical, 100 iterations, best of 3.
    Differs: their code sets `max_points_per_centroid` after construction, where faiss does not look, and so trains on
    256 vectors a cluster.
    """
    check_num_clusters(num_clusters, len(vectors))
    if num_iterations < 1:
        raise OptionError("num_iterations", num_iterations, "must be >= 1", "the paper takes 100")
    require_directions(vectors, where)
    faiss = load_faiss(gpu)
    if num_clusters == len(vectors):
        return KMeans(vectors.copy(), 1.0)
    # A call has no progress of its own, so a run is several; each begins with the centroids of the one before.
    num_a_call = gcd(num_iterations, _ITERATIONS_A_CALL)
    kmeans = faiss.Kmeans(
        vectors.shape[1],
        num_clusters,
        niter=num_a_call,
        nredo=1,
        seed=(seed + _SEED_STEP * run + 2**31) % 2**32 - 2**31,
        spherical=True,
        max_points_per_centroid=-(-len(vectors) // num_clusters),
        min_points_per_centroid=1,
        gpu=gpu,
    )
    centroids = _trained(kmeans, vectors, num_iterations // num_a_call, num_a_call, f"k-means, run {run + 1}")
    return KMeans(np.ascontiguousarray(centroids, dtype=np.float32), float(kmeans.obj[-1]) / len(vectors))


def _trained(kmeans: Any, vectors: NDArray[np.float32], num_calls: int, num_a_call: int, title: str) -> Any:
    """The centroids after so many calls, of so many iterations each."""
    centroids = None
    with tqdm(total=num_calls * num_a_call, desc=title, unit="iteration", delay=_PROGRESS_DELAY_SECONDS) as bar:
        for _ in range(num_calls):
            kmeans.train(vectors, init_centroids=centroids)
            centroids = kmeans.centroids
            bar.update(num_a_call)
    return centroids


def check_num_clusters(num_clusters: int, num_vectors: int) -> None:
    """Refuse a number of clusters that the vectors cannot fill.

    Raises:
        OptionError: If it is not positive, or there are fewer vectors.
    """
    if num_clusters < 1:
        raise OptionError("num_clusters", num_clusters, "must be >= 1", "leave it out and give cluster_size")
    if num_clusters > num_vectors:
        rule = f"must not exceed the {num_vectors} rows"
        raise OptionError("num_clusters", num_clusters, rule, "lower it, or give cluster_size")


def num_duplicates(centroids: NDArray[np.float32]) -> int:
    """How many centroids repeat another to five decimals: what faiss makes where different vectors are too few."""
    return len(centroids) - len(np.unique(np.round(centroids, _DUPLICATE_DECIMALS), axis=0))
