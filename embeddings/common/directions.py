"""Vectors that have a direction: neither zero nor NaN nor infinite."""

import numpy as np
import numpy.typing as npt

from embeddings.common.errors import InputError

# Of the squared length, after rounding to float32.
UNIT_TOLERANCE = 1e-3
# What a manifest says of a folder whose every vector was checked before it was written.
CHECKED = "directions_checked"


def require_directions(
    vector_ND: npt.NDArray[np.float32],
    where: str,
    first_row: int = 0,
    unit: bool = False,
    row_N: npt.NDArray[np.int64] | None = None,
) -> None:
    """Check that every vector has a direction: its length is finite and not zero, or 1 where `unit` is set.

    Args:
        vector_ND: (n, D) float32.
        where: What the message calls their file.
        first_row: Row of the first vector in that file; the others follow it.
        unit: Whether they must be of unit length.
        row_N: The row of each vector, where they do not follow one another.

    Raises:
        InputError: At the first vector that is zero, NaN, infinite or of another length; the message names `where` and
            the row.
    """
    square_N = np.einsum("nd,nd->n", vector_ND, vector_ND)
    usable_N = np.isfinite(square_N) & (square_N > 0)
    if unit:
        usable_N &= np.abs(square_N - 1) < UNIT_TOLERANCE
    bad_n = np.flatnonzero(~usable_N)
    if bad_n.size:
        row = first_row + int(bad_n[0]) if row_N is None else int(row_N[bad_n[0]])
        square = float(square_N[bad_n[0]])
        kind = "zero" if square == 0 else f"of length {square**0.5:.4g}" if np.isfinite(square) else "not finite"
        raise InputError(f"{where}:{row}", f"the vector is {kind}", "check its text and the model")
