"""Converted sources of pairs, and vectors of theirs that no model made."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from embeddings.common.io import write_manifest
from embeddings.data.sources import SourceConfig
from embeddings.data.store import CachedSource, open_cached
from embeddings.inference.vectors import VectorShards
from embeddings.mining.pair_index import index_pairs
from embeddings.mining.pair_vectors import PairVectors
from tests.data.cluster_folders import unit_vectors
from tests.data.rows import write_jsonl
from tests.mining.vectors import shards

TOPICS = (
    ("bread", "flour", "oven", "dough", "yeast"),
    ("engine", "piston", "gear", "clutch", "fuel"),
    ("violin", "cello", "sonata", "quartet", "bow"),
)


def topic_of(row: int) -> int:
    """The topic of a row of `topic_source`."""
    return row * 7 % 3


def topic_source(folder: Path, num_rows: int = 60) -> CachedSource:
    """Pairs about three topics, mixed, no word shared between topics."""
    rows = []
    for row in range(num_rows):
        words = TOPICS[topic_of(row)]
        chosen = [words[(row + step) % 5] for step in range(4)]
        rows.append({"query": f"{chosen[0]} {chosen[1]}", "positive": [f"{' '.join(chosen)} {row}", "another"]})
    return open_cached(SourceConfig("pairs", str(write_jsonl(folder / "pairs.jsonl", rows))))


def write_vectors(folder: Path, vectors: NDArray[np.float32], shard_size: int, kind: str) -> VectorShards:
    """Shards of vectors with the manifest that encoding leaves beside them."""
    made: VectorShards = shards(folder, vectors, shard_size)
    model = {"model_sha256": "none", "precision": "float32", "prompt_name": None}
    write_manifest(folder, {"kind": kind, "complete": True, **model})
    return made


def content(folder: Path) -> dict[str, bytes]:
    """The bytes of every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def made_vectors(
    folder: Path,
    source: CachedSource,
    queries: NDArray[np.float32] | None = None,
    documents: NDArray[np.float32] | None = None,
    shard_size: int = 16,
) -> PairVectors:
    """Pair vectors of a source: those given, or random ones."""
    index = index_pairs(source, folder / "index")
    queries = unit_vectors(index.num_queries, seed=1) if queries is None else queries
    documents = unit_vectors(index.num_documents, seed=2) if documents is None else documents
    return PairVectors(
        index,
        write_vectors(folder / "queries", queries, shard_size, "query vectors"),
        write_vectors(folder / "documents", documents, shard_size, "document vectors"),
    )
