"""Converted sources in the cache: rows in one memory-mapped Arrow file, an index of classes, and a manifest.

A folder is named by the hash of the files and the settings; the key of a source is the hash of its converted rows.
"""

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import chain, islice
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from embeddings.common.errors import InputError
from embeddings.common.io import (
    CACHE_VARIABLE,
    FILES,
    atomic_folder,
    cache_folder,
    check_file,
    check_manifest,
    folder_hashes,
    lists_of,
    load_array,
    write_manifest,
)
from embeddings.common.process import is_first_process, logger
from embeddings.data.conversion import GROUP_ROWS, Facts, Suspects, convert, groups_of, usable_records
from embeddings.data.readers import Reader, blocks_of
from embeddings.data.records import Record
from embeddings.data.sources import HASHES, Conversion, SourceConfig, SourceInputs

SCHEMA_VERSION = 3
ROWS_FILE = "rows.arrow"
ORDER_FILE, OFFSETS_FILE, PAIRED_FILE = "class_order.npy", "class_offsets.npy", "class_paired.npy"
MAX_BATCH_ROWS, MAX_BATCH_CHARACTERS = 65_536, 32 * 2**20
# Slices of a batch beyond which gathering its rows at once is faster.
_MAX_SLICES = 6
_FIX = "delete the folder and run again"
_SETTINGS = ("layout", "columns", "min_score", "suspect_rows")
_SCHEMA = pa.schema(
    [
        ("query", pa.large_string()),
        ("positives", pa.large_list(pa.large_string())),
        ("negatives", pa.large_list(pa.large_string())),
        ("levels", pa.large_list(pa.int8())),
        ("label", pa.int32()),
        ("instruction", pa.large_string()),
        ("scores", pa.large_list(pa.float32())),
    ]
)
Int64s = NDArray[np.int64]


class StoredRow(NamedTuple):
    """One converted row: `label` is -1 and `instruction` "" if it has none; `scores` as in `Record`."""

    query: str
    positives: Sequence[str] = ()
    negatives: Sequence[str] = ()
    levels: Sequence[int] = ()
    label: int = -1
    instruction: str = ""
    scores: Sequence[float] = ()


def write_table(folder: Path, rows: Iterable[StoredRow]) -> int:
    """Write rows into `folder`, one batch in memory at a time; returns their number."""
    return _write_columns(folder, (zip(*group, strict=True) for group in lists_of(rows, GROUP_ROWS)))


def _write_columns(folder: Path, groups: Iterable[Iterable[Sequence[Any]]]) -> int:
    """`write_table` of groups of rows, each as the columns of `StoredRow`."""
    num_rows = 0
    with pa.OSFile(str(folder / ROWS_FILE), "wb") as file, pa.ipc.new_file(file, _SCHEMA) as writer:
        for columns in _batches(groups):
            arrays = [pa.array(values, type=field.type) for values, field in zip(columns, _SCHEMA, strict=True)]
            writer.write_batch(pa.record_batch(arrays, schema=_SCHEMA))
            num_rows += len(columns[0])
    return num_rows


def _batches(groups: Iterable[Iterable[Sequence[Any]]]) -> Iterator[list[list[Any]]]:
    """The columns of batches, each of which ends with the row that reaches one of the limits."""
    batch: list[list[Any]] = [[] for _ in _SCHEMA]
    characters = 0
    for columns in map(list, groups):
        fits = len(batch[0]) + len(columns[0]) < MAX_BATCH_ROWS
        fits = fits and characters + _num_characters(columns) < MAX_BATCH_CHARACTERS
        for part in [columns] if fits else [[[value] for value in row] for row in zip(*columns, strict=True)]:
            for held, values in zip(batch, part, strict=True):
                held.extend(values)
            characters += _num_characters(part)
            if len(batch[0]) >= MAX_BATCH_ROWS or characters >= MAX_BATCH_CHARACTERS:
                yield batch
                batch, characters = [[] for _ in _SCHEMA], 0
    if batch[0]:
        yield batch


def _num_characters(columns: Sequence[Sequence[Any]]) -> int:
    queries, positives, negatives, *_ = columns
    return sum(map(len, chain(queries, chain.from_iterable(positives), chain.from_iterable(negatives))))


class Table:
    """Memory-mapped reader of the file of `write_table`; pickling stores only the folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        check_file(folder / ROWS_FILE, _FIX)
        try:
            # With `pa.memory_map`, using one row would read its whole batch from disk.
            with open(folder / ROWS_FILE, "rb") as file:
                data = pa.py_buffer(mmap(file.fileno(), 0, access=ACCESS_READ))
            # Arrow's threads do not survive the fork that starts a worker.
            reader = pa.ipc.open_file(data, options=pa.ipc.IpcReadOptions(use_threads=False))
            self._batches = [reader.get_batch(number) for number in range(reader.num_record_batches)]
            self.has_scores = any(len(batch["scores"].values) for batch in self._batches)
        except (pa.ArrowException, OSError, ValueError, KeyError) as error:
            raise damaged(folder) from error
        self._start_R = np.cumsum([0, *map(len, self._batches)])

    def __reduce__(self) -> tuple[type["Table"], tuple[Path]]:
        return Table, (self.folder,)

    def __len__(self) -> int:
        return int(self._start_R[-1])

    def row(self, index: int) -> StoredRow:
        """The row at `index`, from 0; `rows` is faster for many."""
        return self.rows([index])[0]

    def rows(self, indices: Sequence[int] | Int64s) -> list[StoredRow]:
        """The rows at `indices`, which may be in any order and repeat."""
        names = StoredRow._fields if self.has_scores else StoredRow._fields[:-1]
        return list(map(StoredRow, *self._take(names, indices)))

    def queries(self, indices: Sequence[int] | Int64s) -> list[str]:
        return self._take(["query"], indices)[0]

    def positives(self, indices: Sequence[int] | Int64s) -> list[list[str]]:
        return self._take(["positives"], indices)[0]

    def negatives(self, indices: Sequence[int] | Int64s) -> list[list[str]]:
        return self._take(["negatives"], indices)[0]

    def levels(self, indices: Sequence[int] | Int64s) -> list[list[int]]:
        return self._take(["levels"], indices)[0]

    def labels(self) -> NDArray[np.int32]:
        """The label of every row, (rows,)."""
        return np.concatenate([np.empty(0, np.int32), *(batch["label"].to_numpy() for batch in self._batches)])

    def row_levels(self) -> Iterator[NDArray[np.uint8]]:
        """The levels of the negatives of each row as bit masks (bit l: level l), batch by batch, (rows,)."""
        for batch in self._batches:
            starts = batch["levels"].offsets.to_numpy()
            has_negatives = starts[:-1] < starts[1:]
            masks = np.zeros(len(has_negatives), dtype=np.uint8)
            if has_negatives.any():
                bits = np.left_shift(np.uint8(1), batch["levels"].values.to_numpy().astype(np.uint8))
                masks[has_negatives] = np.bitwise_or.reduceat(bits, starts[:-1][has_negatives])
            yield masks

    def has_levels(self, where: str) -> bool:
        """Whether the negatives have levels; raises `InputError` if only some of them do."""
        # Bit 0 stands for a negative without a level.
        masks = {mask for levels_N in self.row_levels() for mask in np.unique(levels_N).tolist()}
        is_graded = any(mask > 1 for mask in masks)
        if is_graded and any(mask & 1 for mask in masks):
            what = "some negatives have a level and others have none"
            raise InputError(where, what, "give all of them a level, or none")
        return is_graded

    def _take(self, names: Sequence[str], indices: Sequence[int] | Int64s) -> list[list[Any]]:
        """The values of the columns `names` at `indices`, one list for each column."""
        index_N = np.asarray(indices, dtype=np.int64)
        outside_N = (index_N < 0) | (index_N >= len(self))
        if outside_N.any():
            raise IndexError(f"row {index_N[outside_N][0]} of {len(self)}")
        batch_N = np.searchsorted(self._start_R, index_N, side="right") - 1
        local_N = index_N - self._start_R[batch_N]
        batches = np.unique(batch_N).tolist()
        # Consecutive rows of a batch are one slice.
        first = np.flatnonzero((np.diff(index_N, prepend=-2) != 1) | (np.diff(batch_N, prepend=-1) != 0))
        if len(first) <= _MAX_SLICES * len(batches):
            lengths = np.diff(first, append=len(index_N)).tolist()
            slices = zip(batch_N[first].tolist(), local_N[first].tolist(), lengths, strict=True)
            parts = [self._batches[batch].slice(start, length) for batch, start, length in slices]
            taken = pa.Table.from_batches(parts, _SCHEMA).select(names).combine_chunks()
        else:
            parts = [self._batches[batch].select(names).take(pa.array(local_N[batch_N == batch])) for batch in batches]
            order_N = np.argsort(np.argsort(batch_N, kind="stable"))
            taken = pa.Table.from_batches(parts).combine_chunks().take(pa.array(order_N))
        return [column.to_pylist() for column in taken.columns]


def damaged(folder: Path) -> InputError:
    """The error for a folder of converted data whose files were changed or truncated."""
    return InputError(str(folder), "the converted data is damaged", _FIX)


def layout(conversion: Conversion) -> str:
    """Conversions with the same layout of the stored rows share a converted source."""
    return {"pairs": "records", "sts": "scored"}.get(conversion, "labelled")


def write_class_index(folder: Path, labels: NDArray[np.int32], num_classes: int, lone: Collection[int] = ()) -> None:
    """Write the row order by class, the offset of each class in it, and the rows of classes that are not `lone`."""
    np.save(folder / ORDER_FILE, np.argsort(labels, kind="stable").astype(np.int64))
    counts = np.bincount(labels, minlength=num_classes)
    np.save(folder / OFFSETS_FILE, np.concatenate([[0], np.cumsum(counts)]).astype(np.int64))
    np.save(folder / PAIRED_FILE, np.flatnonzero(~np.isin(labels, list(lone))).astype(np.int64))


class ClassIndex:
    """Memory-mapped index of the rows inside and outside each class; pickling stores only the folder.

    `paired` are the rows whose class has another text, (rows,) int64.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._order = load_array(folder / ORDER_FILE, _FIX, mapped=True)
        self.paired: Int64s = load_array(folder / PAIRED_FILE, _FIX, mapped=True)
        self._offsets: list[int] = load_array(folder / OFFSETS_FILE, _FIX).tolist()

    def __reduce__(self) -> tuple[type["ClassIndex"], tuple[Path]]:
        return ClassIndex, (self.folder,)

    def size(self, label: int) -> int:
        return self._offsets[label + 1] - self._offsets[label]

    def num_outside(self, label: int) -> int:
        return len(self._order) - self.size(label)

    def member(self, label: int, position: int) -> int:
        """The row at `position` (0 to `size` - 1) of a class."""
        return int(self._order[self._offsets[label] + position])

    def outsider(self, label: int, position: int) -> tuple[int, int]:
        """The row at `position` (0 to `num_outside` - 1) of all other classes, and its class."""
        skipped = position if position < self._offsets[label] else position + self.size(label)
        return int(self._order[skipped]), bisect_right(self._offsets, skipped) - 1


class CachedSource:
    """A converted source, read from its folder.

    Attributes:
        key: Hash of the rows and their classes: the same for another file, compression or mapping with the same rows.
        inputs: Identity of the files, or of the Hub data set (see `SourceInputs`).
        settings: Settings of the conversion, in JSON types.
        labels: The text of each class, by code.
        lone_class: A class whose texts are all equal, with the file and row of its first row, or None.
        longest_instruction: File and row, and the instruction, or None.
        unused_columns: Unused columns whose names resemble a field, each with the field.
        classes: The index of classes, or None in a layout without classes.
    """

    def __init__(self, folder: Path) -> None:
        manifest = check_manifest(folder, {"schema_version": SCHEMA_VERSION})
        self.folder, self.table = folder, Table(folder)
        if len(self.table) != manifest["num_rows"]:
            raise damaged(folder)
        self.key: str = manifest["key"]
        self.inputs: list[dict[str, Any]] = manifest["inputs"]
        self.settings: dict[str, Any] = {name: manifest[name] for name in _SETTINGS}
        self.labels: list[str] = manifest["labels"]
        self.lone_class: list[str] | None = manifest["lone_class"]
        self.longest_instruction: list[str] | None = manifest["longest_instruction"]
        self.unused_columns: dict[str, str] = manifest["unused_columns"]
        self.suspects = Suspects(**manifest["suspects"])
        self.classes = ClassIndex(folder) if manifest["layout"] == "labelled" else None


@contextlib.contextmanager
def borrowed_cache(cache_dir: str | os.PathLike[str] | None = None) -> Iterator[str]:
    """A temporary cache that links to the sources of `cache_dir`; new conversions are deleted with it."""
    root = cache_folder(cache_dir).absolute()
    with tempfile.TemporaryDirectory() as folder:
        for path in root.iterdir() if root.is_dir() else ():
            if path.name == HASHES:
                shutil.copytree(path, Path(folder) / HASHES)
            elif path.is_dir() and not path.name.startswith("."):
                (Path(folder) / path.name).symlink_to(path)
        yield folder


def converted_folder(root: Path, identity: Mapping[str, Any], write: Callable[[Path, dict[str, Any]], None]) -> Path:
    """The folder of an identity in `root`, which `write` fills first if it does not exist.

    It appears only when it is complete, and several processes may call this at the same time.
    """
    target = root / content_key(identity)
    if not target.is_dir():
        with writing_cache(root), atomic_folder(target) as folder:
            write(folder, dict(identity))
    return target


@contextlib.contextmanager
def writing_cache(root: Path) -> Iterator[None]:
    try:
        yield
    except (PermissionError, FileExistsError, NotADirectoryError) as error:
        what = f"the cache cannot be written ({error.strerror})"
        raise InputError(str(root), what, f"set {CACHE_VARIABLE} to another folder") from None


def content_key(identity: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:32]


def open_cached(config: SourceConfig, cache_dir: str | os.PathLike[str] | None = None) -> CachedSource:
    """Open a converted source; the first call for these files (or this commit) and settings converts it."""
    # Absolute, because a worker opens the folder again, possibly in another working directory.
    root = cache_folder(cache_dir).absolute()
    inputs = SourceInputs(config, root)
    settings = {
        "layout": layout(config.conversion),
        "columns": dict(sorted(config.columns.items())),
        "min_score": config.score_threshold if config.conversion == "sts" else None,
        "suspect_rows": "keep" if config.suspect_rows == "keep" else "leave_out",
    }
    identity = {"schema_version": SCHEMA_VERSION, **settings, "inputs": inputs.identity}
    cached = CachedSource(converted_folder(root, identity, partial(_convert, config, inputs)))
    inputs.remember()
    if cached.suspects.count and config.suspect_rows == "refuse":
        fix = "correct them, or set suspect_rows: leave_out (or keep)"
        raise InputError(f"source {config.name!r}", str(cached.suspects), fix)
    if cached.suspects.count and is_first_process():
        done, other = ("kept", "leave_out") if config.suspect_rows == "keep" else ("left out", "keep or refuse")
        logger.warning("source %s: %s; %s (else suspect_rows: %s)", config.name, cached.suspects, done, other)
    return cached


def read_records(config: SourceConfig, cached: CachedSource, title: str = "reading") -> Iterator[tuple[str, Record]]:
    """The complete records of a source of `pairs` or `sts`, with file and row, in the order of the table.

    They are read from the source again, because converted rows lack `score`, `id`, `language` and the label text. The
    progress bar has the title and the source's name.
    """
    inputs = SourceInputs(config, cached.folder.parent, cached.inputs[0].get("commit"))
    if not config.is_hub and inputs.identity != cached.inputs:
        raise InputError(f"source {config.name!r}", "its files have changed since the job started", "start again")
    blocks = blocks_of(f"{title} {config.name}", _readers(config, inputs))
    yield from (record for group in groups_of(blocks) for record in usable_records(config, group))
    inputs.require_unchanged()


def record_place(config: SourceConfig, cached: CachedSource, row: int) -> str:
    """File and row of a record, for messages; reads the source up to that record."""
    return next(islice(read_records(config, cached), row, None))[0]


def _convert(config: SourceConfig, inputs: SourceInputs, folder: Path, identity: dict[str, Any]) -> None:
    facts = Facts()
    readers = _readers(config, inputs)
    blocks = blocks_of(f"converting {config.name}", readers)
    num_rows = _write_columns(folder, convert(config, facts.noting_columns(config, blocks), facts))
    if num_rows == 0:
        what = f"no row can be used: {facts.suspects}"
        raise InputError(f"source {config.name!r}", what, "correct them, or set suspect_rows: keep")
    facts.columns |= dict.fromkeys(name for reader in readers for name in reader.unread_columns)
    if identity["layout"] == "labelled":
        write_class_index(folder, Table(folder).labels(), len(facts.labels), facts.lone_text)
    inputs.require_unchanged()
    if facts.substitutes:
        used = ", ".join(f"{name} as {field}" for name, field in facts.substitutes.items())
        logger.info("source %s: columns used: %s", config.name, used)
    files, labels = folder_hashes(folder), list(facts.labels)
    fields = {
        "key": content_key({"rows": files[ROWS_FILE], "labels": labels}),
        "num_rows": num_rows,
        "labels": labels,
        "lone_class": facts.lone_class,
        "longest_instruction": facts.longest_instruction,
        "unused_columns": facts.unused_columns(config),
        "suspects": asdict(facts.suspects),
        "paths": inputs.paths,
    }
    write_manifest(folder, {**identity, **fields, FILES: files})


def _readers(config: SourceConfig, inputs: SourceInputs) -> list[Reader]:
    required = ("query", "positive") if config.conversion == "pairs" else config.fields
    columns = [[config.columns.get(name) or name for name in names] for names in (config.fields, required)]
    return inputs.readers(*columns)


def read_languages(config: SourceConfig, cached: CachedSource) -> NDArray[np.uint16]:
    """The language code of each row, numbered by first appearance, (rows,)."""
    code_N = np.empty(len(cached.table), np.uint16)
    codes: dict[str, int] = {}
    for row, (where, record) in enumerate(read_records(config, cached)):
        if record.language is None:
            fix = "give every record one, or map it with columns: {language: YOUR_COLUMN}"
            raise InputError(where, "the record has no language", fix)
        code = codes.setdefault(record.language, len(codes))
        code_N[row] = code
    return code_N
