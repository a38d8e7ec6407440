"""Converted rows in one memory-mapped Arrow file, from which any rows are read in any order.

The file holds R record batches. The scores of a teacher, which few sources have, lie in a file of their own with the
same batches.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import islice
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from embeddings.common.errors import InputError
from embeddings.common.io import load_array

ROWS_FILE, STARTS_FILE, SCORES_FILE = "rows.arrow", "starts.npy", "scores.arrow"
MAX_BATCH_ROWS, MAX_BATCH_CHARACTERS = 65_536, 32 * 2**20
# Batches whose columns are kept at hand, 10 KB each.
_OPEN_BATCHES = 1024
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
Int64s = NDArray[np.int64]


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
    starts, has_scores = [0], False
    with (
        _arrow_file(folder / ROWS_FILE, _SCHEMA) as writer,
        _arrow_file(folder / SCORES_FILE, _SCORES_SCHEMA) as scores_writer,
    ):
        for batch in _batches(rows):
            *columns, scores = zip(*batch, strict=True)
            writer.write_batch(_record_batch(columns, _SCHEMA))
            scores_writer.write_batch(_record_batch([scores], _SCORES_SCHEMA))
            starts.append(starts[-1] + len(batch))
            has_scores = has_scores or any(scores)
    if not has_scores:
        (folder / SCORES_FILE).unlink()
    np.save(folder / STARTS_FILE, np.array(starts, dtype=np.int64))
    return starts[-1]


def _batches(rows: Iterable[StoredRow]) -> Iterator[list[StoredRow]]:
    batch: list[StoredRow] = []
    characters = 0
    for row in rows:
        batch.append(row)
        characters += len(row.query) + sum(map(len, row.positives)) + sum(map(len, row.negatives))
        if len(batch) >= MAX_BATCH_ROWS or characters >= MAX_BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


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
    system's cache.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.has_scores = folder, (folder / SCORES_FILE).exists()
        self._start_R: Int64s = load_array(folder / STARTS_FILE, "delete the folder and run again")
        self._open = lru_cache(_OPEN_BATCHES)(self._read_batch)
        files = {ROWS_FILE: _SCHEMA, SCORES_FILE: _SCORES_SCHEMA} if self.has_scores else {ROWS_FILE: _SCHEMA}
        with _refuses_damage(folder):
            self._readers = [_open_arrow(folder / name) for name in files]
            for reader, schema in zip(self._readers, files.values(), strict=True):
                if reader.schema != schema or reader.num_record_batches != len(self._start_R) - 1:
                    raise ValueError("other columns, or another number of batches")

    def __reduce__(self) -> tuple[type["Table"], tuple[Path]]:
        return Table, (self.folder,)

    def __len__(self) -> int:
        return int(self._start_R[-1])

    def row(self, index: int) -> StoredRow:
        """The row at `index`, from 0; many are read faster together."""
        return self.rows([index])[0]

    def rows(self, indices: Sequence[int] | Int64s) -> list[StoredRow]:
        """The rows at some indices, in any order and as often as asked for."""
        names = StoredRow._fields if self.has_scores else _SCHEMA.names
        return list(map(StoredRow, *self._take(names, indices)))

    def queries(self, indices: Sequence[int] | Int64s) -> list[str]:
        return self._take(["query"], indices)[0]

    def positives(self, indices: Sequence[int] | Int64s) -> list[list[str]]:
        return self._take(["positives"], indices)[0]

    def negatives(self, indices: Sequence[int] | Int64s) -> list[list[str]]:
        return self._take(["negatives"], indices)[0]

    def levels(self, indices: Sequence[int] | Int64s) -> list[list[int]]:
        """The levels of the negatives at some indices alone; the three above are like it."""
        return self._take(["levels"], indices)[0]

    def labels(self) -> NDArray[np.int32]:
        """The label of every row, (rows,)."""
        parts = [columns["label"].to_numpy() for columns in self._all_batches()]
        return np.concatenate([np.empty(0, np.int32), *parts])

    def row_levels(self) -> Iterator[NDArray[np.uint8]]:
        """Which levels the negatives of each row have, batch by batch, (rows,): bit l is set where one has level l."""
        for columns in self._all_batches():
            starts = columns["levels"].offsets.to_numpy()
            has_negatives = starts[:-1] < starts[1:]
            found = np.zeros(len(has_negatives), dtype=np.uint8)
            if has_negatives.any():
                bits = np.left_shift(np.uint8(1), columns["levels"].values.to_numpy().astype(np.uint8))
                found[has_negatives] = np.bitwise_or.reduceat(bits, starts[:-1][has_negatives])
            yield found

    def _take(self, names: Sequence[str], indices: Sequence[int] | Int64s) -> list[list[Any]]:
        """The values of some columns at some indices, a list for each column; each batch is asked once."""
        index_N = np.asarray(indices, dtype=np.int64)
        outside_N = (index_N < 0) | (index_N >= len(self))
        if outside_N.any():
            raise IndexError(f"row {index_N[outside_N][0]} of {len(self)}")
        batch_N = np.searchsorted(self._start_R, index_N, side="right") - 1
        order_N = np.argsort(batch_N, kind="stable")
        found: list[list[Any]] = [[] for _ in names]
        with _refuses_damage(self.folder):
            for batch in np.unique(batch_N).tolist():
                first, stop = np.searchsorted(batch_N, [batch, batch + 1], sorter=order_N)
                number_n = index_N[order_N[first:stop]] - self._start_R[batch]
                for values, name in zip(found, names, strict=True):
                    values.extend(_values(self._open(batch)[name], number_n))
        places = np.argsort(order_N).tolist()
        return [[values[place] for place in places] for values in found]

    def _all_batches(self) -> Iterator[dict[str, pa.Array]]:
        for batch in range(len(self._start_R) - 1):
            with _refuses_damage(self.folder):
                columns = self._open(batch)
            yield columns

    def _read_batch(self, batch: int) -> dict[str, pa.Array]:
        """The columns of a batch by their names, views of the file."""
        columns: dict[str, pa.Array] = {}
        expected = int(self._start_R[batch + 1] - self._start_R[batch])
        for reader in self._readers:
            read = reader.get_batch(batch)
            read.validate()
            if read.num_rows != expected:
                raise ValueError(f"{read.num_rows} rows, expected {expected}")
            columns |= zip(read.schema.names, read.columns, strict=True)
        return columns


def _open_arrow(path: Path) -> pa.RecordBatchFileReader:
    """A reader of a mapped file. `pa.memory_map` would have the disk read the whole of each batch that is touched."""
    with open(path, "rb") as file:
        data = mmap(file.fileno(), 0, access=ACCESS_READ)
    # Threads of Arrow's own would not survive the fork that makes a worker.
    return pa.ipc.open_file(pa.py_buffer(data), options=pa.ipc.IpcReadOptions(use_threads=False))


def _values(array: pa.Array, number_N: Int64s) -> list[Any]:
    """N values of a column; a `ValueError` where one is damaged: Arrow would follow any offset out of the file."""
    if pa.types.is_primitive(array.type):
        return list(array.to_numpy()[number_N].tolist())
    if not len(number_N):
        return []
    is_text = pa.types.is_large_string(array.type)
    offsets, elements = np.frombuffer(array.buffers()[1], np.int64), array.buffers()[2] if is_text else array.values
    start_N, stop_N = offsets[number_N], offsets[number_N + 1]
    if ((start_N < 0) | (stop_N < start_N) | (stop_N > len(elements))).any():
        raise ValueError("offsets out of their range")
    if is_text:
        characters = memoryview(elements)
        return [str(characters[start:stop], "utf-8") for start, stop in zip(start_N, stop_N, strict=True)]
    numbers = [np.arange(start, stop) for start, stop in zip(start_N, stop_N, strict=True)]
    values = iter(_values(elements, np.concatenate(numbers)))
    return [list(islice(values, len(own))) for own in numbers]


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
