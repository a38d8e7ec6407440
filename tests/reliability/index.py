"""Vectors, clusters and mined shards that are damaged, or of something else."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tests.reliability.cases import FIT, MINE, Case, Make, both, copied, rows, table
from tests.reliability.checkpoints import content, edited
from tests.reliability.relations import clustered_on
from tests.reliability.texts import source
from tests.reliability.world import Place

SEARCH = "search --model MODEL --corpus vectors --precision float32 fox"
SECOND = "vectors-00001.npy"


def vectors(damage: Callable[[Path], object]) -> Make:
    """A copy of an encoded corpus that is damaged."""
    return copied("vectors", damage)


def changed(name: str, change: Callable[[NDArray[np.float32]], NDArray[np.generic]]) -> Callable[[Path], object]:
    """Changes an array of a folder."""

    def rewrite(folder: Path) -> None:
        array = change(np.load(folder / name))
        with open(folder / name, "wb") as file:
            np.save(file, array)

    return rewrite


def filled(value: float, row: int = 1) -> Callable[[NDArray[np.float32]], NDArray[np.float32]]:
    """Gives a vector this value everywhere."""

    def fill(array: NDArray[np.float32]) -> NDArray[np.float32]:
        array[row] = value
        return array

    return fill


def mined(role: str, damage: Callable[[Path], object], *makes: Make) -> Make:
    """The good pairs, and their vectors by `mine`, of which a role's are damaged."""

    def make(place: Place) -> None:
        place.copy("pairs.jsonl")
        place.world.path("mined")
        folder = place.folder / "vectors"
        shutil.copytree(place.world.path("mined") / "mined.parquet.work" / "vectors", folder)
        damage(folder / role)

    return make


def few(*texts: str) -> Make:
    """Records of these texts alone."""
    return rows("pairs.jsonl", *({"query": f"{text} asked", "positive": text} for text in texts))


MINED = MINE.replace("out.parquet", "out.parquet --vectors vectors --precision float32")
SHARD = "vectors-00000.npy"
CASES = [
    *table(
        SEARCH,
        {
            "a shard of vectors that is missing": (
                vectors(lambda folder: (folder / SECOND).unlink()),
                f"vectors/{SECOND}: is missing, empty or damaged",
            ),
            "an empty shard": (vectors(content(SECOND, b"")), f"vectors/{SECOND}: is missing, empty or damaged"),
            "a shard that is cut off": (
                vectors(lambda folder: (folder / SECOND).write_bytes((folder / SECOND).read_bytes()[:-9])),
                f"vectors/{SECOND}: is missing, empty or damaged",
            ),
            "a shard that is no array": (
                vectors(content(SECOND, "text")),
                f"vectors/{SECOND}: is missing, empty or damaged",
            ),
            "a shard of another width": (
                vectors(changed(SECOND, lambda array: array[:, :8])),
                f"vectors/{SECOND}: holds float32 of shape (3, 8), expected",
            ),
            "a shard of doubles": (
                vectors(changed(SECOND, lambda array: array.astype(np.float64))),
                f"vectors/{SECOND}: holds float64 of shape (3, 32), expected",
            ),
            "a vector that is NaN": (
                vectors(changed(SECOND, filled(np.nan))),
                f"vectors/{SECOND}:1: the vector is not finite",
            ),
            "a vector that is infinite": (
                vectors(changed(SECOND, filled(np.inf))),
                f"vectors/{SECOND}:1: the vector is not finite",
            ),
            "a vector that is zero": (vectors(changed(SECOND, filled(0))), f"vectors/{SECOND}:1: the vector is zero"),
            "vectors that are unfinished": (
                vectors(edited("manifest.json", complete=False)),
                "vectors/manifest.json: field 'complete' is False, expected True",
            ),
            "vectors without a manifest": (
                vectors(lambda folder: (folder / "manifest.json").unlink()),
                "vectors/manifest.json: no manifest lies beside this output",
            ),
            "a manifest that is a list": (
                vectors(content("manifest.json", "[]")),
                "vectors/manifest.json: is empty or damaged",
            ),
            "a manifest without a field": (
                vectors(
                    lambda folder: content(
                        "manifest.json",
                        json.dumps(
                            {
                                name: value
                                for name, value in json.loads((folder / "manifest.json").read_text()).items()
                                if name != "shard_size"
                            }
                        ),
                    )(folder)
                ),
                "vectors/manifest.json: ",
            ),
            "a manifest with a text for a number": (
                vectors(edited("manifest.json", shard_size="five")),
                "vectors/manifest.json: ",
            ),
            "a manifest of more documents than there are": (
                vectors(edited("manifest.json", num_documents=800)),
                "vectors/",
            ),
        },
    ),
    Case(
        "documents that are missing",
        vectors(lambda folder: (folder / "documents-00001.jsonl").unlink()),
        SEARCH.replace("fox", "fox --top-k 8"),
        "vectors/documents-00001.jsonl: is missing or damaged",
    ),
    Case(
        "a document that is cut off",
        vectors(content("documents-00001.jsonl", '{"_id": "d5"')),
        SEARCH.replace("fox", "fox --top-k 8"),
        "vectors/documents-00001.jsonl:1: holds no document",
    ),
    Case(
        "vectors by another model",
        vectors(lambda folder: None),
        SEARCH.replace("MODEL", "OTHER"),
        "vectors/manifest.json: field 'model_sha256' is",
    ),
    Case(
        "vectors of other options",
        vectors(lambda folder: None),
        "encode --model MODEL --input vectors/documents-00000.jsonl --output vectors",
        "vectors/manifest.json: field 'corpus_sha256' is",
    ),
    *table(
        MINED,
        {
            "a vector to mine from that is NaN": (
                mined("documents", changed(SHARD, filled(np.nan))),
                f"vectors/documents/{SHARD}:1: the vector is not finite",
            ),
            "a vector to mine from that is not of unit length": (
                mined("documents", changed(SHARD, lambda array: array * 2)),
                f"vectors/documents/{SHARD}:0: the vector is of length 2",
            ),
            "a query to mine for that is zero": (
                mined("queries", changed(SHARD, filled(0))),
                f"vectors/queries/{SHARD}:1: the vector is zero",
            ),
            "a shard to mine from of another width": (
                mined("documents", changed(SHARD, lambda array: array[:, :8])),
                f"vectors/documents/{SHARD}: holds float32 of shape (12, 8)",
            ),
            "vectors to mine from that are of other records": (
                both(mined("documents", lambda folder: None), few("one", "two", "three")),
                "vectors/index/manifest.json: field 'source_key' is",
            ),
        },
    ),
    Case(
        "vectors by encode in another role",
        both(few("one", "two", "three"), vectors(lambda folder: None)),
        MINE + " --query-vectors vectors --precision float32",
        "vectors/manifest.json: field 'role' is 'document', expected 'query'",
    ),
    Case(
        "vectors by encode of other texts",
        both(few("one", "two", "three"), vectors(lambda folder: None)),
        MINE + " --document-vectors vectors --precision float32",
        "vectors: holds none of the 3 texts",
    ),
    *table(
        FIT,
        {
            "clusters that are cut off": (
                clustered_on(lambda folder: (folder / "centroids.npy").write_bytes(b"\x93NUMPY")),
                "clusters/centroids.npy: is missing or not what was written",
            ),
            "clusters with a neighbour that is none": (
                clustered_on(changed("neighbours.npy", lambda array: array + 7)),
                "clusters/neighbours.npy:0: is not of the 3 clusters",
            ),
            "clusters whose centroids are NaN": (
                clustered_on(changed("centroids.npy", filled(np.nan))),
                "clusters/centroids.npy:1: is not finite",
            ),
            "clusters whose bounds fall": (
                clustered_on(changed("offsets.npy", lambda array: array[::-1].copy())),
                "clusters/offsets.npy: ",
            ),
            "clusters that are unfinished": (
                clustered_on(edited("manifest.json", complete=False)),
                "clusters/manifest.json: field 'complete' is False",
            ),
            "vectors for a filter that are not there": (
                source(surrogate_vectors="gone"),
                "gone/index/manifest.json: no manifest",
            ),
        },
    ),
]
