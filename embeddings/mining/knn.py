"""The nearest documents of queries by cosine, exactly, over shards larger than memory."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from embeddings.common.directions import require_directions
from embeddings.common.errors import InputError, OptionError
from embeddings.inference.precision import has_native_bfloat16
from embeddings.inference.search import TopK
from embeddings.inference.vector_shards import VectorShards
from embeddings.mining.faiss_library import load_faiss
from embeddings.mining.scans import Bfloat16Scan, FaissScan, Floats, Rows, Scan, rounding_error

# Documents of one call of faiss: enough that its heaps cost little beside its products.
TILE_BYTES = 48 << 20
# faiss on a GPU goes wrong or aborts beyond 65,535 queries in a call, and returns at most 2,048 documents.
QUERY_CHUNK = 16_384
GPU_MOST_DOCUMENTS, GPU_SLACK = 2048, 16
# Pairs whose vectors fit a processor's cache.
_PAIR_BLOCK = 512
# Queries compared with every document of a tile at once, where the slack was not enough.
_DOUBTFUL_BLOCK = 64


class DocumentSearch(Protocol):
    """Finds the nearest documents of queries."""

    @property
    def documents(self) -> VectorShards:
        """What is searched."""

    def search(self, query_QD: Floats, top_k: int) -> TopK:
        """The nearest documents of each query, best first; row -1 with score -inf where there are no more."""


class ExactSearch:
    """The documents of largest inner product of each query, as if all pairs had been scored.

    A scan finds more than `top_k` by scores that are nearly right, tile by tile: in bfloat16 by PyTorch where the
    processor has it, else in float32 by faiss. What it keeps is scored again in float64. A query for which the scan's
    error bound does not rule out that a document was missed goes through the next scan, from bfloat16 to float32 to the
    comparison with every document in float64.

    Precision: a score is the inner product summed in float64, rounded to float32.
    Determinism: equal scores are ordered by row; scores and rows are the same whatever the size of shards and the
        number of queries in a call, and should be on any device (no GPU has run it yet).
    Memory: two tiles of 48 MiB, and 12 bytes for each of (2 `top_k` + 16) documents of a query.

    Args:
        documents: Unit vectors.
        gpu: Whether faiss runs on the first GPU.

    Raises:
        MissingExtraError: If faiss is not installed.
        OptionError: If a GPU is asked for and there is none.
    """

    def __init__(self, documents: VectorShards, gpu: bool = False) -> None:
        self.documents, self.gpu = documents, gpu
        faiss = load_faiss(gpu)
        resources: Any = faiss.StandardGpuResources() if gpu else None
        self._scans: list[Callable[[Floats], Scan]] = [partial(FaissScan, faiss, resources)]
        if not gpu and has_native_bfloat16(torch.device("cpu")):
            self._scans.insert(0, Bfloat16Scan)

    def search(self, query_QD: Floats, top_k: int) -> TopK:
        """The nearest documents of each query.

        Args:
            query_QD: Unit vectors, (Q, D) float32.
            top_k: Documents of a query; all of them where there are fewer.

        Returns:
            Scores and rows, (Q, K), best first; of equal scores the lower row first.

        Raises:
            InputError: If a vector is zero, not finite or not of unit length, or the widths differ.
            OptionError: If `top_k` is not positive, or more than a GPU returns.
        """
        check_search(self.documents, query_QD, top_k, self.gpu)
        shape = (len(query_QD), min(top_k, self.documents.num_rows))
        best = TopK(np.empty(shape, np.float32), np.empty(shape, np.int64))
        open_Q = np.arange(len(query_QD))
        for scan_of in self._scans:
            if open_Q.size:
                best.score_QK[open_Q], best.index_QK[open_Q], doubtful_Q = self._scanned(
                    scan_of, query_QD[open_Q], top_k
                )
                open_Q = open_Q[doubtful_Q]
        for start in range(0, open_Q.size, _DOUBTFUL_BLOCK):
            query_n = open_Q[start : start + _DOUBTFUL_BLOCK]
            least_n = best.score_QK[query_n, -1]
            best.score_QK[query_n], best.index_QK[query_n] = self._among_all(query_QD[query_n], least_n, top_k)
        return best

    def _scanned(
        self, scan_of: Callable[[Floats], Scan], query_QD: Floats, top_k: int
    ) -> tuple[Floats, Rows, npt.NDArray[np.bool_]]:
        """The best of what a scan keeps, and for which queries it may have missed a better one."""
        scan = scan_of(query_QD)
        width = min(scan.width(top_k), self.documents.num_rows)
        found = best_of_tiles(self.documents, len(query_QD), width, scan)
        best = in_order(query_QD, found.index_QK, self.documents, top_k)
        if width == self.documents.num_rows:
            return best.score_QK, best.index_QK, np.zeros(len(query_QD), np.bool_)
        # What was left out scores at most as much here as the last that was kept.
        return best.score_QK, best.index_QK, best.score_QK[:, -1] <= scan.bound(found.score_QK.min(axis=1))

    def _among_all(self, query_QD: Floats, least_Q: Floats, top_k: int) -> TopK:
        """The top k of a few queries among all documents; `least_Q` is a score that the k-th reaches at least."""
        threshold_Q1 = (least_Q - rounding_error(query_QD.shape[1]))[:, None]
        score_QK = np.full((len(query_QD), top_k), -np.inf, np.float32)
        row_QK = np.full((len(query_QD), top_k), -1, np.int64)
        for first_row, tile_TD in tiles(self.documents):
            query_P, row_P = np.nonzero(query_QD @ tile_TD.T >= threshold_Q1)
            score_P = dot_pairs(query_QD, query_P, tile_TD, row_P)
            for query in np.unique(query_P).tolist():
                own = query_P == query
                scores = np.append(score_QK[query], score_P[own])
                rows = np.append(row_QK[query], row_P[own] + first_row)
                order = np.lexsort((rows, -scores))[:top_k]
                score_QK[query], row_QK[query] = scores[order], rows[order]
        return TopK(score_QK, row_QK)


def check_search(documents: VectorShards, query_QD: Floats, top_k: int, gpu: bool) -> None:
    """Check what a search is asked for.

    Raises:
        InputError: If a query's vector is zero, not finite or not of unit length, or the widths differ.
        OptionError: If `top_k` is not positive, or more than a GPU returns.
    """
    if top_k < 1:
        raise OptionError("top_k", top_k, "must be >= 1", "100 is usual")
    if gpu and top_k > (most := GPU_MOST_DOCUMENTS - GPU_SLACK):
        raise OptionError("top_k", top_k, f"must be <= {most} on a GPU", "lower it, or search on the processor")
    if query_QD.shape[1] != documents.embedding_dim:
        raise InputError(
            str(documents.folder),
            f"holds vectors of width {documents.embedding_dim}, the queries' is {query_QD.shape[1]}",
            "encode both with one model",
        )
    require_directions(query_QD, "query vectors", unit=True)


def tiles(documents: VectorShards) -> Iterator[tuple[int, Floats]]:
    """All vectors in pieces of at most `TILE_BYTES`, each with its first row; a piece is valid until the next one.

    Raises:
        InputError: If a shard is damaged, or a vector is zero, not finite or not of unit length.
    """
    size = max(1, TILE_BYTES // (4 * documents.embedding_dim))
    tile_TD = np.empty((min(size, documents.num_rows), documents.embedding_dim), np.float32)
    first_row = filled = 0
    for shard, vector_ND in enumerate(documents):
        for start in range(0, len(vector_ND), size):
            part_nD = vector_ND[start : start + size]
            require_directions(part_nD, str(documents.path(shard)), start, unit=True)
            while len(part_nD):
                taken = min(len(part_nD), size - filled)
                tile_TD[filled : filled + taken] = part_nD[:taken]
                filled, part_nD = filled + taken, part_nD[taken:]
                if filled == size:
                    yield first_row, tile_TD
                    first_row, filled = first_row + size, 0
    if filled:
        yield first_row, tile_TD[:filled]


def best_of_tiles(
    documents: VectorShards,
    num_queries: int,
    width: int,
    scan: Callable[[slice, int, Floats, int], tuple[Floats, Rows]],
) -> TopK:
    """The `width` best documents of each query over all tiles, in no order."""
    score_QK = np.full((num_queries, width), -np.inf, np.float32)
    row_QK = np.full((num_queries, width), -1, np.int64)
    for first_row, tile_TD in tiles(documents):
        for start in range(0, num_queries, QUERY_CHUNK):
            chunk = slice(start, start + QUERY_CHUNK)
            scores, rows = scan(chunk, first_row, tile_TD, min(width, len(tile_TD)))
            scores = np.concatenate([score_QK[chunk], scores], axis=1)
            rows = np.concatenate([row_QK[chunk], rows], axis=1)
            best = np.argpartition(-scores, width - 1, axis=1)[:, :width]
            score_QK[chunk] = np.take_along_axis(scores, best, axis=1)
            row_QK[chunk] = np.take_along_axis(rows, best, axis=1)
    return TopK(score_QK, row_QK)


def in_order(query_QD: Floats, row_QK: Rows, documents: VectorShards, top_k: int) -> TopK:
    """The best of some documents of each query, by score and then by row; row -1 comes last."""
    score_QK = np.full(row_QK.shape, -np.inf, np.float32)
    query_P, place_P = np.nonzero(row_QK >= 0)
    score_QK[query_P, place_P] = pair_scores(query_QD, query_P, row_QK[query_P, place_P], documents)
    order_QK = np.lexsort((row_QK, -score_QK), axis=1)[:, :top_k]
    return TopK(np.take_along_axis(score_QK, order_QK, axis=1), np.take_along_axis(row_QK, order_QK, axis=1))


def pair_scores(query_QD: Floats, query_P: Rows, row_P: Rows, documents: VectorShards) -> Floats:
    """The inner products of pairs of a query and a document; shards are read in order, each once.

    Args:
        query_QD: Query vectors, (Q, D) float32.
        query_P: The query of each pair, (P,) int64.
        row_P: The document of each pair, (P,) int64.
        documents: Document vectors.

    Returns:
        (P,) float32.

    Precision: summed in float64, so that a pair has one score whatever it is computed beside.
    """
    order_P = np.argsort(row_P, kind="stable")
    shard_P = row_P[order_P] // documents.shard_size
    score_P = np.empty(len(row_P), np.float32)
    for shard in np.unique(shard_P).tolist():
        pairs = order_P[np.searchsorted(shard_P, shard) : np.searchsorted(shard_P, shard, side="right")]
        row_n = row_P[pairs] - documents.rows(shard).start
        score_P[pairs] = dot_pairs(query_QD, query_P[pairs], documents.load(shard), row_n)
    return score_P


def dot_pairs(query_QD: Floats, query_P: Rows, vector_ND: Floats, row_P: Rows) -> Floats:
    """The inner products of pairs of rows, (P,) float32, summed in float64."""
    score_P = np.empty(len(row_P), np.float32)
    for start in range(0, len(row_P), _PAIR_BLOCK):
        block = slice(start, start + _PAIR_BLOCK)
        left_nD = query_QD[query_P[block]].astype(np.float64)
        score_P[block] = np.vecdot(left_nD, np.asarray(vector_ND[row_P[block]]).astype(np.float64))
    return score_P
