"""What a rule says of each record of a source: one small number a row, in shards and then as a whole."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from embeddings.common.errors import OptionError
from embeddings.mining.jobs import load_shard

# A record that a rule leaves in; rules number their reasons to take one out from 1.
KEPT = 0
SHARD_ROWS = 65536


def require_shard_size(shard_size: int) -> None:
    """Check the number of records of a shard.

    Raises:
        OptionError: If it is not positive.
    """
    if shard_size < 1:
        raise OptionError("shard_size", shard_size, "must be >= 1", "leave it out for the default")


def shard_rows(shard: int, shard_size: int, num_rows: int) -> range:
    """The rows that a shard holds."""
    return range(shard * shard_size, min((shard + 1) * shard_size, num_rows))


def save_array(path: Path, array: npt.NDArray[Any]) -> None:
    """Write an array as `.npy` to exactly this path."""
    with open(path, "wb") as file:
        np.save(file, array)


def open_verdicts(path: Path) -> npt.NDArray[np.uint8]:
    """The verdicts of all rows, memory-mapped.

    Raises:
        InputError: If the file is missing or damaged.
    """
    verdict_N: npt.NDArray[np.uint8] = load_shard(path, mapped=True)
    return verdict_N
