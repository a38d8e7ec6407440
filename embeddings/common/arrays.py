"""Arrays of numbers on disk, read without running anything that a file holds."""

from pathlib import Path
from typing import Any

import numpy as np

from embeddings.common.errors import InputError


def load_array(path: Path, fix: str, mapped: bool = False) -> Any:
    """The array of a `.npy` file, or the archive of arrays of a `.npz` file.

    Args:
        path: The file.
        fix: The way out where it is damaged.
        mapped: Whether the array stays on disk, mapped into memory.

    Raises:
        InputError: If the file is missing or damaged, or holds objects in place of numbers, or is of the other kind.
        PermissionError: If it may not be read.
        MemoryError: If there is no room for it.
    """
    damaged = InputError(str(path), "is missing, empty or damaged", fix)
    try:
        found = np.load(path, mmap_mode="r" if mapped else None, allow_pickle=False)
    except PermissionError:
        raise
    except MemoryError:
        # A damaged header may ask for more than the file holds, which is then found out in mapping it.
        if not mapped:
            load_array(path, fix, mapped=True)
        raise
    # A header is read as Python's literals, and fails in all the ways that these do.
    except Exception as error:
        raise damaged from error
    if isinstance(found, np.ndarray) == (path.suffix == ".npz"):
        if not isinstance(found, np.ndarray):
            found.close()
        raise damaged
    return found
