"""Floor 3: evaluation of models on retrieval, similarity and the tasks of mteb."""

from embeddings.evaluation.bootstrap import Difference, paired_bootstrap
from embeddings.evaluation.folders import (
    EvaluationFolder,
    Qrels,
    RetrievalFolder,
    find_evaluation_folders,
    read_evaluation_folder,
    read_retrieval_folder,
    retrieval_metrics,
    spearman,
)
from embeddings.evaluation.hybrid import HybridResult, evaluate_hybrid, format_hybrid
from embeddings.evaluation.runner import (
    EvaluationResult,
    RetrievalRun,
    evaluate_folder,
    evaluate_folders,
    evaluate_widths,
    format_results,
    score_retrieval,
)

__all__ = [
    "Difference",
    "EvaluationFolder",
    "EvaluationResult",
    "HybridResult",
    "Qrels",
    "RetrievalFolder",
    "RetrievalRun",
    "evaluate_folder",
    "evaluate_folders",
    "evaluate_hybrid",
    "evaluate_widths",
    "find_evaluation_folders",
    "format_hybrid",
    "format_results",
    "paired_bootstrap",
    "read_evaluation_folder",
    "read_retrieval_folder",
    "retrieval_metrics",
    "score_retrieval",
    "spearman",
]
