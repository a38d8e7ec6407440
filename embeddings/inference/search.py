"""The best documents of each query by inner product, exactly, in tiles."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from embeddings.common.errors import OptionError

QUERY_TILE = 1024
DOCUMENT_TILE = 16384


class TopK(NamedTuple):
    """The best documents of each query, best first.

    Attributes:
        score_QK: Inner products, (Q, K) float32.
        index_QK: Rows of the documents, (Q, K) int64.
    """

    score_QK: npt.NDArray[np.float32]
    index_QK: npt.NDArray[np.int64]


def unit_rows(vector_ND: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The vectors at unit length, so that inner products are cosines; a zero vector stays zero."""
    norm_N1 = np.linalg.norm(vector_ND, axis=1, keepdims=True)
    out_ND = np.zeros_like(vector_ND, subok=False)
    return np.asarray(np.divide(vector_ND, norm_N1, out=out_ND, where=norm_N1 > 0))


def search_top_k(
    query_QD: npt.NDArray[np.float32],
    documents: npt.NDArray[np.float32] | Iterable[npt.NDArray[np.float32]],
    top_k: int,
    device: str | torch.device = "cpu",
) -> TopK:
    """The K documents with the largest inner products of each query.

    Only tiles of 1,024 queries x 16,384 documents are held, so the documents may be memory-mapped and larger than
    memory; they are read once whatever the number of queries.

    Args:
        query_QD: Query vectors, (Q, D) float32.
        documents: Document vectors, (n, D) float32, or several such arrays that follow one another.
        top_k: Most documents of a query; K is the smaller of this and the number of documents.
        device: Where tiles are multiplied.

    Returns:
        Scores and rows, best first; of equal scores the lower row first.

    Precision: products and sums in float32.
    Determinism: the same arrays in the same pieces give the same bits on one machine.

    Raises:
        OptionError: If `top_k` is not positive.
    """
    require_top_k(top_k)
    query = torch.from_numpy(np.ascontiguousarray(query_QD, dtype=np.float32)).to(device)
    pieces = [documents] if isinstance(documents, np.ndarray) else documents
    query_tiles = [query[start : start + QUERY_TILE] for start in range(0, len(query), QUERY_TILE)]
    best = [(tile.new_empty((len(tile), 0)), _no_rows(tile)) for tile in query_tiles]
    first_row = 0
    for piece in pieces:
        for start in range(0, len(piece), DOCUMENT_TILE):
            # A copy: a memory-mapped tile is read-only, which torch does not know.
            tile_TD = torch.from_numpy(np.array(piece[start : start + DOCUMENT_TILE], dtype=np.float32)).to(device)
            for number, tile_QD in enumerate(query_tiles):
                score_QK, row_QK = _stable_top_k(tile_QD @ tile_TD.T, top_k)
                best[number] = _merge(best[number], (score_QK, row_QK + first_row), top_k)
            first_row += len(tile_TD)
    if not best:
        width = min(top_k, first_row)
        return TopK(np.empty((0, width), np.float32), np.empty((0, width), np.int64))
    score = torch.cat([scores for scores, _ in best]).cpu().numpy()
    return TopK(score, torch.cat([rows for _, rows in best]).cpu().numpy())


def require_top_k(top_k: int) -> None:
    """Check how many documents are wanted.

    Raises:
        OptionError: If it is not positive.
    """
    if top_k < 1:
        raise OptionError("top_k", top_k, "must be >= 1", "10 is usual")


def _no_rows(tile: Tensor) -> Tensor:
    return torch.empty((len(tile), 0), dtype=torch.int64, device=tile.device)


def _stable_top_k(score_QN: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Top scores and columns, best first, equal scores by column; `torch.topk` leaves their order open."""
    num_columns = score_QN.shape[1]
    if top_k >= num_columns:
        return _sorted_top_k(score_QN, top_k)
    score_QK, column_QK = torch.topk(score_QN, top_k, dim=1)
    order_QK = torch.argsort(column_QK, dim=1)
    score_QK, column_QK = score_QK.gather(1, order_QK), column_QK.gather(1, order_QK)
    order_QK = torch.argsort(score_QK, dim=1, descending=True, stable=True)
    score_QK, column_QK = score_QK.gather(1, order_QK), column_QK.gather(1, order_QK)
    # Where the last score occurs outside the chosen ones too, which of them were chosen was arbitrary: sort those rows.
    tied_Q = (score_QN >= score_QK[:, -1:]).sum(dim=1) > top_k
    if bool(tied_Q.any()):
        score_QK[tied_Q], column_QK[tied_Q] = _sorted_top_k(score_QN[tied_Q], top_k)
    return score_QK, column_QK


def _sorted_top_k(score_QN: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    score_QN, column_QN = torch.sort(score_QN, dim=1, descending=True, stable=True)
    return score_QN[:, :top_k], column_QN[:, :top_k]


def _merge(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor], top_k: int) -> tuple[Tensor, Tensor]:
    """The best of two sorted lists; rows of `first` come before those of `second`, so ties stay right."""
    score_QM = torch.cat([first[0], second[0]], dim=1)
    row_QM = torch.cat([first[1], second[1]], dim=1)
    score_QK, column_QK = _sorted_top_k(score_QM, top_k)
    return score_QK, row_QM.gather(1, column_QK)
