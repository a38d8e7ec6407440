"""Vectors of the pairs of a source by another model (the surrogate), read from the output of a job during training."""

import os
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from embeddings.common.errors import InputError
from embeddings.common.io import UNIT_TOLERANCE, check_manifest, check_vectors, load_array

# Maximum mapped files per process: an operating system allows about 65,000, and large sources have more shards.
_MAX_MAPPED_SHARDS = 512
_FIX = "encode the pairs of this source again"

Vectors = npt.NDArray[np.float32]


class SurrogateVectors:
    """Memory-mapped unit vectors of the queries, positives and (if they were encoded) negatives of a source.

    The folder contains `index/` (the documents of each row), `queries/` and `documents/` (shards of vectors). A vector
    is checked when it is read. Pickling stores only the path; the other process opens the folder again.
    """

    def __init__(self, folder: str | os.PathLike[str], source_key: str, check_files: bool = True) -> None:
        self.folder, self.source_key = Path(folder), source_key
        index = self.folder / "index"
        fields = check_manifest(index, {"kind": "pair_index", "source_key": source_key})
        self._positives = _Entries.of(index, "positive")
        self._negatives = _Entries.of(index, "negative") if fields.get("negatives") else None
        self._query_shards = _Shards(self.folder / "queries", "query vectors", source_key, check_files)
        self._document_shards = _Shards(self.folder / "documents", "document vectors", source_key, check_files)
        if self._query_shards.width != self._document_shards.width:
            raise InputError(str(self.folder), "the vectors of queries and documents differ in width", _FIX)

    def __reduce__(self) -> tuple[type["SurrogateVectors"], tuple[Path, str, bool]]:
        """Pickle the folder and the key; the bytes of the files are already checked."""
        return SurrogateVectors, (self.folder, self.source_key, False)

    @property
    def width(self) -> int:
        return self._query_shards.width

    @property
    def model(self) -> str | None:
        """The hash of the model that made the vectors; None if the folder does not say."""
        return self._query_shards.model

    @property
    def has_negatives(self) -> bool:
        return self._negatives is not None

    def query(self, row: int) -> Vectors:
        return self._query_shards[row]

    def positives(self, row: int) -> Vectors:
        """The vectors of the positives of a row, in order, (P, S)."""
        return self._documents(self._positives.documents(row))

    def negatives(self, row: int, positions: Sequence[int], max_negatives: int) -> Vectors:
        """The vectors of a row's negatives at the first `max_negatives` of `positions`, (N, S)."""
        assert self._negatives is not None, "check has_negatives first"
        documents = self._negatives.documents(row)
        return self._documents([documents[position] for position in positions[:max_negatives]])

    def _documents(self, documents: Sequence[int]) -> Vectors:
        vectors = [self._document_shards[document] for document in documents]
        return np.array(vectors, np.float32).reshape(len(vectors), self.width)


class _Entries(NamedTuple):
    """The documents of every row, concatenated and memory-mapped."""

    offsets: npt.NDArray[np.int64]
    rows: npt.NDArray[Any]

    @classmethod
    def of(cls, index: Path, kind: str) -> "_Entries":
        return cls(_mapped(index / f"{kind}_offsets.npy"), _mapped(index / f"{kind}_rows.npy"))

    def documents(self, row: int) -> list[int]:
        documents: list[int] = self.rows[self.offsets[row] : self.offsets[row + 1]].tolist()
        return documents


class _Shards:
    def __init__(self, folder: Path, kind: str, source_key: str, check_files: bool) -> None:
        fields = check_manifest(folder, {"kind": kind, "source_key": source_key, "complete": True})
        self.folder, self.width = folder, fields.integer("embedding_dim", minimum=1)
        self.model: str | None = fields.get("model_sha256")
        self.num_rows, self.shard_size = fields.integer("num_rows"), fields.integer("shard_size", minimum=1)
        for shard in range(-(-self.num_rows // self.shard_size)):
            array = _mapped(folder / _file(shard), check_files)
            expected = (min(self.shard_size, self.num_rows - shard * self.shard_size), self.width)
            if array.shape != expected or array.dtype != np.float32:
                what = f"contains {array.dtype} of shape {array.shape}, expected float32 of shape {expected}"
                raise InputError(str(folder / _file(shard)), what, _FIX)
        self._load = lru_cache(_MAX_MAPPED_SHARDS)(lambda shard: np.asarray(_mapped(folder / _file(shard), False)))

    def __getitem__(self, row: int) -> Vectors:
        if not 0 <= row < self.num_rows:
            raise InputError(str(self.folder), f"has no vector for row {row}", _FIX)
        shard, position = divmod(row, self.shard_size)
        vector: Vectors = self._load(shard)[position]
        # Later code reads NaN as a missing vector, and a zero vector is equally similar to all candidates.
        if not abs(float(vector @ vector) - 1) < UNIT_TOLERANCE:
            check_vectors(vector[None], str(self.folder / _file(shard)), position, unit=True)
        return vector


def _file(shard: int) -> str:
    return f"vectors-{shard:05d}.npy"


def _mapped(path: Path, check_file: bool = True) -> Any:
    return load_array(path, _FIX, mapped=True, is_checked=not check_file)
