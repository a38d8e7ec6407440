"""The best documents of each query where only the signs of their numbers are kept: Hamming distance, then rescoring."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from embeddings.common.errors import OptionError
from embeddings.inference.search import DOCUMENT_TILE, TopK, require_top_k
from embeddings.inference.vector_formats import sign_bits
from embeddings.inference.vector_shards import VectorShards

RESCORE_MULTIPLIER = 4
# Queries at a time: their distances to a tile of documents stay at some MiB.
_QUERIES = 32
# A distance and a row in one number that sorts by both.
_ROW_BITS = 40


class NearestSigns(NamedTuple):
    """The documents of each query whose signs differ from its own in the fewest places, nearest first.

    Attributes:
        distance_QK: Places that differ, (Q, K) int64.
        index_QK: Rows of the documents, (Q, K) int64.
    """

    distance_QK: npt.NDArray[np.int64]
    index_QK: npt.NDArray[np.int64]


def search_signs(
    query_QD: npt.NDArray[np.float32],
    documents: VectorShards,
    top_k: int,
    rescore_multiplier: int = RESCORE_MULTIPLIER,
) -> TopK:
    """The documents of large cosine between a query and their signs, out of those whose signs are nearest to its own.

    The K x `rescore_multiplier` documents of least Hamming distance are scored by the query's own numbers:
    score = q . s / sqrt(D) with s in {-1, 1}.

    Args:
        query_QD: Unit vectors, (Q, D) float32.
        documents: Vectors in the format binary.
        top_k: Most documents of a query; K is the smaller of this and the number of documents.
        rescore_multiplier: Documents scored again for one that is returned; 1 puts the K nearest in order.

    Returns:
        Scores and rows, best first; of equal scores the lower row first.

    Precision: distances are whole numbers, counted on the processor; scores are summed in float64.
    Raises:
        InputError: If a shard is missing or damaged.
        OptionError: If `top_k` or `rescore_multiplier` is not positive.
    Source: Yamada et al. 2021 (BPR), arXiv:2106.00882: candidates by Hamming distance, scored again by the query's
        numbers. Differs: the model need not be trained for it.
    """
    require_top_k(top_k)
    require_multiplier(rescore_multiplier)
    shards = (documents.stored(shard) for shard in range(documents.num_shards))
    nearest = nearest_signs(sign_bits(query_QD), shards, top_k * rescore_multiplier)
    width = min(top_k, documents.num_rows)
    score_QK = np.empty((len(query_QD), width), np.float32)
    row_QK = np.empty((len(query_QD), width), np.int64)
    for start in range(0, len(query_QD), _QUERIES):
        block = slice(start, start + _QUERIES)
        row_N, place_qM = np.unique(nearest.index_QK[block], return_inverse=True)
        sign_ND = documents.take(row_N, unit=False)
        for query, place_M in enumerate(place_qM.reshape(nearest.index_QK[block].shape), start=start):
            dot_M = np.vecdot(sign_ND[place_M].astype(np.float64), query_QD[query].astype(np.float64))
            score_M = (dot_M / documents.embedding_dim**0.5).astype(np.float32)
            # The places ascend with the rows.
            order_K = np.lexsort((place_M, -score_M))[:width]
            score_QK[query], row_QK[query] = score_M[order_K], row_N[place_M[order_K]]
    return TopK(score_QK, row_QK)


def nearest_signs(
    query_QB: npt.NDArray[np.uint8], documents: Iterable[npt.NDArray[np.uint8]], top_k: int
) -> NearestSigns:
    """The documents of least Hamming distance, of equal distances the lower rows.

    Args:
        query_QB: Packed signs of the queries, (Q, B) uint8.
        documents: Packed signs of documents, several arrays (n, B) uint8 that follow one another.
        top_k: Most documents of a query.

    Memory: a tile of 16,384 documents and its distances to 32 queries, beside what is found.
    Raises:
        OptionError: If `top_k` is not positive.
    """
    require_top_k(top_k)
    query_QW, first_row = _words(query_QB), 0
    blocks = [slice(start, start + _QUERIES) for start in range(0, len(query_QB), _QUERIES)]
    best = [np.empty((len(query_QW[block]), 0), np.int64) for block in blocks]
    for piece in documents:
        for start in range(0, len(piece), DOCUMENT_TILE):
            tile_WT = np.ascontiguousarray(_words(piece[start : start + DOCUMENT_TILE]).T)
            row_T = np.arange(first_row, first_row + tile_WT.shape[1])
            for number, block in enumerate(blocks):
                key_QT = (_distances(query_QW[block], tile_WT) << _ROW_BITS) | row_T
                best[number] = _least(np.concatenate([best[number], key_QT], axis=1), top_k)
            first_row += tile_WT.shape[1]
    width = min(top_k, first_row)
    key_QK = np.concatenate([np.sort(keys, axis=1) for keys in best]) if best else np.empty((0, width), np.int64)
    return NearestSigns(key_QK >> _ROW_BITS, key_QK & ((1 << _ROW_BITS) - 1))


def require_multiplier(rescore_multiplier: int) -> None:
    """Check how many documents are to be scored again.

    Raises:
        OptionError: If it is not positive.
    """
    if rescore_multiplier < 1:
        rule = "must be >= 1"
        raise OptionError("rescore_multiplier", rescore_multiplier, rule, f"leave it out for {RESCORE_MULTIPLIER}")


def _words(bits_NB: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    """The same bits in words of 64, filled up with 0, (N, W)."""
    word_NW = np.zeros((len(bits_NB), -(-bits_NB.shape[1] // 8)), np.uint64)
    word_NW.view(np.uint8)[:, : bits_NB.shape[1]] = bits_NB
    return word_NW


def _distances(query_QW: npt.NDArray[np.uint64], tile_WT: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """Bits that differ between each query and document, (Q, T)."""
    distance_QT = np.zeros((len(query_QW), tile_WT.shape[1]), np.int64)
    for word, word_T in enumerate(tile_WT):
        distance_QT += np.bitwise_count(query_QW[:, word, None] ^ word_T)
    return distance_QT


def _least(key_QN: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.int64]:
    """The least keys of each query, in no order; no two are equal."""
    return np.partition(key_QN, count - 1, axis=1)[:, :count] if count < key_QN.shape[1] else key_QN
