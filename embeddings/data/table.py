"""Converted rows in one memory-mapped Arrow file, any of them at hand in constant time."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from embeddings.common.errors import InputError
from embeddings.data.columns import ListColumn, NumberColumn, TextColumn

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

    Batches are cut by size as well as by count: a batch must fit in memory while it is written, and each one costs
    its reader a few kilobytes, so they are neither very large nor many.
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
    system's cache. Batches are decoded when first touched and kept: a few kilobytes for each 32 MiB of text.

    Raises:
        InputError: If the file is missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self._starts: list[int] = np.load(folder / STARTS_FILE).tolist()
            # Threads of Arrow's own would not survive the fork that makes a worker.
            options = pa.ipc.IpcReadOptions(use_threads=False)
            self._reader = pa.ipc.open_file(pa.memory_map(str(folder / ROWS_FILE)), options=options)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise _damaged(folder) from error
        if self._reader.num_record_batches != len(self._starts) - 1:
            raise _damaged(folder)
        self._columns: list[_Columns | None] = [None] * (len(self._starts) - 1)

    def __reduce__(self) -> tuple[type["Table"], tuple[Path]]:
        """The folder alone."""
        return Table, (self.folder,)

    def __len__(self) -> int:
        """Number of rows."""
        return self._starts[-1]

    def row(self, index: int) -> StoredRow:
        """The row at `index`, from 0."""
        columns, place = self._find(index)
        return StoredRow(
            columns.query[place],
            columns.positives[place],
            columns.negatives[place],
            columns.levels[place],
            columns.label.values[place],
            columns.instruction[place],
        )

    def query(self, index: int) -> str:
        """The query at `index` alone."""
        columns, place = self._find(index)
        return columns.query[place]

    def positives(self, index: int) -> list[str]:
        """The positives at `index` alone."""
        columns, place = self._find(index)
        return columns.positives[place]

    def negatives(self, index: int) -> list[str]:
        """The negatives at `index` alone."""
        columns, place = self._find(index)
        return columns.negatives[place]

    def labels(self) -> NDArray[np.int32]:
        """The label of every row, (rows,)."""
        return np.concatenate(
            [np.asarray(self._batch(number).label.values) for number in range(len(self._columns))]
            or [np.empty(0, np.int32)]
        )

    def negative_levels(self) -> Iterator[NDArray[np.int8]]:
        """The levels of all negatives, batch by batch, (negatives,)."""
        for number in range(len(self._columns)):
            numbers = self._batch(number).levels.child
            assert isinstance(numbers, NumberColumn)
            yield np.asarray(numbers.values)

    def row_levels(self) -> Iterator[NDArray[np.uint8]]:
        """Which levels the negatives of each row have, batch by batch, (rows,): bit l is set where one has level l."""
        for number, numbers in enumerate(self.negative_levels()):
            starts = self._batch(number).levels.starts(self._starts[number + 1] - self._starts[number])
            has_negatives = starts[:-1] < starts[1:]
            found = np.zeros(len(has_negatives), dtype=np.uint8)
            if has_negatives.any():
                bits = np.left_shift(np.uint8(1), numbers.astype(np.uint8))
                found[has_negatives] = np.bitwise_or.reduceat(bits, starts[:-1][has_negatives])
            yield found

    def _find(self, index: int) -> tuple["_Columns", int]:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        number = bisect_right(self._starts, index) - 1
        return self._batch(number), index - self._starts[number]

    def _batch(self, number: int) -> "_Columns":
        columns = self._columns[number]
        if columns is None:
            columns = self._columns[number] = _columns_of(self._reader.get_batch(number))
        return columns


class _Columns(NamedTuple):
    """The columns of one record batch, as `StoredRow` names them."""

    query: TextColumn
    positives: ListColumn
    negatives: ListColumn
    levels: ListColumn
    label: NumberColumn
    instruction: TextColumn


def _columns_of(batch: pa.RecordBatch) -> _Columns:
    query, positives, negatives, levels, label, instruction = batch.columns
    return _Columns(
        TextColumn(query),
        ListColumn(positives, TextColumn(positives.values)),
        ListColumn(negatives, TextColumn(negatives.values)),
        ListColumn(levels, NumberColumn(levels.values, "b")),
        NumberColumn(label, "i"),
        TextColumn(instruction),
    )


def _damaged(folder: Path) -> InputError:
    return InputError(str(folder), "the converted data is damaged", "delete the folder and run again")
