"""Floor 5: from documents of one's own to a model: passages, queries, the path between weights, and the verdict."""

from embeddings.adaptation.corpus import PassageReport, write_passages
from embeddings.adaptation.model_queries import QueryModel
from embeddings.adaptation.passages import Splitter, TokenCounter
from embeddings.adaptation.queries import QueriesReport, QuerySettings, make_queries
from embeddings.adaptation.rankings import RetrievalSet, path_scores
from embeddings.adaptation.verdict import Recommendation, Verdict, compare, format_verdict, rank_queries, recommend
from embeddings.adaptation.weights import WeightPath, Whitening, best_share, interpolate_models, write_whitened

__all__ = [
    "PassageReport",
    "QueriesReport",
    "QueryModel",
    "QuerySettings",
    "Recommendation",
    "RetrievalSet",
    "Splitter",
    "TokenCounter",
    "Verdict",
    "WeightPath",
    "Whitening",
    "best_share",
    "compare",
    "format_verdict",
    "interpolate_models",
    "make_queries",
    "path_scores",
    "rank_queries",
    "recommend",
    "write_passages",
    "write_whitened",
]
