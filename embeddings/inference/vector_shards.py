"""Vectors on disk in shards of one size, each a `.npy` file that is mapped into memory."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from embeddings.common.errors import InputError

# Of the squared length, after rounding to float32.
UNIT_TOLERANCE = 1e-3


@dataclass(frozen=True)
class VectorShards:
    """The shards `vectors-<i>.npy` of a folder, (n, D) float32, rows numbered through all of them.

    Attributes:
        folder: Where they lie.
        num_rows: Vectors in all shards.
        embedding_dim: Width of the vectors, D.
        shard_size: Vectors of every shard but the last.
    """

    folder: Path
    num_rows: int
    embedding_dim: int
    shard_size: int

    @property
    def num_shards(self) -> int:
        """Number of shards."""
        return -(-self.num_rows // self.shard_size)

    def path(self, shard: int) -> Path:
        """The file of a shard."""
        return self.folder / f"vectors-{shard:05d}.npy"

    def rows(self, shard: int) -> range:
        """The rows that a shard holds."""
        return range(shard * self.shard_size, min((shard + 1) * self.shard_size, self.num_rows))

    def load(self, shard: int) -> npt.NDArray[np.float32]:
        """The vectors of a shard, memory-mapped, (n, D) float32.

        Raises:
            InputError: If the file is missing or damaged, or holds vectors of another number, width or type.
        """
        path, expected = self.path(shard), (len(self.rows(shard)), self.embedding_dim)
        try:
            vector_ND: npt.NDArray[np.float32] = np.load(path, mmap_mode="r")
        except (OSError, EOFError, ValueError):
            raise InputError(str(path), "is missing, empty or damaged", "delete the folder and encode again") from None
        if vector_ND.shape != expected or vector_ND.dtype != np.float32:
            raise InputError(
                str(path),
                f"holds {vector_ND.dtype} of shape {vector_ND.shape}, expected float32 of shape {expected}",
                "delete the folder and encode again",
            )
        return vector_ND

    def __iter__(self) -> Iterator[npt.NDArray[np.float32]]:
        """The vectors of each shard, in order."""
        return map(self.load, range(self.num_shards))


def save_vectors(path: Path, vector_ND: npt.NDArray[np.float32]) -> None:
    """Write the vectors of a shard, (n, D) float32, to exactly this path."""
    with open(path, "wb") as file:
        np.save(file, vector_ND)


def require_directions(vector_ND: npt.NDArray[np.float32], where: str, first_row: int = 0, unit: bool = False) -> None:
    """Check that every vector has a direction: its length is finite and not zero, or 1 where `unit` is set.

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
        square = float(square_N[bad_n[0]])
        kind = "zero" if square == 0 else f"of length {square**0.5:.4g}" if np.isfinite(square) else "not finite"
        raise InputError(
            f"{where}:{first_row + int(bad_n[0])}", f"the vector is {kind}", "check its text and the model"
        )
