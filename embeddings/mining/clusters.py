"""Clustering of a source of pairs: the surrogate features of pairs, and the folder that the clustered sampler reads."""

import math
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embeddings.common.errors import InputError, OptionError, require_minimum
from embeddings.common.io import SETTINGS, check_manifest
from embeddings.common.jobs import (
    ArrayTask,
    JobFolder,
    ShardedJob,
    discard_on_user_error,
    load_shard,
    save_array,
    shard_rows,
)
from embeddings.common.process import logger
from embeddings.common.progress import progress_bar
from embeddings.common.random import KeyedPermutation, derive_seed
from embeddings.data.samplers.clustered import KIND, MAX_ROWS, ClusterFolder, write_cluster_files
from embeddings.data.store import CachedSource
from embeddings.mining.faiss_library import faiss_version
from embeddings.mining.kmeans import (
    NUM_ITERATIONS,
    NUM_RUNS,
    GpuLibrary,
    KMeans,
    check_gpu,
    kmeans_run,
    nearest_centroids,
    neighbour_lists,
    num_duplicates,
)
from embeddings.mining.pair_index import Int64s
from embeddings.mining.pair_vectors import PairVectors
from embeddings.mining.search import Floats

CLUSTER_SIZE = 512
# As faiss's max_points_per_centroid.
VECTORS_PER_CLUSTER = 256
# Nearest clusters listed for each cluster, for the sampler's tour.
NUM_NEIGHBOURS = 32
_BLOCK = 8192
# Measured with faiss-cpu 1.15: copies of the centroids in memory, and bytes per vector beside its values.
_CENTROID_COPIES, _BYTES_PER_VECTOR = 4, 24
# faiss warns about fewer vectors per cluster.
_MIN_VECTORS_PER_CLUSTER = 39

# The name of a row of the source in messages.
RowName = Callable[[int], str]

# More rows do not change axes of a few hundred dimensions noticeably. k-means always uses as many.
MAX_FITTED_ROWS = 1 << 17


class VectorFeatures:
    """A surrogate's vectors [q; d] or [d; q], d the row's first positive, optionally reduced to principal axes.

    The axes are those of the second moments of both orders, without centring, so that both orders share them. They are
    computed by one process and passed to the others as `learned`, because two machines would compute different bits.

    Args:
        vectors: The surrogate's unit vectors.
        svd_dim: Width to reduce to, 1 to twice the width of the vectors, or None.
        seed: Seed of the sample of rows for the axes, if there are more than 131,072.
        row_name: Name of a row in messages, such as its file and line.

    Source: Morris & Rush 2024 (CDE), arXiv:2410.02525, §4.1 and appendix; reduction as in the released code.
    """

    def __init__(
        self, vectors: PairVectors, svd_dim: int | None = None, seed: int = 0, row_name: RowName = "row {}".format
    ) -> None:
        width = vectors.query_shards.embedding_dim
        check_svd_dim(svd_dim, width)
        self._vectors, self._svd_dim, self._seed, self._row_name = vectors, svd_dim, seed, row_name
        self.learned: dict[str, NDArray[Any]] = {}
        self.num_rows, self.embedding_dim = vectors.index.num_queries, svd_dim or 2 * width
        self.fields: dict[str, Any] = {"features": "vectors", "svd_dim": svd_dim}
        for role, shards in (("query", vectors.query_shards), ("document", vectors.document_shards)):
            made = check_manifest(shards.folder, {})
            self.fields |= {f"{role}_{name}": made[name] for name in ("model_sha256", "precision", "prompt_name")}

    def fit(self) -> dict[str, NDArray[Any]]:
        """The principal axes, (2D, svd_dim); empty without a reduction."""
        if self._svd_dim is None:
            return {}
        width = 2 * self._vectors.query_shards.embedding_dim
        moments = np.zeros((width, width))
        rows = sample_rows(self.num_rows, MAX_FITTED_ROWS, derive_seed(self._seed, "axes"))
        starts = range(0, len(rows), _BLOCK)
        for start in progress_bar(None, "reducing the vectors", "block", iterable=starts):
            block = rows[start : start + _BLOCK]
            sides = self._sides(block)
            for order in (sides, sides[::-1]):
                vectors = self._joined(order, block).astype(np.float64)
                moments += vectors.T @ vectors
        _, axes = np.linalg.eigh(moments)
        return {"axes": np.ascontiguousarray(axes[:, ::-1][:, : self._svd_dim], dtype=np.float32)}

    def rows(self, rows: Int64s) -> Floats:
        """The features of ascending rows, (n, embedding_dim) float32, unit rows."""
        return self._reduced(self._sides(rows), rows)

    def both_orders(self, rows: Int64s) -> tuple[Floats, Floats]:
        """The features of ascending rows with the query first, and with the document first, from one reading."""
        sides = self._sides(rows)
        return self._reduced(sides, rows), self._reduced(sides[::-1], rows)

    def _sides(self, rows: Int64s) -> tuple[Floats, Floats]:
        vectors, index = self._vectors, self._vectors.index
        documents = np.asarray(index.positive_rows[index.positive_offsets[rows]], dtype=np.int64)
        return vectors.query_shards.take(rows), vectors.document_shards.take(documents)

    def _joined(self, sides: tuple[Floats, Floats], rows: Int64s) -> Floats:
        return unit_features(np.concatenate(sides, axis=1), rows, self._row_name)

    def _reduced(self, sides: tuple[Floats, Floats], rows: Int64s) -> Floats:
        vectors = self._joined(sides, rows)
        if self._svd_dim is None:
            return vectors
        return unit_features(vectors @ self.learned["axes"], rows, self._row_name)


def check_svd_dim(svd_dim: int | None, embedding_dim: int) -> None:
    if svd_dim is not None and not 1 <= svd_dim <= 2 * embedding_dim:
        rule = f"must be between 1 and {2 * embedding_dim}, twice the width of the vectors"
        raise OptionError("svd_dim", svd_dim, rule, "128 is usual")


def unit_features(vectors: Floats, rows: Int64s, row_name: RowName) -> Floats:
    """The vectors of some rows at unit length, (n, d) float32; an `InputError` names a zero or non-finite row."""
    length_N1 = np.linalg.norm(vectors, axis=1, keepdims=True)
    invalid = np.flatnonzero(~(np.isfinite(length_N1[:, 0]) & (length_N1[:, 0] > 0)))
    if len(invalid):
        what = f"its features are {'zero' if length_N1[invalid[0], 0] == 0 else 'not finite'}"
        raise InputError(row_name(int(rows[invalid[0]])), what, "check its texts and the model")
    return np.asarray(vectors / length_N1, dtype=np.float32)


def sample_rows(num_rows: int, max_rows: int, seed: int) -> Int64s:
    """All rows, or `max_rows` random ones if there are more, ascending, int64."""
    if num_rows <= max_rows:
        return np.arange(num_rows)
    return np.sort(KeyedPermutation(num_rows, seed)(np.arange(max_rows)))


# The share of the time of a run of k-means that reading the features takes.
_READ_SHARE = 0.1


@dataclass(frozen=True)
class ClusterSettings:
    """How a source is clustered.

    Args:
        cluster_size: Mean rows per cluster (k is rounded up); None for 512. The paper tries 64 to 4.2 million.
        num_clusters: k itself, instead of cluster_size.
        num_iterations: Lloyd iterations per run of k-means.
        num_runs: Runs of k-means; the best is used.
        vectors_per_cluster: Maximum vectors per cluster that k-means is trained on, two for each row of a random sample
            (but at least 131,072 rows); None for all rows. All rows are assigned, from disk.
        memory_gib: Maximum memory for training k-means, in GiB. If not all rows fit, it is trained on a random sample.
        shard_size: Rows assigned per shard: the most that is lost when the job is killed.
        seed: Seed of every random choice.
        gpu: Whether k-means and the assignment run on a GPU.
        gpu_library: What runs there: `torch` uses the first GPU; `faiss` uses all, and needs the extra `gpu`.
    """

    cluster_size: int | None = None
    num_clusters: int | None = None
    num_iterations: int = NUM_ITERATIONS
    num_runs: int = NUM_RUNS
    vectors_per_cluster: int | None = VECTORS_PER_CLUSTER
    memory_gib: float = 16.0
    shard_size: int = 65_536
    seed: int = 0
    gpu: bool = False
    gpu_library: GpuLibrary = "torch"

    @property
    def library(self) -> GpuLibrary | None:
        """The library that runs on the GPU, None on a CPU."""
        return self.gpu_library if self.gpu else None

    def __post_init__(self) -> None:
        if self.gpu_library != "torch" and not self.gpu:
            raise OptionError("gpu_library", self.gpu_library, "has no effect on a CPU", "set gpu too, or leave it out")
        if self.cluster_size is not None and self.num_clusters is not None:
            rule = "replaces cluster_size"
            raise OptionError("num_clusters", self.num_clusters, rule, "give one of the two")
        for name, value in asdict(self).items():
            if name not in ("seed", "memory_gib") and type(value) is int:
                require_minimum(name, value, 1)

    def resolve_num_clusters(self, num_rows: int) -> int:
        if num_rows > MAX_ROWS:
            raise OptionError("input", num_rows, f"must have at most {MAX_ROWS} rows", "cluster it in parts")
        num_clusters = self.num_clusters
        if num_clusters is None:
            num_clusters = -(-num_rows // (self.cluster_size or CLUSTER_SIZE))
        if num_clusters > num_rows:
            rule = f"must not exceed the {num_rows} rows"
            raise OptionError("num_clusters", num_clusters, rule, "lower it, or give cluster_size")
        return num_clusters

    def resolve_training_rows(self, num_rows: int, num_clusters: int, width: int) -> int | None:
        """Maximum rows that k-means is trained on, or None for all; an `OptionError` if `memory_gib` is too small.

        A row takes 2·(4·width + 24) bytes, in both orders; faiss has four copies of the k centroids, 4·4·k·width bytes.
        """
        centroid_bytes, row_bytes = _CENTROID_COPIES * 4 * num_clusters * width, 2 * (4 * width + _BYTES_PER_VECTOR)
        max_rows = int((self.memory_gib * 2**30 - centroid_bytes) // row_bytes)
        wanted = num_rows
        if self.vectors_per_cluster is not None:
            enough = math.ceil(self.vectors_per_cluster * num_clusters / 2)
            wanted = min(num_rows, max(MAX_FITTED_ROWS, enough))
        if wanted <= max_rows:
            return wanted if wanted < num_rows else None
        if 2 * max_rows < num_clusters:
            least = math.ceil((centroid_bytes + -(-num_clusters // 2) * row_bytes) / 2**30 * 10) / 10
            rule = f"must be at least {least} for {num_clusters} clusters of width {width}"
            raise OptionError("memory_gib", self.memory_gib, rule, "raise it, or ask for fewer clusters")
        return max_rows


def cluster_pairs(
    features: VectorFeatures,
    source: CachedSource,
    output: str | os.PathLike[str],
    settings: ClusterSettings | None = None,
    task: ArrayTask | None = None,
) -> ClusterFolder | None:
    """Cluster the rows of a source into a folder that `ClusteredBatchSampler` reads.

    k-means is trained on [q; d] and [d; q] of all rows, or of a sample of many; each row is assigned to the
    centroid nearest to its [q; d], shard by shard. A killed job loses at most one run of k-means or one shard; the same
    call resumes there and writes the same bytes. Tasks of an array share the runs and the shards; they leave the folder
    `OUTPUT.work`, which may be deleted at the end.

    Args:
        features: Features of the rows.
        source: The source of the features.
        output: The folder to write.
        settings: Settings; None for the paper's.
        task: Runs and shards that this process computes; None for all.

    Returns:
        The clusters, or None if other tasks have not finished their shards.

    Source: Morris & Rush 2024 (CDE), arXiv:2410.02525, §4.1 (Eq. 3) and §5. Differs: k-means by cosine, as released,
        where §4.1 has Euclidean distances; large sources are sampled by default, 256 vectors per cluster as effectively
        in the release, which also splits sources of more than 50M rows and clusters each part.
    """
    settings = settings or ClusterSettings()
    assert features.num_rows == len(source.table)
    num_clusters = settings.resolve_num_clusters(features.num_rows)
    max_rows = settings.resolve_training_rows(features.num_rows, num_clusters, features.embedding_dim)
    check_gpu(settings.library)
    # Options that resolve to the same values for this source must give the same fields.
    excluded = ["cluster_size", "vectors_per_cluster", "memory_gib", *([] if settings.gpu else ["gpu_library"])]
    resolved = {name: value for name, value in asdict(settings).items() if name not in excluded}
    fields = {
        SETTINGS: source.settings,
        "source_key": source.key,
        "num_rows": features.num_rows,
        "faiss": faiss_version(),
        **features.fields,
        **resolved,
        "max_training_rows": max_rows,
        "num_clusters": num_clusters,
        "num_neighbours": min(NUM_NEIGHBOURS, num_clusters - 1),
    }
    output = Path(output)
    work = output.with_name(f"{output.name}.work")
    with discard_on_user_error(output, work, task=task):
        job = JobFolder(output, {"kind": KIND, **fields})
        if not job.complete:
            learning = ShardedJob(work / "features", {"kind": "features", **fields}, 1, suffix=".npz")
            # One process fits the features, the others read its file.
            learning.run(lambda _, path: _save(path, features.fit()), task, take_over=True)
            with load_shard(learning.path(0)) as learned:
                features.learned = dict(learned)
            vectors = cache(partial(_training_vectors, features, num_clusters, max_rows, settings.seed))

            def train(run: int, path: Path) -> None:
                options = (settings.num_iterations, settings.seed, settings.library, "training row")
                result = kmeans_run(vectors(), num_clusters, run, *options)
                _save(path, {"centroids": result.centroids, "objective": np.array(result.objective)})

            runs_fields = {"kind": "k-means", **fields}
            runs = ShardedJob(work / "runs", runs_fields, settings.num_runs, stem="run", suffix=".npz")
            if runs.missing(task):
                # Here, so that the bar of the runs has only k-means.
                vectors()
            runs.run(train, task, take_over=True)
            best, num_shards = _best_run(runs), -(-features.num_rows // settings.shard_size)
            assigning = ShardedJob(work / "assignments", {"kind": "assignments", **fields}, num_shards)
            rows = partial(shard_rows, shard_size=settings.shard_size, num_rows=features.num_rows)

            def assign(shard: int, path: Path) -> None:
                starts = progress_bar(None, "assigning rows", "block", iterable=rows(shard)[::_BLOCK])
                blocks = (features.rows(np.arange(start, min(start + _BLOCK, rows(shard).stop))) for start in starts)
                save_array(path, nearest_centroids(blocks, best.centroids, settings.library))

            assigning.run(assign, task, rows=rows)
            if assigning.missing():
                return None
            job.finish(partial(_merge, job, assigning, best, settings))
    if task is None or task.count == 1:
        shutil.rmtree(work, ignore_errors=True)
    return ClusterFolder(output)


def _training_vectors(features: VectorFeatures, num_clusters: int, max_rows: int | None, seed: int) -> Floats:
    """Both orders of the rows to train on, one order after the other, (2n, d) float32; at most `max_rows` rows."""
    rows = sample_rows(features.num_rows, max_rows or features.num_rows, derive_seed(seed, "training rows"))
    if len(rows) < features.num_rows:
        per_cluster, hint = 2 * len(rows) / num_clusters, ""
        if per_cluster < _MIN_VECTORS_PER_CLUSTER:
            hint = f", fewer than {_MIN_VECTORS_PER_CLUSTER}; raise memory_gib to use more rows"
        counts = f"{len(rows)} of {features.num_rows} rows, {per_cluster:.0f} vectors per cluster{hint}"
        logger.warning("k-means is trained on %s", counts)
    vectors = np.empty((2 * len(rows), features.embedding_dim), dtype=np.float32)
    starts = range(0, len(rows), _BLOCK)
    # k-means takes most of the time.
    for start in progress_bar(None, "reading features", "block", iterable=starts, share=_READ_SHARE):
        orders = features.both_orders(rows[start : start + _BLOCK])
        for half, order in zip((vectors[: len(rows)], vectors[len(rows) :]), orders, strict=True):
            half[start : start + _BLOCK] = order
    return vectors


def _best_run(runs: ShardedJob) -> KMeans:
    def objective(path: Path) -> float:
        with load_shard(path) as run:
            return float(run["objective"])

    with load_shard(max(map(runs.path, range(runs.num_shards)), key=objective)) as best:
        return KMeans(best["centroids"], float(best["objective"]))


def _merge(job: JobFolder, assigning: ShardedJob, best: KMeans, settings: ClusterSettings) -> dict[str, Any]:
    centroids, objective = best
    assignments = [load_shard(assigning.path(shard), mapped=True) for shard in range(assigning.num_shards)]
    lists = neighbour_lists(centroids, NUM_NEIGHBOURS, settings.library)
    facts = write_cluster_files(job.folder, assignments, centroids, lists)
    sizes = np.sum([np.bincount(assignment, minlength=len(centroids)) for assignment in assignments], axis=0)
    statistics = {
        "objective": objective,
        "num_empty": int((sizes == 0).sum()),
        "num_duplicates": num_duplicates(centroids),
        "largest_cluster": int(sizes.max()),
    }
    if statistics["num_empty"] or statistics["num_duplicates"]:
        logger.warning(
            "%s: %d of %d clusters have no rows (their centroids fit only the order [document; query], or rows are too "
            "similar for this number of clusters) and %d centroids are copies; the others have %.0f rows on average",
            job.folder, statistics["num_empty"], len(centroids), statistics["num_duplicates"],
            sizes.sum() / (sizes > 0).sum(),
        )  # fmt: skip
    return {**facts, **statistics}


def _save(path: Path, arrays: dict[str, NDArray[Any]]) -> None:
    with open(path, "wb") as file:
        np.savez(file, allow_pickle=False, **arrays)
