"""A search index of an encoded folder's vectors: memory-mapped inverted lists on disk."""

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import numpy as np

from embeddings.common.errors import InputError
from embeddings.common.io import (
    CHECKSUM,
    atomic_path,
    check_disk_space,
    check_file_manifest,
    check_manifest,
    file_hash,
    write_file_manifest,
)
from embeddings.common.jobs import progress_bar
from embeddings.inference.search import TopK, require_top_k, search_top_k
from embeddings.inference.vector_folder import VectorFolder
from embeddings.inference.vectors import unit_rows
from embeddings.mining.faiss_library import faiss_version, load_faiss, map_lists, new_lists, write_lists
from embeddings.mining.search import Floats, ivf_sizes, sample_rows, train_centroids

INDEX_FILE, MANIFEST_FILE = "ivf.faiss", "ivf.manifest.json"
_HINT = "make it with the command index"
# Bytes at the end of each file of vectors that go into the folder's hash.
_TAIL_BYTES = 4096
# Maximum length of a unit vector, with rounding.
_UNIT = 1.001


class VectorIndex:
    """Inverted lists of an encoded folder's vectors, in a file beside them.

    A query is compared with the documents of the lists whose centroids are nearest to it.

    Attributes:
        num_lists: Number of lists.
        num_probes: Lists searched for a query.
    """

    def __init__(self, lists: Any, path: Path) -> None:
        self._lists, self._path = lists, path
        self.num_lists, self.num_probes = int(lists.nlist), int(lists.nprobe)

    @classmethod
    def open(cls, folder: VectorFolder) -> Self:
        """The index beside a folder's vectors, mapped into memory.

        The hash of the file is checked, which reads it once.

        Raises:
            InputError: If there is no index, it is damaged or of other vectors, or the vectors are int8 or binary.
            MissingExtraError: If faiss is not installed.
        """
        _require_floats(folder)
        load_faiss()
        path = folder.path / INDEX_FILE
        if not path.is_file():
            raise InputError(str(path), "there is no index of these vectors", _HINT)
        expected = {"kind": "ivf index", "vectors_sha256": folder_sha256(folder)}
        fields = check_file_manifest(folder.path / MANIFEST_FILE, expected, _HINT)
        if file_hash(path) != fields["output_xxh3_128"]:
            raise InputError(str(path), "is damaged: its bytes are not those that were written", _HINT)
        try:
            lists = map_lists(path)
        except (RuntimeError, MemoryError):
            raise InputError(str(path), "is damaged", _HINT) from None
        lists.nprobe = min(fields.integer("num_probes", minimum=1), lists.nlist)
        return cls(lists, path)

    def search(self, query_QD: Floats, top_k: int) -> TopK:
        """The nearest documents of each query in its lists (see `DocumentSearch`).

        Raises:
            InputError: If the results show that the lists are damaged.
            OptionError: If `top_k` is not positive.
        """
        require_top_k(top_k)
        score_QK, row_QK = self._lists.search(np.ascontiguousarray(query_QD), min(top_k, self._lists.ntotal))
        # The product of a query with a unit vector is at most the length of the query.
        bound_Q1 = _UNIT * np.linalg.norm(query_QD, axis=1, keepdims=True)
        if ((row_QK < -1) | (row_QK >= self._lists.ntotal) | ((row_QK >= 0) & (score_QK > bound_Q1))).any():
            raise InputError(str(self._path), "is damaged", _HINT)
        # For missing documents faiss returns row -1 and the lowest float.
        score_QK[row_QK < 0] = -np.inf
        order_QK = np.lexsort((row_QK, -score_QK), axis=1)
        return TopK(np.take_along_axis(score_QK, order_QK, axis=1), np.take_along_axis(row_QK, order_QK, axis=1))


def build_index(
    folder: VectorFolder, *, num_lists: int | None = None, num_probes: int | None = None, seed: int = 0
) -> VectorIndex:
    """Build the index of a folder's vectors, beside them; an existing index is replaced.

    Args:
        folder: Output of `encode_corpus`.
        num_lists: Number of lists, or None for the default of `build_ivf`.
        num_probes: Lists searched per query, or None for 32, or all if there are fewer.
        seed: Seed of the sample and of the k-means.

    Memory: all vectors, once.
    Raises:
        InputError: If a vector is zero or not finite, or the vectors are int8 or binary.
        MissingExtraError: If faiss is not installed.
        OptionError: If there are more lists than documents or fewer than probes.
        OSError: If the disk is full; an existing index is preserved.
    """
    _require_floats(folder)
    if check_manifest(folder.path, {}).get("similarity") == "dot":
        what = "has the vectors of a model that compares them by inner products of any length; an index needs cosines"
        raise InputError(str(folder.path), what, "search the folder without an index")
    faiss = load_faiss()
    num_lists, num_probes = ivf_sizes(folder.num_documents, num_lists, num_probes)
    path, manifest = folder.path / INDEX_FILE, folder.path / MANIFEST_FILE
    check_disk_space(path, _list_bytes(folder) + 4 * num_lists * folder.embedding_dim)
    row_n = sample_rows(folder.num_documents, num_lists, seed)
    centroid_CD = train_centroids(unit_rows(folder.shards.take(row_n, unit=False)), num_lists, seed)
    quantizer = faiss.IndexFlatIP(folder.embedding_dim)
    quantizer.add(centroid_CD)
    lists = new_lists(quantizer, num_lists)
    for vector_ND in _with_progress(folder, "adding vectors"):
        lists.add(np.ascontiguousarray(vector_ND))
    # The old manifest is removed once the new file is complete, and before it replaces the old one.
    with atomic_path(path, verify=lambda _: manifest.unlink(missing_ok=True)) as temporary:
        write_lists(lists, temporary)
        output_hash = file_hash(temporary)
    fields = {
        "kind": "ivf index",
        "vectors_sha256": folder_sha256(folder),
        "output_xxh3_128": output_hash,
        "num_lists": num_lists,
        "num_probes": num_probes,
        "seed": seed,
        "faiss": faiss_version(),
    }
    write_file_manifest(manifest, fields)
    return VectorIndex.open(folder)


def recall_of(index: VectorIndex, folder: VectorFolder, num_queries: int = 200, top_k: int = 10) -> float:
    """The share of documents' nearest neighbours that an index finds.

    The queries are up to `num_queries` documents, spread evenly over the folder; each query's own row is excluded.
    """
    row_Q = np.unique(np.linspace(0, folder.num_documents - 1, num_queries).astype(np.int64))
    query_QD = unit_rows(folder.shards.take(row_Q, unit=False))
    exact = search_top_k(query_QD, _with_progress(folder, "measuring recall"), top_k + 1).index_QK.tolist()
    approximate = index.search(query_QD, top_k + 1).index_QK.tolist()
    hits = total = 0
    for query_row, *results in zip(row_Q, exact, approximate, strict=True):
        expected, found = ([row for row in rows if row != query_row][:top_k] for rows in results)
        hits, total = hits + len({*expected} & {*found}), total + len(expected)
    return hits / total if total else 1.0


def folder_sha256(folder: VectorFolder) -> str:
    """A hash that identifies a folder's vectors: of its manifest, and of the size and end of each file of vectors."""
    fields = {
        name: value for name, value in check_manifest(folder.path, {}).items() if name not in ("versions", CHECKSUM)
    }
    digest = hashlib.sha256(json.dumps(fields, sort_keys=True).encode())
    for path in map(folder.shards.path, range(folder.num_shards)):
        if not path.is_file():
            raise InputError(str(path), "is missing", "delete the folder and encode again")
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            digest.update(f"{size} ".encode() + file.read())
    return digest.hexdigest()


def _with_progress(folder: VectorFolder, title: str) -> Iterator[Floats]:
    """The folder's directions, block by block, with a progress bar."""
    with progress_bar(folder.num_documents, title, "vector") as bar:
        for vector_ND in folder.directions():
            yield vector_ND
            bar.update(len(vector_ND))


def _list_bytes(folder: VectorFolder) -> int:
    """Size of the lists in the file: each vector in float32, and its row in 64 bits."""
    return folder.num_documents * (4 * folder.embedding_dim + 8)


def _require_floats(folder: VectorFolder) -> None:
    folder.require_format("float32", "float16", use="an index, which keeps float32 copies of them,")
