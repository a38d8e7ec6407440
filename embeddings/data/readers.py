"""Readers of rows: JSON lines, CSV and Parquet files, and Hub data sets."""

import csv
import gzip
import json
import re
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from io import BufferedReader, BytesIO
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from embeddings.common.errors import InputError
from embeddings.common.io import check_regular, lists_of
from embeddings.common.progress import progress_bar
from embeddings.common.text import one_line
from embeddings.data.records import PAIR_FIELDS, Cell, look_alikes

MAX_LINE_BYTES = 32 * 2**20
_CHUNK_BYTES = 2**20
# A small gzip file can contain so many blank lines that reading takes hours.
MAX_BLANK_LINES = 2**24
_GZIP, _PARQUET = b"\x1f\x8b", b"PAR1"
# First bytes of common files that cannot be read, and what they are.
_FOREIGN = {
    b"\xff\xfe\x00\x00": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
    b"BZh": "compressed by bzip2",
    b"\xfd7zX": "compressed by xz",
    b"\x28\xb5\x2f\xfd": "compressed by zstd",
    b"PK\x03\x04": "a zip archive",
    b"ARRO": "an Arrow file",
}
_BOM = b"\xef\xbb\xbf"
# File names of CSV and TSV tables, and their possible separators: the first one in the header applies.
_TABLE, _SEPARATORS = re.compile(r"\.(csv|tsv)(\.gz)?$", re.IGNORECASE), {"csv": ",;\t", "tsv": "\t"}
_BLOCK_ROWS = 1024


class Row(NamedTuple):
    """One row: `where` is file and row, for messages; `fields` are its values by column name."""

    where: str
    fields: Mapping[str, Any]


class Block(NamedTuple):
    """Rows that were read together: their values by column name, and their numbers in the file `name`."""

    name: str
    numbers: Sequence[int]
    fields: Sequence[Mapping[str, Any]]

    @property
    def rows(self) -> Iterator[Row]:
        for number, fields in zip(self.numbers, self.fields, strict=True):
            yield Row(f"{self.name}:{number}", fields)


class Reader(ABC):
    """Rows in order, with the progress of reading; `total_bytes` is None if it is unknown."""

    path: Path
    total_bytes: int | None = None
    bytes_read: int = 0
    unread_columns: Sequence[str] = ()

    def __iter__(self) -> Iterator[Row]:
        """The rows from the first; raises `InputError` at an unreadable row, or if there are no rows."""
        for block in self.blocks():
            yield from block.rows

    def blocks(self) -> Iterator[Block]:
        """The same rows, many at a time."""
        num_rows = 0
        for block in self._blocks():
            num_rows += len(block.fields)
            yield block
        if not num_rows:
            raise self._without_rows()

    @abstractmethod
    def _blocks(self) -> Iterator[Block]: ...

    def _without_rows(self) -> InputError:
        return InputError(str(self.path), "contains no rows", "write the file again, or leave it out")


def blocks_of(title: str, readers: Sequence[Reader]) -> Iterator[Block]:
    """The rows of all readers, with a progress bar."""
    sizes = [reader.total_bytes for reader in readers]
    total = None if None in sizes else sum(size or 0 for size in sizes)
    with progress_bar(total, title, "row" if total is None else "B", unit_scale=True) as bar:
        for reader in readers:
            done = bar.n
            for block in reader.blocks():
                yield block
                bar.update(len(block.fields) if total is None else done + reader.bytes_read - bar.n)


def rows_of(title: str, readers: Sequence[Reader]) -> Iterator[Row]:
    """As `blocks_of`, one row at a time."""
    return chain.from_iterable(block.rows for block in blocks_of(title, readers))


def open_reader(path: Path, fields: Sequence[str], required: Sequence[str], content: bytes | None = None) -> Reader:
    """The reader for a file: gzip and Parquet are recognised by their first bytes, tables by their names.

    From Parquet only `fields` and columns that may stand in for an optional one are read, or all columns if a
    `required` one is missing. `content` is read in place of the bytes of a text file.
    """
    check_regular(path)
    try:
        with _opened(path, content) as file:
            start = file.read(4)
    except OSError as error:
        what = f"cannot be read ({error.strerror})"
        raise InputError(str(path), what, "check the path and its permissions") from None
    if not start:
        raise InputError(str(path), "is empty", "write the file again, or leave it out")
    if start == _PARQUET:
        return ParquetReader(path, fields, required)
    if path.suffix == ".parquet":
        raise InputError(str(path), "is not a Parquet file despite its name", "check how it was written")
    lines, table = JsonlReader(path, start.startswith(_GZIP), content), _TABLE.search(path.name)
    if table is None or lines.first_line().lstrip()[:1] in (b"{", b"["):
        return lines
    return CsvReader(path, lines.gzipped, content, _SEPARATORS[table[1].lower()])


def _opened(path: Path, content: bytes | None) -> BufferedReader | BytesIO:
    return open(path, "rb") if content is None else BytesIO(content)


class LineReader(Reader):
    """Rows of a text file, named by line number from 1, without byte-order mark and blank lines."""

    def __init__(self, path: Path, gzipped: bool, content: bytes | None = None) -> None:
        self.path, self.gzipped, self._content = path, gzipped, content
        self.total_bytes = path.stat().st_size if content is None else len(content)

    def first_line(self) -> bytes:
        """The first line that is not blank; empty if there is none."""
        return next((line for _, lines in self._chunks() for line in lines if line.strip()), b"")

    def _chunks(self) -> Iterator[tuple[int, list[bytes]]]:
        """The lines of the file, some at a time, with the number of the first."""
        number, rest, num_blank = 1, None, 0
        with _opened(self.path, self._content) as raw, gzip.GzipFile(fileobj=raw) if self.gzipped else raw as file:
            while chunk := self._read(file, number):
                text = self._without_mark(chunk) if rest is None else rest + chunk
                self.bytes_read = raw.tell()
                *lines, rest = text.split(b"\n")
                yield number, [line + b"\n" for line in lines]
                number += len(lines)
                num_blank = 0 if chunk.strip() else num_blank + len(lines)
                if num_blank > MAX_BLANK_LINES:
                    what = f"{MAX_BLANK_LINES} consecutive blank lines"
                    raise InputError(f"{self.path}:{number}", what, "remove them, or leave the file out")
                if len(rest) > MAX_LINE_BYTES:
                    what = f"the row is longer than {MAX_LINE_BYTES >> 20} MiB"
                    fix = "check that the file is JSON lines or CSV, or shorten the text"
                    raise InputError(f"{self.path}:{number}", what, fix)
        if rest:
            yield number, [rest]

    def _read(self, file: BufferedReader | BytesIO | gzip.GzipFile, number: int) -> bytes:
        try:
            return file.read1(_CHUNK_BYTES)
        except (OSError, EOFError, zlib.error):
            if not self.gzipped:
                raise
            what = "the gzip data is truncated or damaged here"
            raise InputError(f"{self.path}:{number}", what, "download or compress the file again") from None

    def _without_mark(self, start: bytes) -> bytes:
        for mark, kind in _FOREIGN.items():
            if start.startswith(mark):
                raise InputError(f"{self.path}:1", f"the file is {kind}", "save it as UTF-8 text, plain or gzipped")
        return start.removeprefix(_BOM)


class JsonlReader(LineReader):
    """Rows of a file with one JSON object a line."""

    def _blocks(self) -> Iterator[Block]:
        path = str(self.path)
        for first, lines in self._chunks():
            numbers: Sequence[int] = range(first, first + len(lines))
            if not all(map(bytes.strip, lines)):
                numbers = [number for number, line in enumerate(lines, first) if line.strip()]
                lines = [line for line in lines if line.strip()]
            try:
                # One call for many rows takes a third of the time.
                rows = json.loads(f"[{b','.join(lines).decode()}]")
            except (ValueError, RecursionError):
                rows = []
            if len(rows) == len(lines) and set(map(type, rows)) <= {dict}:
                yield Block(path, numbers, rows)
            else:
                for number, line in zip(numbers, lines, strict=True):
                    yield Block(path, [number], [_parse_line(line, f"{path}:{number}")])


class CsvReader(LineReader):
    """Rows of a table with a header; an empty cell is null.

    Messages name a row by its first line. The first of `separators` that the header contains separates the cells.
    """

    def __init__(self, path: Path, gzipped: bool, content: bytes | None, separators: str) -> None:
        super().__init__(path, gzipped, content)
        self._separators = separators

    def _blocks(self) -> Iterator[Block]:
        for block in lists_of(self._rows(), _BLOCK_ROWS):
            yield Block(str(self.path), *zip(*block, strict=True))

    def _rows(self) -> Iterator[tuple[int, dict[str, Cell | None]]]:
        header, first = list[str](), self.first_line()
        separator = next((each for each in self._separators if each.encode() in first), self._separators[0])
        # The limit applies to the whole process; the default is 128 KiB.
        csv.field_size_limit(MAX_LINE_BYTES)
        numbered = ((number, line) for start, lines in self._chunks() for number, line in enumerate(lines, start))
        lines = (_decoded(line, f"{self.path}:{number}") for number, line in numbered)
        table = csv.reader(lines, delimiter=separator, strict=True)
        while True:
            number = table.line_num + 1
            where = f"{self.path}:{number}"
            try:
                cells = next(table, None)
            except csv.Error as error:
                fix = "close the quotes of its cells, and double those inside a text"
                raise InputError(where, f"the row is not CSV ({error})", fix) from None
            if cells is None:
                return
            if not any(cell.strip() for cell in cells):
                continue
            if not header:
                header = [name.strip() for name in cells]
                if duplicate := next((name for name in header if header.count(name) > 1), None):
                    raise InputError(str(self.path), f"has two columns {duplicate!r}", "rename one of them")
            elif len(cells) != len(header):
                what = f"the row has {len(cells)} cells, and the header {len(header)}"
                raise InputError(where, what, "quote texts that contain the separator, or fix the row")
            elif separator == "\t" and any(_spans_rows(cell, len(header)) for cell in cells):
                what = "a cell that opens with a quote here contains the next rows"
                raise InputError(where, what, "double the quote and quote the cell, or save the table as CSV")
            else:
                yield number, {name: Cell(cell) if cell else None for name, cell in zip(header, cells, strict=True)}


def _spans_rows(cell: str, num_columns: int) -> bool:
    """Whether a cell contains whole rows: each line end in it comes with the separators of one row."""
    num_lines = cell.count("\n")
    return num_lines > 0 and cell.count("\t") == num_lines * (num_columns - 1) > 0


class ParquetReader(Reader):
    """Rows of a Parquet file, counted from 1; one batch of rows is in memory at a time."""

    def __init__(self, path: Path, fields: Sequence[str], required: Sequence[str]) -> None:
        self.path, self.fields, self.required = path, fields, required
        self.total_bytes: int = path.stat().st_size

    def _blocks(self) -> Iterator[Block]:
        number = 0
        try:
            with pq.ParquetFile(self.path) as file:
                total = file.metadata.num_rows
                for batch in file.iter_batches(_BLOCK_ROWS, columns=self._selected(file.schema_arrow.names)):
                    numbers = range(number + 1, number + 1 + batch.num_rows)
                    self.bytes_read = self.total_bytes * numbers[-1] // total
                    yield Block(str(self.path), numbers, self._batch_rows(batch, number))
                    number += batch.num_rows
        except (pa.ArrowException, OSError) as error:
            reason = one_line(str(error) or type(error).__name__, 100)
            what = f"the Parquet data is truncated or damaged ({reason})"
            raise InputError(f"{self.path}:{number + 1}", what, "write the file again") from error

    def _selected(self, names: list[str]) -> list[str] | None:
        for name in self.fields:
            if names.count(name) > 1:
                raise InputError(str(self.path), f"has two columns {name!r}", "rename one of them")
        if not set(self.required) <= set(names):
            return None
        optional = [name for name in PAIR_FIELDS[2:] if name in self.fields]
        wanted = {*self.fields, *look_alikes(names, optional)}
        self.unread_columns = [name for name in names if name not in wanted]
        return [name for name in names if name in wanted]

    def _batch_rows(self, batch: pa.RecordBatch, done: int) -> list[dict[str, Any]]:
        """The rows of a batch; on a decoding error each row is tried alone, so that the message can name it."""
        try:
            rows: list[dict[str, Any]] = batch.to_pylist()
        except UnicodeDecodeError:
            if batch.num_rows > 1:
                return [self._batch_rows(batch.slice(row, 1), done + row)[0] for row in range(batch.num_rows)]
            fix = "rewrite the file as UTF-8"
            raise InputError(f"{self.path}:{done + 1}", "a text is not valid UTF-8", fix) from None
        return rows


def _decoded(line: bytes, where: str) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        if error.reason == "unexpected end of data":
            raise _cut_off(where) from None
        what = f"byte {error.start + 1} of the row is not valid UTF-8"
        raise InputError(where, what, "save the file as UTF-8") from None


def _parse_line(line: bytes, where: str) -> Mapping[str, Any]:
    text, fix = _decoded(line, where), "write one JSON object a line"
    if text.lstrip().startswith("["):
        raise InputError(where, "a JSON array starts here, expected an object", fix)
    try:
        value = json.loads(text)
    except RecursionError:
        raise InputError(where, "the JSON is nested too deeply", "write flat records") from None
    except ValueError as error:
        if text.lstrip().startswith("{") and not text.endswith("\n"):
            raise _cut_off(where) from None
        column = f" at column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        raise InputError(where, f"the row is not JSON{column}", fix) from None
    if not isinstance(value, dict):
        raise InputError(where, "the row is a JSON value, expected an object", fix)
    return value


def _cut_off(where: str) -> InputError:
    return InputError(where, "the file ends in the middle of this row", "download it again, or delete the row")


def resolve_revision(name: str, revision: str | None) -> str:
    """The commit of a revision of a Hub data set; a full commit hash needs no network."""
    if revision is not None and re.fullmatch(r"[0-9a-f]{40}", revision):
        return revision
    return ask_commit(name, revision)


def ask_commit(name: str, revision: str | None) -> str:
    """The commit of a revision, always asked from the Hub; raises `InputError` if the Hub cannot be reached."""
    # Slow to import, and most runs read files.
    from huggingface_hub import HfApi

    try:
        commit = HfApi().dataset_info(name, revision=revision, timeout=20).sha
    # The client raises errors of several libraries, which change between its versions.
    except Exception as error:
        raise unreachable(name, error) from error
    assert commit is not None
    return commit


class HubReader(Reader):
    """Rows of one split of a Hub data set at a commit, streamed, counted from 1."""

    def __init__(self, name: str, subset: str | None, split: str, commit: str) -> None:
        self.name, self.subset, self.split, self.commit = name, subset, split, commit

    def _blocks(self) -> Iterator[Block]:
        # Streaming retries an unreachable Hub for half a minute, with a log line each time.
        ask_commit(self.name, self.commit)
        try:
            from datasets import load_dataset

            options = {"split": self.split, "revision": self.commit, "streaming": True}
            first = 1
            for block in lists_of(load_dataset(self.name, self.subset, **options), _BLOCK_ROWS):
                yield Block(f"hub:{self.name}[{self.split}]", range(first, first + len(block)), block)
                first += len(block)
        except Exception as error:
            raise unreachable(self.name, error) from error

    def _without_rows(self) -> InputError:
        return InputError(f"hub:{self.name}", f"split {self.split!r} contains no rows", "choose another split")


def unreachable(name: str, error: Exception) -> InputError:
    """The error for a Hub data set that a library could not read."""
    reason = one_line((str(error).strip().splitlines() or [type(error).__name__])[0], 160)
    fix = "check name, split and network, or download it and name its files"
    return InputError(f"hub:{name}", f"cannot be read ({reason})", fix)
