"""Batches of rows that lie near each other: clusters packed into batches (contextual document embeddings)."""

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Literal

import numpy as np

from embeddings.common.errors import InputError, OptionError
from embeddings.common.fileio import check_manifest
from embeddings.common.randomness import derive_seed
from embeddings.data.files import fill_path
from embeddings.data.samplers.base import BatchSampler, Rows, SourceIdentity
from embeddings.data.samplers.cluster_folder import KIND, ClusterFolder
from embeddings.data.samplers.packing import PackedClusters, nearest_order, random_order
from embeddings.data.samplers.permutation import KeyedPermutation


class ClusteredBatchSampler(BatchSampler):
    """Every batch holds rows of one source that were clustered together, or in neighbouring clusters.

    The folders are opened by `identify`, which the data module calls: only it knows the sources' names.

    In each epoch each source's clusters are laid end to end in a new order and cut into global batches (see
    `PackedClusters`); the batches of all sources are then shuffled together. A rank's slice is
    cut from it in the clusters' order, so it is of as few clusters as can be, whether candidates are gathered over the
    ranks or not.

    Determinism: see `BatchSampler`. The order of the clusters is computed when the first batch of a source is asked
    for in an epoch, 2 to 6 microseconds a cluster; each batch is then found without the ones before it.
    Guarantees: sources never share a batch. In an epoch no row comes twice, and of each source only the fewer than
    global_batch_size rows that do not fill a batch are left out, others in the next epoch. A cluster's rows lie in
    consecutive batches before these are shuffled, so a cluster smaller than a batch is cut at most once. Memory: 12
    bytes a cluster beside the memory-mapped files, nothing a row.
    Length: the sum over the sources of the global batches that their rows fill.

    Args:
        sizes: Rows of each source; row numbers count through the sources one after another.
        batch_size: Queries of one rank's batch.
        seed: The run's seed.
        weights: None, or all equal: every row comes once an epoch.
        clusters: The folder that `cluster` wrote for each source, by the source's name, or one folder that holds a
            folder of that name for each. Environment variables (`$DATA`, `${DATA}`) and `~` are filled in.
        order: `nearest`: a greedy tour from each cluster to the nearest one that is left, so that clusters that share
            a batch are alike; `random`: any order.
        num_replicas: Number of ranks, or None for the process group's.
        rank: This rank, or None for the process group's.

    Raises:
        OptionError: If weights cannot take effect or a size is impossible.

    Source: Morris & Rush 2024 (CDE), arXiv:2410.02525, §4.1 and appendix. Differs: see `nearest_order` and
    `PackedClusters`.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        batch_size: int,
        seed: int = 0,
        weights: Sequence[float] | None = None,
        *,
        clusters: str | dict[str, str],
        order: Literal["nearest", "random"] = "nearest",
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        super().__init__(batch_size, seed, num_replicas, rank)
        if not sizes or min(sizes) < 1:
            raise OptionError("data.sources", list(sizes), "must each have rows", "leave out the empty source")
        if weights is not None and len(set(weights)) > 1:
            rule = "cannot take effect where every row comes once an epoch"
            raise OptionError("data.sources[].weight", list(weights), rule, "leave the weights out")
        self.sizes, self.order, self.clusters = tuple(sizes), order, clusters
        self._first_rows = [0, *accumulate(self.sizes)]
        self._names: tuple[str, ...] = ()
        self._folders: tuple[ClusterFolder, ...] = ()
        self._packed: dict[int, tuple[tuple[int, int], PackedClusters]] = {}

    def check_sources(self, names: Sequence[str]) -> None:
        """Check that each source has clusters, whatever they are of.

        Raises:
            InputError: If a folder holds no finished clusters.
            OptionError: If a source has no clusters.
        """
        for path in cluster_paths(self.clusters, names):
            check_manifest(path, {"kind": KIND, "complete": True})

    def identify(self, sources: Sequence[SourceIdentity]) -> None:
        """Open the clusters of each source.

        Raises:
            InputError: If clusters are missing, damaged, or those of another data set.
            OptionError: If a source has no clusters, or fewer rows than a global batch.
        """
        assert len(sources) == len(self.sizes)
        paths = cluster_paths(self.clusters, [source.name for source in sources])
        self._names = tuple(source.name for source in sources)
        self._folders = tuple(ClusterFolder(path) for path in paths)
        for source, size, folder in zip(sources, self.sizes, self._folders, strict=True):
            _check_same_data(folder, source, size)
        _ = self.num_steps

    @property
    def num_steps(self) -> int:
        """Global batches in an epoch."""
        return self._last_steps()[-1]

    def plan_fields(self) -> dict[str, int | str]:
        """What the plan depends on, in plain types."""
        keys = hashlib.sha256(" ".join(folder.key for folder in self._folders).encode()).hexdigest()[:32]
        sizes = ",".join(map(str, self.sizes))
        return {**super().plan_fields(), "sizes": sizes, "clusters": keys, "order": self.order}

    def global_batch(self, epoch: int, step: int) -> tuple[Rows, Rows]:
        """One step's rows in the mixture and their draw keys, each (global_batch_size,) int64."""
        last_steps = self._last_steps()
        shuffle = KeyedPermutation(last_steps[-1], derive_seed(self.seed, "batches", epoch))
        place = int(shuffle(np.array([step]))[0])
        source = bisect_right(last_steps, place)
        number = place - (last_steps[source - 1] if source else 0)
        rows = self._packed_source(source, epoch).batch(number)
        return rows + self._first_rows[source], self.draw_keys(epoch, step)

    def _last_steps(self) -> list[int]:
        """For each source the global batches of it and of those before it, where they are not shuffled yet."""
        return list(accumulate(self.whole_batches(self.sizes, self._names)))

    def _packed_source(self, source: int, epoch: int) -> PackedClusters:
        """The batches of a source in an epoch; the latest of each source are kept."""
        stamp = (epoch, self.global_batch_size)
        known = self._packed.get(source)
        if known is None or known[0] != stamp:
            assert self._folders, "identify() comes first"
            folder, key = self._folders[source], derive_seed(self.seed, "pack", epoch, source)
            if self.order == "nearest":
                order = nearest_order(folder.centroids, folder.neighbours, key)
            else:
                order = random_order(folder.num_clusters, key)
            packed = PackedClusters(folder.rows_by_cluster, folder.offsets, order, self.global_batch_size, key)
            known = self._packed[source] = (stamp, packed)
        return known[1]


def cluster_paths(clusters: str | dict[str, str], names: Sequence[str]) -> list[Path]:
    """The folder of each source's clusters, in the order of the names.

    Args:
        clusters: The folder of each source by its name, or one folder that holds a folder of each name.
        names: The sources.

    Raises:
        InputError: If an environment variable is not set.
        OptionError: If a source is not named, or a name is of no source.
    """
    if isinstance(clusters, str):
        return [fill_path(clusters) / name for name in names]
    for name in names:
        if name not in clusters:
            rule = f"must name the clusters of source {name!r}"
            raise OptionError("sampler.clusters", sorted(clusters), rule, "add its folder; `cluster` makes it")
    for name in clusters:
        if name not in names:
            raise OptionError("sampler.clusters", name, f"must be one of the sources {list(names)}", "remove it")
    return [fill_path(clusters[name]) for name in names]


def _check_same_data(folder: ClusterFolder, source: SourceIdentity, size: int) -> None:
    if folder.source_key != source.key:
        what = f"these are clusters of another data set than source {source.name!r} is now"
        raise InputError(str(folder.path), what, "run `cluster` on this source with the same columns and options")
    if folder.num_rows != size:
        what = f"the clusters are of {folder.num_rows} rows, but source {source.name!r} gives {size}"
        raise InputError(str(folder.path), what, "leave out max_rows and single_text_classes")
