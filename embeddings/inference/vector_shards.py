"""Vectors on disk in shards of one size, each a `.npy` file that is mapped into memory."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from embeddings.common.arrays import load_array
from embeddings.common.directions import require_directions
from embeddings.common.errors import InputError


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
        fix = "delete the folder and encode again"
        vector_ND: npt.NDArray[np.float32] = load_array(path, fix, mapped=True)
        if vector_ND.shape != expected or vector_ND.dtype != np.float32:
            raise InputError(
                str(path),
                f"holds {vector_ND.dtype} of shape {vector_ND.shape}, expected float32 of shape {expected}",
                fix,
            )
        return vector_ND

    def take(self, row_N: npt.NDArray[np.int64], unit: bool = True) -> npt.NDArray[np.float32]:
        """Some vectors in the order given, (n, D) float32; each shard that holds some of them is read once.

        Args:
            row_N: Their rows, (n,) int64.
            unit: Whether they must be of unit length.

        Raises:
            InputError: If a shard is missing or damaged, or one of the vectors is zero, not finite or (where `unit` is
                set) not of unit length; the message names the shard and the row in it.
        """
        vector_ND = np.empty((len(row_N), self.embedding_dim), dtype=np.float32)
        order_N = np.argsort(row_N, kind="stable")
        shard_N = row_N[order_N] // self.shard_size
        for start, stop in pairwise(np.flatnonzero(np.diff(shard_N, prepend=-1, append=-1))):
            shard, place_n = int(shard_N[start]), order_N[start:stop]
            row_n = row_N[place_n] % self.shard_size
            vector_nD = self.load(shard)[row_n]
            require_directions(vector_nD, str(self.path(shard)), unit=unit, row_N=row_n)
            vector_ND[place_n] = vector_nD
        return vector_ND

    def __iter__(self) -> Iterator[npt.NDArray[np.float32]]:
        """The vectors of each shard, in order."""
        return map(self.load, range(self.num_shards))


def save_vectors(path: Path, vector_ND: npt.NDArray[np.float32]) -> None:
    """Write the vectors of a shard, (n, D) float32, to exactly this path."""
    with open(path, "wb") as file:
        np.save(file, vector_ND)
