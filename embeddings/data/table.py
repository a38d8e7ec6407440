"""Converted rows in one memory-mapped Arrow file: any row is read in constant time, many rows together.

The file holds R record batches; a value is named by its batch and its number in the column, of which a batch need not
begin at 0. Columns are plain views of the file's bytes, without Arrow scalars. N values are read at once by numpy: the
CPU then waits for many places of the file at a time instead of for one after another. The scores of a teacher, which
few sources have, lie in a file of their own with the same batches.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise, repeat
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from embeddings.common.errors import InputError
from embeddings.common.io import load_array

ROWS_FILE, STARTS_FILE, SCORES_FILE = "rows.arrow", "starts.npy", "scores.arrow"
MAX_BATCH_ROWS, MAX_BATCH_CHARACTERS = 65_536, 32 * 2**20
_SCHEMA = pa.schema(
    [
        ("query", pa.large_string()),
        ("positives", pa.large_list(pa.large_string())),
        ("negatives", pa.large_list(pa.large_string())),
        ("levels", pa.large_list(pa.int8())),
        ("label", pa.int32()),
        ("instruction", pa.large_string()),
    ]
)
_SCORES_SCHEMA = pa.schema([("scores", pa.large_list(pa.float32()))])
_WORD_BYTES = 8
Int64s = NDArray[np.int64]


class MappedFile:
    """A file in memory as bytes (a slice copies), and as words of 8 bytes, to which Arrow aligns its buffers."""

    def __init__(self, path: Path) -> None:
        with open(path, "rb") as file:
            self.data = mmap(file.fileno(), 0, access=ACCESS_READ)
        self.buffer = pa.py_buffer(self.data)
        self.bytes_B = np.frombuffer(self.data, dtype=np.uint8)
        self.words_W = np.frombuffer(self.data, dtype=np.int64, count=len(self.data) // _WORD_BYTES)

    def position(self, buffer: pa.Buffer | None) -> int:
        """Where a buffer of the file starts, in bytes, at a word; 0 for an empty one, which may lie nowhere."""
        found: int = buffer.address - self.buffer.address if buffer is not None and buffer.size else 0
        if found % _WORD_BYTES:
            raise ValueError(f"a buffer at byte {found}")
        return found


class NumberColumn:
    """Numbers of a column without nulls."""

    def __init__(self, file: MappedFile, num_batches: int, dtype: Literal["int8", "int32", "float32"]) -> None:
        self._file, self._width = file, np.dtype(dtype).itemsize
        self._values_V = np.frombuffer(file.data, dtype=dtype, count=len(file.data) // self._width)
        self._at_R = np.zeros(num_batches, dtype=np.int64)

    def open(self, batch: int, array: pa.Array, first: int = 0) -> None:
        """Note where a batch's numbers lie, the first of which has the number `first` in the column."""
        assert array.null_count == array.offset == 0
        self._at_R[batch] = self._file.position(array.buffers()[1]) // self._width - first

    def view(self, batch: int, start: int, stop: int) -> NDArray[Any]:
        """The numbers at `start` … `stop` - 1 of a batch, not copied, (stop - start,)."""
        at = self._at_R[batch]
        return self._values_V[at + start : at + stop]

    def take(self, batch_N: Int64s, number_N: Int64s) -> list[Any]:
        return self._values_V[self._at_R[batch_N] + number_N].tolist()  # type: ignore[no-any-return]


class _OffsetColumn:
    """What columns of texts and of lists share: 8-byte offsets that bound their values among their elements."""

    def __init__(self, file: MappedFile, num_batches: int) -> None:
        self._file = file
        # Word of the offset of the number 0, and how many elements (bytes of texts) there are.
        self._at_R, self._size_R = np.zeros((2, num_batches), dtype=np.int64)

    def _open(self, batch: int, array: pa.Array, first: int, size: int) -> None:
        assert array.null_count == array.offset == 0
        self._at_R[batch] = self._file.position(array.buffers()[1]) // _WORD_BYTES - first
        self._size_R[batch] = size

    def bounds(self, batch_N: Int64s, number_N: Int64s) -> tuple[Int64s, Int64s]:
        """Where the elements of N values start and stop, (N,) each; a `ValueError` if they are not in the batch."""
        at_N = self._at_R[batch_N] + number_N
        start_N, stop_N = self._file.words_W[at_N], self._file.words_W[at_N + 1]
        if ((start_N < 0) | (stop_N < start_N) | (stop_N > self._size_R[batch_N])).any():
            raise ValueError("offsets out of their range")
        return start_N, stop_N


class TextColumn(_OffsetColumn):
    """Texts of a `large_string` column without nulls; each is decoded when it is asked for."""

    def __init__(self, file: MappedFile, num_batches: int) -> None:
        super().__init__(file, num_batches)
        self._data_R = np.zeros(num_batches, dtype=np.int64)

    def open(self, batch: int, array: pa.Array, first: int = 0) -> None:
        """Note where a batch's texts lie, the first of which has the number `first` in the column."""
        data = array.buffers()[2]
        self._open(batch, array, first, 0 if data is None else data.size)
        self._data_R[batch] = self._file.position(data)

    def take(self, batch_N: Int64s, number_N: Int64s) -> list[str]:
        """N texts; a `ValueError` at one that is damaged."""
        if not self._size_R[batch_N].any():
            return [""] * len(batch_N)
        start_N, stop_N = self.bounds(batch_N, number_N)
        data_N, data = self._data_R[batch_N], self._file.data
        start_N, stop_N = data_N + start_N, data_N + stop_N
        # One look at all first bytes has the memory fetch them side by side; the texts are then read from its caches.
        self._file.bytes_B[start_N]
        return [data[start:stop].decode() for start, stop in zip(start_N.tolist(), stop_N.tolist(), strict=True)]


class ListColumn(_OffsetColumn):
    """Lists of a `large_list` column without nulls; `child`, opened with it, is the column of all their elements."""

    def __init__(self, file: MappedFile, num_batches: int, child: TextColumn | NumberColumn) -> None:
        super().__init__(file, num_batches)
        self.child = child

    def open(self, batch: int, array: pa.Array, first: int = 0) -> None:
        """Note where a batch's lists lie, the first of which has the number `first` in the column."""
        self._open(batch, array, first, len(array.values))
        self.child.open(batch, array.values)

    def starts(self, batch: int, start: int, stop: int) -> Int64s:
        """Where each list `start` … `stop` - 1 starts among the batch's elements and the last ends, (lists + 1,)."""
        at = self._at_R[batch]
        return self._file.words_W[at + start : at + stop + 1]

    def num_elements(self, batch: int) -> int:
        return int(self._size_R[batch])

    def take(self, batch_N: Int64s, number_N: Int64s) -> list[list[Any]]:
        """N lists; a `ValueError` at one that is damaged."""
        if not self._size_R[batch_N].any():
            return [[] for _ in range(len(batch_N))]
        start_N, stop_N = self.bounds(batch_N, number_N)
        count_N = stop_N - start_N
        if (count_N == 1).all():
            return [[value] for value in self.child.take(batch_N, start_N)]
        end_N = np.cumsum(count_N)
        # Element e of the N lists together is number e of the child, moved by where its list starts in either.
        number_E = np.arange(end_N[-1]) + np.repeat(stop_N - end_N, count_N)
        values: list[Any] = self.child.take(np.repeat(batch_N, count_N), number_E)
        return [values[start:stop] for start, stop in pairwise([0, *end_N.tolist()])]


Column = NumberColumn | TextColumn | ListColumn


class StoredRow(NamedTuple):
    """One converted row.

    `levels` is as long as `negatives`; `label` is -1 and `instruction` "" where there is none. `scores` are a teacher's
    of each positive, then of each negative, NaN where it gave none; they are empty where the row has none at all.
    """

    query: str
    positives: Sequence[str] = ()
    negatives: Sequence[str] = ()
    levels: Sequence[int] = ()
    label: int = -1
    instruction: str = ""
    scores: Sequence[float] = ()


def write_table(folder: Path, rows: Iterable[StoredRow]) -> int:
    """Write rows into `folder`; returns their number. At most one batch of them is in memory.

    A batch must fit in memory, and its reader parses each one that it touches, so batches are neither very large nor
    many. `SCORES_FILE` is written where a row has scores.
    """
    starts, count, characters = [0], 0, 0
    # Columns, not rows: the garbage collector walks a tuple a row again and again.
    columns: list[list[Any]] = [[] for _ in StoredRow._fields]
    with ExitStack() as files:
        writer, scores_writer = files.enter_context(_arrow_file(folder / ROWS_FILE, _SCHEMA)), None

        def write_batch() -> None:
            """Write the rows in the columns, and empty them."""
            nonlocal scores_writer
            if scores_writer is None and any(columns[-1]):
                scores_writer = files.enter_context(_arrow_file(folder / SCORES_FILE, _SCORES_SCHEMA))
                for first, stop in pairwise(starts):
                    scores_writer.write_batch(_record_batch([[()] * (stop - first)], _SCORES_SCHEMA))
            if scores_writer is not None:
                scores_writer.write_batch(_record_batch(columns[-1:], _SCORES_SCHEMA))
            writer.write_batch(_record_batch(columns[:-1], _SCHEMA))
            starts.append(count)
            for column in columns:
                column.clear()

        for row in rows:
            for column, value in zip(columns, row, strict=True):
                column.append(value)
            count += 1
            characters += len(row.query) + sum(map(len, row.positives)) + sum(map(len, row.negatives))
            if count - starts[-1] >= MAX_BATCH_ROWS or characters >= MAX_BATCH_CHARACTERS:
                write_batch()
                characters = 0
        if count > starts[-1]:
            write_batch()
    np.save(folder / STARTS_FILE, np.array(starts, dtype=np.int64))
    return count


@contextmanager
def _arrow_file(path: Path, schema: pa.Schema) -> Iterator[pa.RecordBatchFileWriter]:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, schema) as writer:
        yield writer


def _record_batch(columns: Sequence[Sequence[Any]], schema: pa.Schema) -> pa.RecordBatch:
    arrays = [pa.array(values, type=field.type) for values, field in zip(columns, schema, strict=True)]
    return pa.record_batch(arrays, schema=schema)


class Table:
    """Reads what `write_table` wrote: the file stays on disk, mapped into memory.

    A table travels to another process by its folder and is opened there again, so that workers share the operating
    system's cache. Where a batch's columns lie is noted when it is first touched, in some 200 bytes.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.has_scores = folder, (folder / SCORES_FILE).exists()
        self._start_R: Int64s = load_array(folder / STARTS_FILE, "delete the folder and run again")
        num_batches = len(self._start_R) - 1
        self._is_open_R = np.zeros(num_batches, dtype=np.bool_)
        with _refuses_damage(folder):
            file, reader = _mapped(folder / ROWS_FILE)
            self._readers = [reader]
            texts = [TextColumn(file, num_batches) for _ in range(4)]
            self._query, instruction = texts[:2]
            self._positives, self._negatives = (ListColumn(file, num_batches, child) for child in texts[2:])
            self._level = NumberColumn(file, num_batches, "int8")
            self._levels = ListColumn(file, num_batches, self._level)
            self._label = NumberColumn(file, num_batches, "int32")
            # As `StoredRow` names them.
            self._columns: list[Column]
            self._columns = [self._query, self._positives, self._negatives, self._levels, self._label, instruction]
            if self.has_scores:
                file, reader = _mapped(folder / SCORES_FILE)
                self._readers.append(reader)
                self._columns.append(ListColumn(file, num_batches, NumberColumn(file, num_batches, "float32")))
            if any(reader.num_record_batches != num_batches for reader in self._readers):
                raise ValueError("another number of batches")

    def __reduce__(self) -> tuple[type["Table"], tuple[Path]]:
        return Table, (self.folder,)

    def __len__(self) -> int:
        return int(self._start_R[-1])

    def row(self, index: int) -> StoredRow:
        """The row at `index`, from 0; many are read faster together."""
        return self.rows([index])[0]

    def rows(self, indices: Sequence[int] | Int64s) -> list[StoredRow]:
        """The rows at some indices, in any order and as often as asked for."""
        columns = self._take(self._columns, indices)
        if not self.has_scores:
            columns.append(repeat((), len(indices)))
        # The tuples' own constructor: that of `StoredRow` looks for arguments left out, and takes twice the time.
        return list(map(partial(tuple.__new__, StoredRow), zip(*columns, strict=True)))

    def queries(self, indices: Sequence[int] | Int64s) -> list[str]:
        return list(self._take([self._query], indices)[0])

    def positives(self, indices: Sequence[int] | Int64s) -> list[list[str]]:
        return list(self._take([self._positives], indices)[0])

    def negatives(self, indices: Sequence[int] | Int64s) -> list[list[str]]:
        return list(self._take([self._negatives], indices)[0])

    def levels(self, indices: Sequence[int] | Int64s) -> list[list[int]]:
        """The levels of the negatives at some indices alone; the three above are like it."""
        return list(self._take([self._levels], indices)[0])

    def labels(self) -> NDArray[np.int32]:
        """The label of every row, (rows,)."""
        parts = [self._label.view(batch, *self._bounds(batch)) for batch in self._batches()]
        return np.concatenate([np.empty(0, np.int32), *parts])

    def negative_levels(self) -> Iterator[NDArray[np.int8]]:
        """The levels of all negatives, batch by batch, (negatives,)."""
        for batch in self._batches():
            yield self._level.view(batch, 0, self._levels.num_elements(batch))

    def row_levels(self) -> Iterator[NDArray[np.uint8]]:
        """Which levels the negatives of each row have, batch by batch, (rows,): bit l is set where one has level l."""
        for batch, numbers in enumerate(self.negative_levels()):
            starts = self._levels.starts(batch, *self._bounds(batch))
            has_negatives = starts[:-1] < starts[1:]
            found = np.zeros(len(has_negatives), dtype=np.uint8)
            if has_negatives.any():
                bits = np.left_shift(np.uint8(1), numbers.astype(np.uint8))
                found[has_negatives] = np.bitwise_or.reduceat(bits, starts[:-1][has_negatives])
            yield found

    def _take(self, columns: Sequence[Column], indices: Sequence[int] | Int64s) -> list[Any]:
        """The values of some columns at some indices, a list for each column."""
        index_N = np.asarray(indices, dtype=np.int64)
        outside_N = (index_N < 0) | (index_N >= len(self))
        if outside_N.any():
            raise IndexError(f"row {index_N[outside_N][0]} of {len(self)}")
        batch_N = np.searchsorted(self._start_R, index_N, side="right") - 1
        for batch in np.unique(batch_N[~self._is_open_R[batch_N]]).tolist():
            self._open(batch)
        with _refuses_damage(self.folder):
            return [column.take(batch_N, index_N) for column in columns]

    def _batches(self) -> Iterator[int]:
        for batch in range(len(self._is_open_R)):
            self._open(batch)
            yield batch

    def _bounds(self, batch: int) -> tuple[int, int]:
        return int(self._start_R[batch]), int(self._start_R[batch + 1])

    def _open(self, batch: int) -> None:
        """Note where a batch's columns lie, once."""
        if self._is_open_R[batch]:
            return
        first, stop = self._bounds(batch)
        with _refuses_damage(self.folder):
            arrays: list[pa.Array] = []
            for reader in self._readers:
                read = reader.get_batch(batch)
                read.validate()
                if read.num_rows != stop - first:
                    raise ValueError(f"{read.num_rows} rows, expected {stop - first}")
                arrays += read.columns
            for column, array in zip(self._columns, arrays, strict=True):
                column.open(batch, array, first)
        self._is_open_R[batch] = True


def _mapped(path: Path) -> tuple[MappedFile, pa.RecordBatchFileReader]:
    file = MappedFile(path)
    # Threads of Arrow's own would not survive the fork that makes a worker.
    return file, pa.ipc.open_file(file.buffer, options=pa.ipc.IpcReadOptions(use_threads=False))


@contextmanager
def _refuses_damage(folder: Path) -> Iterator[None]:
    """Inside, whatever reading damaged files raises is the error of their folder."""
    try:
        yield
    except (pa.ArrowException, OSError, ValueError) as error:
        raise damaged(folder) from error


def damaged(folder: Path) -> InputError:
    """The error of a folder of converted data whose files are not what was written."""
    return InputError(str(folder), "the converted data is damaged", "delete the folder and run again")
