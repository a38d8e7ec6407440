"""Which documents a source of pairs has: each text once, numbered by first appearance, and which are whose."""

import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from embeddings.common.errors import InputError
from embeddings.common.io import atomic_folder, check_manifest, file_sha256, load_array, text_hash, write_manifest
from embeddings.common.jobs import save_array
from embeddings.common.process import logger
from embeddings.data.readers import open_reader
from embeddings.data.store import CachedSource
from embeddings.data.table import StoredRow, Table, write_table
from embeddings.inference.corpus import text_field

# Rows whose texts are read at once.
_TEXT_ROWS = 1 << 11

Int64s = npt.NDArray[np.int64]


class KnownPositives(NamedTuple):
    """The documents known to answer some queries, gathered by query text: queries of one text share a group.

    Each is a group, ascending, and a document's row, once in a group.
    """

    group_Q: Int64s
    group_P: Int64s
    row_P: Int64s


class PairIndex:
    """Queries and documents of a source of pairs, by row, on disk.

    A query is a row of the source. A document is a text that is the positive of some row, or its negative where these
    were asked for, or a text of the extra corpus; texts that are equal but for outer white space are one document.

    Attributes:
        folder: The index's folder.
        source: The source.
        num_queries: Rows of the source.
        num_documents: Different texts.
        positive_offsets: The positives of query `i` are entries `offsets[i]` to `offsets[i + 1]`, (rows + 1,) int64.
        positive_rows: Documents, (entries,) int32, or int64 where there are more than 2^31.
        negative_offsets, negative_rows: The same of the negatives; None where these are no documents.
        document_hashes: `text_hash` of each document, (documents,) int64.
        query_hashes: `text_hash` of each query, (rows,) int64.

    Raises:
        InputError: If the folder holds no index, or that of another source.
    """

    def __init__(self, folder: str | os.PathLike[str], source: CachedSource) -> None:
        self.folder, self.source = Path(folder), source
        self.fields = check_manifest(self.folder, {"kind": "pair_index", "source_key": source.folder.name})
        self.num_queries, self.num_documents = (self.fields.integer(name) for name in ("num_queries", "num_documents"))

        def mapped(name: str, is_there: object = True) -> Any:
            path = self.folder / f"{name}.npy"
            return load_array(path, "delete the folder and run again", mapped=True) if is_there else None

        has_negatives = self.fields.get("negatives")
        self.positive_offsets: Int64s = mapped("positive_offsets")
        self.positive_rows: npt.NDArray[Any] = mapped("positive_rows")
        self.negative_offsets: Int64s | None = mapped("negative_offsets", has_negatives)
        self.negative_rows: npt.NDArray[Any] | None = mapped("negative_rows", has_negatives)
        self.document_hashes: Int64s = mapped("document_hashes")
        self.query_hashes: Int64s = mapped("query_hashes")
        self._entries: Int64s = mapped("document_entries")
        self._query_order: Int64s = mapped("query_order")
        self._query_slots: Int64s = mapped("query_slots")
        self._corpus = Table(self.folder) if self.fields["corpus_sha256"] else None
        self._twin_slots: Int64s | None = mapped("twin_slots", self._corpus)
        self._twin_rows: Int64s | None = mapped("twin_rows", self._corpus)

    @property
    def key(self) -> dict[str, Any]:
        """What tells this index from others, for manifests."""
        # Indices of before negatives could be documents do not say that no document is one.
        return {name: self.fields.get(name) for name in ("source_key", "corpus_sha256", "negatives")}

    def positives(self, query: int) -> npt.NDArray[Any]:
        """The documents that are a query's positives, in the row's order."""
        return self.positive_rows[self.positive_offsets[query] : self.positive_offsets[query + 1]]

    def document_texts(self, documents: Sequence[int] | Int64s) -> list[str]:
        """The texts of some documents, each as it first appeared."""
        table, entry_N, first = self.source.table, np.asarray(self._entries[documents]), 0
        texts = [""] * len(entry_N)
        for offsets, texts_of in ((self.positive_offsets, table.positives), (self.negative_offsets, table.negatives)):
            if offsets is not None:
                own_n = np.flatnonzero((entry_N >= first) & (entry_N < first + offsets[-1]))
                row_n = np.searchsorted(offsets, entry_N[own_n] - first, side="right") - 1
                place_n = entry_N[own_n] - first - offsets[row_n]
                for own, place, found in zip(own_n.tolist(), place_n.tolist(), texts_of(row_n), strict=True):
                    texts[own] = found[place]
                first += int(offsets[-1])
        if self._corpus is not None:
            own_n = np.flatnonzero(entry_N >= first)
            for own, text in zip(own_n.tolist(), self._corpus.queries(entry_N[own_n] - first), strict=True):
                texts[own] = text
        return texts

    def known_positives(self, rows: Int64s) -> KnownPositives:
        """All documents that some row of the source names as a positive of the same query text as one of `rows`.

        Where the extra corpus holds a text behind a title and a positive is the text alone, or the other way round,
        both are known positives.
        """
        slot_G2, group_Q = np.unique(self._query_slots[rows], axis=0, return_inverse=True)
        row_R = self._query_order[concatenated_ranges(slot_G2[:, 0], slot_G2[:, 1])]
        start_R, stop_R = self.positive_offsets[row_R], self.positive_offsets[row_R + 1]
        group_P = np.repeat(np.repeat(np.arange(len(slot_G2)), slot_G2[:, 1] - slot_G2[:, 0]), stop_R - start_R)
        row_P = self.positive_rows[concatenated_ranges(start_R, stop_R)].astype(np.int64)
        if self._twin_slots is not None and self._twin_rows is not None:
            start_P, stop_P = self._twin_slots[row_P].T
            group_P = np.append(group_P, np.repeat(group_P, stop_P - start_P))
            row_P = np.append(row_P, self._twin_rows[concatenated_ranges(start_P, stop_P)])
        group_P, row_P = np.divmod(np.unique(group_P * self.num_documents + row_P), self.num_documents)
        return KnownPositives(group_Q.reshape(-1).astype(np.int64), group_P, row_P)


def index_pairs(
    source: CachedSource,
    folder: str | os.PathLike[str],
    corpus: str | os.PathLike[str] | None = None,
    negatives: bool = False,
) -> PairIndex:
    """Number the documents of a source of pairs; an index that is there already is opened.

    Two different texts are taken for one with a probability below n^2 / 2^65, 3 in 10,000 for 100 million texts.

    Args:
        source: A converted source whose rows hold positives.
        folder: The folder to make, atomically.
        corpus: A file of more documents (`text`, and `title` where there is one), or None. Empty texts are left out.
        negatives: Whether the rows' negatives are documents too, after the positives and before the corpus.

    Memory: about 50 bytes a text while the index is made: their 64-bit hashes are sorted in memory.
    Raises:
        InputError: If the source's rows are no pairs, none has the negatives asked for, the corpus cannot be used, or
            the folder holds another index.
    """
    target = Path(folder)
    if source.classes is not None:
        raise InputError(str(source.folder), "the source holds labelled texts, no pairs", "use conversion: pairs")
    key = {
        "kind": "pair_index",
        "source_key": source.folder.name,
        "corpus_sha256": None if corpus is None else file_sha256(corpus),
        "negatives": negatives or None,
    }
    if target.exists():
        check_manifest(target, key)
        return PairIndex(target, source)
    with atomic_folder(target) as stage:
        _write_queries(source.table, stage)
        # The entries are the texts of the rows by kind, then those of the corpus.
        hashes = {"positive": _write_texts(source.table.positives, len(source.table), stage / "positive")}
        if negatives:
            hashes["negative"] = _write_texts(source.table.negatives, len(source.table), stage / "negative")
            if not len(hashes["negative"]):
                raise InputError(str(source.folder), "no row has negatives", "leave out the option negatives")
        text_hashes, body_hashes = array("q"), array("q")
        if corpus is not None:
            write_table(stage, _hashed_corpus(Path(corpus), text_hashes, body_hashes))
        hash_C, body_C = (np.array(found, dtype=np.int64) for found in (text_hashes, body_hashes))
        num_documents = _write_documents(stage, hashes, hash_C, None if corpus is None else body_C)
        write_manifest(stage, {**key, "num_queries": len(source.table), "num_documents": num_documents})
    return PairIndex(target, source)


def _write_queries(table: Table, stage: Path) -> None:
    """Write each row's query hash, `query_order`, which has rows of one query side by side, and `query_slots`.

    The latter is where a row's neighbours begin and end in the order.
    """
    hashes = np.concatenate([_hashes(table.queries(rows)) for rows in _row_blocks(len(table))])
    order, slots = _sorted_slots(hashes)
    for name, array_N in (("query_hashes", hashes), ("query_order", order), ("query_slots", slots)):
        save_array(stage / f"{name}.npy", array_N)


def _write_texts(texts_of: Callable[[range], list[list[str]]], num_rows: int, path: Path) -> Int64s:
    """Write where the texts of each row begin (`PATH_offsets.npy`); returns their hashes."""
    hashes, counts = [], [0]
    for rows in _row_blocks(num_rows):
        found = texts_of(rows)
        hashes.append(_hashes(chain.from_iterable(found)))
        counts += map(len, found)
    save_array(path.with_name(f"{path.name}_offsets.npy"), np.cumsum(counts))
    return np.concatenate(hashes)


def _row_blocks(num_rows: int) -> Iterator[range]:
    return (range(start, min(start + _TEXT_ROWS, num_rows)) for start in range(0, num_rows, _TEXT_ROWS))


def _hashes(texts: Iterable[str]) -> Int64s:
    return np.fromiter(map(text_hash, texts), np.int64)


def _hashed_corpus(path: Path, text_hashes: "array[int]", body_hashes: "array[int]") -> Iterator[StoredRow]:
    """The documents of a corpus file as rows to store; hashes with and without title are added on the way."""
    left_out = 0
    for where, fields in open_reader(path, ("title", "text"), ("text",)):
        title, body = text_field(where, {"title": "", **fields}, "title"), text_field(where, fields, "text")
        text = " ".join(part for part in (title, body) if part)
        # What the reader of training records would refuse in a negative.
        if not text.strip() or "\x00" in text:
            left_out += 1
            continue
        text_hashes.append(text_hash(text))
        body_hashes.append(text_hash(body if body.strip() else text))
        yield StoredRow(text)
    if left_out:
        logger.warning("%s: %d documents without text are left out", path, left_out)


def _write_documents(stage: Path, hashes: dict[str, Int64s], hash_C: Int64s, body_C: Int64s | None) -> int:
    """Write the document of each text of the rows, by kind, and the facts of each document; returns their number.

    `hash_C` is of the texts of the corpus, `body_C` of the same without their titles, None without a corpus.
    """
    hash_E = np.concatenate([*hashes.values(), hash_C])
    hash_U, first_U, place_E = np.unique(hash_E, return_index=True, return_inverse=True)
    # Documents are numbered as they first appear.
    entry_D = np.sort(first_U)
    row_U = np.searchsorted(entry_D, first_U)
    row_E = row_U[place_E]
    save_array(stage / "document_hashes.npy", hash_E[entry_D])
    save_array(stage / "document_entries.npy", entry_D)
    width, start = np.int32 if len(entry_D) <= np.iinfo(np.int32).max else np.int64, 0
    for kind, found in hashes.items():
        save_array(stage / f"{kind}_rows.npy", row_E[start : start + len(found)].astype(width))
        start += len(found)
    if body_C is not None:
        # Which documents are one text with and without its title: those of `d` are `twin_rows[slice(*slots[d])]`.
        place_C = np.minimum(np.searchsorted(hash_U, body_C), len(hash_U) - 1)
        pair_n2 = np.stack([row_U[place_C], row_E[start:]], axis=1)[hash_U[place_C] == body_C]
        pair_n2 = pair_n2[pair_n2[:, 0] != pair_n2[:, 1]]
        pair_n2 = np.concatenate([pair_n2, pair_n2[:, ::-1]])
        order_n, slot_n2 = _sorted_slots(hash_E[entry_D][pair_n2[:, 0]])
        slot_D2 = np.zeros((len(entry_D), 2), np.int64)
        slot_D2[pair_n2[:, 0]] = slot_n2
        save_array(stage / "twin_slots.npy", slot_D2)
        save_array(stage / "twin_rows.npy", pair_n2[order_n, 1])
    return len(entry_D)


def _sorted_slots(hash_n: Int64s) -> tuple[Int64s, Int64s]:
    """The entries sorted by hash, (n,), and where in this order the hash of each begins and ends, (n, 2)."""
    order_n = np.argsort(hash_n, kind="stable")
    sorted_n = hash_n[order_n]
    edges = [np.searchsorted(sorted_n, hash_n, side) for side in ("left", "right")]
    return order_n, np.stack(edges, axis=1)


def concatenated_ranges(start_n: Int64s, stop_n: Int64s) -> Int64s:
    """All numbers of start … stop - 1 of each range, range after range, (sum of lengths,) int64."""
    length_n = stop_n - start_n
    before_n = np.cumsum(length_n) - length_n
    return np.repeat(start_n - before_n, length_n) + np.arange(int(length_n.sum()))
