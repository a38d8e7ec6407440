"""Vectors on disk: storage formats (float32, float16, int8 with a scale, signs) and shards of memory-mapped files."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from embeddings.common.errors import InputError, OptionError
from embeddings.common.io import check_vectors, load_array

VectorFormat = Literal["float32", "float16", "int8", "binary"]
VECTOR_FORMATS: tuple[VectorFormat, ...] = get_args(VectorFormat)
# Rows of a shard that are read and compared at a time.
DOCUMENT_TILE = 16384
ENCODE_AGAIN = "delete the folder and encode again"
_MAX_CODE = 127


def require_format(vector_format: VectorFormat, embedding_dim: int) -> None:
    """Check that a format exists, and that vectors of this width can be stored in it."""
    if vector_format not in VECTOR_FORMATS:
        raise OptionError("vector_format", vector_format, f"must be one of {', '.join(VECTOR_FORMATS)}", "use float32")
    if vector_format == "binary" and embedding_dim % 8:
        rule = f"needs vectors whose width is a multiple of 8, these have {embedding_dim}"
        raise OptionError("vector_format", vector_format, rule, "use int8, or truncate the vectors with dimensions")


def stored_type(vector_format: VectorFormat, embedding_dim: int) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """The dtype of stored vectors, and the shape of a row; int8 is a record of `scale` and `codes`."""
    match vector_format:
        case "float32" | "float16":
            return np.dtype(vector_format), (embedding_dim,)
        case "int8":
            return np.dtype([("scale", "<f4"), ("codes", "i1", (embedding_dim,))]), ()
        case "binary":
            return np.dtype(np.uint8), (embedding_dim // 8,)


def bytes_per_vector(vector_format: VectorFormat, embedding_dim: int) -> int:
    """Bytes of a stored vector."""
    dtype, shape = stored_type(vector_format, embedding_dim)
    return int(dtype.itemsize * np.prod(shape, dtype=np.int64))


def stored_rows(
    vector_ND: npt.NDArray[np.float32], vector_format: VectorFormat, where: str, first_row: int = 0
) -> npt.NDArray[Any]:
    """Convert vectors, (N, D) float32, to their stored form, (N, ...) of `stored_type`; float32 is not copied.

    int8 is symmetric with one scale per row: scale = max |x| / 127, code = x / scale, rounded to nearest (half to
    even). Nothing is clipped; the error of a number is at most scale / 2, and that of an inner product with a unit
    vector at most sqrt(D) scale / 2. Rows are independent, so shards may be made in any order, on any device. One scale
    per dimension, calibrated on the first 1,000 rows, clips some later numbers and preserves the order less well (E13).

    binary stores which numbers are above 0, eight per byte, the first in the highest bit (`numpy.packbits`).

    An `InputError` names `where` and the row of a vector that is zero, not finite, or outside the range of float16.
    """
    check_vectors(vector_ND, where, first_row)
    match vector_format:
        case "float32":
            return vector_ND
        case "float16":
            return _to_float16(vector_ND, where, first_row)
        case "int8":
            rows_N = np.empty(len(vector_ND), stored_type(vector_format, vector_ND.shape[1])[0])
            rows_N["scale"] = np.abs(vector_ND).max(axis=1) / _MAX_CODE
            rows_N["codes"] = np.rint(vector_ND / rows_N["scale"][:, None])
            return rows_N
        case "binary":
            return sign_bits(vector_ND)


def float_rows(stored: npt.NDArray[Any], vector_format: VectorFormat) -> npt.NDArray[np.float32]:
    """Convert stored vectors to float32, (N, D): scale x code for int8, -1 or 1 for binary; float32 is not copied."""
    match vector_format:
        case "float32":
            rows: npt.NDArray[np.float32] = stored
        case "float16":
            rows = stored.astype(np.float32)
        case "int8":
            rows = stored["codes"] * stored["scale"][:, None]
        case "binary":
            rows = np.unpackbits(stored, axis=1).astype(np.float32)
            rows *= 2
            rows -= 1
    return rows


def sign_bits(vector_ND: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """The signs of vectors, packed: bit 1 where a number is above 0, (N, D / 8) uint8."""
    return np.packbits(vector_ND > 0, axis=1)


def _to_float16(vector_ND: npt.NDArray[np.float32], where: str, first_row: int) -> npt.NDArray[np.float16]:
    with np.errstate(over="ignore", under="ignore"):
        half_ND = vector_ND.astype(np.float16)
    bad_n = np.flatnonzero(~np.isfinite(half_ND).all(axis=1) | ~half_ND.any(axis=1))
    if bad_n.size:
        what = "the vector has numbers too large or too small for float16"
        raise InputError(f"{where}:{first_row + int(bad_n[0])}", what, "encode with vector_format float32 or int8")
    return half_ND


@dataclass(frozen=True)
class VectorShards:
    """The shards `vectors-<i>.npy` of a folder; row numbers run through all shards.

    Every shard except the last has `shard_size` of the `num_rows` vectors of width D.
    """

    folder: Path
    num_rows: int
    embedding_dim: int
    shard_size: int
    vector_format: VectorFormat = "float32"

    @property
    def num_shards(self) -> int:
        return -(-self.num_rows // self.shard_size)

    def path(self, shard: int) -> Path:
        return self.folder / f"vectors-{shard:05d}.npy"

    def rows(self, shard: int) -> range:
        return range(shard * self.shard_size, min((shard + 1) * self.shard_size, self.num_rows))

    def stored(self, shard: int) -> npt.NDArray[Any]:
        """A shard as stored, memory-mapped, (n, ...) of `stored_type`; an `InputError` if it is damaged."""
        dtype, row_shape = stored_type(self.vector_format, self.embedding_dim)
        path, shape = self.path(shard), (len(self.rows(shard)), *row_shape)
        array: npt.NDArray[Any] = load_array(path, ENCODE_AGAIN, mapped=True)
        if array.shape != shape or array.dtype != dtype:
            what = f"is {array.dtype} of shape {array.shape}, expected {dtype} of shape {shape}"
            raise InputError(str(path), what, ENCODE_AGAIN)
        return array

    def load(self, shard: int) -> npt.NDArray[np.float32]:
        """The vectors of a shard, (n, D) float32: memory-mapped if stored as float32, else a copy."""
        return float_rows(self.stored(shard), self.vector_format)

    def take(self, row_N: npt.NDArray[np.int64], unit: bool = True) -> npt.NDArray[np.float32]:
        """The vectors at `row_N`, in that order, (N, D) float32; each shard with such a row is read once.

        An `InputError` names shard and row of a vector that is zero, not finite or, with `unit`, not of unit length.
        """
        vector_ND = np.empty((len(row_N), self.embedding_dim), dtype=np.float32)
        order_N = np.argsort(row_N, kind="stable")
        shard_N = row_N[order_N] // self.shard_size
        for start, stop in pairwise(np.flatnonzero(np.diff(shard_N, prepend=-1, append=-1))):
            shard, index_n = int(shard_N[start]), order_N[start:stop]
            row_n = row_N[index_n] % self.shard_size
            vector_nD = float_rows(self.stored(shard)[row_n], self.vector_format)
            check_vectors(vector_nD, str(self.path(shard)), unit=unit, row_N=row_n)
            vector_ND[index_n] = vector_nD
        return vector_ND

    def __iter__(self) -> Iterator[npt.NDArray[np.float32]]:
        """The vectors of each shard, in order, (n, D) float32."""
        return map(self.load, range(self.num_shards))


def unit_rows(vector_ND: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The vectors scaled to unit length, so that inner products are cosines; a zero vector stays zero."""
    norm_N1 = np.linalg.norm(vector_ND, axis=1, keepdims=True)
    out_ND = np.zeros_like(vector_ND, subok=False)
    return np.asarray(np.divide(vector_ND, norm_N1, out=out_ND, where=norm_N1 > 0))
