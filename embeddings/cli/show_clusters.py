"""`show clusters`: what `cluster` has put together, in two dimensions."""

from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from embeddings.figures.cluster_points import ClusterFacts


def clusters(
    clusters: Path,
    vectors: Path | None = None,
    output: Path = Path("clusters.png"),
    num_clusters: int = 10,
    rows_per_cluster: int = 100,
    seed: int = 0,
    projection: Literal["pca", "tsne"] = "pca",
    perplexity: float | None = None,
) -> None:
    """Draw rows of some clusters in two dimensions, and print how tight each cluster is.

    Args:
        clusters: The folder that `cluster` wrote.
        vectors: The vectors of the same source that it wrote beside it; `CLUSTERS.vectors` if left out. Clusters
            by words (`--features bm25`) have none of their own, but may be shown by a model's.
        output: The PNG file to write.
        num_clusters: How many clusters are drawn at random, at most 20.
        rows_per_cluster: Most rows of one.
        seed: Seed of the draw, which is all that is left to chance.
        projection: `pca` draws the plane in which the rows differ most, `tsne` a map on which neighbours stay
            neighbours, of 5,000 rows at most.
        perplexity: About how many neighbours of each row t-SNE goes by, fewer than a third of the rows drawn; 30 if
            left out.
    """
    from embeddings.common import InputError, OptionError
    from embeddings.common.text import one_line
    from embeddings.data.samplers.cluster_folder import ClusterFolder
    from embeddings.data.surrogate_vectors import SurrogateVectors
    from embeddings.figures import check_output, draw_clusters
    from embeddings.figures.cluster_points import draw_cluster_points
    from embeddings.figures.clusters import MOST_CLUSTERS
    from embeddings.figures.neighbour_map import PERPLEXITY, neighbour_map

    if num_clusters > MOST_CLUSTERS:
        rule = f"must be at most {MOST_CLUSTERS}: more colours cannot be told apart"
        raise OptionError("num_clusters", num_clusters, rule, "10 is usual")
    if perplexity is not None and projection != "tsne":
        raise OptionError("perplexity", perplexity, "has no effect without --projection tsne", "leave it out")
    check_output(output)
    found = ClusterFolder(clusters)
    folder = vectors or clusters.absolute().with_name(f"{clusters.absolute().name}.vectors")
    if not folder.is_dir():
        fix = "name the vectors of the same source, which `cluster --model` writes"
        raise InputError(f"--vectors {vectors or folder.name}", "no such folder", fix)
    points = draw_cluster_points(
        found, SurrogateVectors(folder, found.source_key, check_vectors=False), num_clusters, rows_per_cluster, seed
    )
    title = f"{one_line(clusters.absolute().name, 40)}: {len(points.clusters)} of {found.num_clusters:,} clusters"
    subtitle = (
        f"{len(points.vector_ND):,} of {found.num_rows:,} rows, at most {rows_per_cluster} of a cluster; a row is its "
        "query's vector beside its document's. Numbers: the clusters, amid their rows."
    )
    map_N2 = None
    if projection == "tsne":
        perplexity = PERPLEXITY if perplexity is None else perplexity
        subtitle += f" Perplexity {perplexity:g}."
        map_N2 = neighbour_map(points.vector_ND, perplexity)
    draw_clusters(points, title, subtitle, output, map_N2)
    print(f"{title}\n{subtitle}\n\n{_table(points.facts())}\n\nwrote {output}")


def _table(facts: "list[ClusterFacts]") -> str:
    """How tight each cluster is, and how far from the nearest other one."""
    names = (
        "cluster",
        "rows",
        "drawn",
        "cosine with its mean",
        "nearest other",
        "cosine of means",
        "nearest its own mean",
    )
    lines = ["{:>7}  {:>8}  {:>5}  {:>20}  {:>13}  {:>15}  {:>20}".format(*names)]
    for each in facts:
        lines.append(
            f"{each.cluster:>7}  {each.num_rows:>8,}  {each.num_drawn:>5}  {each.cosine:>20.3f}  {each.nearest:>13}  "
            f"{each.nearest_cosine:>15.3f}  {each.at_home:>20.1%}"
        )
    return "\n".join(lines)
