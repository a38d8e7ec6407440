"""Vectors of a source's pairs by another model, as the jobs over a corpus leave them, read row by row in training."""

import os
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from embeddings.common.directions import UNIT_TOLERANCE, require_directions
from embeddings.common.errors import InputError
from embeddings.common.fileio import check_manifest

# Files that a process holds mapped at once: a system allows some 65,000 maps, and large sources have more shards.
_MAPPED_SHARDS = 512
_FIX = "encode the pairs of this source again"

Vectors = npt.NDArray[np.float32]


class SurrogateVectors:
    """The unit vectors of a source's queries and positives, memory-mapped.

    The folder holds `index/` (which documents are whose positives), `queries/` and `documents/` (shards of vectors).
    It travels to another process by its name and is opened there again. Opening reads the header of every shard, some
    0.1 ms each; a vector is checked when it is read, 1 microsecond each, so that no shard is read for one row's sake.

    Args:
        folder: The folder of the vectors.
        source_key: Content key of the source they must be of (the name of its converted folder).

    Raises:
        InputError: If the folder is of another source, not complete, or damaged; later, at a vector that is zero, not
            finite or not of unit length. The message names the shard and the row in it.
    """

    def __init__(self, folder: str | os.PathLike[str], source_key: str) -> None:
        self.folder, self.source_key = Path(folder), source_key
        check_manifest(self.folder / "index", {"kind": "pair_index", "source_key": source_key})
        self._offsets = _mapped(self.folder / "index" / "positive_offsets.npy")
        self._documents = _mapped(self.folder / "index" / "positive_rows.npy")
        self._query_shards = _Shards(self.folder / "queries", "query vectors", source_key)
        self._document_shards = _Shards(self.folder / "documents", "document vectors", source_key)
        if self._query_shards.width != self._document_shards.width:
            raise InputError(str(self.folder), "queries and documents are not of one width", _FIX)

    def __reduce__(self) -> tuple[type["SurrogateVectors"], tuple[Path, str]]:
        """The folder and the key alone."""
        return SurrogateVectors, (self.folder, self.source_key)

    @property
    def width(self) -> int:
        """Width of the vectors, S."""
        return self._query_shards.width

    def query(self, row: int) -> Vectors:
        """The vector of the query of a row, (S,)."""
        return self._query_shards[row]

    def positives(self, row: int) -> Vectors:
        """The vectors of a row's positives in their order, (P, S)."""
        documents = self._documents[self._offsets[row] : self._offsets[row + 1]]
        return np.stack([self._document_shards[int(document)] for document in documents])


class _Shards:
    def __init__(self, folder: Path, kind: str, source_key: str) -> None:
        fields = check_manifest(folder, {"kind": kind, "source_key": source_key, "complete": True})
        self.folder, self.width = folder, int(fields["embedding_dim"])
        self.num_rows, self.shard_size = int(fields["num_rows"]), int(fields["shard_size"])
        for shard in range(-(-self.num_rows // self.shard_size)):
            self._check_header(shard)
        self._load = lru_cache(_MAPPED_SHARDS)(self._map)

    def __getitem__(self, row: int) -> Vectors:
        """The vector of a row, (S,)."""
        if not 0 <= row < self.num_rows:
            raise InputError(str(self.folder), f"has no vector of row {row}", _FIX)
        shard, place = divmod(row, self.shard_size)
        vector: Vectors = self._load(shard)[place]
        # NaN marks a text without a vector further on, and a vector of zeros is as near to one candidate as to another.
        if not abs(float(vector @ vector) - 1) < UNIT_TOLERANCE:
            require_directions(vector[None], str(self.folder / _file(shard)), place, unit=True)
        return vector

    def _map(self, shard: int) -> Vectors:
        return np.asarray(_mapped(self.folder / _file(shard)))

    def _check_header(self, shard: int) -> None:
        """Check that a shard is there, of the size and shape that it should have, without reading its vectors."""
        path = self.folder / _file(shard)
        expected = (min(self.shard_size, self.num_rows - shard * self.shard_size), self.width)
        try:
            with open(path, "rb") as file:
                major, _ = np.lib.format.read_magic(file)
                read = np.lib.format.read_array_header_1_0 if major == 1 else np.lib.format.read_array_header_2_0
                shape, _, dtype = read(file)
                num_bytes = os.fstat(file.fileno()).st_size - file.tell()
        except (OSError, EOFError, ValueError):
            raise InputError(str(path), "is missing or damaged", _FIX) from None
        if shape != expected or dtype != np.float32:
            what = f"holds {dtype} of shape {shape}, expected float32 of shape {expected}"
            raise InputError(str(path), what, _FIX)
        if num_bytes != 4 * expected[0] * expected[1]:
            raise InputError(str(path), "is missing or damaged", _FIX)


def _file(shard: int) -> str:
    return f"vectors-{shard:05d}.npy"


def _mapped(path: Path) -> Any:
    try:
        return np.load(path, mmap_mode="r")
    except (OSError, EOFError, ValueError):
        raise InputError(str(path), "is missing or damaged", _FIX) from None
