"""Clusters of a made-up source, and its vectors beside them."""

import hashlib
from pathlib import Path

import numpy as np

from embeddings.common.io import write_manifest
from tests.data import cluster_folders

SOURCE_KEY = hashlib.sha256(b"source").hexdigest()[:32]
WIDTH = 5


def write_clusters(
    folder: Path, ids: list[int], num_clusters: int, seed: int = 0
) -> tuple[Path, np.ndarray, np.ndarray]:
    """Write `folder` and `folder.vectors`, with the rows of each cluster around one direction.

    Returns:
        The folder, and the vectors of the queries and of the documents, (rows, 5) each.
    """
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(num_clusters, 2 * WIDTH))
    rows = centres[ids] + 0.1 * rng.normal(size=(len(ids), 2 * WIDTH))
    sides = [(side / np.linalg.norm(side, axis=1, keepdims=True)).astype(np.float32) for side in np.split(rows, 2, 1)]
    cluster_folders.write_clusters(folder, ids, num_clusters, SOURCE_KEY)
    vectors = folder.with_name(f"{folder.name}.vectors")
    (vectors / "index").mkdir(parents=True)
    write_manifest(vectors / "index", {"kind": "pair_index", "source_key": SOURCE_KEY})
    # The documents are in reverse order; every row but the first has a second positive.
    last = len(ids) - 1
    first = last - np.arange(len(ids))
    positives = [[row] if row == last else [row, 0] for row in first.tolist()]
    offsets = np.cumsum([0, *map(len, positives)])
    np.save(vectors / "index" / "positive_offsets.npy", offsets)
    np.save(vectors / "index" / "positive_rows.npy", np.concatenate(positives).astype(np.int32))
    for name, kind, content in (("queries", "query", sides[0]), ("documents", "document", sides[1][::-1])):
        (vectors / name).mkdir()
        size = max(1, len(ids) // 2)
        for shard, start in enumerate(range(0, len(ids), size)):
            np.save(vectors / name / f"vectors-{shard:05d}.npy", np.ascontiguousarray(content[start : start + size]))
        shape = {"num_rows": len(ids), "embedding_dim": WIDTH, "shard_size": size}
        write_manifest(vectors / name, {"kind": f"{kind} vectors", "source_key": SOURCE_KEY, "complete": True, **shape})
    return folder, sides[0], sides[1]
