"""Which rows belong to which class, without an object for any of them."""

from bisect import bisect_right
from collections.abc import Collection
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from embeddings.common.arrays import load_array

ORDER_FILE, OFFSETS_FILE, PAIRED_FILE = "class_order.npy", "class_offsets.npy", "class_paired.npy"


def write_class_index(folder: Path, labels: NDArray[np.int32], num_classes: int, lone: Collection[int] = ()) -> None:
    """Write the rows sorted by class, where each class starts among them, and the rows that can have a positive.

    Args:
        folder: Where to.
        labels: Class of each row, (rows,), 0 to `num_classes` - 1.
        num_classes: Number of classes.
        lone: Classes whose texts are all the same, so that no row of theirs can have a positive.
    """
    np.save(folder / ORDER_FILE, np.argsort(labels, kind="stable").astype(np.int64))
    counts = np.bincount(labels, minlength=num_classes)
    np.save(folder / OFFSETS_FILE, np.concatenate([[0], np.cumsum(counts)]).astype(np.int64))
    np.save(folder / PAIRED_FILE, np.flatnonzero(~np.isin(labels, list(lone))).astype(np.int64))


class ClassIndex:
    """The rows of each class and the rows outside it, memory-mapped; it travels to another process by its folder.

    Raises:
        InputError: If a file is missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        fix = "delete its folder and run again"
        self._order = load_array(folder / ORDER_FILE, fix, mapped=True)
        self._paired = load_array(folder / PAIRED_FILE, fix, mapped=True)
        self._offsets: list[int] = load_array(folder / OFFSETS_FILE, fix).tolist()

    def __reduce__(self) -> tuple[type["ClassIndex"], tuple[Path]]:
        """The folder alone."""
        return ClassIndex, (self.folder,)

    def __len__(self) -> int:
        """Number of classes."""
        return len(self._offsets) - 1

    @property
    def num_paired(self) -> int:
        """Number of rows that can have a positive: another text of their class."""
        return len(self._paired)

    def paired(self, position: int) -> int:
        """The row at `position` (0 to `num_paired` - 1) of those that can have a positive."""
        return int(self._paired[position])

    def size(self, label: int) -> int:
        """Number of rows of a class."""
        return self._offsets[label + 1] - self._offsets[label]

    def num_outside(self, label: int) -> int:
        """Number of rows of all other classes."""
        return len(self._order) - self.size(label)

    def member(self, label: int, position: int) -> int:
        """The row at `position` (0 to `size` - 1) of a class."""
        return int(self._order[self._offsets[label] + position])

    def outsider(self, label: int, position: int) -> int:
        """The row at `position` (0 to `num_outside` - 1) of all other classes."""
        skipped = position if position < self._offsets[label] else position + self.size(label)
        return int(self._order[skipped])

    def label_of_outsider(self, label: int, position: int) -> int:
        """The class of the row at `position` of all other classes."""
        skipped = position if position < self._offsets[label] else position + self.size(label)
        return bisect_right(self._offsets, skipped) - 1
