"""Columns of a memory-mapped Arrow file, read through plain views of its bytes: a value costs a look, no Arrow scalar.

The file holds R record batches; a value is named by its batch and its number in the column, which a batch need not
begin at 0. Values are read one at a time, or N at once, which takes a fraction of the time for each: then numpy looks
all of them up together, and the processor waits for many places of the file at a time instead of for one after another.
"""

from itertools import pairwise
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

_WORD_BYTES = 8

Int64s = NDArray[np.int64]


class MappedFile:
    """A file in memory as bytes, and as words of 8 bytes, which is what Arrow aligns its buffers to.

    Attributes:
        data: Its bytes; a slice is a copy.
        bytes_B: The same as an array.
        words: The same as 8-byte integers, for a look at one of them.
        words_W: The same as an array, for a look at many.

    Args:
        path: The file.

    Raises:
        OSError: If it cannot be opened.
        ValueError: If it is empty.
    """

    __slots__ = ("buffer", "bytes_B", "data", "words", "words_W")

    def __init__(self, path: Path) -> None:
        with open(path, "rb") as file:
            self.data = mmap(file.fileno(), 0, access=ACCESS_READ)
        self.buffer = pa.py_buffer(self.data)
        self.bytes_B = np.frombuffer(self.data, dtype=np.uint8)
        self.words_W = np.frombuffer(self.data, dtype=np.int64, count=len(self.data) // _WORD_BYTES)
        self.words = self.words_W.data

    def position(self, buffer: pa.Buffer | None) -> int:
        """Where a buffer of the file starts, in bytes; 0 for an empty one, which may lie nowhere.

        Raises:
            ValueError: If it does not start at a word.
        """
        found: int = buffer.address - self.buffer.address if buffer is not None and buffer.size else 0
        if found % _WORD_BYTES:
            raise ValueError(f"a buffer at byte {found}")
        return found


class NumberColumn:
    """Numbers of an integer column without nulls.

    Args:
        file: The file.
        num_batches: Its record batches, R.
        dtype: Type of the numbers.
    """

    def __init__(self, file: MappedFile, num_batches: int, dtype: Literal["int8", "int32"]) -> None:
        self._file, self._width = file, np.dtype(dtype).itemsize
        self._values_V = np.frombuffer(file.data, dtype=dtype, count=len(file.data) // self._width)
        self._values = self._values_V.data
        self._at_R = np.zeros(num_batches, dtype=np.int64)
        self._at = self._at_R.data

    def open(self, batch: int, array: pa.Array, first: int = 0) -> None:
        """Note where a batch's numbers lie, the first of which has the number `first` in the column."""
        assert array.null_count == array.offset == 0
        self._at[batch] = self._file.position(array.buffers()[1]) // self._width - first

    def at(self, batch: int, number: int) -> int:
        """One number."""
        return self._values[self._at[batch] + number]

    def part(self, batch: int, start: int, stop: int) -> list[int]:
        """The numbers at `start` … `stop` - 1 of a batch."""
        return self.view(batch, start, stop).tolist()  # type: ignore[no-any-return]

    def view(self, batch: int, start: int, stop: int) -> NDArray[Any]:
        """The same as an array that is not copied, (stop - start,)."""
        at = self._at[batch]
        return self._values_V[at + start : at + stop]

    def take(self, batch_N: Int64s, number_N: Int64s) -> list[int]:
        """The numbers at N places."""
        return self._values_V[self._at_R[batch_N] + number_N].tolist()  # type: ignore[no-any-return]


class _OffsetColumn:
    """What columns of texts and of lists share: 8-byte offsets that bound their values among their elements."""

    def __init__(self, file: MappedFile, num_batches: int) -> None:
        self._file, self._words = file, file.words
        # Word of the offset of the number 0, and how many elements (bytes of texts) there are.
        self._at_R, self._size_R = np.zeros((2, num_batches), dtype=np.int64)
        self._at, self._size = self._at_R.data, self._size_R.data

    def _open(self, batch: int, array: pa.Array, first: int, size: int) -> None:
        assert array.null_count == array.offset == 0
        self._at[batch] = self._file.position(array.buffers()[1]) // _WORD_BYTES - first
        self._size[batch] = size

    def bounds(self, batch: int, number: int) -> tuple[int, int]:
        """Where the elements of one value start and stop.

        Raises:
            ValueError: If they are not in the batch.
        """
        at = self._at[batch] + number
        start, stop = self._words[at], self._words[at + 1]
        if not 0 <= start <= stop <= self._size[batch]:
            raise ValueError(f"offsets {start} and {stop} of {self._size[batch]}")
        return start, stop

    def bounds_of(self, batch_N: Int64s, number_N: Int64s) -> tuple[Int64s, Int64s]:
        """The same of N values, (N,) each."""
        at_N = self._at_R[batch_N] + number_N
        start_N, stop_N = self._file.words_W[at_N], self._file.words_W[at_N + 1]
        if ((start_N < 0) | (stop_N < start_N) | (stop_N > self._size_R[batch_N])).any():
            raise ValueError("offsets out of their range")
        return start_N, stop_N


class TextColumn(_OffsetColumn):
    """Texts of a `large_string` column without nulls; each is decoded when it is asked for.

    Args:
        file: The file.
        num_batches: Its record batches, R.
    """

    def __init__(self, file: MappedFile, num_batches: int) -> None:
        super().__init__(file, num_batches)
        self._data_R = np.zeros(num_batches, dtype=np.int64)
        self._data = self._data_R.data

    def open(self, batch: int, array: pa.Array, first: int = 0) -> None:
        """Note where a batch's texts lie, the first of which has the number `first` in the column."""
        data = array.buffers()[2]
        self._open(batch, array, first, 0 if data is None else data.size)
        self._data[batch] = self._file.position(data)

    def at(self, batch: int, number: int) -> str:
        """One text.

        Raises:
            ValueError: If it is damaged.
        """
        start, stop = self.bounds(batch, number)
        data = self._data[batch]
        return self._file.data[data + start : data + stop].decode()

    def part(self, batch: int, start: int, stop: int) -> list[str]:
        """The texts at `start` … `stop` - 1 of a batch."""
        return [self.at(batch, number) for number in range(start, stop)]

    def take(self, batch_N: Int64s, number_N: Int64s) -> list[str]:
        """N texts.

        Raises:
            ValueError: If one is damaged.
        """
        if not self._size_R[batch_N].any():
            return [""] * len(batch_N)
        start_N, stop_N = self.bounds_of(batch_N, number_N)
        data_N, data = self._data_R[batch_N], self._file.data
        start_N, stop_N = data_N + start_N, data_N + stop_N
        # One look at all first bytes has the memory fetch them side by side; the texts are then read from its caches.
        self._file.bytes_B[start_N]
        return [data[start:stop].decode() for start, stop in zip(start_N.tolist(), stop_N.tolist(), strict=True)]


class ListColumn(_OffsetColumn):
    """Lists of a `large_list` column without nulls.

    Args:
        file: The file.
        num_batches: Its record batches, R.
        child: The column of all their elements, one list after another, which is opened with this one.
    """

    def __init__(self, file: MappedFile, num_batches: int, child: TextColumn | NumberColumn) -> None:
        super().__init__(file, num_batches)
        self.child = child

    def open(self, batch: int, array: pa.Array, first: int = 0) -> None:
        """Note where a batch's lists lie, the first of which has the number `first` in the column."""
        self._open(batch, array, first, len(array.values))
        self.child.open(batch, array.values)

    def at(self, batch: int, number: int) -> list[Any]:
        """One list.

        Raises:
            ValueError: If it is damaged.
        """
        start, stop = self.bounds(batch, number)
        return self.child.part(batch, start, stop) if start < stop else []

    def starts(self, batch: int, start: int, stop: int) -> Int64s:
        """Where each list `start` … `stop` - 1 starts among the batch's elements and the last ends, (lists + 1,)."""
        at = self._at[batch]
        return self._file.words_W[at + start : at + stop + 1]

    def num_elements(self, batch: int) -> int:
        """Elements of all lists of a batch."""
        return self._size[batch]

    def take(self, batch_N: Int64s, number_N: Int64s) -> list[list[Any]]:
        """N lists.

        Raises:
            ValueError: If one is damaged.
        """
        if not self._size_R[batch_N].any():
            return [[] for _ in range(len(batch_N))]
        start_N, stop_N = self.bounds_of(batch_N, number_N)
        count_N = stop_N - start_N
        if (count_N == 1).all():
            return [[value] for value in self.child.take(batch_N, start_N)]
        end_N = np.cumsum(count_N)
        # Element e of the N lists together is number e of the child, moved by where its list starts in either.
        number_E = np.arange(end_N[-1]) + np.repeat(stop_N - end_N, count_N)
        values: list[Any] = self.child.take(np.repeat(batch_N, count_N), number_E)
        return [values[start:stop] for start, stop in pairwise([0, *end_N.tolist()])]
