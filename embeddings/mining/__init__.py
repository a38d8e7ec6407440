"""Floor 3: what is computed over a whole corpus before training. The names load their module on first use."""

from typing import TYPE_CHECKING

from embeddings.common.lazy import lazy_names

if TYPE_CHECKING:
    from embeddings.mining.jobs import ArrayTask, ShardedJob
    from embeddings.mining.pair_index import PairIndex, index_pairs
    from embeddings.mining.pair_vectors import PairVectors, encode_pairs, open_pair_vectors

__all__ = [
    "ArrayTask",
    "PairIndex",
    "PairVectors",
    "ShardedJob",
    "encode_pairs",
    "index_pairs",
    "open_pair_vectors",
]

__getattr__ = lazy_names(
    __name__,
    {
        "ArrayTask": "jobs",
        "PairIndex": "pair_index",
        "PairVectors": "pair_vectors",
        "ShardedJob": "jobs",
        "encode_pairs": "pair_vectors",
        "index_pairs": "pair_index",
        "open_pair_vectors": "pair_vectors",
    },
)
