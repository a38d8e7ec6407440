"""Arrow columns read through plain views of their buffers: a value costs a look, not an Arrow scalar."""

from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

_Code = Literal["b", "B", "i", "q"]
_EMPTY = memoryview(b"")


class TextColumn:
    """Texts of a `large_string` array without nulls; each is decoded when it is asked for."""

    __slots__ = ("_data", "_offsets")

    def __init__(self, array: pa.Array) -> None:
        assert array.null_count == 0
        _, offsets, data = array.buffers()
        self._offsets = _view(offsets, "q")[array.offset :]
        self._data = _view(data, "B")

    def __getitem__(self, index: int) -> str:
        """The text at `index`, which must lie in the array."""
        return str(self._data[self._offsets[index] : self._offsets[index + 1]], "utf-8")

    def part(self, start: int, stop: int) -> list[str]:
        """The texts at `start` … `stop` - 1."""
        data, bounds = self._data, self._offsets[start : stop + 1].tolist()
        return [str(data[bounds[i] : bounds[i + 1]], "utf-8") for i in range(stop - start)]


class NumberColumn:
    """Numbers of an integer array without nulls.

    Args:
        array: The array.
        code: Its type as `struct` writes it: `b` for int8, `i` for int32.
    """

    __slots__ = ("values",)

    def __init__(self, array: pa.Array, code: Literal["b", "i"]) -> None:
        assert array.null_count == 0
        self.values = _view(array.buffers()[1], code)[array.offset : array.offset + len(array)]

    def part(self, start: int, stop: int) -> list[int]:
        """The numbers at `start` … `stop` - 1."""
        return self.values[start:stop].tolist()


class ListColumn:
    """Lists of a `large_list` array without nulls.

    Args:
        array: The array.
        child: The column of all their elements, one list after another.
    """

    __slots__ = ("_offsets", "child")

    def __init__(self, array: pa.Array, child: TextColumn | NumberColumn) -> None:
        assert array.null_count == 0
        self._offsets = _view(array.buffers()[1], "q")[array.offset :]
        self.child = child

    def starts(self, count: int) -> NDArray[np.int64]:
        """Where each of the first `count` lists starts among all elements, and where the last ends, (count + 1,)."""
        return np.asarray(self._offsets[: count + 1])

    def __getitem__(self, index: int) -> list[Any]:
        """The list at `index`, which must lie in the array."""
        start, stop = self._offsets[index], self._offsets[index + 1]
        return self.child.part(start, stop) if start < stop else []


def _view(buffer: pa.Buffer | None, code: _Code) -> "memoryview[int]":
    """A buffer as numbers of a type; it keeps the memory alive."""
    if buffer is None or not buffer.size:
        return _EMPTY.cast(code)
    return memoryview(buffer).cast("B").cast(code)
