"""Consistency filtering: how many documents of its segment a query finds nearer than its own."""

import hashlib
import os
from bisect import bisect_right
from collections.abc import Iterator
from functools import partial
from itertools import accumulate
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from embeddings.common.errors import OptionError
from embeddings.common.io import check_manifest
from embeddings.common.jobs import ArrayTask, ShardedJob, load_shard, save_array, write_array
from embeddings.common.random import KeyedPermutation, derive_seed
from embeddings.inference.vectors import VectorShards
from embeddings.mining.pair_index import concatenated_ranges
from embeddings.mining.pair_vectors import PairVectors

SEGMENT_SIZE = 1_000_000
RANKS = "ranks.npy"
# Scores nearer than this are equal: float32 sums of one product in two orders differ by less.
TIE = 1e-6
NOT_RANKED = -1

_QUERY_TILE, _DOCUMENT_TILE = 2048, 16384
_Int64s = npt.NDArray[np.int64]


class Segments:
    """The records to be compared, in segments of nearly one size, none of which holds two groups.

    A segment holds what a keyed permutation of a group's records puts side by side, so that neighbours in the file,
    which are often of one page or one user, hardly ever share one.
    """

    def __init__(
        self, row_N: npt.NDArray[np.uint32], segment_size: int, seed: int, group_N: npt.NDArray[np.uint16] | None = None
    ) -> None:
        self.row_N, self._seed = row_N, seed
        parts = [row_N]
        if group_N is not None:
            order_N = np.argsort(group_N, kind="stable")
            parts = np.split(row_N[order_N], np.flatnonzero(np.diff(group_N[order_N])) + 1)
        self._parts = [part_n for part_n in parts if len(part_n)]
        self._counts = [-(-len(part_n) // segment_size) for part_n in self._parts]
        self._stops = list(accumulate(self._counts))

    def __len__(self) -> int:
        return sum(self._counts)

    def members(self, segment: int) -> _Int64s:
        """The rows of a segment, in order, found without those of the others."""
        place = bisect_right(self._stops, segment)
        row_n, count = self._parts[place], self._counts[place]
        number, total = segment - (self._stops[place] - count), len(row_n)
        start, stop = number * total // count, (number + 1) * total // count
        order = KeyedPermutation(total, derive_seed(self._seed, "segments"))
        positions: _Int64s = np.sort(order(np.arange(start, stop, dtype=np.int64)))
        return row_n[positions].astype(np.int64)


def rank_pairs(
    vectors: PairVectors,
    folder: str | os.PathLike[str],
    *,
    is_considered_N: npt.NDArray[np.bool_] | None = None,
    group_N: npt.NDArray[np.uint16] | None = None,
    segment_size: int = SEGMENT_SIZE,
    seed: int = 0,
    device: str | torch.device = "cpu",
    task: ArrayTask | None = None,
) -> npt.NDArray[np.int32]:
    """For each pair, how many documents of its segment lie nearer to its query than its own document does.

    A pair is consistent at `top_k` where this number is below `top_k`: ties count in its favour. The documents of a
    segment are the different positives of its records; what any record of the source names as a positive of the same
    query text is no rival. Of a record with several positives the nearest counts. All documents are compared, none is
    approximated. The segments are the job's shards.

    Args:
        vectors: Unit vectors of the source's queries and documents.
        folder: The folder to work in.
        is_considered_N: Which records take part, (rows,); None for all. The others are nobody's rivals.
        group_N: The group of each record, (rows,): only records of one group share a segment. None for one group.
        segment_size: Maximum records of a segment, at least 2.
        seed: Seed of what records share a segment.
        device: Where vectors are multiplied.
        task: Which segments are this process's; None for all.

    Returns:
        (rows,) int32, memory-mapped; `NOT_RANKED` where a record takes no part.

    Precision: products in float32; scores within `TIE` are equal.
    Memory: 8 bytes a record of the source, and 4 * D bytes a record of one segment: 1.5 GB for 1M records of D = 384.
    Raises:
        InputError: If the folder holds something else, or was made with other options, or a vector is not of unit
            length.

    Source: Nussbaum et al. 2024 (Nomic Embed), arXiv:2402.01613, and Nussbaum and Duderstadt 2025 (Nomic Embed v2),
        arXiv:2502.07972, section 4.2: segments of 1M pairs, kept if the document is among the 2 nearest.
        Differs: segments are random within a source, or within each group of it; ties, several positives, positives of
            the same query elsewhere.
    """
    require_segment_size(segment_size)
    num_rows = vectors.index.num_queries
    is_considered_N = np.ones(num_rows, dtype=np.bool_) if is_considered_N is None else is_considered_N
    row_N = np.flatnonzero(is_considered_N).astype(np.uint32)
    group_n = None if group_N is None else group_N[row_N]
    segments = Segments(row_N, segment_size, seed, group_n)
    sides = [check_manifest(shards.folder, {}) for shards in (vectors.query_shards, vectors.document_shards)]
    fields = {
        "kind": "consistency",
        **vectors.index.key,
        "model_sha256": sides[1]["model_sha256"],
        "precision": sides[1]["precision"],
        "prompt_names": [made["prompt_name"] for made in sides],
        "num_rows": num_rows,
        "rows_sha256": hashlib.sha256(row_N.tobytes()).hexdigest(),
        "groups_sha256": None if group_n is None else hashlib.sha256(group_n.tobytes()).hexdigest(),
        "segment_size": segment_size,
        "seed": seed,
    }
    job = ShardedJob(folder, fields, len(segments), stem="segment")
    job.run(partial(_write_ranks, vectors, segments, torch.device(device)), task, take_over=True)
    job.finish(lambda: _join(job, segments, num_rows))
    ranks: npt.NDArray[np.int32] = load_shard(Path(folder) / RANKS, mapped=True)
    return ranks


def require_segment_size(segment_size: int) -> None:
    """Refuse segments of fewer than 2 records, in which no record has a rival."""
    if segment_size < 2:
        raise OptionError("segment_size", segment_size, "must be >= 2", "the paper uses 1000000")


def segment_ranks(vectors: PairVectors, row_N: _Int64s, device: torch.device) -> npt.NDArray[np.int32]:
    """The ranks of the pairs in the rows of a segment, (n,) int32 (see `rank_pairs`)."""
    index = vectors.index
    start_N, stop_N = index.positive_offsets[row_N], index.positive_offsets[row_N + 1]
    entry_E = concatenated_ranges(start_N, stop_N)
    document_M, column_E = np.unique(index.positive_rows[entry_E], return_inverse=True)
    owner_E = np.repeat(np.arange(len(row_N)), stop_N - start_N)
    query_ND = torch.from_numpy(vectors.query_shards.take(row_N))
    own_N = torch.full((len(row_N),), -torch.inf)
    # By document, so that each tile of documents finds its own entries side by side.
    order_E = np.argsort(column_E, kind="stable")
    owner_E, column_E = owner_E[order_E], column_E[order_E]
    for start, tile_TD in _tiles(vectors.document_shards, document_M):
        first, last = np.searchsorted(column_E, [start, start + len(tile_TD)])
        for part in range(first, last, _QUERY_TILE):
            owner_e = torch.from_numpy(owner_E[part : min(part + _QUERY_TILE, last)])
            column_e = torch.from_numpy(column_E[part : min(part + _QUERY_TILE, last)] - start)
            score_e = (query_ND[owner_e] * tile_TD[column_e]).sum(dim=1)
            own_N.scatter_reduce_(0, owner_e, score_e, "amax")
    # The known positives among the segment's documents, ascending by group and column: a group's in a tile are a range.
    known = index.known_positives(row_N)
    column_P = np.minimum(np.searchsorted(document_M, known.row_P), len(document_M) - 1)
    is_here_P = document_M[column_P] == known.row_P
    key_P = known.group_P[is_here_P] * len(document_M) + column_P[is_here_P]
    count_N = torch.zeros(len(row_N), dtype=torch.int32)
    for first, tile_TD in _tiles(vectors.document_shards, document_M):
        tile_DT = tile_TD.to(device).T
        for start in range(0, len(row_N), _QUERY_TILE):
            part_N = slice(start, start + _QUERY_TILE)
            is_nearer_NT = query_ND[part_N].to(device) @ tile_DT > own_N[part_N].to(device)[:, None] + TIE
            least_n = known.group_Q[part_N] * len(document_M) + first
            start_n, stop_n = np.searchsorted(key_P, least_n), np.searchsorted(key_P, least_n + len(tile_TD))
            row_K = np.repeat(np.arange(len(least_n)), stop_n - start_n)
            column_K = key_P[concatenated_ranges(start_n, stop_n)] - least_n[row_K]
            is_nearer_NT[torch.from_numpy(row_K), torch.from_numpy(column_K)] = False
            count_N[part_N] += is_nearer_NT.sum(dim=1, dtype=torch.int32).cpu()
    ranks: npt.NDArray[np.int32] = count_N.numpy()
    return ranks


def _tiles(shards: VectorShards, row_M: _Int64s) -> Iterator[tuple[int, Tensor]]:
    """The vectors of some rows, a tile at a time, each with the place of its first row."""
    for start in range(0, len(row_M), _DOCUMENT_TILE):
        yield start, torch.from_numpy(shards.take(row_M[start : start + _DOCUMENT_TILE]))


def _write_ranks(vectors: PairVectors, segments: Segments, device: torch.device, segment: int, path: Path) -> None:
    save_array(path, segment_ranks(vectors, segments.members(segment), device))


def _join(job: ShardedJob, segments: Segments, num_rows: int) -> dict[str, int]:
    """Write the ranks of all segments as one array; returns how many records were ranked."""
    rank_N = np.full(num_rows, NOT_RANKED, dtype=np.int32)
    for segment in range(job.num_shards):
        rank_N[segments.members(segment)] = load_shard(job.path(segment))
    write_array(job.folder / RANKS, rank_N)
    return {"num_ranked": len(segments.row_N)}
