"""Vectors of a source's pairs by another model, as the jobs over a corpus leave them, read row by row in training."""

import os
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from embeddings.common.errors import InputError
from embeddings.common.io import CHECKED, UNIT_TOLERANCE, check_manifest, check_vectors, load_array
from embeddings.common.jobs import progress_bar

# Files that a process holds mapped at once: a system allows some 65,000 maps, and large sources have more shards.
_MAPPED_SHARDS = 512
_CHECKED_ROWS = 8192
_FIX = "encode the pairs of this source again"

Vectors = npt.NDArray[np.float32]


class SurrogateVectors:
    """The unit vectors of a source's queries, positives and, where they were encoded too, negatives, memory-mapped.

    The folder holds `index/` (which documents are whose positives and negatives), `queries/` and `documents/` (shards
    of vectors). It travels to another process by its name and is opened there again.

    Opening reads the header of every shard, some 0.1 ms each, and all vectors of shards that are not older than the
    manifest, which says that the job checked them. A vector is checked again when it is drawn, in 1 microsecond.
    """

    def __init__(self, folder: str | os.PathLike[str], source_key: str, check_vectors: bool = True) -> None:
        self.folder, self.source_key = Path(folder), source_key
        index = self.folder / "index"
        fields = check_manifest(index, {"kind": "pair_index", "source_key": source_key})
        self._positives = _Entries.of(index, "positive")
        self._negatives = _Entries.of(index, "negative") if fields.get("negatives") else None
        self._query_shards = _Shards(self.folder / "queries", "query vectors", source_key)
        self._document_shards = _Shards(self.folder / "documents", "document vectors", source_key)
        if self._query_shards.width != self._document_shards.width:
            raise InputError(str(self.folder), "queries and documents are not of one width", _FIX)
        if check_vectors:
            self._query_shards.check()
            self._document_shards.check()

    def __reduce__(self) -> tuple[type["SurrogateVectors"], tuple[Path, str, bool]]:
        """The folder and the key alone; its vectors are checked by now."""
        return SurrogateVectors, (self.folder, self.source_key, False)

    @property
    def width(self) -> int:
        return self._query_shards.width

    @property
    def has_negatives(self) -> bool:
        return self._negatives is not None

    def query(self, row: int) -> Vectors:
        return self._query_shards[row]

    def positives(self, row: int) -> Vectors:
        """The vectors of a row's positives in their order, (P, S)."""
        return self._documents(self._positives.documents(row))

    def negatives(self, row: int, places: Sequence[int], most: int) -> Vectors:
        """The vectors of the first `most` of a row's negatives at `places`, (N, S); only these are read."""
        assert self._negatives is not None, "has_negatives says no"
        documents = self._negatives.documents(row)
        return self._documents([documents[place] for place in places[:most]])

    def _documents(self, documents: Sequence[int]) -> Vectors:
        found = [self._document_shards[document] for document in documents]
        return np.array(found, np.float32).reshape(len(found), self.width)


class _Entries(NamedTuple):
    """The documents of every row, one row's after another's, memory-mapped."""

    offsets: npt.NDArray[np.int64]
    rows: npt.NDArray[Any]

    @classmethod
    def of(cls, index: Path, kind: str) -> "_Entries":
        return cls(_mapped(index / f"{kind}_offsets.npy"), _mapped(index / f"{kind}_rows.npy"))

    def documents(self, row: int) -> list[int]:
        found: list[int] = self.rows[self.offsets[row] : self.offsets[row + 1]].tolist()
        return found


class _Shards:
    def __init__(self, folder: Path, kind: str, source_key: str) -> None:
        fields = check_manifest(folder, {"kind": kind, "source_key": source_key, "complete": True})
        self.folder, self.width = folder, fields.integer("embedding_dim", least=1)
        self.num_rows, self.shard_size = fields.integer("num_rows"), fields.integer("shard_size", least=1)
        self._checked_ns = (folder / "manifest.json").stat().st_mtime_ns if fields.get(CHECKED) else 0
        # Shards whose vectors no job has checked: written otherwise, or after the manifest.
        self._unchecked = [s for s in range(-(-self.num_rows // self.shard_size)) if not self._was_checked(s)]
        self._load = lru_cache(_MAPPED_SHARDS)(self._map)

    def __getitem__(self, row: int) -> Vectors:
        if not 0 <= row < self.num_rows:
            raise InputError(str(self.folder), f"has no vector of row {row}", _FIX)
        shard, place = divmod(row, self.shard_size)
        vector: Vectors = self._load(shard)[place]
        # NaN marks a text without a vector further on, and a vector of zeros is as near to one candidate as to another.
        if not abs(float(vector @ vector) - 1) < UNIT_TOLERANCE:
            check_vectors(vector[None], str(self.folder / _file(shard)), place, unit=True)
        return vector

    def check(self) -> None:
        """Read every vector that no job has checked, with progress and the time left on standard error."""
        with progress_bar(None, f"checking {self.folder}", "shard", iterable=self._unchecked) as shards:
            for shard in shards:
                vector_ND = self._map(shard)
                for start in range(0, len(vector_ND), _CHECKED_ROWS):
                    block_nD = vector_ND[start : start + _CHECKED_ROWS]
                    check_vectors(block_nD, str(self.folder / _file(shard)), start, unit=True)

    def _map(self, shard: int) -> Vectors:
        return np.asarray(_mapped(self.folder / _file(shard)))

    def _was_checked(self, shard: int) -> bool:
        """Check a shard's size and shape, not its vectors; returns whether a manifest newer than it checked these."""
        path, found = self.folder / _file(shard), _mapped(self.folder / _file(shard))
        expected = (min(self.shard_size, self.num_rows - shard * self.shard_size), self.width)
        if found.shape != expected or found.dtype != np.float32:
            what = f"holds {found.dtype} of shape {found.shape}, expected float32 of shape {expected}"
            raise InputError(str(path), what, _FIX)
        status = path.stat()
        if status.st_size != found.offset + found.nbytes:
            raise InputError(str(path), f"holds more than its {expected[0]} vectors", _FIX)
        return status.st_mtime_ns < self._checked_ns


def _file(shard: int) -> str:
    return f"vectors-{shard:05d}.npy"


def _mapped(path: Path) -> Any:
    return load_array(path, _FIX, mapped=True)
