"""Converted sources of pairs, with made-up vectors."""

from embeddings.common.io import write_manifest
from embeddings.data.sources import SourceConfig
from embeddings.data.store import open_cached
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


def source(folder, rows, **options):
    """The rows as a converted source."""
    config = SourceConfig("pairs", str(write_jsonl(folder / "pairs.jsonl", rows)), **options)
    return open_cached(config, folder / "cache")


def topic_of(row):
    """The topic of a row of `topic_source`."""
    return row * 7 % 3


def topic_source(folder, num_rows=60):
    """Pairs about three topics, mixed; topics share no words."""
    rows = []
    for row in range(num_rows):
        words = TOPICS[topic_of(row)]
        chosen = [words[(row + step) % 5] for step in range(4)]
        rows.append({"query": f"{chosen[0]} {chosen[1]}", "positive": [f"{' '.join(chosen)} {row}", "another"]})
    return source(folder, rows)


def write_vectors(folder, vectors, shard_size, kind):
    """Shards of vectors with the manifest that encoding writes beside them."""
    made = shards(folder, vectors, shard_size)
    model = {"model_sha256": "none", "precision": "float32", "prompt_name": None}
    write_manifest(folder, {"kind": kind, "complete": True, **model})
    return made


def content(folder):
    """The bytes of every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def made_vectors(folder, source, queries=None, documents=None, shard_size=16):
    """Pair vectors of a source: the arguments, or random ones."""
    index = index_pairs(source, folder / "index")
    queries = unit_vectors(index.num_queries, seed=1) if queries is None else queries
    documents = unit_vectors(index.num_documents, seed=2) if documents is None else documents
    return PairVectors(
        index,
        write_vectors(folder / "queries", queries, shard_size, "query vectors"),
        write_vectors(folder / "documents", documents, shard_size, "document vectors"),
    )
