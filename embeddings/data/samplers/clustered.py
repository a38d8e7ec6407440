"""Batches of one cluster or neighbouring clusters (CDE), and the folder of clusters on disk."""

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from embeddings.common.errors import InputError, OptionError, run_checks
from embeddings.common.io import check_manifest, file_sha256, load_array
from embeddings.common.jobs import write_array
from embeddings.common.protocols import BatchNeeds
from embeddings.common.random import KeyedPermutation, derive_seed, sorted_permutation
from embeddings.data.samplers.base import BatchSampler, Rows, SourceIdentity
from embeddings.data.sources import fill_path

KIND = "clusters"
IDS_FILE, ROWS_FILE, OFFSETS_FILE = "cluster_ids.npy", "rows_by_cluster.npy", "offsets.npy"
CENTROIDS_FILE, NEIGHBOURS_FILE = "centroids.npy", "neighbours.npy"
MAX_ROWS = 2**32


class ClusterFolder:
    """The memory-mapped output folder of `cluster`.

    Attributes:
        num_clusters: Number of clusters, k; some may be empty.
        source_key: Content key of the clustered source (`CachedSource.key`).
        key: Content key of the clusters.
        rows_by_cluster: Rows sorted by cluster, then by row, (rows,) uint32.
        offsets: Start of each cluster in `rows_by_cluster`, then the number of rows, (k+1,) int64.
        centroids: Unit vectors, (k, d) float32.
        neighbours: The n nearest other clusters of each cluster, nearest first, (k, n) int32.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = Path(path)
        fields = check_manifest(path, {"kind": KIND, "complete": True})
        self.num_rows, self.num_clusters = (fields.integer(name, minimum=1) for name in ("num_rows", "num_clusters"))
        self.source_key: str = fields["source_key"]
        self.key: str = fields["clusters_key"]
        self.rows_by_cluster, self.offsets, self.centroids, self.neighbours = (
            # A single cluster has no neighbours, and an empty array cannot be mapped.
            load_array(self.path / name, "make the clusters again", mapped=name != NEIGHBOURS_FILE)
            for name in (ROWS_FILE, OFFSETS_FILE, CENTROIDS_FILE, NEIGHBOURS_FILE)
        )


def write_cluster_files(
    folder: Path,
    assignments: Sequence[NDArray[np.int32]],
    centroids: NDArray[np.float32],
    neighbours: NDArray[np.int32],
) -> dict[str, Any]:
    """Write the files of a cluster folder, from the clusters of the rows in shards; returns their manifest fields."""
    cluster_N = np.concatenate(assignments)
    sizes = np.bincount(cluster_N, minlength=len(centroids))
    arrays = {
        IDS_FILE: cluster_N,
        ROWS_FILE: np.argsort(cluster_N, kind="stable").astype(np.uint32),
        OFFSETS_FILE: np.concatenate([[0], np.cumsum(sizes)]),
        CENTROIDS_FILE: centroids,
        NEIGHBOURS_FILE: neighbours,
    }
    for name, array in arrays.items():
        write_array(folder / name, array)
    hashes = [file_sha256(folder / name) for name in (IDS_FILE, CENTROIDS_FILE, NEIGHBOURS_FILE)]
    return {
        "num_rows": len(cluster_N),
        "num_clusters": len(centroids),
        "num_neighbours": neighbours.shape[1],
        "embedding_dim": centroids.shape[1],
        "clusters_key": hashlib.sha256("".join(hashes).encode()).hexdigest()[:32],
    }


Order = NDArray[np.int32]
SAMPLE = 2048
# Up to this size, sorting the hashes of a complete cluster is faster than computing the few needed positions.
_MAX_SORTED_ROWS = 1 << 16
# Vectors are rounded to integer multiples of 1/4096, so float64 sums of products are exact in any order.
_STEPS = 4096.0


def random_order(num_clusters: int, key: int) -> Order:
    """The clusters 0 … k-1 in a random order that depends on `key`, (k,) int32."""
    return KeyedPermutation(num_clusters, key)(np.arange(num_clusters)).astype(np.int32)


def nearest_order(centroids: NDArray[np.float32], neighbours: NDArray[np.int32], key: int) -> Order:
    """The clusters in the order of a greedy tour: start at a random cluster, then go to the nearest unvisited one.

    The exact tour compares every cluster with all unvisited ones: k² / 2 products. This approximation searches in the
    first of these sets with an unvisited cluster, and takes the nearest in it:
    1. the neighbours of the current cluster (exact);
    2. the neighbours of these neighbours;
    3. a random sample of 1,024 to 2,048 unvisited clusters, or all of them if there are fewer.
    Time and memory grow with k, not k². With 32 neighbours the tour is at most 0.3 % longer than the exact greedy tour.
    Arguments as in `ClusterFolder`; `key` determines the start of the tour and the sampled clusters.

    Source: Morris & Rush 2024 (CDE), arXiv:2410.02525, §4.1 and appendix. Differs: approximate as above.
    """
    num_clusters = len(neighbours)
    # Plain views: each access to a memory map would cost another microsecond.
    near, centroids = np.asarray(neighbours), np.asarray(centroids)
    visited = bytearray(num_clusters)
    is_visited = np.frombuffer(visited, dtype=np.bool_)
    # The unvisited clusters in a random order; visited ones are removed once they are half of the sample.
    unvisited = random_order(num_clusters, derive_seed(key, "left"))
    order = np.empty(num_clusters, dtype=np.int32)
    current = derive_seed(key, "start") % num_clusters
    for position in range(num_clusters - 1):
        visited[current] = 1
        order[position] = current
        for cluster in near[current].tolist():
            if not visited[cluster]:
                current = cluster
                break
        else:
            listed = near[near[current]].ravel()
            candidates = listed[~is_visited[listed]]
            if not len(candidates):
                candidates = unvisited[:SAMPLE][~is_visited[unvisited[:SAMPLE]]]
                if 2 * len(candidates) < SAMPLE:
                    unvisited = unvisited[~is_visited[unvisited]]
                    candidates = unvisited[:SAMPLE]
            products = _rounded(centroids[candidates]) @ _rounded(centroids[current])
            current = int(candidates[np.argmax(products)])
    order[-1] = current
    return order


def _rounded(vectors: NDArray[np.float32]) -> NDArray[np.float64]:
    return np.asarray(np.rint(vectors * np.float32(_STEPS)), dtype=np.float64)


class PackedClusters:
    """The batches of one epoch of one source: its clusters concatenated in `order`, split every `batch_size` rows.

    The rows that do not fill a batch are skipped together at a random position between two batches: a greedy tour
    visits outliers last, so skipping the end would drop them in every epoch. The rows of a split cluster are in random
    order.

    Source: Morris & Rush 2024 (CDE), arXiv:2410.02525, §4.1 and appendix. Differs: CDE drops the tail of the order.
    """

    def __init__(
        self, rows_by_cluster: NDArray[np.uint32], offsets: NDArray[np.int64], order: Order, batch_size: int, key: int
    ) -> None:
        self._rows, self._offsets, self._order = np.asarray(rows_by_cluster), np.asarray(offsets), order
        self._starts = np.zeros(len(order) + 1, dtype=np.int64)
        np.cumsum(np.diff(self._offsets)[order], out=self._starts[1:])
        self.batch_size, self._key = batch_size, key
        self.num_batches, self._num_skipped = divmod(len(rows_by_cluster), batch_size)
        self._skips_before = derive_seed(key, "skip") % (self.num_batches + 1)

    def batch(self, number: int) -> Rows:
        """The rows of batch `number` (0 to `num_batches` - 1), (batch_size,) int64, grouped by cluster."""
        start = number * self.batch_size + (self._num_skipped if number >= self._skips_before else 0)
        return self._rows[self._indices(start, start + self.batch_size)].astype(np.int64)

    def _indices(self, start: int, stop: int) -> Rows:
        """Indices into `rows_by_cluster` of positions `start` … `stop` - 1 of the concatenated clusters."""
        first = int(np.searchsorted(self._starts, start, side="right")) - 1
        last = int(np.searchsorted(self._starts, stop, side="left")) - 1
        starts = self._starts[first : last + 2]
        cuts = np.clip(starts, start, stop)
        counts = cuts[1:] - cuts[:-1]
        offsets = self._offsets[self._order[first : last + 1]]
        indices = np.arange(start, stop) + np.repeat(offsets - starts[:-1], counts)
        for cluster, piece in {first: slice(0, int(counts[0])), last: slice(-int(counts[-1]), None)}.items():
            size = int(starts[cluster - first + 1] - starts[cluster - first])
            if len(indices[piece]) < size:
                indices[piece] = self._shuffled(indices[piece], int(self._order[cluster]), size)
        return indices

    def _shuffled(self, indices: Rows, cluster: int, size: int) -> Rows:
        """Map indices of a cluster to the random order of the cluster."""
        offset, key = int(self._offsets[cluster]), derive_seed(self._key, "rows", cluster)
        if size <= _MAX_SORTED_ROWS:
            return sorted_permutation(size, key)[indices - offset] + offset
        return KeyedPermutation(size, key)(indices - offset) + offset


class ClusteredBatchSampler(BatchSampler):
    """Every batch contains rows of one source from one cluster or from neighbouring clusters.

    In each epoch the clusters of each source are concatenated in a new order and split into blocks (see
    `PackedClusters`). The blocks of all sources are then shuffled together. If the loss gathers candidates across
    ranks, a step is one block of global_batch_size rows, and each rank takes a slice of it: all negatives of a query
    are its neighbours. Otherwise (`gather_across_devices: false`) a block has batch_size rows, and each rank takes a
    different one, possibly of another source, as in the release.

    In an epoch no row is repeated. Rows of a source that do not fill a block are left out, and of separate blocks also
    fewer than ranks; these rows differ between epochs. With separate blocks the batches depend on batch_size and the
    number of ranks, not only on their product.

    Args:
        sizes, batch_size, seed: As in `BlendedBatchSampler`.
        weights: None, or all equal: every row is used once per epoch.
        clusters: The output folder of `cluster` for each source, by source name; or one folder with a subfolder of that
            name for each source. Environment variables (`$DATA`, `${DATA}`) and `~` are expanded.
        order: `nearest`: a greedy tour from each cluster to the nearest unvisited one, so that the clusters of a batch
            are similar; `random`: a random order.
        across_ranks: `one_block` or `own_blocks`, one for each rank; `auto`: as the loss of the module requires.

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
        across_ranks: Literal["auto", "one_block", "own_blocks"] = "auto",
    ) -> None:
        super().__init__(batch_size, seed)
        self._first_rows = list(accumulate(sizes, initial=0))
        if weights is not None and len(set(weights)) > 1:
            rule = "cannot take effect, because every row is used once per epoch"
            raise OptionError("data.sources[].weight", list(weights), rule, "leave the weights out")
        self.sizes, self.order, self.clusters = tuple(sizes), order, clusters
        self.across_ranks = across_ranks
        self._gathers_candidates = True
        self._folders: tuple[ClusterFolder, ...] = ()
        self._packed: dict[int, tuple[tuple[int, int], PackedClusters]] = {}

    def check_sources(self, names: Sequence[str]) -> None:
        """Check that each source has a folder of clusters; `identify` checks that they fit the source."""
        paths = cluster_paths(self.clusters, names)
        run_checks(partial(check_manifest, path, {"kind": KIND, "complete": True}) for path in paths)

    def identify(self, sources: Sequence[SourceIdentity]) -> None:
        """Open the clusters of each source, and check that they were made from it."""
        super().identify(sources)
        self._folders = tuple(ClusterFolder(path) for path in cluster_paths(self.clusters, self._names))
        for source, size, folder in zip(sources, self.sizes, self._folders, strict=True):
            _check_same_data(folder, source, size)

    def set_needs(self, needs: BatchNeeds) -> None:
        self._gathers_candidates = needs.gathers_candidates

    def remarks(self) -> list[str]:
        return self.left_out(self.sizes, self._block_size)

    @property
    def num_steps(self) -> int:
        steps = self._last_blocks()[-1] // self._blocks_per_step
        if steps == 0:
            rule = f"must leave a block for each of {self._blocks_per_step} ranks"
            raise OptionError("data.batch_size", self.batch_size, rule, "lower it, or set across_ranks: one_block")
        return steps

    def plan_fields(self) -> dict[str, int | str]:
        keys = hashlib.sha256(" ".join(folder.key for folder in self._folders).encode()).hexdigest()[:32]
        sizes = ",".join(map(str, self.sizes))
        fields = {**super().plan_fields(), "sizes": sizes, "clusters": keys, "order": self.order}
        return fields if self._blocks_per_step == 1 else {**fields, "blocks_per_step": self._blocks_per_step}

    def global_batch(self, epoch: int, step: int) -> Rows:
        last_blocks, per_step = self._last_blocks(), self._blocks_per_step
        shuffle = KeyedPermutation(last_blocks[-1], derive_seed(self.seed, "batches", epoch))
        blocks = shuffle(np.arange(step * per_step, (step + 1) * per_step)).tolist()
        return np.concatenate([self._block(epoch, last_blocks, block) for block in blocks])

    @property
    def _blocks_per_step(self) -> int:
        """Blocks per step: one, or one for each rank."""
        own_blocks = not self._gathers_candidates if self.across_ranks == "auto" else self.across_ranks == "own_blocks"
        return self.rank_and_size[1] if own_blocks else 1

    @property
    def _block_size(self) -> int:
        return self.global_batch_size // self._blocks_per_step

    def _block(self, epoch: int, last_blocks: Sequence[int], block: int) -> Rows:
        """The rows of a block, by its index among the unshuffled blocks of all sources."""
        source = bisect_right(last_blocks, block)
        number = block - (last_blocks[source - 1] if source else 0)
        return self._packed_source(source, epoch).batch(number) + self._first_rows[source]

    def _last_blocks(self) -> list[int]:
        """Cumulative number of blocks up to and including each source."""
        return list(accumulate(self.whole_batches(self.sizes, self._block_size)))

    def _packed_source(self, source: int, epoch: int) -> PackedClusters:
        """The blocks of a source in an epoch, cached for the latest epoch."""
        stamp = (epoch, self._block_size)
        cached = self._packed.get(source)
        if cached is None or cached[0] != stamp:
            assert self._folders, "identify() comes first"
            folder, key = self._folders[source], derive_seed(self.seed, "pack", epoch, source)
            if self.order == "nearest":
                order = nearest_order(folder.centroids, folder.neighbours, key)
            else:
                order = random_order(folder.num_clusters, key)
            packed = PackedClusters(folder.rows_by_cluster, folder.offsets, order, self._block_size, key)
            cached = self._packed[source] = (stamp, packed)
        return cached[1]


def cluster_paths(clusters: str | dict[str, str], names: Sequence[str]) -> list[Path]:
    """The cluster folder of each source, in the order of `names`; `clusters` as in `ClusteredBatchSampler`."""
    if isinstance(clusters, str):
        return [fill_path(clusters) / name for name in names]
    for name in names:
        if name not in clusters:
            rule = f"must name the clusters of source {name!r}"
            raise OptionError("sampler.clusters", sorted(clusters), rule, "add its folder; `cluster` creates it")
    return [fill_path(clusters[name]) for name in names]


def _check_same_data(folder: ClusterFolder, source: SourceIdentity, size: int) -> None:
    if folder.source_key != source.key:
        what = f"the clusters were made from other data than source {source.name!r} has now"
        raise InputError(str(folder.path), what, "run `cluster` on this source with the same columns and options")
    if folder.num_rows != size:
        what = f"the clusters have {folder.num_rows} rows, but source {source.name!r} has {size}"
        raise InputError(str(folder.path), what, "leave out max_rows and single_text_classes")
