"""Some clusters of a source in two dimensions, a colour each."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from embeddings.figures.cluster_points import ClusterPoints
from embeddings.figures.page import write_heading
from embeddings.figures.png import pyplot, write_png
from embeddings.figures.projection import Plane
from embeddings.figures.shades import BLACK

# As many colours can be told apart.
MOST_CLUSTERS = 20


def draw_clusters(
    points: ClusterPoints, title: str, subtitle: str, output: Path, map_N2: npt.NDArray[np.float64] | None = None
) -> None:
    """Draw rows on the plane in which they differ most, coloured by cluster, each cluster's mean numbered.

    Clusters that touch here may lie apart in the dimensions that are not shown: the axes say how much of the variance
    is.

    Args:
        points: The rows, of at most 20 clusters.
        title: The line above all.
        subtitle: What else is to be known, wrapped over lines.
        output: The PNG file to write.
        map_N2: Where the rows are put in place of that plane (see `neighbour_map`), (N, 2); a cluster's number then
            stands at the median of its own.

    Raises:
        MissingExtraError: If matplotlib is not installed.
    """
    assert len(points.clusters) <= MOST_CLUSTERS
    plt = pyplot()
    plane = Plane.of(points.vector_ND)
    if map_N2 is None:
        point_N2, mean_K2 = plane.points(points.vector_ND), plane.points(points.mean_KD)
    else:
        point_N2 = map_N2
        places = range(len(points.clusters))
        mean_K2 = np.stack([np.median(map_N2[points.place_N == place], axis=0) for place in places])
    figure, axis = plt.subplots(figsize=(9, 7), layout="constrained")
    colours = [plt.get_cmap("tab20")((2 * place) % 20 + (place >= 10)) for place in range(len(points.clusters))]
    for place, (cluster, colour) in enumerate(zip(points.clusters, colours, strict=True)):
        own_n2 = point_N2[points.place_N == place]
        label = f"{cluster} ({points.num_rows_K[place]:,})"
        axis.scatter(*own_n2.T, s=14, color=colour, alpha=0.7, linewidths=0, label=label)
    for cluster, colour, (x, y) in zip(points.clusters, colours, mean_K2.tolist(), strict=True):
        box = {"boxstyle": "round,pad=0.2", "facecolor": "white", "edgecolor": colour, "linewidth": 1.2, "alpha": 0.85}
        axis.text(x, y, str(cluster), size=8, color=BLACK, ha="center", va="center", bbox=box)
    if map_N2 is None:
        plane.name_axes(axis)
    else:
        _hide_scales(axis)
    figure.legend(loc="outside right upper", title="cluster (rows)", frameon=False, markerscale=2, fontsize=9)
    write_heading(figure, axis, title, subtitle, 88)
    write_png(figure, output)


def _hide_scales(axis: Any) -> None:
    """A frame without numbers: neither the axes of a map of neighbours nor its distances have a unit."""
    axis.set_aspect("equal", adjustable="datalim")
    axis.set_xticks([])
    axis.set_yticks([])
    axis.set_xlabel("t-SNE: who is near whom counts, distances between groups do not", size=9)
