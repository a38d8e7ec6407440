"""The largest values of each row of a wide matrix, without a look at most of them twice."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

# Values of a row that are first judged by the largest of them.
_STRIPES = 16


def largest_of_rows(score_QT: Tensor, top_k: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """The `top_k` largest values of each row, in no order.

    A row is laid out in stripes, one below the other. The columns whose largest values are the `top_k` largest of all
    columns hold the `top_k` largest values of the row: each of them has one that no other column exceeds.

    Args:
        score_QT: Values, (Q, T) on the processor, without NaN.
        top_k: How many, 1 to T.

    Returns:
        The values and their places in the row, (Q, `top_k`). Of equal values any may be among them.
    """
    num_columns = score_QT.shape[1] // _STRIPES
    if num_columns <= top_k:
        return _of_few(score_QT.float().numpy(), top_k)
    striped = score_QT[:, : _STRIPES * num_columns].view(-1, _STRIPES, num_columns)
    _, column_QK = _of_few(striped.amax(dim=1).float().numpy(), top_k)
    taken_QSK = torch.from_numpy(column_QK)[:, None, :].expand(-1, _STRIPES, -1)
    score_QC = torch.cat([striped.gather(2, taken_QSK).flatten(1), score_QT[:, _STRIPES * num_columns :]], dim=1)
    value_QK, candidate_QK = _of_few(score_QC.float().numpy(), top_k)
    stripe_QK, place_QK = np.divmod(candidate_QK, top_k)
    column_QK = np.take_along_axis(column_QK, place_QK, axis=1)
    # Behind the candidates of the stripes come the values of an incomplete last stripe, in their order.
    rest_QK = candidate_QK - _STRIPES * top_k
    return value_QK, np.where(rest_QK < 0, stripe_QK * num_columns + column_QK, _STRIPES * num_columns + rest_QK)


def _of_few(value_QN: npt.NDArray[np.float32], top_k: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    place_QK = np.argpartition(value_QN, -top_k, axis=1)[:, -top_k:]
    return np.take_along_axis(value_QN, place_QK, axis=1), place_QK
