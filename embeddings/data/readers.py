"""Readers of rows: JSON lines, CSV and Parquet files, and Hub data sets."""

import csv
import gzip
import json
import re
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from embeddings.common.errors import InputError
from embeddings.common.io import check_regular
from embeddings.common.text import one_line
from embeddings.data.records import PAIR_FIELDS, Cell, look_alikes

MAX_LINE_BYTES = 32 * 2**20
# A gzip file of a few kilobytes can contain so many blank lines that reading takes hours.
MAX_BLANK_LINES = 2**20
_GZIP, _PARQUET = b"\x1f\x8b", b"PAR1"
# First bytes of common files that are not JSON lines; the first match applies.
_FOREIGN = {
    b"\xff\xfe\x00\x00": ("UTF-32", "save it as UTF-8"),
    b"\xff\xfe": ("UTF-16", "save it as UTF-8"),
    b"\xfe\xff": ("UTF-16", "save it as UTF-8"),
    b"BZh": ("compressed by bzip2", "unpack it, or compress it by gzip"),
    b"\xfd7zX": ("compressed by xz", "unpack it, or compress it by gzip"),
    b"\x28\xb5\x2f\xfd": ("compressed by zstd", "unpack it, or compress it by gzip"),
    b"PK\x03\x04": ("a zip archive", "unpack it"),
    b"ARRO": ("an Arrow file", "write it as Parquet"),
}
_BOM = b"\xef\xbb\xbf"
# A first line of column names, such as `query,positive`.
_HEADER = re.compile(rb'"?[A-Za-z_]\w*"?([,;\t]"?[A-Za-z_]\w*"?)+\s*')
# File names of CSV and TSV tables, and their possible separators: the first one in the header applies.
_TABLE, _SEPARATORS = re.compile(r"\.(csv|tsv)(\.gz)?$", re.IGNORECASE), {"csv": ",;\t", "tsv": "\t"}
_PARQUET_ROWS = 1024


class Row(NamedTuple):
    """One row: `where` is file and row, for messages; `fields` are its values by column name."""

    where: str
    fields: Mapping[str, Any]


class Reader(ABC):
    """Rows in order, with the progress of reading; `total_bytes` is None if it is unknown."""

    path: Path
    total_bytes: int | None = None
    bytes_read: int = 0
    unread_columns: Sequence[str] = ()

    def __iter__(self) -> Iterator[Row]:
        """The rows from the first; raises `InputError` at an unreadable row, or if there are no rows."""
        row = None
        for row in self._rows():
            yield row
        if row is None:
            raise self._without_rows()

    @abstractmethod
    def _rows(self) -> Iterator[Row]: ...

    def _without_rows(self) -> InputError:
        return InputError(str(self.path), "contains no rows", "write the file again, or leave it out")


def row_in_memory(source: str, index: int) -> str:
    """A row of the list that was passed to `source_from_rows`, for messages."""
    return f"source {source!r}: rows[{index}]"


def open_reader(path: Path, fields: Sequence[str], required: Sequence[str]) -> Reader:
    """The reader for a file: gzip and Parquet are recognised by their first bytes, tables by their names.

    From Parquet only `fields` and columns that may stand in for an optional one are read, or all columns if a
    `required` one is missing.
    """
    check_regular(path)
    try:
        with open(path, "rb") as file:
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
    lines, table = JsonlReader(path, gzipped=start.startswith(_GZIP)), _TABLE.search(path.name)
    if table is None or lines.first_line().lstrip()[:1] in (b"{", b"["):
        return lines
    return CsvReader(path, lines.gzipped, _SEPARATORS[table[1].lower()])


class LineReader(Reader):
    """Rows of a text file, named by line number from 1, without byte-order mark and blank lines."""

    def __init__(self, path: Path, gzipped: bool) -> None:
        self.path, self.gzipped = path, gzipped
        self.total_bytes = path.stat().st_size

    def first_line(self) -> bytes:
        """The first line that is not blank; empty if there is none."""
        return next((line for _, line in self._lines() if line.strip()), b"")

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        """All lines, also blank ones, with their numbers."""
        number, last = 0, 0
        with open(self.path, "rb") as raw, gzip.GzipFile(fileobj=raw) if self.gzipped else raw as file:
            while line := self._next_line(file, number + 1):
                number += 1
                self.bytes_read = raw.tell()
                if number == 1:
                    line = self._without_mark(line)
                if line.strip():
                    last = number
                elif number - last > MAX_BLANK_LINES:
                    what = f"{MAX_BLANK_LINES} consecutive blank lines"
                    raise InputError(f"{self.path}:{number}", what, "remove them, or leave the file out")
                yield number, line

    def _next_line(self, file: IO[bytes] | gzip.GzipFile, number: int) -> bytes:
        where = f"{self.path}:{number}"
        try:
            line = file.readline(MAX_LINE_BYTES + 1)
        except (OSError, EOFError, zlib.error):
            if not self.gzipped:
                raise
            what = "the gzip data is truncated or damaged here"
            raise InputError(where, what, "download or compress the file again") from None
        if len(line) > MAX_LINE_BYTES:
            what = f"the row is longer than {MAX_LINE_BYTES >> 20} MiB"
            raise InputError(where, what, "check that the file is JSON lines or CSV, or shorten the text")
        return line

    def _without_mark(self, line: bytes) -> bytes:
        for mark, (kind, fix) in _FOREIGN.items():
            if line.startswith(mark):
                raise InputError(f"{self.path}:1", f"the file is {kind}", fix)
        return line.removeprefix(_BOM)


class JsonlReader(LineReader):
    """Rows of a file with one JSON object a line; `in_memory` is the source whose list the file is a copy of."""

    in_memory: str | None = None

    def _rows(self) -> Iterator[Row]:
        for number, line in self._lines():
            if line.strip():
                where = f"{self.path}:{number}" if self.in_memory is None else row_in_memory(self.in_memory, number - 1)
                yield Row(where, _parse_line(line, where))


class CsvReader(LineReader):
    """Rows of a table with a header; an empty cell is null.

    Messages name a row by its first line. The first of `separators` that the header contains separates the cells.
    """

    def __init__(self, path: Path, gzipped: bool, separators: str) -> None:
        super().__init__(path, gzipped)
        self._separators = separators

    def _rows(self) -> Iterator[Row]:
        header, first = list[str](), self.first_line()
        separator = next((each for each in self._separators if each.encode() in first), self._separators[0])
        # The limit applies to the whole process; the default is 128 KiB.
        csv.field_size_limit(MAX_LINE_BYTES)
        lines = (_decoded(line, f"{self.path}:{number}") for number, line in self._lines())
        table = csv.reader(lines, delimiter=separator, strict=True)
        while True:
            where = f"{self.path}:{table.line_num + 1}"
            try:
                cells = next(table, None)
            except csv.Error as error:
                raise _not_csv(where, str(error)) from None
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
                yield Row(where, {name: Cell(cell) if cell else None for name, cell in zip(header, cells, strict=True)})


def _spans_rows(cell: str, num_columns: int) -> bool:
    """Whether a cell contains whole rows: each line end in it comes with the separators of one row."""
    num_lines = cell.count("\n")
    return num_lines > 0 and cell.count("\t") == num_lines * (num_columns - 1) > 0


def _not_csv(where: str, error: str) -> InputError:
    """The error for a row that the `csv` module refuses."""
    if "end of data" in error:
        return InputError(where, "a quote in this row is not closed", "close it, or download the file again")
    if "field limit" in error:
        what = f"a cell is longer than {MAX_LINE_BYTES >> 20} MiB"
        return InputError(where, what, "check that its quote is closed, or shorten the text")
    if "new-line character" in error:
        return _carriage_returns(where)
    return InputError(where, "text follows the closing quote of a cell", "double the quotes inside a quoted cell")


class ParquetReader(Reader):
    """Rows of a Parquet file, counted from 1; one batch of rows is in memory at a time."""

    def __init__(self, path: Path, fields: Sequence[str], required: Sequence[str]) -> None:
        self.path, self.fields, self.required = path, fields, required
        self.total_bytes: int = path.stat().st_size

    def _rows(self) -> Iterator[Row]:
        number = 0
        try:
            with pq.ParquetFile(self.path) as file:
                total = file.metadata.num_rows
                for batch in file.iter_batches(_PARQUET_ROWS, columns=self._selected(file.schema_arrow.names)):
                    for fields in self._batch_rows(batch, number):
                        number += 1
                        yield Row(f"{self.path}:{number}", fields)
                    self.bytes_read = self.total_bytes * number // total
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

    def _batch_rows(self, batch: pa.RecordBatch, done: int) -> Iterator[dict[str, Any]]:
        """The rows of a batch; on a decoding error each row is tried alone, so that the message can name it."""
        try:
            yield from batch.to_pylist()
        except UnicodeDecodeError:
            for index in range(batch.num_rows):
                try:
                    batch.slice(index, 1).to_pylist()
                except UnicodeDecodeError:
                    where, fix = f"{self.path}:{done + index + 1}", "rewrite the file as UTF-8"
                    raise InputError(where, "a text is not valid UTF-8", fix) from None


def _decoded(line: bytes, where: str) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        if error.reason == "unexpected end of data":
            raise _cut_off(where) from None
        what = f"byte {error.start + 1} of the row is not valid UTF-8"
        raise InputError(where, what, "save the file as UTF-8") from None


def _parse_line(line: bytes, where: str) -> Mapping[str, Any]:
    text = _decoded(line, where)
    try:
        value = json.loads(text)
    except RecursionError:
        raise InputError(where, "the JSON is nested too deeply", "write flat records") from None
    except ValueError as error:
        raise _not_json(line, where, error) from None
    if not isinstance(value, dict):
        kind = "a JSON array" if isinstance(value, list) else "a JSON value"
        raise InputError(where, f"the row is {kind}, expected an object", "write one JSON object a line")
    return value


def _not_json(line: bytes, where: str, error: ValueError) -> InputError:
    if b"\x00" in line:
        return InputError(where, "the row contains a NUL byte", "download or write the file again")
    if line.lstrip().startswith(b"["):
        return InputError(where, "a JSON array starts here, expected JSON lines", "write one JSON object a line")
    if b"\r" in line.strip():
        return _carriage_returns(where)
    if line.lstrip().startswith(b"{") and not line.endswith(b"\n"):
        return _cut_off(where)
    if where.endswith(":1") and _HEADER.fullmatch(line):
        what = "the file is a CSV table, but its name does not end in .csv or .tsv"
        return InputError(where, what, "name the file .csv or .tsv")
    column = f" at column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
    return InputError(where, f"the row is not JSON{column}", "write one JSON object a line")


def _carriage_returns(where: str) -> InputError:
    return InputError(where, "rows end with carriage returns only", "save the file with line feeds")


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

    def _rows(self) -> Iterator[Row]:
        # Streaming retries an unreachable Hub for half a minute, with a log line each time.
        ask_commit(self.name, self.commit)
        try:
            # Slow to import, and most runs read files.
            from datasets import load_dataset

            rows = load_dataset(self.name, self.subset, split=self.split, revision=self.commit, streaming=True)
            for number, fields in enumerate(rows, start=1):
                yield Row(f"hub:{self.name}[{self.split}]:{number}", fields)
        except Exception as error:
            raise unreachable(self.name, error) from error

    def _without_rows(self) -> InputError:
        return InputError(f"hub:{self.name}", f"split {self.split!r} contains no rows", "choose another split")


def unreachable(name: str, error: Exception) -> InputError:
    """The error for a Hub data set that a library could not read."""
    reason = one_line((str(error).strip().splitlines() or [type(error).__name__])[0], 160)
    fix = "check name, split and network, or download it and name its files"
    return InputError(f"hub:{name}", f"cannot be read ({reason})", fix)
