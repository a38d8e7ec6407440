"""Rows of JSON lines, gzipped JSON lines and Parquet files, each with its place for messages."""

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from embeddings.common.errors import InputError
from embeddings.common.text import one_line

MAX_LINE_BYTES = 32 * 2**20
# A gzip file of a few kilobytes can unpack to hours of blank lines.
MAX_BLANK_LINES = 2**20
_GZIP, _PARQUET = b"\x1f\x8b", b"PAR1"
# First bytes of what is often met in place of JSON lines; of two that fit the first one holds.
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
_PARQUET_ROWS = 1024


class Row(NamedTuple):
    """One row: `where` is file and row for messages, `fields` its values by column name."""

    where: str
    fields: Mapping[str, Any]


class Reader(Protocol):
    """Rows in their order, and how far reading has come."""

    @property
    def total_bytes(self) -> int | None:
        """Bytes to read, or None where nobody knows."""

    @property
    def bytes_read(self) -> int:
        """Bytes read so far."""

    @property
    def unread_columns(self) -> Sequence[str]:
        """Columns that the rows leave out, known once the first row is read."""

    def __iter__(self) -> Iterator[Row]: ...


def open_reader(path: Path, fields: Sequence[str], required: Sequence[str]) -> Reader:
    """The reader for a file's content: gzip and Parquet are known by their first bytes, whatever the name says.

    Args:
        path: File to read.
        fields: Columns that are of use; Parquet reads no others.
        required: Columns without which a row is refused; where one is missing Parquet reads all columns, so that the
            refusal can name them.

    Raises:
        InputError: If the file is empty, cannot be opened, or contradicts its name.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        raise InputError(str(path), "is no regular file", "write what it gives to a file, and name that")
    try:
        with open(path, "rb") as file:
            start = file.read(4)
    except OSError as error:
        raise InputError(
            str(path), f"cannot be read ({error.strerror})", "check the path and its permissions"
        ) from None
    if not start:
        raise InputError(str(path), "is empty", "write the file again, or leave it out")
    if start == _PARQUET:
        return ParquetReader(path, fields, required)
    if path.suffix == ".parquet":
        raise InputError(str(path), "is not a Parquet file, whatever its name says", "check how it was written")
    return JsonlReader(path, gzipped=start.startswith(_GZIP))


class JsonlReader:
    """Rows of a file with one JSON object a line; rows count from 1 as an editor's lines do.

    A byte-order mark and blank lines are passed over, up to `MAX_BLANK_LINES` of them in one stretch.

    Raises:
        InputError: While reading, at the first row that is not UTF-8, not JSON, not an object, too long, or cut off,
            after too many blank lines, or where the compressed data ends or breaks; the message names the row.
    """

    def __init__(self, path: Path, gzipped: bool) -> None:
        self.path, self.gzipped = path, gzipped
        self.total_bytes = path.stat().st_size
        self.bytes_read, self.unread_columns = 0, ()

    def __iter__(self) -> Iterator[Row]:
        """The rows from the first."""
        number, last = 0, 0
        with open(self.path, "rb") as raw, gzip.GzipFile(fileobj=raw) if self.gzipped else raw as file:
            while line := self._next_line(file, number + 1):
                number += 1
                self.bytes_read = raw.tell()
                if number == 1:
                    line = self._without_mark(line)
                if not line or line.isspace():
                    if number - last > MAX_BLANK_LINES:
                        what = f"{MAX_BLANK_LINES} blank lines follow each other"
                        raise InputError(f"{self.path}:{number}", what, "take them out, or leave the file out")
                    continue
                last = number
                where = f"{self.path}:{number}"
                yield Row(where, _parse_line(line, where))
        if not last:
            raise InputError(str(self.path), "holds no rows", "write the file again, or leave it out")

    def _next_line(self, file: IO[bytes] | gzip.GzipFile, number: int) -> bytes:
        try:
            line = file.readline(MAX_LINE_BYTES + 1)
        except (OSError, EOFError, zlib.error):
            if not self.gzipped:
                raise
            raise InputError(
                f"{self.path}:{number}", "the gzip data is cut off or damaged here", "fetch or compress the file again"
            ) from None
        if len(line) > MAX_LINE_BYTES:
            raise InputError(
                f"{self.path}:{number}",
                f"the row is longer than {MAX_LINE_BYTES >> 20} MiB",
                "check that the file is JSON lines, or cut the text",
            )
        return line

    def _without_mark(self, line: bytes) -> bytes:
        for mark, (kind, fix) in _FOREIGN.items():
            if line.startswith(mark):
                raise InputError(f"{self.path}:1", f"the file is {kind}", fix)
        return line.removeprefix(_BOM)


class ParquetReader:
    """Rows of a Parquet file, counted from 1; one batch of rows is in memory at a time.

    Raises:
        InputError: If the file is damaged, has no rows, or a column twice that is asked for.
    """

    def __init__(self, path: Path, fields: Sequence[str], required: Sequence[str]) -> None:
        self.path, self.fields, self.required = path, fields, required
        self.total_bytes = path.stat().st_size
        self.bytes_read = 0
        self.unread_columns: Sequence[str] = ()

    def __iter__(self) -> Iterator[Row]:
        """The rows from the first."""
        number = 0
        try:
            with pq.ParquetFile(self.path) as file:
                total = file.metadata.num_rows
                for batch in file.iter_batches(_PARQUET_ROWS, columns=self._selected(file.schema_arrow.names)):
                    for fields in self._rows(batch, number):
                        number += 1
                        yield Row(f"{self.path}:{number}", fields)
                    self.bytes_read = self.total_bytes * number // total
        except (pa.ArrowException, OSError) as error:
            self._refuse(number, error)
        if number == 0:
            raise InputError(str(self.path), "holds no rows", "write the file again, or leave it out")

    def _selected(self, names: list[str]) -> list[str] | None:
        for name in self.fields:
            if names.count(name) > 1:
                raise InputError(str(self.path), f"has two columns {name!r}", "rename one of them")
        if not set(self.required) <= set(names):
            return None
        self.unread_columns = [name for name in names if name not in self.fields]
        return [name for name in names if name in self.fields]

    def _rows(self, batch: pa.RecordBatch, done: int) -> Iterator[dict[str, Any]]:
        """The rows of a batch; where one cannot be decoded the rows are tried one at a time to name it."""
        try:
            yield from batch.to_pylist()
        except UnicodeDecodeError:
            for index in range(batch.num_rows):
                try:
                    batch.slice(index, 1).to_pylist()
                except UnicodeDecodeError:
                    raise InputError(
                        f"{self.path}:{done + index + 1}", "a text is not valid UTF-8", "write the file again as UTF-8"
                    ) from None

    def _refuse(self, number: int, error: Exception) -> NoReturn:
        reason = one_line(str(error) or type(error).__name__, 100)
        raise InputError(
            f"{self.path}:{number + 1}", f"the Parquet data is cut off or damaged ({reason})", "write the file again"
        ) from error


def _parse_line(line: bytes, where: str) -> Mapping[str, Any]:
    """The object of one line."""
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        if error.reason == "unexpected end of data":
            raise _cut_off(where) from None
        raise InputError(
            where, f"byte {error.start + 1} of the row is not valid UTF-8", "save the file as UTF-8"
        ) from None
    except RecursionError:
        raise InputError(where, "the JSON is nested too deep", "write flat records") from None
    except ValueError as error:
        raise _not_json(line, where, error) from None
    if not isinstance(value, dict):
        kind = "a JSON array" if isinstance(value, list) else "a JSON value"
        raise InputError(where, f"the row is {kind}, expected an object", "write one JSON object a line")
    return value


def _not_json(line: bytes, where: str, error: ValueError) -> InputError:
    if b"\x00" in line:
        return InputError(where, "the row holds a NUL byte", "fetch or write the file again")
    if line.lstrip().startswith(b"["):
        return InputError(where, "a JSON array begins here, expected JSON lines", "write one JSON object a line")
    if b"\r" in line.strip():
        return InputError(where, "rows end in carriage returns alone", "save the file with line feeds")
    if line.lstrip().startswith(b"{") and not line.endswith(b"\n"):
        return _cut_off(where)
    column = f" at column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
    return InputError(where, f"the row is not JSON{column}", "write one JSON object a line")


def _cut_off(where: str) -> InputError:
    return InputError(where, "the file ends in the middle of this row", "fetch it again, or delete the row")
