"""Floor 3: how good a model's vectors are."""

from embeddings.evaluation.folders import EvaluationFolder, find_evaluation_folders, read_evaluation_folder
from embeddings.evaluation.metrics import Judgments, RetrievalScores, retrieval_metrics, spearman
from embeddings.evaluation.runner import EvaluationResult, evaluate_folder, evaluate_folders, format_results

__all__ = [
    "EvaluationFolder",
    "EvaluationResult",
    "Judgments",
    "RetrievalScores",
    "evaluate_folder",
    "evaluate_folders",
    "find_evaluation_folders",
    "format_results",
    "read_evaluation_folder",
    "retrieval_metrics",
    "spearman",
]
