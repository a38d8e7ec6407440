"""Floor 3: jobs over a whole corpus before training. Names load their module on first use."""

from typing import TYPE_CHECKING

from embeddings.common.jobs import ArrayTask
from embeddings.common.process import lazy_names

if TYPE_CHECKING:
    from embeddings.mining.clusters import ClusterSettings, VectorFeatures, cluster_pairs
    from embeddings.mining.duplicates import Decontaminator, EvaluationTexts, find_contaminated, find_duplicates
    from embeddings.mining.filter import FilterReport, FilterRules, filter_pairs, rank_pairs
    from embeddings.mining.ivf import IvfSearch, VectorIndex, build_index, build_ivf, recall_of
    from embeddings.mining.mine import MiningReport, Reranker, SearchOptions, Teachers, mine_negatives
    from embeddings.mining.negatives import LevelRules, NegativeRules, TextQrels, choose_negatives
    from embeddings.mining.pair_index import PairIndex, index_pairs
    from embeddings.mining.pair_vectors import EncodedTexts, EncodingOptions, PairVectors, encode_pairs
    from embeddings.mining.search import DocumentSearch, ExactSearch

__all__ = [
    "ArrayTask",
    "ClusterSettings",
    "Decontaminator",
    "DocumentSearch",
    "EncodedTexts",
    "EncodingOptions",
    "EvaluationTexts",
    "ExactSearch",
    "FilterReport",
    "FilterRules",
    "IvfSearch",
    "LevelRules",
    "MiningReport",
    "NegativeRules",
    "PairIndex",
    "PairVectors",
    "Reranker",
    "SearchOptions",
    "Teachers",
    "TextQrels",
    "VectorFeatures",
    "VectorIndex",
    "build_index",
    "build_ivf",
    "choose_negatives",
    "cluster_pairs",
    "encode_pairs",
    "filter_pairs",
    "find_contaminated",
    "find_duplicates",
    "index_pairs",
    "mine_negatives",
    "rank_pairs",
    "recall_of",
]

__getattr__ = lazy_names(__name__)
