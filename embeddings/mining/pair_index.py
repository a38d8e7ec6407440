"""The distinct documents of a source of pairs, numbered by first appearance, and the documents of each row."""

import os
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from embeddings.common.errors import InputError
from embeddings.common.io import atomic_folder, check_manifest, file_sha256, load_array, text_hash, write_manifest
from embeddings.common.process import logger
from embeddings.common.progress import progress_bar
from embeddings.data.near_duplicates import concatenated_ranges
from embeddings.data.readers import open_reader, rows_of
from embeddings.data.store import CachedSource, StoredRow, Table, write_table
from embeddings.inference.vector_folder import text_field

# Rows read at once.
_TEXT_ROWS = 1 << 11

Int64s = npt.NDArray[np.int64]


class KnownPositives(NamedTuple):
    """The documents known to answer some queries; queries with the same text share a group.

    `group_P` and `row_P` are pairs of a group and a document's row, each once, sorted by group.
    """

    group_Q: Int64s
    group_P: Int64s
    row_P: Int64s


class PairIndex:
    """Queries and documents of a source of pairs, by row, in memory-mapped files.

    A query is a row of the source. A document is a positive of a row, a negative if negatives were included, or a text
    of the extra corpus. Texts that differ only in outer white space are one document.

    The positives of query `i` are `positive_rows[positive_offsets[i] : positive_offsets[i + 1]]`, and so for negatives,
    which are None if they are not documents. `document_hashes` and `query_hashes` are the texts' `text_hash`, int64.
    """

    def __init__(self, folder: str | os.PathLike[str], source: CachedSource) -> None:
        self.source = source
        fields = check_manifest(Path(folder), {"kind": "pair_index", "source_key": source.key})
        self.num_queries, self.num_documents = (fields.integer(name) for name in ("num_queries", "num_documents"))
        self.key = {name: fields[name] for name in ("source_key", "corpus_sha256", "negatives")}

        def mapped(name: str, exists: object = True) -> Any:
            path = Path(folder) / f"{name}.npy"
            return load_array(path, "delete the folder and run again", mapped=True) if exists else None

        self.positive_offsets: Int64s = mapped("positive_offsets")
        self.positive_rows: Int64s = mapped("positive_rows")
        self.negative_offsets: Int64s | None = mapped("negative_offsets", self.key["negatives"])
        self.negative_rows: Int64s | None = mapped("negative_rows", self.key["negatives"])
        self.document_hashes: Int64s = mapped("document_hashes")
        self.query_hashes: Int64s = mapped("query_hashes")
        self._entries: Int64s = mapped("document_entries")
        self._query_order: Int64s = mapped("query_order")
        self._twins_2T: Int64s = mapped("twins")
        self._corpus = Table(Path(folder)) if self.key["corpus_sha256"] else None

    def positives(self, query: int) -> Int64s:
        """The positives of a query, in the order of its row."""
        return self.positive_rows[self.positive_offsets[query] : self.positive_offsets[query + 1]]

    def document_texts(self, documents: Sequence[int] | Int64s) -> list[str]:
        """The texts of documents, read from the source's positives and negatives and from the corpus."""
        table, entry_N, first = self.source.table, np.asarray(self._entries[documents]), 0
        texts = [""] * len(entry_N)
        for offsets, texts_of in ((self.positive_offsets, table.positives), (self.negative_offsets, table.negatives)):
            if offsets is not None:
                index_n = np.flatnonzero((entry_N >= first) & (entry_N < first + offsets[-1]))
                row_n = np.searchsorted(offsets, entry_N[index_n] - first, side="right") - 1
                offset_n = entry_N[index_n] - first - offsets[row_n]
                for index, offset, row in zip(index_n.tolist(), offset_n.tolist(), texts_of(row_n), strict=True):
                    texts[index] = row[offset]
                first += int(offsets[-1])
        if self._corpus is not None:
            index_n = np.flatnonzero(entry_N >= first)
            for index, text in zip(index_n.tolist(), self._corpus.queries(entry_N[index_n] - first), strict=True):
                texts[index] = text
        return texts

    def known_positives(self, rows: Int64s) -> KnownPositives:
        """The positives, in any row of the source, of queries with the same text as those of `rows`.

        If a positive is a corpus text without its title, or with it, the other form is a known positive too.
        """
        hash_G, group_Q = np.unique(self.query_hashes[rows], return_inverse=True)
        start_G, stop_G = _slots(self.query_hashes, hash_G, self._query_order)
        row_R = self._query_order[concatenated_ranges(start_G, stop_G - start_G)]
        start_R, stop_R = self.positive_offsets[row_R], self.positive_offsets[row_R + 1]
        group_P = np.repeat(np.repeat(np.arange(len(hash_G)), stop_G - start_G), stop_R - start_R)
        row_P = self.positive_rows[concatenated_ranges(start_R, stop_R - start_R)]
        start_P, stop_P = _slots(self._twins_2T[0], row_P)
        group_P = np.append(group_P, np.repeat(group_P, stop_P - start_P))
        row_P = np.append(row_P, self._twins_2T[1, concatenated_ranges(start_P, stop_P - start_P)])
        key_P = np.unique(group_P * self.num_documents + row_P)
        return KnownPositives(group_Q.reshape(-1), *np.divmod(key_P, self.num_documents))


def index_pairs(
    source: CachedSource,
    folder: str | os.PathLike[str],
    corpus: str | os.PathLike[str] | None = None,
    negatives: bool = False,
) -> PairIndex:
    """Number the documents of a source of pairs; an existing index is opened.

    The probability that two different texts count as one is below n^2 / 2^65: 3 in 10,000 for 100 million texts.

    Args:
        source: A converted source whose rows have positives.
        folder: The folder to write, atomically.
        corpus: A file of additional documents (`text`, optional `title`), or None. Empty texts are skipped.
        negatives: Whether the rows' negatives are documents too, after the positives and before the corpus.
    """
    if source.classes is not None:
        raise InputError(str(source.folder), "contains labelled texts, not pairs", "use conversion: pairs")
    key = {
        "kind": "pair_index",
        "source_key": source.key,
        "corpus_sha256": None if corpus is None else file_sha256(corpus),
        "negatives": negatives or None,
    }
    if Path(folder).exists():
        check_manifest(Path(folder), key)
        return PairIndex(folder, source)
    with atomic_folder(Path(folder)) as stage:
        arrays = _index(source, stage, corpus, negatives)
        for name, values in arrays.items():
            np.save(stage / f"{name}.npy", values)
        write_manifest(
            stage, {**key, "num_queries": len(source.table), "num_documents": len(arrays["document_hashes"])}
        )
    return PairIndex(folder, source)


def _index(
    source: CachedSource, stage: Path, corpus: str | os.PathLike[str] | None, negatives: bool
) -> dict[str, Int64s]:
    """The arrays of the index by the name of their file; writes the texts of the corpus in `stage`."""
    table = source.table
    kinds = {"positive": table.positives} | ({"negative": table.negatives} if negatives else {})
    offsets, hashes = {}, {}
    for kind, texts_of in kinds.items():
        offsets[kind], hashes[kind] = _hashes(texts_of, len(table), f"reading {kind}s")
        if not len(hashes[kind]):
            raise InputError(str(source.folder), "no row has negatives", "leave out the option negatives")
    text_hashes, body_hashes = array("q"), array("q")
    if corpus is not None:
        write_table(stage, _hashed_corpus(Path(corpus), text_hashes, body_hashes))
    hashes["corpus"] = np.array(text_hashes, np.int64)
    hash_D, entry_D, document_E = distinct(np.concatenate(list(hashes.values())))
    ends = np.cumsum([len(hash_E) for hash_E in hashes.values()])
    documents = dict(zip(hashes, np.split(document_E, ends), strict=False))

    _, query_hashes = _hashes(lambda rows: [[text] for text in table.queries(rows)], len(table), "reading queries")
    # Each corpus text, and its body without the title if that is another document.
    body_C = find(np.array(body_hashes, np.int64), hash_D)
    is_twin_C = (body_C >= 0) & (body_C != documents["corpus"])
    twins_2T = np.stack([documents["corpus"][is_twin_C], body_C[is_twin_C]])
    twins_2T = np.concatenate([twins_2T, twins_2T[::-1]], axis=1)
    return {
        "document_hashes": hash_D,
        "document_entries": entry_D,
        "query_hashes": query_hashes,
        "query_order": np.argsort(query_hashes, kind="stable"),
        "twins": twins_2T[:, np.argsort(twins_2T[0], kind="stable")],
        **{f"{kind}_offsets": offset_N for kind, offset_N in offsets.items()},
        **{f"{kind}_rows": documents[kind] for kind in offsets},
    }


def _hashes(texts_of: Callable[[range], list[list[str]]], num_rows: int, title: str) -> tuple[Int64s, Int64s]:
    """The offsets of each row's texts, (num_rows + 1,), and the hashes of all texts."""
    ends, hashes = array("q", [0]), array("q")
    for start in progress_bar(None, title, "block", iterable=range(0, num_rows, _TEXT_ROWS)):
        for texts in texts_of(range(start, min(start + _TEXT_ROWS, num_rows))):
            hashes.extend(map(text_hash, texts))
            ends.append(len(hashes))
    return np.array(ends, np.int64), np.array(hashes, np.int64)


def _hashed_corpus(path: Path, text_hashes: "array[int]", body_hashes: "array[int]") -> Iterator[StoredRow]:
    """The documents of a corpus file as rows to store; also appends their hashes with and without the title."""
    num_skipped = 0
    reader = open_reader(path, ("title", "text"), ("text",))
    for where, fields in rows_of(f"reading {path}", [reader]):
        title = "" if fields.get("title") is None else text_field(where, fields, "title")
        body = text_field(where, fields, "text")
        text = " ".join(part for part in (title, body) if part)
        # The reader of training records rejects such negatives.
        if not text.strip() or "\x00" in text:
            num_skipped += 1
            continue
        text_hashes.append(text_hash(text))
        body_hashes.append(text_hash(body if body.strip() else text))
        yield StoredRow(text)
    if num_skipped:
        logger.warning("%s: %d documents without text are skipped", path, num_skipped)


def distinct(hash_E: Int64s) -> tuple[Int64s, Int64s, Int64s]:
    """The distinct hashes by first appearance, the first entry of each, and the number of each entry's hash."""
    hash_D, first_D, sorted_E = np.unique(hash_E, return_index=True, return_inverse=True)
    order_D = np.argsort(first_D)
    number_D = np.empty_like(order_D)
    number_D[order_D] = np.arange(len(order_D))
    return hash_D[order_D], first_D[order_D], number_D[sorted_E]


def find(hash_n: Int64s, hash_D: Int64s) -> Int64s:
    """The first position of each hash in `hash_D`, or -1, (n,)."""
    hash_U, first_U = np.unique(hash_D, return_index=True)
    index_n = np.searchsorted(hash_U, hash_n).clip(max=len(hash_U) - 1)
    return np.where(hash_U[index_n] == hash_n, first_U[index_n], -1)


def _slots(value_N: Int64s, found_n: Int64s, order_N: Int64s | None = None) -> tuple[Int64s, Int64s]:
    """Where each of `found_n` starts and ends in `value_N`, which `order_N` sorts."""
    return np.searchsorted(value_N, found_n, "left", order_N), np.searchsorted(value_N, found_n, "right", order_N)
