"""An encoder's scores on evaluation folders."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from embeddings.common.log import logger
from embeddings.evaluation.classification import logistic_regression_scores
from embeddings.evaluation.clustering import kmeans_v_measure
from embeddings.evaluation.folders import (
    ClassificationFolder,
    ClusteringFolder,
    EvaluationFolder,
    RetrievalFolder,
    SimilarityFolder,
    find_evaluation_folders,
    read_evaluation_folder,
)
from embeddings.evaluation.metrics import retrieval_metrics, spearman
from embeddings.inference.choose_context import require_context_size, sample_context
from embeddings.inference.search import search_top_k, unit_rows

if TYPE_CHECKING:
    from embeddings.inference.context import Context
    from embeddings.inference.encoder import Encoder

CUTOFFS = (10, 100)


@dataclass(frozen=True)
class EvaluationResult:
    """Scores of one folder.

    Attributes:
        name: The folder, as it is called in a table.
        kind: `retrieval`, `sts`, `classification` or `clustering`.
        metrics: Values from 0 to 1 (rank correlation: from -1), the main one first: `ndcg_at_10`, `cosine_spearman`,
            `accuracy`, `v_measure`.
        counts: What was counted: `num_queries`, `num_documents`, `num_skipped`, …
        seconds: Time of encoding and scoring.
    """

    name: str
    kind: str
    metrics: dict[str, float]
    counts: dict[str, int]
    seconds: float

    @property
    def main_metric(self) -> str:
        """The name of the metric a table shows."""
        return next(iter(self.metrics))


def evaluate_folder(
    encoder: "Encoder",
    folder: str | PathLike[str] | EvaluationFolder,
    *,
    name: str | None = None,
    prompt_name: str | None = None,
    seed: int = 0,
    context_size: int | None = None,
    context_seed: int = 0,
) -> EvaluationResult:
    """The scores of an encoder on one evaluation folder.

    Every kind works on vectors of unit length. Retrieval ranks all documents by cosine, with the model's `query` prompt
    before queries and its `document` prompt before documents. Similarity is Spearman's correlation of the cosine with
    the score. Classification is logistic regression, clustering is k-means.

    Args:
        encoder: The model.
        folder: A folder (see `read_evaluation_folder`), or what was read from one.
        name: What to call it; None for the folder's own name.
        prompt_name: Prompt before queries (retrieval) or before every text (the other kinds), None for the default.
        seed: Seed of the k-means starts.
        context_size: Documents that a contextual model reads every text behind, drawn from the folder's own corpus,
            never from its queries: the documents of a retrieval folder, the training texts of a classification, all
            texts of the other kinds. None for no context.
        context_seed: Seed of that draw.

    Raises:
        InputError: If the folder cannot be used; one line names file and row.
        OptionError: If the model has no such prompt, or takes no context or none of this size.
    """
    if isinstance(folder, str | PathLike):
        name = Path(folder).resolve().name if name is None else name
        folder = read_evaluation_folder(folder)
    start = time.perf_counter()
    context = None
    if context_size is not None:
        context = sample_context(encoder, corpus_texts(folder), context_size, context_seed)
    match folder:
        case RetrievalFolder():
            metrics, counts, _ = score_retrieval(encoder, folder, prompt_name, context)
        case SimilarityFolder():
            metrics, counts = _score_similarity(encoder, folder, prompt_name, context)
        case ClassificationFolder():
            metrics, counts = _score_classification(encoder, folder, prompt_name, context)
        case ClusteringFolder():
            metrics, counts = _score_clustering(encoder, folder, prompt_name, seed, context)
    if context is not None:
        counts["num_context"] = len(context)
    return EvaluationResult(name or folder.kind, folder.kind, metrics, counts, time.perf_counter() - start)


def evaluate_folders(
    encoder: "Encoder",
    roots: Iterable[str | PathLike[str]],
    *,
    prompt_name: str | None = None,
    seed: int = 0,
    context_size: int | None = None,
    context_seed: int = 0,
) -> list[EvaluationResult]:
    """The scores on every evaluation folder at or below the given ones, in order.

    All folders are read before the first is scored, so that a mistake in the last one does not cost the work on the
    others. Each contextual score takes its context from its own folder (see `evaluate_folder`).

    Raises:
        InputError: If a root holds no evaluation data, or a row cannot be used.
    """
    if context_size is not None:
        require_context_size(encoder, context_size)
    paths = [(_table_name(Path(root), path), path) for root in roots for path in find_evaluation_folders(root)]
    for _, path in paths:
        read_evaluation_folder(path)
    results = []
    for name, path in paths:
        results.append(
            evaluate_folder(
                encoder,
                path,
                name=name,
                prompt_name=prompt_name,
                seed=seed,
                context_size=context_size,
                context_seed=context_seed,
            )
        )
        logger.info("%s: %s %.4f", name, results[-1].main_metric, results[-1].metrics[results[-1].main_metric])
    return results


def format_results(results: Sequence[EvaluationResult]) -> str:
    """The results as a text table, one row a folder: the kind, the metrics, the seconds."""
    rows = [("data", "kind", "scores", "seconds")]
    for result in results:
        scores = "  ".join(f"{name} {value:.4f}" for name, value in result.metrics.items())
        rows.append((result.name, result.kind, scores, f"{result.seconds:.1f}"))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


class RetrievalRun(NamedTuple):
    """Metrics, counts, and the unit vectors of the documents, (N, D) float32, for whoever searches them next."""

    metrics: dict[str, float]
    counts: dict[str, int]
    document_ND: npt.NDArray[np.float32]


def corpus_texts(folder: EvaluationFolder) -> Sequence[str]:
    """The texts of a folder that its context is drawn from: never a query of a retrieval, never a text to classify."""
    match folder:
        case RetrievalFolder():
            return folder.documents
        case SimilarityFolder():
            return [*folder.first, *folder.second]
        case ClassificationFolder():
            return folder.train_texts
        case ClusteringFolder():
            return folder.texts


def score_retrieval(
    encoder: "Encoder", folder: RetrievalFolder, prompt_name: str | None = None, context: "Context | None" = None
) -> RetrievalRun:
    """The scores of an encoder on a retrieval folder (see `evaluate_folder`)."""
    query_QD = unit_rows(encoder.encode(folder.queries, prompt_name, context, role="query"))
    document_ND = unit_rows(encoder.encode(folder.documents, None, context, role="document"))
    found = search_top_k(query_QD, document_ND, max(CUTOFFS), encoder.device)
    scores = retrieval_metrics(found.index_QK, folder.judgments, CUTOFFS)
    counts = {
        "num_queries": scores.num_queries,
        "num_documents": len(folder.documents),
        "num_skipped": folder.num_skipped,
    }
    return RetrievalRun(scores.metrics, counts, document_ND)


def _score_similarity(
    encoder: "Encoder", folder: SimilarityFolder, prompt_name: str | None, context: "Context | None"
) -> tuple[dict[str, float], dict[str, int]]:
    vectors = encoder.encode([*folder.first, *folder.second], prompt_name, context)
    first_ND, second_ND = np.split(unit_rows(vectors), 2)
    cosine_N = np.einsum("nd,nd->n", first_ND, second_ND, dtype=np.float64)
    return {"cosine_spearman": spearman(cosine_N, folder.score_N)}, {"num_pairs": len(folder.first)}


def _score_classification(
    encoder: "Encoder", folder: ClassificationFolder, prompt_name: str | None, context: "Context | None"
) -> tuple[dict[str, float], dict[str, int]]:
    train_ND = unit_rows(encoder.encode(folder.train_texts, prompt_name, context))
    test_ND = unit_rows(encoder.encode(folder.test_texts, prompt_name, context))
    metrics = logistic_regression_scores(train_ND, folder.train_labels, test_ND, folder.test_labels)
    counts = {
        "num_train": len(folder.train_texts),
        "num_test": len(folder.test_texts),
        "num_labels": len(set(folder.train_labels)),
    }
    return metrics, counts


def _score_clustering(
    encoder: "Encoder", folder: ClusteringFolder, prompt_name: str | None, seed: int, context: "Context | None"
) -> tuple[dict[str, float], dict[str, int]]:
    vector_ND = unit_rows(encoder.encode(folder.texts, prompt_name, context))
    metrics = kmeans_v_measure(vector_ND, folder.labels, seed=seed)
    return metrics, {"num_texts": len(folder.texts), "num_labels": len(set(folder.labels))}


def _table_name(root: Path, path: Path) -> str:
    """The root's own name, and below it the path of the folder."""
    return "/".join((root.resolve().name, *path.relative_to(root).parts))
