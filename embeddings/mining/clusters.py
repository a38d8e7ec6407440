"""The clusters of a source of pairs, from its features to a folder that the clustered sampler reads."""

import math
import os
import shutil
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embeddings.common.errors import InputError, OptionError
from embeddings.common.io import SETTINGS
from embeddings.common.jobs import ArrayTask, ShardedJob, discard_on_user_error, load_shard, save_array, shard_rows
from embeddings.common.process import logger
from embeddings.common.random import derive_seed
from embeddings.data.samplers.cluster_folder import KIND, MAX_ROWS, ClusterFolder, write_cluster_files
from embeddings.data.store import CachedSource
from embeddings.mining.faiss_library import (
    NUM_ITERATIONS,
    NUM_RUNS,
    KMeans,
    check_num_clusters,
    faiss_version,
    kmeans_run,
    load_faiss,
    nearest_centroids,
    neighbour_lists,
    num_duplicates,
)
from embeddings.mining.features import PairFeatures, Vectors, sample_rows

CLUSTER_SIZE = 512
_BLOCK = 8192
# Measured of faiss-cpu 1.15: how often the centroids are held, and what a vector takes beside its numbers.
_CENTROID_COPIES, _BYTES_A_VECTOR = 4, 24
# Below this faiss warns that the centroids are of too few vectors.
_MIN_VECTORS_PER_CLUSTER = 39


@dataclass(frozen=True)
class ClusterSettings:
    """How a source is clustered.

    Args:
        cluster_size: Mean rows of a cluster: k is the rows over this, rounded up. The paper tries 64 to 4.2 million.
            None for 512.
        num_clusters: k itself, in place of cluster_size.
        num_iterations: Lloyd iterations of a run of k-means.
        num_runs: Runs of k-means, of which the best is kept.
        max_training_rows: Maximum rows that k-means is trained on, twice each (both orders); None for as many as
            `memory_gib` holds. Every row is assigned, from disk.
        memory_gib: Maximum memory that training k-means takes, in GiB: both orders of the rows that it is trained on,
            and what faiss holds of the centroids. Where not all rows fit, a random sample of them is trained on.
        num_neighbours: Nearest clusters listed for each, for the sampler's tour.
        shard_size: Rows that are assigned at once: what a kill costs at most.
        seed: Seed of every random choice.
        gpu: Whether k-means and the assignment run on the GPUs (needs the extra `gpu`).

    Raises:
        OptionError: If a number is not positive, or both cluster_size and num_clusters are given.
    """

    cluster_size: int | None = None
    num_clusters: int | None = None
    num_iterations: int = NUM_ITERATIONS
    num_runs: int = NUM_RUNS
    max_training_rows: int | None = None
    memory_gib: float = 16.0
    num_neighbours: int = 32
    shard_size: int = 65_536
    seed: int = 0
    gpu: bool = False

    def __post_init__(self) -> None:
        if self.cluster_size is not None and self.num_clusters is not None:
            rule = "takes the place of cluster_size"
            raise OptionError("num_clusters", self.num_clusters, rule, "give one of the two")
        if not (math.isfinite(self.memory_gib) and self.memory_gib > 0):
            raise OptionError("memory_gib", self.memory_gib, "must be a finite number > 0", "leave it out for 16")
        for name in ("cluster_size", "num_iterations", "num_runs", "max_training_rows", "num_neighbours", "shard_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise OptionError(name, value, "must be >= 1", "leave it out for the default")

    def resolve_num_clusters(self, num_rows: int) -> int:
        """Number of clusters for that many rows; refuses more than there are rows to train on."""
        if num_rows > MAX_ROWS:
            raise OptionError("input", num_rows, f"must have at most {MAX_ROWS} rows", "cluster it in parts")
        num_clusters = self.num_clusters
        if num_clusters is None:
            num_clusters = -(-num_rows // (self.cluster_size or CLUSTER_SIZE))
        check_num_clusters(num_clusters, num_rows)
        if self.max_training_rows is not None and num_clusters > 2 * self.max_training_rows:
            rule = f"must be at least half of the {num_clusters} clusters"
            raise OptionError("max_training_rows", self.max_training_rows, rule, "raise it")
        return num_clusters

    def resolve_training_rows(self, num_rows: int, num_clusters: int, width: int) -> int | None:
        """Most rows that k-means is trained on, or None for all; refuses what `memory_gib` does not hold.

        A row takes 2·(4·width + 24) bytes: both orders, and of each its cluster, its similarity and its length. faiss
        holds the k centroids four times, 4·4·k·width bytes. 65M rows of width 1,536 in clusters of 512 (k = 126,954)
        would take 750 GiB: 16 GiB hold 1.1M of them, 18 vectors a cluster, and 64 GiB 5.3M, 84 a cluster.
        """

        def gib_for(rows: int) -> float:
            return math.ceil((centroid_bytes + rows * row_bytes) / 2**30 * 10) / 10

        centroid_bytes, row_bytes = _CENTROID_COPIES * 4 * num_clusters * width, 2 * (4 * width + _BYTES_A_VECTOR)
        most = int((self.memory_gib * 2**30 - centroid_bytes) // row_bytes)
        asked = min(num_rows, self.max_training_rows or num_rows)
        if asked <= most:
            return self.max_training_rows
        if self.max_training_rows is not None:
            rule = f"takes {gib_for(asked)} GiB to train on, more than memory_gib {self.memory_gib:g}"
            raise OptionError("max_training_rows", self.max_training_rows, rule, "leave it out, or raise memory_gib")
        if 2 * most < num_clusters:
            rule = f"must be at least {gib_for(-(-num_clusters // 2))} for {num_clusters} clusters of width {width}"
            raise OptionError("memory_gib", self.memory_gib, rule, "raise it, or ask for fewer clusters")
        return most


def cluster_pairs(
    features: PairFeatures,
    source: CachedSource,
    output: str | os.PathLike[str],
    settings: ClusterSettings | None = None,
    task: ArrayTask | None = None,
) -> ClusterFolder | None:
    """Cluster the rows of a source into a folder that `ClusteredBatchSampler` reads.

    k-means is trained on [q; d] and [d; q] of each row, or of a sample that fits in the memory; a row belongs to the
    centroid nearest to its [q; d], found shard by shard. Where queries and documents lie apart, up to half of the
    centroids are of [d; q] alone and get no row: the manifest and a warning say how many.

    A kill costs at most one run of k-means or one shard of assignments; the same call resumes there and ends with the
    same bytes. Tasks of an array share the runs and the shards, and the last one finishes the folder.

    Args:
        features: What the rows are clustered by.
        source: The source they were computed of.
        output: The folder to make.
        settings: How; None for the paper's.
        task: Which part of the work is this process's; None for all.

    Returns:
        The clusters, or None where other tasks have shards to assign yet.

    Memory: `memory_gib` while k-means is trained; afterwards four times the centroids and some blocks of features.
    Raises:
        InputError: If the folder holds something else, or was made with other options; or a row has no direction, or a
            shard of vectors is damaged.
        OptionError: If there are more clusters than rows, or than the memory holds, or no GPU where one is asked for.

    Source: Morris & Rush 2024 (CDE), arXiv:2410.02525, §4.1 (Eq. 3) and §5. Differs: k-means by cosine, as released,
        where §4.1 has Euclidean distances; sources that do not fit in memory are sampled, where the release cuts those
        of more than 50M rows into parts and clusters each.
    """
    settings = settings or ClusterSettings()
    assert features.num_rows == len(source.table)
    num_rows = features.num_rows
    num_clusters = settings.resolve_num_clusters(num_rows)
    most = settings.resolve_training_rows(num_rows, num_clusters, features.embedding_dim)
    settings = replace(settings, max_training_rows=most)
    load_faiss(settings.gpu)
    fields = _manifest_fields(features, source, settings, num_clusters)
    num_shards = -(-num_rows // settings.shard_size)
    with discard_on_user_error(Path(output)):
        job, work = ShardedJob(output, fields, num_shards, stem="assignment"), Path(output) / "work"
        try:
            if not job.complete:
                _make(features, settings, job, work, task)
        except (FileNotFoundError, InputError):
            # Another task may have finished meanwhile, and removed what this one was at.
            if not job.complete:
                raise
        if not job.complete:
            return None
    _remove_parts(job, work)
    return ClusterFolder(output)


def _manifest_fields(
    features: PairFeatures, source: CachedSource, settings: ClusterSettings, num_clusters: int
) -> dict[str, Any]:
    # What comes of the settings for this source, however it was said.
    chosen = {name: value for name, value in asdict(settings).items() if name not in ("cluster_size", "memory_gib")}
    return {
        "kind": KIND,
        SETTINGS: source.settings,
        "source_key": source.key,
        "num_rows": features.num_rows,
        "faiss": faiss_version(),
        **features.fields,
        **chosen,
        "num_clusters": num_clusters,
        "num_neighbours": min(settings.num_neighbours, num_clusters - 1),
    }


def _make(
    features: PairFeatures, settings: ClusterSettings, job: ShardedJob, work: Path, task: ArrayTask | None
) -> None:
    """Do the task's part of the stages that are left, as long as no other task finishes the job."""
    with job.lock():
        # Under the lock, so that no part is opened again that a finished job has removed.
        if job.complete:
            return
        fields = {name: value for name, value in job.fields.items() if name != "num_shards"}
        learning = ShardedJob(work / "features", {**fields, "kind": "features"}, 1, suffix=".npz")
        runs_fields = {**fields, "kind": "k-means"}
        runs = ShardedJob(work / "runs", runs_fields, settings.num_runs, stem="run", suffix=".npz")
    # One process learns what the features need, the others take it from its file.
    learning.run(lambda _, path: _save(path, features.fit()), task, take_over=True)
    with load_shard(learning.path(0)) as learned:
        features.learned = dict(learned)
    vectors = cache(partial(_training_vectors, features, settings))

    def train(run: int, path: Path) -> None:
        how = (settings.num_iterations, settings.seed, settings.gpu, "training row")
        found = kmeans_run(vectors(), fields["num_clusters"], run, *how)
        _save(path, {"centroids": found.centroids, "objective": np.array(found.objective)})

    runs.run(train, task, take_over=True)
    job.run(partial(_assign, features, _best_run(runs).centroids, settings), task)
    job.finish(partial(_merge, job, runs, settings))


def _remove_parts(job: ShardedJob, work: Path) -> None:
    """Remove what the finished files hold; a kill in between leaves it to the next call."""
    paths = [path for path in map(job.path, range(job.num_shards)) if path.exists()]
    if paths or work.exists():
        with job.lock():
            shutil.rmtree(work, ignore_errors=True)
            for path in paths:
                path.unlink(missing_ok=True)


def _training_vectors(features: PairFeatures, settings: ClusterSettings) -> Vectors:
    """Both orders of the rows to train on, one order after the other, (2n, d) float32."""
    most = settings.max_training_rows or features.num_rows
    rows = sample_rows(features.num_rows, most, derive_seed(settings.seed, "training rows"))
    num_clusters = settings.resolve_num_clusters(features.num_rows)
    if len(rows) < features.num_rows:
        a_cluster, few = 2 * len(rows) / num_clusters, ""
        if a_cluster < _MIN_VECTORS_PER_CLUSTER:
            few = f", fewer than {_MIN_VECTORS_PER_CLUSTER}: more memory_gib takes more of them"
        counts = f"{len(rows)} of {features.num_rows} rows, {a_cluster:.0f} vectors a cluster{few}"
        logger.warning("k-means is trained on %s", counts)
    vectors = np.empty((2 * len(rows), features.embedding_dim), dtype=np.float32)
    for swapped in (False, True):
        half = vectors[len(rows) :] if swapped else vectors[: len(rows)]
        for start in range(0, len(rows), _BLOCK):
            half[start : start + _BLOCK] = features.rows(rows[start : start + _BLOCK], swapped)
    return vectors


def _best_run(runs: ShardedJob) -> KMeans:
    best = KMeans(np.empty((0, 0), np.float32), -math.inf)
    for path in map(runs.path, range(runs.num_shards)):
        with load_shard(path) as found:
            if float(found["objective"]) > best.objective:
                best = KMeans(np.asarray(found["centroids"]), float(found["objective"]))
    return best


def _assign(features: PairFeatures, centroids: Vectors, settings: ClusterSettings, shard: int, path: Path) -> None:
    """Write the nearest centroid of each row of a shard, (n,) int32."""
    row_N = np.array(shard_rows(shard, settings.shard_size, features.num_rows))
    blocks = (row_N[start : start + _BLOCK] for start in range(0, len(row_N), _BLOCK))
    save_array(path, np.concatenate([nearest_centroids(features.rows(b), centroids, settings.gpu) for b in blocks]))


def _merge(job: ShardedJob, runs: ShardedJob, settings: ClusterSettings) -> dict[str, Any]:
    """Write the finished files; returns what they are like, for the manifest."""
    centroids, objective = _best_run(runs)
    assignments = [load_shard(job.path(shard), mapped=True) for shard in range(job.num_shards)]
    lists = neighbour_lists(centroids, settings.num_neighbours, settings.gpu)
    facts = write_cluster_files(job.folder, assignments, centroids, lists)
    sizes = np.sum([np.bincount(assignment, minlength=len(centroids)) for assignment in assignments], axis=0)
    found = {
        "objective": objective,
        "num_empty": int((sizes == 0).sum()),
        "num_duplicates": num_duplicates(centroids),
        "largest_cluster": int(sizes.max()),
    }
    if found["num_empty"] or found["num_duplicates"]:
        logger.warning(
            "%s: of %d clusters %d hold no row (their centroids are of documents before queries, or of rows too alike "
            "for so many clusters) and %d centroids are copies; the others hold %.0f rows on average",
            job.folder, len(centroids), found["num_empty"], found["num_duplicates"], sizes.sum() / (sizes > 0).sum(),
        )  # fmt: skip
    return {**facts, **found}


def _save(path: Path, arrays: dict[str, NDArray[Any]]) -> None:
    with open(path, "wb") as file:
        np.savez(file, allow_pickle=False, **arrays)
