"""Converted rows in one memory-mapped Arrow file, any of them at hand in constant time."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from embeddings.common.arrays import load_array
from embeddings.common.errors import InputError
from embeddings.data.columns import Int64s, ListColumn, MappedFile, NumberColumn, TextColumn

ROWS_FILE, STARTS_FILE = "rows.arrow", "starts.npy"
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


class StoredRow(NamedTuple):
    """One converted row. `levels` is as long as `negatives`; `label` is -1 and `instruction` "" where there is none."""

    query: str
    positives: Sequence[str] = ()
    negatives: Sequence[str] = ()
    levels: Sequence[int] = ()
    label: int = -1
    instruction: str = ""


def write_table(folder: Path, rows: Iterable[StoredRow]) -> int:
    """Write rows into `folder`; returns their number. At most one batch of them is in memory.

    Batches are cut by size as well as by count: a batch must fit in memory while it is written, and its reader parses
    each one that it touches, so they are neither very large nor many.
    """
    starts, count, characters = [0], 0, 0
    # Columns, not rows: the garbage collector walks a tuple a row again and again.
    columns: list[list[Any]] = [[] for _ in _SCHEMA]
    with pa.OSFile(str(folder / ROWS_FILE), "wb") as file, pa.ipc.new_file(file, _SCHEMA) as writer:
        for row in rows:
            for column, value in zip(columns, row, strict=True):
                column.append(value)
            count += 1
            characters += len(row.query) + sum(map(len, row.positives)) + sum(map(len, row.negatives))
            if count - starts[-1] >= MAX_BATCH_ROWS or characters >= MAX_BATCH_CHARACTERS:
                writer.write_batch(_record_batch(columns))
                starts.append(count)
                characters = 0
        if count > starts[-1]:
            writer.write_batch(_record_batch(columns))
            starts.append(count)
    np.save(folder / STARTS_FILE, np.array(starts, dtype=np.int64))
    return count


def _record_batch(columns: list[list[Any]]) -> pa.RecordBatch:
    """The columns as a batch; they are emptied."""
    arrays = [pa.array(values, type=field.type) for values, field in zip(columns, _SCHEMA, strict=True)]
    for column in columns:
        column.clear()
    return pa.record_batch(arrays, schema=_SCHEMA)


class Table:
    """Reads what `write_table` wrote: the file stays on disk, mapped into memory.

    A table travels to another process by its folder and is opened there again, so that workers share the operating
    system's cache. Where a batch's columns lie is noted when it is first touched, in some 200 bytes.

    Raises:
        InputError: If the file is missing or damaged, here or where a row is read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self._start_R: Int64s = load_array(folder / STARTS_FILE, "delete the folder and run again")
            file = MappedFile(folder / ROWS_FILE)
            # Threads of Arrow's own would not survive the fork that makes a worker.
            self._reader = pa.ipc.open_file(file.buffer, options=pa.ipc.IpcReadOptions(use_threads=False))
        except InputError:
            raise
        except (pa.ArrowException, OSError, ValueError) as error:
            raise _damaged(folder) from error
        self._starts: list[int] = self._start_R.tolist()
        num_batches = len(self._starts) - 1
        if self._reader.num_record_batches != num_batches:
            raise _damaged(folder)
        self._is_open_R = np.zeros(num_batches, dtype=np.bool_)
        self._is_open = self._is_open_R.data
        self._query, self._instruction = TextColumn(file, num_batches), TextColumn(file, num_batches)
        self._positives = ListColumn(file, num_batches, TextColumn(file, num_batches))
        self._negatives = ListColumn(file, num_batches, TextColumn(file, num_batches))
        self._level = NumberColumn(file, num_batches, "int8")
        self._levels = ListColumn(file, num_batches, self._level)
        self._label = NumberColumn(file, num_batches, "int32")
        # As `StoredRow` names them.
        self._columns: tuple[TextColumn | ListColumn | NumberColumn, ...] = (
            self._query, self._positives, self._negatives, self._levels, self._label, self._instruction,
        )  # fmt: skip

    def __reduce__(self) -> tuple[type["Table"], tuple[Path]]:
        """The folder alone."""
        return Table, (self.folder,)

    def __len__(self) -> int:
        """Number of rows."""
        return self._starts[-1]

    def row(self, index: int) -> StoredRow:
        """The row at `index`, from 0."""
        batch = self._batch_of(index)
        try:
            return StoredRow._make([column.at(batch, index) for column in self._columns])
        except ValueError as error:
            raise _damaged(self.folder) from error

    def rows(self, indices: Sequence[int] | Int64s) -> list[StoredRow]:
        """The rows at some indices, in any order and as often as asked for, each as `row` gives it."""
        index_N = np.asarray(indices, dtype=np.int64)
        outside_N = (index_N < 0) | (index_N >= len(self))
        if outside_N.any():
            raise self._outside(int(index_N[outside_N][0]))
        batch_N = np.searchsorted(self._start_R, index_N, side="right") - 1
        closed_N = ~self._is_open_R[batch_N]
        if closed_N.any():
            for batch in np.unique(batch_N[closed_N]).tolist():
                self._open(batch)
        try:
            columns = [column.take(batch_N, index_N) for column in self._columns]
        except ValueError as error:
            raise _damaged(self.folder) from error
        # The tuples' own constructor: that of `StoredRow` looks for arguments left out, and takes twice the time.
        return list(map(partial(tuple.__new__, StoredRow), zip(*columns, strict=True)))

    def query(self, index: int) -> str:
        """The query at `index` alone."""
        return self._value(self._query, index)  # type: ignore[no-any-return]

    def positives(self, index: int) -> list[str]:
        """The positives at `index` alone."""
        return self._value(self._positives, index)  # type: ignore[no-any-return]

    def negatives(self, index: int) -> list[str]:
        """The negatives at `index` alone."""
        return self._value(self._negatives, index)  # type: ignore[no-any-return]

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

    def num_without_negatives(self) -> int:
        """How many rows have no negative."""
        return sum(int(np.count_nonzero(found == 0)) for found in self.row_levels())

    def _value(self, column: TextColumn | ListColumn, index: int) -> Any:
        batch = self._batch_of(index)
        try:
            return column.at(batch, index)
        except ValueError as error:
            raise _damaged(self.folder) from error

    def _batch_of(self, index: int) -> int:
        """The batch of a row, opened."""
        if not 0 <= index < len(self):
            raise self._outside(index)
        batch = bisect_right(self._starts, index) - 1
        if not self._is_open[batch]:
            self._open(batch)
        return batch

    def _batches(self) -> Iterator[int]:
        """All batches, each opened."""
        for batch in range(len(self._is_open)):
            if not self._is_open[batch]:
                self._open(batch)
            yield batch

    def _bounds(self, batch: int) -> tuple[int, int]:
        """The first row of a batch and that of the next."""
        return self._starts[batch], self._starts[batch + 1]

    def _open(self, batch: int) -> None:
        """Note where a batch's columns lie."""
        first, stop = self._bounds(batch)
        try:
            arrays = self._reader.get_batch(batch)
            arrays.validate()
            if arrays.num_rows != stop - first:
                raise ValueError(f"{arrays.num_rows} rows, expected {stop - first}")
            for column, array in zip(self._columns, arrays.columns, strict=True):
                column.open(batch, array, first)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise _damaged(self.folder) from error
        self._is_open[batch] = True

    def _outside(self, index: int) -> IndexError:
        return IndexError(f"row {index} of {len(self)}")


def _damaged(folder: Path) -> InputError:
    return InputError(str(folder), "the converted data is damaged", "delete the folder and run again")
