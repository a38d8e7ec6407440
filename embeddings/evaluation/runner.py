"""An encoder's scores on evaluation folders."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from embeddings.common.errors import OptionError
from embeddings.common.process import logger
from embeddings.common.text import TextRole
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
from embeddings.evaluation.pair_classification import PairClassificationFolder, pair_classification_metrics
from embeddings.evaluation.reranking import RerankingFolder, reranking_metrics
from embeddings.evaluation.summarisation import SummarisationFolder, summarisation_metrics
from embeddings.evaluation.task_prompts import TASK_TYPES, task_prompt
from embeddings.inference.context import require_context_size, sample_context
from embeddings.inference.search import search_top_k
from embeddings.inference.vectors import unit_rows

if TYPE_CHECKING:
    from embeddings.inference.encoder import Context, Encoder

CUTOFFS = (10, 100)


@dataclass(frozen=True)
class EvaluationResult:
    """Scores of one folder.

    Attributes:
        name: The folder, as it is called in a table.
        kind: `retrieval`, `reranking`, `sts`, `pair_classification`, `classification`, `clustering` or `summarisation`.
        metrics: Values from 0 to 1 (rank correlation: from -1), the main one first: `ndcg_at_10`, `cosine_spearman`,
            `accuracy`, `v_measure`, `map_at_1000`, `cosine_ap`.
        counts: What was counted: `num_queries`, `num_documents`, `num_skipped`, …
        seconds: Time of encoding and scoring; of several widths each counts the encoding that they share.
        dimensions: How many of the first numbers of each vector were compared.
    """

    name: str
    kind: str
    metrics: dict[str, float]
    counts: dict[str, int]
    seconds: float
    dimensions: int | None = None

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

    Every kind works on vectors of unit length, and the model's prompts hold as in mteb (`task_prompt`): `query` and
    `document` in retrieval and reranking, that of the kind (`STS`) in the others, and none where there is no such one.
    Retrieval ranks all documents by cosine; reranking orders each query's candidates in this way.
    Similarity is Spearman's correlation of the cosine with the score, summarisation the same within each text, of the
    best cosine of a machine's summary with one of people's. Pair classification is the average precision of the cosine,
    classification logistic regression, clustering k-means.

    Args:
        encoder: The model.
        folder: A folder (see `read_evaluation_folder`), or what was read from one.
        name: What to call it; None for the folder's own name.
        prompt_name: Prompt before queries (retrieval, reranking) or before every text (the other kinds), None for the
            model's own.
        seed: Seed of the k-means starts.
        context_size: Documents that a contextual model reads every text behind, drawn from the folder's own corpus,
            never from its queries: the documents of a retrieval or reranking folder, the training texts of a
            classification, all texts of the other kinds. None for no context.
        context_seed: Seed of that draw.

    Raises:
        InputError: If the folder cannot be used; one line names file and row.
        OptionError: If the model has no such prompt, or takes no context or none of this size.
    """
    return evaluate_widths(
        encoder,
        folder,
        [encoder.embedding_dim],
        name=name,
        prompt_name=prompt_name,
        seed=seed,
        context_size=context_size,
        context_seed=context_seed,
    )[0]


def evaluate_widths(
    encoder: "Encoder",
    folder: str | PathLike[str] | EvaluationFolder,
    widths: Sequence[int],
    *,
    name: str | None = None,
    prompt_name: str | None = None,
    seed: int = 0,
    context_size: int | None = None,
    context_seed: int = 0,
) -> list[EvaluationResult]:
    """The scores on one folder at several widths, from one encoding: vectors are cut, then brought to unit length.

    Args:
        encoder: The model.
        folder: As in `evaluate_folder`, and so are the options that are not named here.
        widths: How many of the first numbers of each vector are compared, one result each.

    Raises:
        InputError: If the folder cannot be used.
        OptionError: If there is no width or an impossible one, or as `evaluate_folder`.
    """
    check_widths(encoder, widths)
    if isinstance(folder, str | PathLike):
        name = Path(folder).resolve().name if name is None else name
        folder = read_evaluation_folder(folder)
    start = time.perf_counter()
    context = None
    if context_size is not None:
        context = sample_context(encoder, corpus_texts(folder), context_size, context_seed)
    whole = _encode(encoder, folder, prompt_name, context, name or "")
    encoding_seconds = time.perf_counter() - start
    results = []
    for width in widths:
        start = time.perf_counter()
        vectors = [unit_rows(vector_ND[:, :width]) for vector_ND in whole]
        match folder:
            case RetrievalFolder():
                metrics, counts, _ = _score_retrieval(folder, vectors, encoder.device)
            case RerankingFolder():
                metrics, counts = _score_reranking(folder, vectors)
            case SimilarityFolder() | PairClassificationFolder():
                metrics, counts = _score_pairs(folder, vectors)
            case SummarisationFolder():
                metrics, counts = _score_summaries(folder, vectors)
            case ClassificationFolder():
                metrics, counts = _score_classification(folder, vectors)
            case ClusteringFolder():
                metrics, counts = _score_clustering(folder, vectors, seed)
        if context is not None:
            counts["num_context"] = len(context)
        seconds = encoding_seconds + time.perf_counter() - start
        results.append(EvaluationResult(name or folder.kind, folder.kind, metrics, counts, seconds, width))
    return results


def check_widths(encoder: "Encoder", widths: Sequence[int]) -> None:
    """Check that an encoder's vectors can be cut to these widths.

    Raises:
        OptionError: If there is no width, or an impossible one.
    """
    if not widths or not all(1 <= width <= encoder.embedding_dim for width in widths):
        rule = f"must be from 1 to the {encoder.embedding_dim} that the model's vectors have"
        given = widths[0] if len(widths) == 1 else list(widths)
        raise OptionError("dimensions", given, rule, "leave it out for all")


def evaluate_folders(
    encoder: "Encoder",
    roots: Iterable[str | PathLike[str]],
    *,
    prompt_name: str | None = None,
    seed: int = 0,
    context_size: int | None = None,
    context_seed: int = 0,
    widths: Sequence[int] | None = None,
) -> list[EvaluationResult]:
    """The scores on every evaluation folder at or below the given ones, in order, at each of `widths` (None: whole).

    All folders are read before the first is scored, so that a mistake in the last one does not cost the work on the
    others. Each contextual score takes its context from its own folder (see `evaluate_folder`).

    Raises:
        InputError: If a root holds no evaluation data, or a row cannot be used.
        OptionError: As `evaluate_widths`.
    """
    if context_size is not None:
        require_context_size(encoder, context_size)
    widths = [encoder.embedding_dim] if widths is None else widths
    check_widths(encoder, widths)
    paths = [(_table_name(Path(root), path), path) for root in roots for path in find_evaluation_folders(root)]
    for _, path in paths:
        read_evaluation_folder(path)
    results: list[EvaluationResult] = []
    for name, path in paths:
        found = evaluate_widths(
            encoder,
            path,
            widths,
            name=name,
            prompt_name=prompt_name,
            seed=seed,
            context_size=context_size,
            context_seed=context_seed,
        )
        for result in found:
            logger.info("%s: %s %.4f", name, result.main_metric, result.metrics[result.main_metric])
        results += found
    return results


def format_results(results: Sequence[EvaluationResult]) -> str:
    """The results as a text table, one row a folder and width: the kind, the metrics, the seconds."""
    rows = [("data", "kind", "scores", "seconds")]
    several = len({result.dimensions for result in results}) > 1
    for result in results:
        scores = "  ".join(f"{name} {value:.4f}" for name, value in result.metrics.items())
        name = f"{result.name} [{result.dimensions}]" if several else result.name
        rows.append((name, result.kind, scores, f"{result.seconds:.1f}"))
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
        case RetrievalFolder() | RerankingFolder():
            return folder.documents
        case SimilarityFolder() | PairClassificationFolder():
            return [*folder.first, *folder.second]
        case SummarisationFolder():
            return [*chain.from_iterable((*folder.human_summaries, *folder.machine_summaries))]
        case ClassificationFolder():
            return folder.train_texts
        case ClusteringFolder():
            return folder.texts


def score_retrieval(
    encoder: "Encoder", folder: RetrievalFolder, prompt_name: str | None = None, context: "Context | None" = None
) -> RetrievalRun:
    """The scores of an encoder on a retrieval folder (see `evaluate_folder`)."""
    vectors = [unit_rows(vector_ND) for vector_ND in _encode(encoder, folder, prompt_name, context)]
    return _score_retrieval(folder, vectors, encoder.device)


def _encode(
    encoder: "Encoder", folder: EvaluationFolder, prompt_name: str | None, context: "Context | None", name: str = ""
) -> list[npt.NDArray[np.float32]]:
    """The vectors that a folder is scored by, (N, D) float32 each: queries and documents, or training and test."""

    def encode(texts: Sequence[str], role: TextRole | None = None) -> npt.NDArray[np.float32]:
        """The vectors of texts, each behind the prompt that goes before texts of its role."""
        text = encoder.embedder.text
        if prompt_name is not None and role != "document":
            prompt = text.prompt(prompt_name, "query")
        else:
            # A folder's task is named with dots (see `folder_tasks`).
            prompt = task_prompt(text.prompts, name.replace("/", "."), TASK_TYPES[folder.kind], role)
        return encoder.encode(texts, context=context, role=role or "document", prompt=prompt)

    match folder:
        case RetrievalFolder() | RerankingFolder():
            return [encode(folder.queries, "query"), encode(folder.documents, "document")]
        case SimilarityFolder() | PairClassificationFolder():
            return np.split(encode([*folder.first, *folder.second]), 2)
        case SummarisationFolder():
            num_human = sum(map(len, folder.human_summaries))
            return np.split(encode(corpus_texts(folder)), [num_human])
        case ClassificationFolder():
            return [encode(folder.train_texts), encode(folder.test_texts)]
        case ClusteringFolder():
            return [encode(folder.texts)]


def _score_retrieval(
    folder: RetrievalFolder, vectors: Sequence[npt.NDArray[np.float32]], device: torch.device
) -> RetrievalRun:
    query_QD, document_ND = vectors
    found = search_top_k(query_QD, document_ND, max(CUTOFFS), device)
    scores = retrieval_metrics(found.index_QK, folder.judgments, CUTOFFS)
    counts = {
        "num_queries": scores.num_queries,
        "num_documents": len(folder.documents),
        "num_skipped": folder.num_skipped,
    }
    return RetrievalRun(scores.metrics, counts, document_ND)


def _score_reranking(
    folder: RerankingFolder, vectors: Sequence[npt.NDArray[np.float32]]
) -> tuple[dict[str, float], dict[str, int]]:
    counts = {"num_queries": len(folder.queries), "num_documents": len(folder.documents)}
    return reranking_metrics(folder, *vectors), counts


def _score_pairs(
    folder: SimilarityFolder | PairClassificationFolder, vectors: Sequence[npt.NDArray[np.float32]]
) -> tuple[dict[str, float], dict[str, int]]:
    first_ND, second_ND = vectors
    cosine_N = np.einsum("nd,nd->n", first_ND, second_ND, dtype=np.float64)
    if isinstance(folder, SimilarityFolder):
        metrics = {"cosine_spearman": spearman(cosine_N, folder.score_N)}
    else:
        metrics = pair_classification_metrics(cosine_N, folder.label_N)
    return metrics, {"num_pairs": len(folder.first)}


def _score_summaries(
    folder: SummarisationFolder, vectors: Sequence[npt.NDArray[np.float32]]
) -> tuple[dict[str, float], dict[str, int]]:
    metrics, num_skipped = summarisation_metrics(folder, *vectors)
    return metrics, {"num_texts": len(folder.relevance), "num_skipped": num_skipped}


def _score_classification(
    folder: ClassificationFolder, vectors: Sequence[npt.NDArray[np.float32]]
) -> tuple[dict[str, float], dict[str, int]]:
    train_ND, test_ND = vectors
    metrics = logistic_regression_scores(train_ND, folder.train_labels, test_ND, folder.test_labels)
    counts = {
        "num_train": len(folder.train_texts),
        "num_test": len(folder.test_texts),
        "num_labels": len(set(folder.train_labels)),
    }
    return metrics, counts


def _score_clustering(
    folder: ClusteringFolder, vectors: Sequence[npt.NDArray[np.float32]], seed: int
) -> tuple[dict[str, float], dict[str, int]]:
    (vector_ND,) = vectors
    metrics = kmeans_v_measure(vector_ND, folder.labels, seed=seed)
    return metrics, {"num_texts": len(folder.texts), "num_labels": len(set(folder.labels))}


def _table_name(root: Path, path: Path) -> str:
    """The root's own name, and below it the path of the folder."""
    return "/".join((root.resolve().name, *path.relative_to(root).parts))
