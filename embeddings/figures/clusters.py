"""Plots of vectors in two dimensions: clusters of a source, and documents in several contexts (CDE's Fig. 15)."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from embeddings.common import require_minimum
from embeddings.common.random import numpy_generator
from embeddings.data.samplers.clustered import ClusterFolder
from embeddings.data.surrogate_vectors import SurrogateVectors
from embeddings.figures.drawing import (
    BLACK,
    colour_of,
    drawn_label,
    plain_axes,
    pyplot,
    write_heading,
    write_png,
)
from embeddings.inference.encoder import unit_rows
from embeddings.inference.inspection import ContextualShift

# The numbers of distinguishable colours and markers.
MAX_CLUSTERS = 20
MAX_DOCUMENTS = 20
MAX_CORPORA = 6
_MARKERS = ("o", "^", "s", "v", "P", "X")
_NAME_LENGTH = 48
Vectors = npt.NDArray[np.floating[Any]]


def principal_plane(vector_ND: Vectors) -> Any:
    """A fitted `sklearn.decomposition.PCA` of two axes; the largest entry of an axis is positive."""
    from sklearn.decomposition import PCA  # slow to import

    # Each row is given twice, because `PCA` refuses a single one. Equal rows have no variance to share.
    with np.errstate(invalid="ignore"):
        return PCA(2, svd_solver="full").fit(np.repeat(vector_ND.astype(np.float64), 2, axis=0))


def name_axes(axis: Any, plane: Any) -> None:
    """Label the axes of a plot with their shares of the variance, and scale them equally."""
    first, second = np.nan_to_num(plane.explained_variance_ratio_)
    axis.set_xlabel(f"first principal axis ({first:.1%} of the variance)", size=9)
    axis.set_ylabel(f"second principal axis ({second:.1%} of the variance)", size=9)
    axis.set_aspect("equal", adjustable="datalim")
    axis.tick_params(labelsize=8)
    plain_axes(axis)


@dataclass(frozen=True, eq=False)
class ClusterPoints:
    """N unit rows drawn from K clusters, ascending; `index_N` is the index of a row's cluster in `clusters`."""

    clusters: list[int]
    num_rows_K: npt.NDArray[np.int64]
    index_N: npt.NDArray[np.int64]
    vector_ND: npt.NDArray[np.float32]

    @property
    def mean_KD(self) -> npt.NDArray[np.float32]:
        return np.stack([self.vector_ND[self.index_N == index].mean(axis=0) for index in range(len(self.clusters))])

    def table(self) -> list[list[object]]:
        """How compact each cluster is, and how far from the others of the sample, with a header.

        The cosine is the mean of the cluster's rows with their own mean. The nearest other cluster is the one with the
        nearest mean, itself if there is no other. The last column is the share of rows that are nearest to their mean.
        """
        columns = ["cluster", "rows", "plotted", "cosine with its mean", "nearest other", "cosine of means"]
        table: list[list[object]] = [[*columns, "nearest to own mean"]]
        mean_KD = unit_rows(self.mean_KD)
        cosine_NK, between_KK = self.vector_ND @ mean_KD.T, mean_KD @ mean_KD.T
        np.fill_diagonal(between_KK, -np.inf if len(self.clusters) > 1 else 1.0)
        for index, cluster in enumerate(self.clusters):
            cosine_nK, nearest = cosine_NK[self.index_N == index], int(between_KK[index].argmax())
            row = [cluster, f"{self.num_rows_K[index]:,}", len(cosine_nK), f"{cosine_nK[:, index].mean():.3f}"]
            row += [self.clusters[nearest], f"{between_KK[index, nearest]:.3f}"]
            table.append([*row, f"{(cosine_nK.argmax(axis=1) == index).mean():.1%}"])
        return table


def draw_cluster_points(
    clusters: ClusterFolder, vectors: SurrogateVectors, num_clusters: int, rows_per_cluster: int, seed: int = 0
) -> ClusterPoints:
    """Draw random non-empty clusters, and random rows of each: query and first positive, concatenated."""
    require_minimum("num_clusters", num_clusters, 1)
    require_minimum("rows_per_cluster", rows_per_cluster, 1)
    generator = numpy_generator(seed, "shown clusters")
    sizes = np.diff(clusters.offsets)
    chosen = np.sort(generator.permutation(np.flatnonzero(sizes))[:num_clusters])
    indices, vectors_of_rows = [], []
    for index, cluster in enumerate(chosen.tolist()):
        rows = np.asarray(clusters.rows_by_cluster[clusters.offsets[cluster] : clusters.offsets[cluster + 1]])
        for row in np.sort(generator.permutation(rows)[:rows_per_cluster]).tolist():
            vectors_of_rows.append(np.concatenate([vectors.query(row), vectors.positives(row)[0]]))
            indices.append(index)
    return ClusterPoints(chosen.tolist(), sizes[chosen], np.array(indices), unit_rows(np.stack(vectors_of_rows)))


def draw_clusters(points: ClusterPoints, title: str, subtitle: str, output: Path) -> None:
    """Plot rows of at most 20 clusters on their first two principal axes, with a colour and a number per cluster."""
    assert len(points.clusters) <= MAX_CLUSTERS
    plt = pyplot()
    plane = principal_plane(points.vector_ND)
    point_N2, mean_K2 = plane.transform(points.vector_ND), plane.transform(points.mean_KD)
    figure, axis = plt.subplots(figsize=(9, 7), layout="constrained")
    colours = list(map(colour_of, range(len(points.clusters))))
    for index, (cluster, colour) in enumerate(zip(points.clusters, colours, strict=True)):
        point_n2 = point_N2[points.index_N == index]
        label = f"{cluster} ({points.num_rows_K[index]:,})"
        axis.scatter(*point_n2.T, s=14, color=colour, alpha=0.7, linewidths=0, label=label)
    for cluster, colour, (x, y) in zip(points.clusters, colours, mean_K2.tolist(), strict=True):
        box = {"boxstyle": "round,pad=0.2", "facecolor": "white", "edgecolor": colour, "linewidth": 1.2, "alpha": 0.85}
        axis.text(x, y, str(cluster), size=8, color=BLACK, ha="center", va="center", bbox=box)
    name_axes(axis, plane)
    figure.legend(loc="outside right upper", title="cluster (rows)", frameon=False, markerscale=2, fontsize=9)
    write_heading(figure, axis, title, subtitle, 88)
    write_png(figure, output)


def draw_contextual_shift(
    shift: ContextualShift, names: Sequence[str], corpora: Sequence[str], title: str, subtitle: str, output: Path
) -> None:
    """Plot documents' vectors in several contexts, one colour per document; a cross is the vector without a context.

    The axes are the first two principal axes of the vectors with contexts. `names` are the names of the documents, and
    `corpora` the name of the corpus of each context; each corpus has a marker.

    Source: Morris and Rush 2024 (CDE), arXiv:2410.02525, §10.5, Fig. 15: randomly drawn documents of one corpus
        (TREC-Covid), PCA of their vectors, one colour per document and one dot per context. Differs: other markers.
    """
    corpus_names = list(dict.fromkeys(corpora))
    assert len(names) <= MAX_DOCUMENTS
    assert len(corpus_names) <= MAX_CORPORA
    plt = pyplot()
    from matplotlib.lines import Line2D

    num_contexts, num_documents, size = shift.vector_CND.shape
    plane = principal_plane(shift.vector_CND.reshape(-1, size))
    point_CN2 = plane.transform(shift.vector_CND.reshape(-1, size)).reshape(num_contexts, num_documents, 2)
    alone_N2 = plane.transform(shift.alone_ND)
    figure, axis = plt.subplots(figsize=(9, 6.5 + 0.1 * (num_documents + len(corpus_names) + 2)), layout="constrained")
    handles = []
    for document, name in enumerate(names):
        colour = colour_of(document)
        for corpus_name, marker in zip(corpus_names, _MARKERS, strict=False):
            contexts = [context for context, corpus in enumerate(corpora) if corpus == corpus_name]
            axis.scatter(*point_CN2[contexts, document].T, s=26, marker=marker, color=colour, alpha=0.75, linewidths=0)
        axis.scatter(*alone_N2[document], s=70, marker="x", color=[colour], linewidths=2)
        handles.append(Line2D([], [], color=colour, marker="o", linestyle="", label=drawn_label(name, _NAME_LENGTH)))
    for corpus_name, marker in zip(corpus_names, _MARKERS, strict=False):
        label = f"contexts of {drawn_label(corpus_name, _NAME_LENGTH)}"
        handles.append(Line2D([], [], color=BLACK, marker=marker, linestyle="", label=label))
    handles.append(Line2D([], [], color=BLACK, marker="x", linestyle="", label="no context"))
    name_axes(axis, plane)
    write_heading(figure, axis, title, subtitle, 110)
    legend = figure.legend(handles=handles, loc="outside lower left", frameon=False, ncols=2, fontsize=8.5)
    for text in legend.get_texts():
        text.set(parse_math=False)
    write_png(figure, output)
