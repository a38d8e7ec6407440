"""Some rows of some clusters and their vectors, to be looked at."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from embeddings.common import OptionError
from embeddings.common.random import numpy_generator
from embeddings.data.samplers.cluster_folder import ClusterFolder
from embeddings.data.surrogate_vectors import SurrogateVectors
from embeddings.inference.vectors import unit_rows


class ClusterFacts(NamedTuple):
    """How tight a cluster is, and how far from the others of a sample.

    Attributes:
        cluster: Its number.
        num_rows: Rows of it in the folder.
        num_drawn: Rows of it in the sample.
        cosine: Mean cosine of its drawn rows with their mean.
        nearest: The other cluster of the sample whose mean is nearest; itself where there is no other.
        nearest_cosine: Cosine of the two means.
        at_home: Share of its drawn rows whose nearest mean is its own.
    """

    cluster: int
    num_rows: int
    num_drawn: int
    cosine: float
    nearest: int
    nearest_cosine: float
    at_home: float


@dataclass(frozen=True, eq=False)
class ClusterPoints:
    """Rows drawn from some clusters.

    Attributes:
        clusters: The K clusters' numbers, ascending.
        num_rows_K: Rows of each in the folder, (K,) int64.
        place_N: The place of each drawn row's cluster among them, (N,) int64, ascending.
        vector_ND: The rows' vectors, (N, D) float32, unit rows.
    """

    clusters: list[int]
    num_rows_K: npt.NDArray[np.int64]
    place_N: npt.NDArray[np.int64]
    vector_ND: npt.NDArray[np.float32]

    @property
    def mean_KD(self) -> npt.NDArray[np.float32]:
        """The mean of each cluster's drawn rows, (K, D)."""
        return np.stack([self.vector_ND[self.place_N == place].mean(axis=0) for place in range(len(self.clusters))])

    def facts(self) -> list[ClusterFacts]:
        """What can be said of each cluster."""
        mean_KD = unit_rows(self.mean_KD)
        cosine_NK, between_KK = self.vector_ND @ mean_KD.T, mean_KD @ mean_KD.T
        np.fill_diagonal(between_KK, -np.inf if len(self.clusters) > 1 else 1.0)
        found = []
        for place, cluster in enumerate(self.clusters):
            own_nK, nearest = cosine_NK[self.place_N == place], int(between_KK[place].argmax())
            at_home = float((own_nK.argmax(axis=1) == place).mean())
            cosines = float(own_nK[:, place].mean()), float(between_KK[place, nearest])
            sizes = int(self.num_rows_K[place]), len(own_nK)
            found.append(ClusterFacts(cluster, *sizes, cosines[0], self.clusters[nearest], cosines[1], at_home))
        return found


def draw_cluster_points(
    clusters: ClusterFolder, vectors: SurrogateVectors, num_clusters: int, rows_per_cluster: int, seed: int = 0
) -> ClusterPoints:
    """Draw some clusters that hold rows, and some rows of each.

    A row's vector is that of its query beside that of its first positive, at unit length: what `cluster` goes by,
    before it reduces it.

    Args:
        clusters: The clusters.
        vectors: The vectors of the same source.
        num_clusters: How many clusters; all where there are fewer.
        rows_per_cluster: Most rows of one.
        seed: Seed of the draw.

    Raises:
        OptionError: If a number is not positive.
    """
    for name, value in (("num_clusters", num_clusters), ("rows_per_cluster", rows_per_cluster)):
        if value < 1:
            raise OptionError(name, value, "must be >= 1", "leave it out for the default")
    generator = numpy_generator(seed, "shown clusters")
    sizes = np.diff(clusters.offsets)
    chosen = np.sort(generator.permutation(np.flatnonzero(sizes))[:num_clusters])
    places, found = [], []
    for place, cluster in enumerate(chosen.tolist()):
        rows = np.asarray(clusters.rows_by_cluster[clusters.offsets[cluster] : clusters.offsets[cluster + 1]])
        for row in np.sort(generator.permutation(rows)[:rows_per_cluster]).tolist():
            found.append(np.concatenate([vectors.query(row), vectors.positives(row)[0]]))
            places.append(place)
    return ClusterPoints(chosen.tolist(), sizes[chosen], np.array(places), unit_rows(np.stack(found)))
