"""P15: mining 10,000 queries over 100,000 documents takes at most 0.7 of sentence-transformers' time, and 350 MB.

Both start from the same vectors of width 384 and return five negatives for each query, which score below 0.95 of the
positive's score.
"""

import json
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from datasets import Dataset
from datasets.utils.logging import disable_progress_bar
from sentence_transformers.util import mine_hard_negatives, pairwise_cos_sim

from benchmarks.harness import compare, options, peak_growth_bytes, record
from embeddings.common.jobs import save_array
from embeddings.data.sources import SourceConfig
from embeddings.data.store import open_cached
from embeddings.inference import VectorShards
from embeddings.mining import ExactSearch, NegativeRules, PairVectors, index_pairs
from embeddings.mining.mined_shards import ShardMiner, write_shard

NUM_NEGATIVES, LAST_RANK, MARGIN = 5, 50, 0.95
SHARD_SIZE = 8192
PEERS = "sentence-transformers, torch, faiss-cpu"

Floats = npt.NDArray[np.float32]


def unit_vectors(num_queries: int, num_documents: int, width: int, seed: int = 0) -> tuple[Floats, Floats]:
    """Documents around a thousand centres, and queries near the first of them."""
    generator = np.random.default_rng(seed)

    def noise(count: int, length: float) -> Floats:
        return generator.standard_normal((count, width), dtype=np.float32) * np.float32(length / width**0.5)

    documents = noise(1000, 1.0)[generator.integers(0, 1000, num_documents)] + noise(num_documents, 0.8)
    queries = documents[:num_queries] + noise(num_queries, 0.6)
    return tuple(part / np.linalg.norm(part, axis=1, keepdims=True) for part in (queries, documents))  # type: ignore


def shards(folder: Path, vectors: Floats) -> VectorShards:
    """Write the vectors in shards to disk."""
    folder.mkdir()
    written = VectorShards(folder, len(vectors), vectors.shape[1], SHARD_SIZE)
    for shard in range(written.num_shards):
        save_array(written.path(shard), vectors[written.rows(shard).start : written.rows(shard).stop])
    return written


def our_miner(folder: Path, num_queries: int, num_documents: int, width: int) -> ShardMiner:
    """Write a source and its vectors; returns their miner."""
    with open(folder / "pairs.jsonl", "w", encoding="utf-8") as file:
        file.writelines(
            json.dumps({"query": f"query {row}", "positive": f"document {row}"}) + "\n" for row in range(num_queries)
        )
    with open(folder / "corpus.jsonl", "w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": f"document {row}"}) + "\n" for row in range(num_documents))
    source = open_cached(SourceConfig("pairs", str(folder / "pairs.jsonl")), folder / "cache")
    index = index_pairs(source, folder / "index", folder / "corpus.jsonl")
    queries, documents = unit_vectors(num_queries, num_documents, width)
    vectors = PairVectors(index, shards(folder / "queries", queries), shards(folder / "documents", documents))
    rules = NegativeRules(NUM_NEGATIVES, MARGIN, last_rank=LAST_RANK)
    return ShardMiner(index, [vectors], [ExactSearch(vectors.document_shards)], rules)


def run_ours(miner: ShardMiner, folder: Path) -> None:
    """Mine all shards into Parquet files."""
    shards = miner.vectors[0].query_shards
    for shard in range(shards.num_shards):
        write_shard(miner.mine(shards.rows(shard)), miner.index, miner.rules, folder / f"mined-{shard}.parquet")


def our_negatives(miner: ShardMiner) -> dict[str, list[str]]:
    """The negatives of each query that has the requested number."""
    found, shards = {}, miner.vectors[0].query_shards
    for shard in range(shards.num_shards):
        mined = miner.mine(shards.rows(shard))
        for query, rows in zip(mined.queries, mined.negatives.row_QN.tolist(), strict=True):
            if min(rows) >= 0:
                found[f"query {query}"] = [f"document {row}" for row in rows]
    return found


class PeerModel(SimpleNamespace):
    """A model that returns vectors computed before."""

    device = torch.device("cpu")
    similarity_pairwise = staticmethod(pairwise_cos_sim)

    @staticmethod
    def similarity(left: Any, right: Any) -> torch.Tensor:
        """Inner products: the vectors are of unit length."""
        return torch.as_tensor(left) @ torch.as_tensor(right).T

    def encode_query(self, texts: list[str], **_: Any) -> Floats:
        """The vectors of all queries."""
        assert len(texts) == len(self.queries)
        return self.queries  # type: ignore

    def encode_document(self, texts: list[str], **_: Any) -> Floats:
        """The vectors of all documents."""
        assert len(texts) == len(self.documents)
        return self.documents  # type: ignore


@cache
def peer_inputs(num_queries: int, num_documents: int, width: int) -> tuple[PeerModel, Dataset, list[str]]:
    """Model, pairs and corpus of the peer."""
    queries, documents = unit_vectors(num_queries, num_documents, width)
    pairs = {name: [f"{name} {row}" for row in range(num_queries)] for name in ("query", "document")}
    corpus = [f"document {row}" for row in range(num_documents)]
    return PeerModel(queries=queries, documents=documents), Dataset.from_dict(pairs), corpus


def run_peer(num_queries: int, num_documents: int, width: int) -> Dataset:
    """The peer's mining, on its default path."""
    model, pairs, corpus = peer_inputs(num_queries, num_documents, width)
    return mine_hard_negatives(
        pairs,
        model,  # type: ignore
        corpus=corpus,
        range_max=LAST_RANK,
        relative_margin=1 - MARGIN,
        num_negatives=NUM_NEGATIVES,
        sampling_strategy="top",
        output_format="n-tuple",
        verbose=False,
    )


def measured(ours: bool, num_queries: int, num_documents: int, width: int) -> Iterator[None]:
    """One mining run in a child process, after its inputs are made."""
    disable_progress_bar()
    with tempfile.TemporaryDirectory() as name:
        if ours:
            miner = our_miner(Path(name), num_queries, num_documents, width)
            yield
            run_ours(miner, Path(name))
        else:
            peer_inputs(num_queries, num_documents, width)
            yield
            run_peer(num_queries, num_documents, width)


def main() -> None:
    """Check that both find the same negatives, then time them, and measure the peaks of both."""
    chosen = options(__doc__)
    sizes = (200, 2000, 32) if chosen.tiny else (10_000, 100_000, 384)
    disable_progress_bar()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        miner = our_miner(folder, *sizes)
        found = our_negatives(miner)
        expected = {
            row["query"]: [row[f"negative_{rank}"] for rank in range(1, NUM_NEGATIVES + 1)] for row in run_peer(*sizes)
        }
        if not expected or found != expected:
            differing = sum(found.get(query) != negatives for query, negatives in expected.items())
            raise RuntimeError(f"{differing} of {len(expected)} queries have different negatives: nothing to compare")
        ratio = compare(lambda: run_ours(miner, folder), lambda: run_peer(*sizes), chosen)
    record(chosen, "P15 mining over the peer", ratio, "ratio", "<=0.7", PEERS)
    for who, ours, target in (("ours", True, "<=350"), ("peer", False, "none")):
        peak = peak_growth_bytes(chosen, measured, ours, *sizes) / 1e6
        record(chosen, f"P15 peak of memory above the start, {who}", peak, "MB", target, PEERS)


if __name__ == "__main__":
    main()
