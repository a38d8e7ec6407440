"""Handmade folders of surrogate vectors in the format of the jobs."""

import numpy as np

from embeddings.common.io import write_manifest


def numbered_vectors(numbers, width):
    """Unit vectors in the first two dimensions that encode these numbers as tangents."""
    vectors = np.zeros((len(numbers), width), np.float32)
    vectors[:, 0], vectors[:, 1] = numbers / np.hypot(numbers, 1), 1 / np.hypot(numbers, 1)
    return vectors


def number_of(vectors):
    """The numbers of vectors from `numbered_vectors`, rounded; NaN for NaN."""
    return (vectors[..., 0] / vectors[..., 1]).round(decimals=4)


def write_surrogates(folder, source, width=4, shard_size=3, negatives=False):
    """Write vectors that encode what they belong to (`number_of`): query i is `i + 0.25`, a document its number.

    Documents are numbered by text: first the positives, then, with `negatives`, the negatives.
    """
    rows = [source.table.row(index) for index in range(len(source.table))]
    texts = {"positive": [row.positives for row in rows]}
    texts |= {"negative": [row.negatives for row in rows]} if negatives else {}
    numbers = {}
    key = {"source_key": source.key}
    (folder / "index").mkdir(parents=True)
    for kind, texts_of_rows in texts.items():
        flat = [numbers.setdefault(text, len(numbers)) for texts_of_row in texts_of_rows for text in texts_of_row]
        offsets = np.cumsum([0, *map(len, texts_of_rows)])
        np.save(folder / "index" / f"{kind}_offsets.npy", offsets.astype(np.int64))
        np.save(folder / "index" / f"{kind}_rows.npy", np.array(flat, np.int32))
    write_manifest(folder / "index", {"kind": "pair_index", "negatives": negatives or None, **key})
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
