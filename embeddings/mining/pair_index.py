"""The distinct documents of a source of pairs, numbered by first appearance, and the documents of each row."""

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numpy.lib.format import open_memmap

from embeddings.common.errors import InputError
from embeddings.common.io import atomic_folder, check_manifest, file_sha256, load_array, text_hash, write_manifest
from embeddings.common.process import logger
from embeddings.data.readers import open_reader
from embeddings.data.store import CachedSource
from embeddings.data.table import StoredRow, Table, write_table
from embeddings.inference.vector_folder import text_field

BLOCK = 1 << 16
# Rows read at once.
_TEXT_ROWS = 1 << 11
# Hashes sorted in memory at once: about 100 bytes each.
PART = 1 << 22

Int64s = npt.NDArray[np.int64]


class KnownPositives(NamedTuple):
    """The documents known to answer some queries; queries with the same text share a group.

    `group_P` and `row_P` are pairs of a group and a document's row, each once, sorted by group.
    """

    group_Q: Int64s
    group_P: Int64s
    row_P: Int64s


class PairIndex:
    """Queries and documents of a source of pairs, by row, on disk.

    A query is a row of the source. A document is a positive of a row, a negative if negatives were included, or a text
    of the extra corpus. Texts that differ only in outer white space are one document.

    Attributes:
        folder: Folder of the index.
        source: The source.
        num_queries: Number of rows of the source.
        num_documents: Number of distinct texts.
        positive_offsets: The positives of query `i` are entries `offsets[i]` to `offsets[i + 1]`, (rows + 1,) int64.
        positive_rows: Documents, (entries,) int32, or int64 if there are more than 2^31.
        negative_offsets, negative_rows: The same for negatives; None if they are not documents.
        document_hashes: `text_hash` of each document, (documents,) int64.
        query_hashes: `text_hash` of each query, (rows,) int64.

    Raises:
        InputError: If the folder has no index, or the index of another source.
    """

    def __init__(self, folder: str | os.PathLike[str], source: CachedSource) -> None:
        self.folder, self.source = Path(folder), source
        self.fields = check_manifest(self.folder, {"kind": "pair_index", "source_key": source.folder.name})
        self.num_queries, self.num_documents = (self.fields.integer(name) for name in ("num_queries", "num_documents"))

        def mapped(name: str, exists: object = True) -> Any:
            path = self.folder / f"{name}.npy"
            return load_array(path, "delete the folder and run again", mapped=True) if exists else None

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
        """The fields that identify this index, for manifests."""
        # Older indices have no field `negatives`; they contain none.
        return {name: self.fields.get(name) for name in ("source_key", "corpus_sha256", "negatives")}

    def positives(self, query: int) -> npt.NDArray[Any]:
        """The positives of a query, in the order of its row."""
        return self.positive_rows[self.positive_offsets[query] : self.positive_offsets[query + 1]]

    def document_texts(self, documents: Sequence[int] | Int64s) -> list[str]:
        """The texts of documents, as each first appeared."""
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
    """Number the documents of a source of pairs; an existing index is opened.

    The probability that two different texts count as one is below n^2 / 2^65: 3 in 10,000 for 100 million texts.

    Args:
        source: A converted source whose rows have positives.
        folder: The folder to write, atomically.
        corpus: A file of additional documents (`text`, optional `title`), or None. Empty texts are skipped.
        negatives: Whether the rows' negatives are documents too, after the positives and before the corpus.

    Memory: does not grow with the number of texts; their 64-bit hashes are sorted in buckets.
    Raises:
        InputError: If the source's rows are not pairs, `negatives` is set and no row has any, the corpus cannot be
            used, or the folder contains another index.
    """
    target = Path(folder)
    if source.classes is not None:
        raise InputError(str(source.folder), "contains labelled texts, not pairs", "use conversion: pairs")
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
        hashes, bodies = stage / "hashes.bin", stage / "bodies.bin"
        with open(hashes, "wb") as file:
            sizes = {"positive": _write_rows(source.table, stage, file)}
            if negatives:
                sizes["negative"] = _write_texts(source.table.negatives, len(source.table), stage / "negative", file)
                if not sizes["negative"]:
                    raise InputError(str(source.folder), "no row has negatives", "leave out the option negatives")
            if corpus is not None:
                with open(bodies, "wb") as body_file:
                    write_table(stage, _hashed_corpus(Path(corpus), file, body_file))
        num_texts = hashes.stat().st_size // 8
        if corpus is not None:
            with open(hashes, "ab") as file, open(bodies, "rb") as body_file:
                shutil.copyfileobj(body_file, file)
            bodies.unlink()
        num_documents = _write_documents(stage, hashes, sizes, num_texts)
        write_manifest(stage, {**key, "num_queries": len(source.table), "num_documents": num_documents})
    return PairIndex(target, source)


def _write_rows(table: Table, stage: Path, hashes: IO[bytes]) -> int:
    """Write each row's query hash, and the hash of each positive; returns the number of positives.

    `query_order` lists the rows grouped by query text; `query_slots` is the start and end of each row's group in it.
    """
    create = partial(open_memmap, mode="w+", dtype=np.int64)
    query_hashes = create(stage / "query_hashes.npy", shape=(len(table),))
    for rows in _row_blocks(len(table)):
        query_hashes[rows.start : rows.stop] = list(map(text_hash, table.queries(rows)))
    order, done = create(stage / "query_order.npy", shape=(len(table),)), 0
    slots = create(stage / "query_slots.npy", shape=(len(table), 2))
    for row_n, slot_n2 in _slots(query_hashes):
        order[done : done + len(row_n)] = row_n
        slots[row_n] = slot_n2
        done += len(row_n)
    return _write_texts(table.positives, len(table), stage / "positive", hashes)


def _write_texts(texts_of: Callable[[range], list[list[str]]], num_rows: int, path: Path, hashes: IO[bytes]) -> int:
    """Write the offsets of each row's texts (`PATH_offsets.npy`), and their hashes; returns their number."""
    offsets = open_memmap(path.with_name(f"{path.name}_offsets.npy"), "w+", np.int64, (num_rows + 1,))
    total = 0
    for rows in _row_blocks(num_rows):
        texts = texts_of(rows)
        offsets[rows.start + 1 : rows.stop + 1] = total + np.cumsum([len(row) for row in texts])
        np.fromiter(map(text_hash, chain.from_iterable(texts)), np.int64).tofile(hashes)
        total += sum(map(len, texts))
    return total


def _row_blocks(num_rows: int) -> Iterator[range]:
    return (range(start, min(start + _TEXT_ROWS, num_rows)) for start in range(0, num_rows, _TEXT_ROWS))


def _hashed_corpus(path: Path, hashes: IO[bytes], bodies: IO[bytes]) -> Iterator[StoredRow]:
    """The documents of a corpus file as rows to store; also writes their hashes with and without the title."""
    num_skipped = 0
    for where, fields in open_reader(path, ("title", "text"), ("text",)):
        title, body = text_field(where, {"title": "", **fields}, "title"), text_field(where, fields, "text")
        text = " ".join(part for part in (title, body) if part)
        # The reader of training records rejects such negatives.
        if not text.strip() or "\x00" in text:
            num_skipped += 1
            continue
        np.array([text_hash(text)], np.int64).tofile(hashes)
        np.array([text_hash(body if body.strip() else text)], np.int64).tofile(bodies)
        yield StoredRow(text)
    if num_skipped:
        logger.warning("%s: %d documents without text are skipped", path, num_skipped)


def _write_documents(stage: Path, hashes_path: Path, sizes: dict[str, int], num_texts: int) -> int:
    """Write the document of each positive and negative, and the data of each document; returns their number.

    The file has the hashes of the entries of each kind (`sizes` counts them), then those of the corpus, `num_texts` in
    all, then those of the corpus's texts without titles. The file is removed.
    """
    total = hashes_path.stat().st_size // 8
    hash_E: Int64s = np.memmap(hashes_path, np.int64, "r", shape=(total,))
    scratch = {stage / "first.bin": total, stage / "number.bin": num_texts}
    first_E, number_E = (np.memmap(path, np.int64, "w+", shape=(size,)) for path, size in scratch.items())
    for entry_n, is_first_n in equal_hashes(hash_E):
        first_E[entry_n] = entry_n[is_first_n][np.cumsum(is_first_n) - 1]
    blocks = [(start, min(start + BLOCK, num_texts)) for start in range(0, num_texts, BLOCK)]
    num_documents = sum(int(np.count_nonzero(first_E[start:stop] == np.arange(start, stop))) for start, stop in blocks)
    width = np.int32 if num_documents <= np.iinfo(np.int32).max else np.int64
    create = partial(open_memmap, mode="w+")
    kinds = [create(stage / f"{kind}_rows.npy", dtype=width, shape=(size,)) for kind, size in sizes.items()]
    hash_D = create(stage / "document_hashes.npy", dtype=np.int64, shape=(num_documents,))
    entry_D = create(stage / "document_entries.npy", dtype=np.int64, shape=(num_documents,))
    done = 0
    for start, stop in blocks:
        first_B = np.asarray(first_E[start:stop])
        new_B = first_B == np.arange(start, stop)
        number_E[start:stop] = done + np.cumsum(new_B) - 1
        end = done + int(np.count_nonzero(new_B))
        entry_D[done:end] = start + np.flatnonzero(new_B)
        hash_D[done:end] = hash_E[start:stop][new_B]
        # A text's first entry is never after it, so its number is already known.
        rows_B, first = number_E[first_B], 0
        for rows_P in kinds:
            begin, last = max(start, first), min(stop, first + len(rows_P))
            if begin < last:
                rows_P[begin - first : last - first] = rows_B[begin - start : last - start]
            first += len(rows_P)
        done = end
    if total > num_texts:
        _write_twins(stage, hash_D, first_E, number_E, sum(sizes.values()))
    for path in (hashes_path, *scratch):
        path.unlink()
    return num_documents


def _write_twins(stage: Path, hash_D: Int64s, first_E: Int64s, number_E: Int64s, corpus_start: int) -> None:
    """Write which documents are one text with and without its title: those of `d` are `twin_rows[slice(*slots[d])]`.

    `first_E` is the first entry with the same hash, in the order of `_write_documents`; `number_E` is the document of
    each first entry below `num_texts`; `corpus_start` is the first entry of the corpus.
    """
    num_texts, path = len(number_E), stage / "twins.bin"
    with open(path, "wb") as file:
        for start in range(num_texts, len(first_E), BLOCK):
            body_B = first_E[start : min(start + BLOCK, len(first_E))]
            text_B = first_E[corpus_start + start - num_texts :][: len(body_B)]
            is_document_B = body_B < num_texts
            pair_n2 = np.stack([number_E[body_B[is_document_B]], number_E[text_B[is_document_B]]], axis=1)
            pair_n2 = pair_n2[pair_n2[:, 0] != pair_n2[:, 1]]
            pair_n2 = np.concatenate([pair_n2, pair_n2[:, ::-1]])
            np.column_stack([hash_D[pair_n2[:, 0]], pair_n2]).tofile(file)
    num_pairs = path.stat().st_size // 24
    slots_D2 = open_memmap(stage / "twin_slots.npy", "w+", np.int64, (len(hash_D), 2))
    row_P = open_memmap(stage / "twin_rows.npy", "w+", np.int64, (num_pairs,))
    if num_pairs:
        pair_P3: Int64s = np.memmap(path, np.int64, "r", shape=(num_pairs, 3))
        done = 0
        for pair_n, slot_n2 in _slots(pair_P3[:, 0]):
            row_P[done : done + len(pair_n)] = pair_P3[pair_n, 2]
            slots_D2[pair_P3[pair_n, 1]] = slot_n2
            done += len(pair_n)
    path.unlink()


def _slots(hash_E: Int64s) -> Iterator[tuple[Int64s, Int64s]]:
    """The entries sorted by hash, one bucket at a time, and the start and end of the equal hashes of each."""
    done = 0
    for entry_n, is_first_n in equal_hashes(hash_E):
        edges = np.append(np.flatnonzero(is_first_n), len(entry_n)) + done
        group_n = np.cumsum(is_first_n) - 1
        yield entry_n, np.stack([edges[group_n], edges[group_n + 1]], axis=1)
        done += len(entry_n)


def equal_hashes(hash_E: Int64s, part: int = PART) -> Iterator[tuple[Int64s, npt.NDArray[np.bool_]]]:
    """The entries sorted by hash, about `part` of them at a time, and whether each is the first with its hash.

    Hashes are uniform over 64 bits. Equal hashes are in one part, in the order of the entries.
    """
    bits = max(0, (len(hash_E) - 1).bit_length() - (part.bit_length() - 1))
    for bucket in range(1 << bits):
        entries = []
        for start in range(0, len(hash_E), BLOCK):
            # By the highest bits; a shift by all 64 gives 0.
            bucket_B = np.asarray(hash_E[start : start + BLOCK]).view(np.uint64) >> np.uint64(64 - bits)
            entries.append(start + np.flatnonzero(bucket_B == bucket))
        entry_n = np.concatenate(entries)
        hash_n = hash_E[entry_n]
        order_n = np.argsort(hash_n, kind="stable")
        hash_n = hash_n[order_n]
        yield entry_n[order_n], np.append(True, hash_n[1:] != hash_n[:-1])[: len(hash_n)]


def concatenated_ranges(start_n: Int64s, stop_n: Int64s) -> Int64s:
    """The numbers start … stop - 1 of each range, concatenated, (sum of lengths,) int64."""
    length_n = stop_n - start_n
    before_n = np.cumsum(length_n) - length_n
    return np.repeat(start_n - before_n, length_n) + np.arange(int(length_n.sum()))
