"""How well k-means clusters of the vectors agree with labels."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from embeddings.common.random import derive_seed

NUM_RUNS = 5


def kmeans_v_measure(
    vector_ND: npt.NDArray[np.float32], labels: Sequence[str], *, seed: int = 0, num_runs: int = NUM_RUNS
) -> dict[str, float]:
    """V-measure of k-means with as many clusters as labels, over several starts.

    Args:
        vector_ND: Vectors, (N, D).
        labels: The label of each, two different ones at least.
        seed: Seed of the starts.
        num_runs: Starts that are averaged: one start varies by a few points.

    Returns:
        `v_measure`, the mean over the starts, and `v_measure_std`, their standard deviation.

    Determinism: equal for equal (vectors, seed) on one machine.
    Source: Rosenberg and Hirschberg 2007, V-measure with beta = 1.
    """
    from sklearn.cluster import KMeans
    from sklearn.metrics import v_measure_score

    scores = []
    for run in range(num_runs):
        start_seed = derive_seed(seed, "kmeans", run) % 2**32
        kmeans = KMeans(n_clusters=len(set(labels)), n_init=1, random_state=start_seed)
        scores.append(v_measure_score(labels, kmeans.fit_predict(vector_ND)))
    return {"v_measure": float(np.mean(scores)), "v_measure_std": float(np.std(scores))}
