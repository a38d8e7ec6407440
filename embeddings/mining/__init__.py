"""Floor 3: what is computed over a whole corpus before training. The names load their module on first use."""

from typing import TYPE_CHECKING

from embeddings.common.lazy import lazy_names

if TYPE_CHECKING:
    from embeddings.mining.consistency import rank_pairs
    from embeddings.mining.decontaminate import Decontaminator, EvaluationTexts, find_contaminated
    from embeddings.mining.duplicates import find_duplicates
    from embeddings.mining.filter import FilterReport, FilterRules, filter_pairs
    from embeddings.mining.ivf import IvfSearch, build_ivf
    from embeddings.mining.jobs import ArrayTask, ShardedJob
    from embeddings.mining.knn import DocumentSearch, ExactSearch
    from embeddings.mining.mine import MiningReport, SearchOptions, Teachers, mine_negatives
    from embeddings.mining.negatives import NegativeRules, choose_negatives
    from embeddings.mining.pair_index import PairIndex, index_pairs
    from embeddings.mining.pair_vectors import PairVectors, encode_pairs, open_pair_vectors

__all__ = [
    "ArrayTask",
    "Decontaminator",
    "DocumentSearch",
    "EvaluationTexts",
    "ExactSearch",
    "FilterReport",
    "FilterRules",
    "IvfSearch",
    "MiningReport",
    "NegativeRules",
    "PairIndex",
    "PairVectors",
    "SearchOptions",
    "ShardedJob",
    "Teachers",
    "build_ivf",
    "choose_negatives",
    "encode_pairs",
    "filter_pairs",
    "find_contaminated",
    "find_duplicates",
    "index_pairs",
    "mine_negatives",
    "open_pair_vectors",
    "rank_pairs",
]

__getattr__ = lazy_names(
    __name__,
    {
        "ArrayTask": "jobs",
        "Decontaminator": "decontaminate",
        "DocumentSearch": "knn",
        "EvaluationTexts": "decontaminate",
        "ExactSearch": "knn",
        "FilterReport": "filter",
        "FilterRules": "filter",
        "IvfSearch": "ivf",
        "MiningReport": "mine",
        "NegativeRules": "negatives",
        "PairIndex": "pair_index",
        "PairVectors": "pair_vectors",
        "SearchOptions": "mine",
        "ShardedJob": "jobs",
        "Teachers": "mine",
        "build_ivf": "ivf",
        "choose_negatives": "negatives",
        "encode_pairs": "pair_vectors",
        "filter_pairs": "filter",
        "find_contaminated": "decontaminate",
        "find_duplicates": "duplicates",
        "index_pairs": "pair_index",
        "mine_negatives": "mine",
        "open_pair_vectors": "pair_vectors",
        "rank_pairs": "consistency",
    },
)
