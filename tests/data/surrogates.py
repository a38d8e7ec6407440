"""Folders of surrogate vectors as the jobs over a corpus write them, made by hand."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embeddings.common.fileio import write_manifest
from embeddings.data.cache import CachedSource


def numbered_vectors(numbers: NDArray[np.float64], width: int) -> NDArray[np.float32]:
    """Unit vectors in the plane of the first two axes, whose tangents are these numbers."""
    vectors = np.zeros((len(numbers), width), np.float32)
    vectors[:, 0], vectors[:, 1] = numbers / np.hypot(numbers, 1), 1 / np.hypot(numbers, 1)
    return vectors


def number_of(vectors: Any) -> Any:
    """The numbers of such vectors, NaN for NaN; rounded, since sine and cosine are."""
    return (vectors[..., 0] / vectors[..., 1]).round(decimals=4)


def write_surrogates(folder: Path, source: CachedSource, width: int = 4, shard_size: int = 3) -> Path:
    """Unit vectors that tell what they are of (`number_of`): query i is `i + 0.25`, a document its number by text."""
    rows = [source.table.row(index) for index in range(len(source.table))]
    numbers: dict[str, int] = {}
    for row in rows:
        for text in row.positives:
            numbers.setdefault(text, len(numbers))
    key = {"source_key": source.folder.name}
    (folder / "index").mkdir(parents=True)
    offsets = np.cumsum([0, *(len(row.positives) for row in rows)])
    np.save(folder / "index" / "positive_offsets.npy", offsets.astype(np.int64))
    flat = [numbers[text] for row in rows for text in row.positives]
    np.save(folder / "index" / "positive_rows.npy", np.array(flat, np.int32))
    write_manifest(folder / "index", {"kind": "pair_index", **key})
    for name, kind, values in (
        ("queries", "query vectors", np.arange(len(rows)) + 0.25),
        ("documents", "document vectors", np.arange(len(numbers))),
    ):
        (folder / name).mkdir()
        vectors = numbered_vectors(values, width)
        for shard, start in enumerate(range(0, len(vectors), shard_size)):
            np.save(folder / name / f"vectors-{shard:05d}.npy", vectors[start : start + shard_size])
        fields = {"kind": kind, **key, "num_rows": len(vectors), "embedding_dim": width, "shard_size": shard_size}
        write_manifest(folder / name, {**fields, "complete": True})
    return folder
