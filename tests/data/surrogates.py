"""Folders of surrogate vectors as the jobs over a corpus write them, made by hand."""

from pathlib import Path

import numpy as np

from embeddings.common.fileio import write_manifest
from embeddings.data.cache import CachedSource


def write_surrogates(folder: Path, source: CachedSource, width: int = 4, shard_size: int = 3) -> Path:
    """Vectors whose entries tell what they are of: query i is `i + 0.25`, a document its number in order of texts."""
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
        vectors = np.repeat(values.astype(np.float32)[:, None], width, axis=1)
        for shard, start in enumerate(range(0, len(vectors), shard_size)):
            np.save(folder / name / f"vectors-{shard:05d}.npy", vectors[start : start + shard_size])
        fields = {"kind": kind, **key, "num_rows": len(vectors), "embedding_dim": width, "shard_size": shard_size}
        write_manifest(folder / name, {**fields, "complete": True})
    return folder
