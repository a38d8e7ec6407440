"""Vectors of a source's pairs by another model, as the jobs over a corpus leave them, read row by row in training."""

import os
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from embeddings.common.errors import InputError
from embeddings.common.fileio import check_manifest

# Files that a process holds mapped at once: a system allows some 65,000 maps, and large sources have more shards.
_MAPPED_SHARDS = 512
_FIX = "encode the pairs of this source again"

Vectors = npt.NDArray[np.float32]


class SurrogateVectors:
    """The unit vectors of a source's queries and positives, memory-mapped.

    The folder holds `index/` (which documents are whose positives), `queries/` and `documents/` (shards of vectors).
    It travels to another process by its name and is opened there again.

    Args:
        folder: The folder of the vectors.
        source_key: Content key of the source they must be of (the name of its converted folder).

    Raises:
        InputError: If the folder is of another source, not complete, or damaged.
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
        there = set(os.listdir(folder))
        for shard in range(-(-self.num_rows // self.shard_size)):
            if _file(shard) not in there:
                raise InputError(str(folder / _file(shard)), "is missing", _FIX)
        self._load = lru_cache(_MAPPED_SHARDS)(self._map)

    def __getitem__(self, row: int) -> Vectors:
        """The vector of a row, (S,)."""
        if not 0 <= row < self.num_rows:
            raise InputError(str(self.folder), f"has no vector of row {row}", _FIX)
        vector: Vectors = self._load(row // self.shard_size)[row % self.shard_size]
        return vector

    def _map(self, shard: int) -> Vectors:
        path = self.folder / _file(shard)
        vectors: Vectors = _mapped(path)
        rows = min(self.shard_size, self.num_rows - shard * self.shard_size)
        if vectors.shape != (rows, self.width) or vectors.dtype != np.float32:
            raise InputError(str(path), f"holds {vectors.dtype} of shape {vectors.shape}", _FIX)
        return vectors


def _file(shard: int) -> str:
    return f"vectors-{shard:05d}.npy"


def _mapped(path: Path) -> Any:
    try:
        return np.load(path, mmap_mode="r")
    except (OSError, EOFError, ValueError):
        raise InputError(str(path), "is missing or damaged", _FIX) from None
