"""Converted rows in one memory-mapped Arrow file with random access.

The file contains R record batches. Teacher scores, which few sources have, are in a second file with the same batches.
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
from embeddings.common.io import check_file, load_array

ROWS_FILE, STARTS_FILE, SCORES_FILE = "rows.arrow", "starts.npy", "scores.arrow"
MAX_BATCH_ROWS, MAX_BATCH_CHARACTERS = 65_536, 32 * 2**20
# Maximum open batches, 10 KB each.
_MAX_OPEN_BATCHES = 1024
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

    `levels` is as long as `negatives`; `label` is -1 and `instruction` "" if the row has none. `scores` are the teacher
    scores of the positives, then of the negatives: NaN if one is missing, empty if the row has none.
    """

    query: str
    positives: Sequence[str] = ()
    negatives: Sequence[str] = ()
    levels: Sequence[int] = ()
    label: int = -1
    instruction: str = ""
    scores: Sequence[float] = ()


def write_table(folder: Path, rows: Iterable[StoredRow]) -> int:
    """Write rows into `folder`; returns their number.

    One batch is in memory at a time, and a reader parses each batch that it uses, so batches are neither very large nor
    very many. `SCORES_FILE` is written only if a row has scores.
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
    """Memory-mapped reader of the files of `write_table`.

    Pickling stores only the folder; the other process opens it again, so workers share the operating system's cache.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.has_scores = folder, (folder / SCORES_FILE).exists()
        self._start_R: Int64s = load_array(folder / STARTS_FILE, "delete the folder and run again")
        self._open = lru_cache(_MAX_OPEN_BATCHES)(self._read_batch)
        files = {ROWS_FILE: _SCHEMA, SCORES_FILE: _SCORES_SCHEMA} if self.has_scores else {ROWS_FILE: _SCHEMA}
        for name in files:
            check_file(folder / name, "delete the folder and run again")
        with _refuses_damage(folder):
            self._readers = [_open_arrow(folder / name) for name in files]
            for reader, schema in zip(self._readers, files.values(), strict=True):
                if reader.schema != schema or reader.num_record_batches != len(self._start_R) - 1:
                    raise ValueError("unexpected columns or number of batches")

    def __reduce__(self) -> tuple[type["Table"], tuple[Path]]:
        return Table, (self.folder,)

    def __len__(self) -> int:
        return int(self._start_R[-1])

    def row(self, index: int) -> StoredRow:
        """The row at `index`, from 0; `rows` is faster for many."""
        return self.rows([index])[0]

    def rows(self, indices: Sequence[int] | Int64s) -> list[StoredRow]:
        """The rows at `indices`, which may be in any order and repeat."""
        names = StoredRow._fields if self.has_scores else _SCHEMA.names
        return list(map(StoredRow, *self._take(names, indices)))

    def queries(self, indices: Sequence[int] | Int64s) -> list[str]:
        return self._take(["query"], indices)[0]

    def positives(self, indices: Sequence[int] | Int64s) -> list[list[str]]:
        return self._take(["positives"], indices)[0]

    def negatives(self, indices: Sequence[int] | Int64s) -> list[list[str]]:
        return self._take(["negatives"], indices)[0]

    def levels(self, indices: Sequence[int] | Int64s) -> list[list[int]]:
        """The levels of the negatives of the rows at `indices`."""
        return self._take(["levels"], indices)[0]

    def labels(self) -> NDArray[np.int32]:
        """The label of every row, (rows,)."""
        parts = [columns["label"].to_numpy() for columns in self._all_batches()]
        return np.concatenate([np.empty(0, np.int32), *parts])

    def row_levels(self) -> Iterator[NDArray[np.uint8]]:
        """The levels of the negatives of each row as bit masks (bit l: level l), batch by batch, (rows,)."""
        for columns in self._all_batches():
            starts = columns["levels"].offsets.to_numpy()
            has_negatives = starts[:-1] < starts[1:]
            masks = np.zeros(len(has_negatives), dtype=np.uint8)
            if has_negatives.any():
                bits = np.left_shift(np.uint8(1), columns["levels"].values.to_numpy().astype(np.uint8))
                masks[has_negatives] = np.bitwise_or.reduceat(bits, starts[:-1][has_negatives])
            yield masks

    def _take(self, names: Sequence[str], indices: Sequence[int] | Int64s) -> list[list[Any]]:
        """The values of the columns `names` at `indices`, one list for each column; each batch is read once."""
        index_N = np.asarray(indices, dtype=np.int64)
        outside_N = (index_N < 0) | (index_N >= len(self))
        if outside_N.any():
            raise IndexError(f"row {index_N[outside_N][0]} of {len(self)}")
        batch_N = np.searchsorted(self._start_R, index_N, side="right") - 1
        order_N = np.argsort(batch_N, kind="stable")
        sorted_columns: list[list[Any]] = [[] for _ in names]
        with _refuses_damage(self.folder):
            for batch in np.unique(batch_N).tolist():
                first, stop = np.searchsorted(batch_N, [batch, batch + 1], sorter=order_N)
                number_n = index_N[order_N[first:stop]] - self._start_R[batch]
                for values, name in zip(sorted_columns, names, strict=True):
                    values.extend(_values(self._open(batch)[name], number_n))
        positions = np.argsort(order_N).tolist()
        return [[values[position] for position in positions] for values in sorted_columns]

    def _all_batches(self) -> Iterator[dict[str, pa.Array]]:
        for batch in range(len(self._start_R) - 1):
            with _refuses_damage(self.folder):
                columns = self._open(batch)
            yield columns

    def _read_batch(self, batch: int) -> dict[str, pa.Array]:
        """The columns of a batch by name, as views of the file."""
        columns: dict[str, pa.Array] = {}
        expected = int(self._start_R[batch + 1] - self._start_R[batch])
        for reader in self._readers:
            record_batch = reader.get_batch(batch)
            record_batch.validate()
            if record_batch.num_rows != expected:
                raise ValueError(f"{record_batch.num_rows} rows, expected {expected}")
            columns |= zip(record_batch.schema.names, record_batch.columns, strict=True)
        return columns


def _open_arrow(path: Path) -> pa.RecordBatchFileReader:
    """A reader of a mapped file. With `pa.memory_map`, using one row would read its whole batch from disk."""
    with open(path, "rb") as file:
        data = mmap(file.fileno(), 0, access=ACCESS_READ)
    # Arrow's threads do not survive the fork that starts a worker.
    return pa.ipc.open_file(pa.py_buffer(data), options=pa.ipc.IpcReadOptions(use_threads=False))


def _values(array: pa.Array, number_N: Int64s) -> list[Any]:
    """N values of a column; raises `ValueError` for damaged offsets, because Arrow does not check them."""
    if pa.types.is_primitive(array.type):
        return list(array.to_numpy()[number_N].tolist())
    if not len(number_N):
        return []
    is_text = pa.types.is_large_string(array.type)
    offsets, elements = np.frombuffer(array.buffers()[1], np.int64), array.buffers()[2] if is_text else array.values
    start_N, stop_N = offsets[number_N], offsets[number_N + 1]
    if ((start_N < 0) | (stop_N < start_N) | (stop_N > len(elements))).any():
        raise ValueError("offsets out of range")
    if is_text:
        characters = memoryview(elements)
        return [str(characters[start:stop], "utf-8") for start, stop in zip(start_N, stop_N, strict=True)]
    numbers = [np.arange(start, stop) for start, stop in zip(start_N, stop_N, strict=True)]
    values = iter(_values(elements, np.concatenate(numbers)))
    return [list(islice(values, len(indices))) for indices in numbers]


@contextmanager
def _refuses_damage(folder: Path) -> Iterator[None]:
    """Turn errors of reading damaged files into the `InputError` of their folder."""
    try:
        yield
    except (pa.ArrowException, OSError, ValueError) as error:
        raise damaged(folder) from error


def damaged(folder: Path) -> InputError:
    """The error for a folder of converted data whose files were changed or truncated."""
    return InputError(str(folder), "the converted data is damaged", "delete the folder and run again")
