"""Unit vectors on disk, and brute-force results of searches."""

import numpy as np

from embeddings.common.jobs import save_array
from embeddings.inference.vector_folder import VectorShards
from tests.data import cluster_folders


def unit_vectors(count, width=8, seed=0, copies=()):
    """Random unit vectors; `copies` lists (row, original) pairs of equal ones."""
    vectors = cluster_folders.unit_vectors(count, width, seed)
    for row, original in copies:
        vectors[row] = vectors[original]
    return vectors


def shards(folder, vectors, shard_size):
    """The vectors in shards."""
    found = VectorShards(folder, len(vectors), vectors.shape[1], shard_size)
    folder.mkdir(parents=True, exist_ok=True)
    for shard in range(found.num_shards):
        save_array(found.path(shard), vectors[shard * shard_size : (shard + 1) * shard_size])
    return found


def brute_force(queries, documents, top_k):
    """Scores and rows of the best documents, a loop over all pairs; ties by row."""
    best = []
    for query in queries.astype(np.float64):
        scores = [np.float32(sum(query * document)) for document in documents.astype(np.float64)]
        best.append(sorted((-score, row) for row, score in enumerate(scores))[:top_k])
    return [[-score for score, _ in row] for row in best], [[number for _, number in row] for row in best]
