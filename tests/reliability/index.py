"""Vectors and clusters that are damaged or unfinished."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tests.reliability.cases import FIT, Make, bytes_of, copied, edited, unchanged, without
from tests.reliability.records import clustered_on

SEARCH = "search --model MODEL --corpus vectors --precision float32 fox"
SECOND = "vectors-00001.npy"


def vectors(damage: Callable[[Path], object] = unchanged) -> Make:
    return copied("vectors", damage)


def changed(name: str, change: Callable[[NDArray[np.float32]], NDArray[np.generic]]) -> Callable[[Path], object]:
    """Changes an array in a folder."""

    def rewrite(folder: Path) -> None:
        array = change(np.load(folder / name))
        with open(folder / name, "wb") as file:
            np.save(file, array)

    return rewrite


def with_nan(array: NDArray[np.float32]) -> NDArray[np.float32]:
    """Sets all elements of the second vector to NaN."""
    array[1] = np.nan
    return array


CASES = {
    SEARCH: {
        "a missing shard of vectors": (vectors(without(SECOND)), f"vectors/{SECOND}: is missing, empty or damaged"),
        "a NaN vector": (vectors(changed(SECOND, with_nan)), f"vectors/{SECOND}:1: the vector is not finite"),
        "unfinished vectors": (
            vectors(edited("manifest.json", complete=False)),
            "vectors/manifest.json: field 'complete' is False, expected True",
        ),
        "a manifest without a field": (
            vectors(bytes_of("manifest.json", lambda text: text.replace(b"shard_size", b"size_of_shard"))),
            "vectors/manifest.json: ",
        ),
    },
    FIT: {
        "truncated clusters": (
            clustered_on(lambda folder: (folder / "centroids.npy").write_bytes(b"\x93NUMPY")),
            "clusters/centroids.npy: ",
        ),
    },
}
