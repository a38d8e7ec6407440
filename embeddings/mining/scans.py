"""Quick scores of all documents, and how far they lie from the true ones: what the exact search begins with."""

from types import ModuleType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from embeddings.mining.largest import largest_of_rows

Floats = npt.NDArray[np.float32]
Rows = npt.NDArray[np.int64]

# Rows of a product of bfloat16 matrices: its scores of a tile stay at some tens of MiB.
_BFLOAT16_QUERIES = 512
# Vectors count as unit vectors to a thousandth.
_UNIT = 1.01


class Scan(Protocol):
    """The best documents of some queries, tile by tile, by scores that are nearly right."""

    def width(self, top_k: int) -> int:
        """How many documents to keep, so that the true top k are nearly always among them."""

    def __call__(self, chunk: slice, first_row: int, tile_TD: Floats, top_k: int) -> tuple[Floats, Rows]:
        """Scores and rows of a tile's best documents for a chunk of the queries; row -1 where there are no more."""

    def bound(self, last_Q: Floats) -> Floats:
        """The most that a document can truly score whose score here is at most `last_Q`, (Q,)."""


class FaissScan:
    """Scores in float32 by faiss.

    Args:
        faiss: The module.
        resources: faiss's resources of a GPU, or None for the processor.
        query_QD: Unit vectors, (Q, D) float32.
    """

    def __init__(self, faiss: ModuleType, resources: Any, query_QD: Floats) -> None:
        self._faiss, self._resources, self._query_QD = faiss, resources, query_QD

    def width(self, top_k: int) -> int:
        """A few more than `top_k`."""
        return top_k + 16

    def __call__(self, chunk: slice, first_row: int, tile_TD: Floats, top_k: int) -> tuple[Floats, Rows]:
        """See `Scan`."""
        query_QD, metric = self._query_QD[chunk], self._faiss.METRIC_INNER_PRODUCT
        if self._resources is not None:
            score_QK, row_QK = self._faiss.knn_gpu(self._resources, query_QD, tile_TD, top_k, metric=metric)
        else:
            score_QK, row_QK = self._faiss.knn(query_QD, tile_TD, top_k, metric=metric)
        assert row_QK.min(initial=0) >= 0
        return score_QK, row_QK + first_row

    def bound(self, last_Q: Floats) -> Floats:
        """The last score and float32's rounding."""
        return last_Q + np.float32(rounding_error(self._query_QD.shape[1]))


class Bfloat16Scan:
    """Scores in bfloat16, which some processors multiply twice as fast as float32.

    With q' and d' the rounded vectors, q d - q' d' = (q - q') d + q' (d - d') is at most |q - q'| + |q'| |d - d'|; the
    two distances are measured, and come to about 0.001 each. The product is rounded once more when it is stored.

    Args:
        query_QD: Unit vectors, (Q, D) float32.
    """

    def __init__(self, query_QD: Floats) -> None:
        query = torch.from_numpy(query_QD)
        self._query_QD = query.bfloat16()
        self._lost_Q = (query - self._query_QD.float()).norm(dim=1).numpy()
        self._most_lost, self._tile_row, self._tile_DT = 0.0, -1, torch.empty(0)

    def width(self, top_k: int) -> int:
        """Twice `top_k`, and a few more."""
        return 2 * top_k + 16

    def __call__(self, chunk: slice, first_row: int, tile_TD: Floats, top_k: int) -> tuple[Floats, Rows]:
        """See `Scan`."""
        if first_row != self._tile_row:
            self._take_tile(first_row, tile_TD)
        found = [
            largest_of_rows(query_QD @ self._tile_DT, top_k)
            for query_QD in torch.split(self._query_QD[chunk], _BFLOAT16_QUERIES)
        ]
        return np.concatenate([scores for scores, _ in found]), np.concatenate([rows for _, rows in found]) + first_row

    def bound(self, last_Q: Floats) -> Floats:
        """The last score and all that rounding can have taken from a higher one."""
        lost_Q = self._lost_Q + (1 + self._lost_Q) * self._most_lost
        stored_Q = np.abs(last_Q) * np.float32(2.0**-8)
        rounding = np.float32(rounding_error(self._query_QD.shape[1]))
        bound_Q: Floats = last_Q + stored_Q + np.float32(_UNIT) * lost_Q + rounding
        return bound_Q

    def _take_tile(self, first_row: int, tile_TD: Floats) -> None:
        """Round a tile, a piece at a time, and measure what is lost."""
        rounded_TD = torch.empty(tile_TD.shape, dtype=torch.bfloat16)
        for start in range(0, len(tile_TD), _BFLOAT16_QUERIES):
            piece_nD = torch.from_numpy(tile_TD[start : start + _BFLOAT16_QUERIES])
            rounded_nD = rounded_TD[start : start + _BFLOAT16_QUERIES].copy_(piece_nD)
            self._most_lost = max(self._most_lost, float((piece_nD - rounded_nD.float()).norm(dim=1).max()))
        self._tile_row, self._tile_DT = first_row, rounded_TD.T


def rounding_error(width: int) -> float:
    """A bound on how far a float32 inner product of unit vectors lies from the true one, twice over."""
    return width * 2.0**-23
