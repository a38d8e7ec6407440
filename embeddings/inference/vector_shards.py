"""Vectors on disk in shards of one size, each a `.npy` file that is mapped into memory."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from embeddings.common.arrays import load_array
from embeddings.common.directions import require_directions
from embeddings.common.errors import InputError
from embeddings.inference.vector_formats import VectorFormat, float_rows, stored_type


@dataclass(frozen=True)
class VectorShards:
    """The shards `vectors-<i>.npy` of a folder, rows numbered through all of them.

    Attributes:
        folder: Where they lie.
        num_rows: Vectors in all shards.
        embedding_dim: Width of the vectors, D.
        shard_size: Vectors of every shard but the last.
        vector_format: How their numbers are kept (see `stored_type`).
    """

    folder: Path
    num_rows: int
    embedding_dim: int
    shard_size: int
    vector_format: VectorFormat = "float32"

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

    def stored(self, shard: int) -> npt.NDArray[Any]:
        """The vectors of a shard as they are stored, memory-mapped, (n, ...) of `stored_type`.

        Raises:
            InputError: If the file is missing or damaged, or holds vectors of another number, width or type.
        """
        kind, row = stored_type(self.vector_format, self.embedding_dim)
        path, expected = self.path(shard), (len(self.rows(shard)), *row)
        fix = "delete the folder and encode again"
        array: npt.NDArray[Any] = load_array(path, fix, mapped=True)
        if array.shape != expected or array.dtype != kind:
            what = f"holds {array.dtype} of shape {array.shape}, expected {kind} of shape {expected}"
            raise InputError(str(path), what, fix)
        return array

    def load(self, shard: int) -> npt.NDArray[np.float32]:
        """The vectors of a shard, (n, D) float32: memory-mapped where they are stored so, else a copy.

        Raises:
            InputError: If the file is missing or damaged, or holds vectors of another number, width or type.
        """
        return float_rows(self.stored(shard), self.vector_format)

    def pieces(self, shard: int, size: int) -> Iterator[tuple[int, npt.NDArray[np.float32]]]:
        """The vectors of a shard, at most `size` at a time, (n, D) float32, each time behind the row of the first.

        Raises:
            InputError: If the file is missing or damaged, or holds vectors of another number, width or type.
        """
        stored = self.stored(shard)
        for start in range(0, len(stored), size):
            yield start, float_rows(stored[start : start + size], self.vector_format)

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
            vector_nD = float_rows(self.stored(shard)[row_n], self.vector_format)
            require_directions(vector_nD, str(self.path(shard)), unit=unit, row_N=row_n)
            vector_ND[place_n] = vector_nD
        return vector_ND

    def __iter__(self) -> Iterator[npt.NDArray[np.float32]]:
        """The vectors of each shard, in order, (n, D) float32."""
        return map(self.load, range(self.num_shards))


def save_vectors(path: Path, stored: npt.NDArray[Any]) -> None:
    """Write the vectors of a shard, (n, D) float32 or what `stored_rows` made of them, to exactly this path."""
    with open(path, "wb") as file:
        np.save(file, stored)
