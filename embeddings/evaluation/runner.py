"""Scores of an encoder on evaluation folders: retrieval and similarity are computed here, the other kinds by mteb."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from embeddings.common.io import lists_of
from embeddings.common.process import logger
from embeddings.common.text import TextRole, format_table
from embeddings.evaluation.folders import (
    EvaluationFolder,
    RetrievalFolder,
    TaskFolder,
    find_evaluation_folders,
    read_evaluation_folder,
    retrieval_metrics,
    spearman,
)
from embeddings.evaluation.mteb_library import load_mteb, task_prompt
from embeddings.inference.context import require_context_size, sample_context
from embeddings.inference.encoder import TEXTS_PER_BLOCK, Context, Encoder, Vectors, check_widths, unit_rows
from embeddings.inference.search import TopKSearch
from embeddings.inference.vector_folder import DOCUMENT_TILE

CUTOFFS = (10, 100)
# The kinds that are scored without mteb.
_OWN_KINDS = {"retrieval", "sts"}
# Texts of several folders that are kept after they were checked; the others are read again.
_MAX_KEPT = 200_000

Metrics = dict[str, float]
Counts = dict[str, int]


@dataclass(frozen=True)
class EvaluationResult:
    """Scores of one folder.

    Attributes:
        name: Name of the folder in tables.
        kind: The kind of the folder, such as `retrieval`.
        metrics: Values from 0 to 1 (rank correlation: from -1), the main metric first.
        counts: Sizes of the data: `num_queries`, `num_documents`, `num_skipped` (queries without a judgment), …
        seconds: Time of encoding, which several widths share, and of scoring.
        dimensions: Number of leading dimensions that were compared.
    """

    name: str
    kind: str
    metrics: dict[str, float]
    counts: dict[str, int]
    seconds: float
    dimensions: int | None = None

    @property
    def main_metric(self) -> str:
        """The name of the metric that tables show."""
        return next(iter(self.metrics))


class RetrievalRun(NamedTuple):
    """Metrics, and the vectors of the documents as encoded, (N, D) float32."""

    metrics: Metrics
    document_ND: Vectors


def evaluate_folder(
    encoder: Encoder, folder: str | PathLike[str] | EvaluationFolder, **options: Any
) -> EvaluationResult:
    """The scores of an encoder on one evaluation folder at full width; `options` are those of `evaluate_widths`."""
    return evaluate_widths(encoder, folder, [encoder.embedding_dim], **options)[0]


def evaluate_widths(
    encoder: Encoder,
    folder: str | PathLike[str] | EvaluationFolder,
    widths: Sequence[int],
    *,
    name: str | None = None,
    prompt_name: str | None = None,
    context_size: int | None = None,
    context_seed: int = 0,
) -> list[EvaluationResult]:
    """The scores on one folder at several widths, from one encoding: vectors are truncated, then normalised.

    Prompts are chosen as in mteb (`task_prompt`). Retrieval ranks all documents by the model's scores
    (`Encoder.similarity`), and similarity correlates cosines with human scores. mteb computes the other kinds.

    Args:
        encoder: The model.
        folder: A folder (see `read_evaluation_folder`), or the data read from one.
        widths: Numbers of leading dimensions to compare, one result each.
        name: Name for the results; None for the name of the folder.
        prompt_name: Prompt before queries (retrieval, reranking) or every text (others); None for the model's choice.
        context_size: Number of context documents for a contextual model, drawn from the folder's corpus, never from
            queries or texts to classify; None for no context.
        context_seed: Seed of that draw.
    """
    check_widths(encoder, widths)
    if isinstance(folder, str | PathLike):
        name = Path(folder).resolve().name if name is None else name
        folder = read_evaluation_folder(folder, encoder.show_progress)
    if context_size is not None:
        require_context_size(encoder, context_size)
    name = name or folder.kind
    start = time.perf_counter()
    scored: list[tuple[Metrics, Counts, float]]
    if folder.kind not in _OWN_KINDS:
        load_mteb()
        from embeddings.evaluation.task_runs import TaskSettings, score_folder

        settings = TaskSettings(prompt_name, context_size=context_size, context_seed=context_seed)
        metrics_by_width = score_folder(encoder, name, folder, widths, settings)
        scored = [(metrics, folder.counts, time.perf_counter() - start) for metrics in metrics_by_width]
    else:
        context = folder_context(encoder, folder, context_size, context_seed)
        texts = FolderEncoder(encoder, name, prompt_name, context)
        if isinstance(folder, RetrievalFolder):
            scored = _score_retrieval(encoder, folder, *texts.query_and_tiles(folder), widths)
        else:
            scored = _score_pairs(texts, folder, widths)
        encoding_seconds = time.perf_counter() - start - sum(seconds for *_, seconds in scored)
        scored = [(metrics, counts, encoding_seconds + seconds) for metrics, counts, seconds in scored]
    extra = {} if context_size is None else {"num_context": context_size}
    return [
        EvaluationResult(name, folder.kind, metrics, counts | extra, seconds, width)
        for width, (metrics, counts, seconds) in zip(widths, scored, strict=True)
    ]


def evaluate_folders(
    encoder: Encoder,
    roots: Iterable[str | PathLike[str]],
    *,
    prompt_name: str | None = None,
    context_size: int | None = None,
    context_seed: int = 0,
    widths: Sequence[int] | None = None,
) -> list[EvaluationResult]:
    """The scores on every evaluation folder at or below `roots`, in order, at each of `widths` (None for full width).

    All folders are read before the first is scored, so that an error in one of them is reported at once; after the
    first 200,000 texts, later folders are read a second time. Arguments are those of `evaluate_widths`.
    """
    if context_size is not None:
        require_context_size(encoder, context_size)
    widths = [encoder.embedding_dim] if widths is None else widths
    check_widths(encoder, widths)
    results: list[EvaluationResult] = []
    options: Any = {"prompt_name": prompt_name, "context_size": context_size, "context_seed": context_seed}
    for name, folder in checked_folders(roots, partial(_read, show_progress=encoder.show_progress)):
        for result in evaluate_widths(encoder, folder, widths, name=name, **options):
            logger.info("%s: %s %.4f", name, result.main_metric, result.metrics[result.main_metric])
            results.append(result)
    return results


def _read(path: Path, show_progress: bool = False) -> EvaluationFolder:
    data = read_evaluation_folder(path, show_progress)
    if data.kind not in _OWN_KINDS:
        load_mteb()
    return data


Folder = TypeVar("Folder", bound=EvaluationFolder)


def checked_folders(
    roots: Iterable[str | PathLike[str]], read: Callable[[Path], Folder]
) -> Iterator[tuple[str, Folder]]:
    """The name and data of every evaluation folder at or below `roots`, in order; all are read before the first."""
    folders = named_folders(roots)
    # All of them may not fit in memory.
    kept, num_kept = dict[Path, Folder](), 0
    for _, path in folders:
        data = read(path)
        num_kept += len(data.context_texts)
        if len(folders) == 1 or num_kept <= _MAX_KEPT:
            kept[path] = data
        del data
    for name, path in folders:
        yield name, kept.pop(path) if path in kept else read(path)


def named_folders(roots: Iterable[str | PathLike[str]]) -> list[tuple[str, Path]]:
    """The name and path of every evaluation folder at or below `roots`, in order; of two with one name, the paths."""
    found = dict.fromkeys(
        ("/".join((Path(root).resolve().name, *path.relative_to(root).parts)), path)
        for root in roots
        for path in find_evaluation_folders(root)
    )
    names = [name for name, _ in found]
    return [(name if names.count(name) == 1 else str(path), path) for name, path in found]


def format_results(results: Sequence[EvaluationResult]) -> str:
    """The results as a text table, one row per folder and width: kind, metrics, skipped queries, seconds."""
    rows = [("data", "kind", "scores", "skipped", "seconds")]
    several = len({result.dimensions for result in results}) > 1
    for result in results:
        scores = "  ".join(f"{name} {value:.4f}" for name, value in result.metrics.items())
        name = f"{result.name} [{result.dimensions}]" if several else result.name
        skipped = str(result.counts.get("num_skipped", ""))
        rows.append((name, result.kind, scores, skipped, f"{result.seconds:.1f}"))
    return format_table(rows, "<")


def score_retrieval(encoder: Encoder, folder: RetrievalFolder, context: Context | None = None) -> RetrievalRun:
    """The scores of an encoder on a retrieval folder (see `evaluate_folder`)."""
    query_QD, tiles = FolderEncoder(encoder, context=context).query_and_tiles(folder)
    document_ND = np.empty((len(folder.documents), encoder.embedding_dim), np.float32)
    copied = copied_tiles(tiles, document_ND)
    [(metrics, _, _)] = _score_retrieval(encoder, folder, query_QD, copied, [encoder.embedding_dim])
    return RetrievalRun(metrics, document_ND)


def copied_tiles(tiles: Iterable[Vectors], document_ND: Vectors) -> Iterator[Vectors]:
    """The tiles, each of which is also copied to its rows of `document_ND`."""
    start = 0
    for tile_TD in tiles:
        document_ND[start : start + len(tile_TD)] = tile_TD
        start += len(tile_TD)
        yield tile_TD


def folder_context(encoder: Encoder, folder: EvaluationFolder, size: int | None, seed: int) -> Context | None:
    return None if size is None else sample_context(encoder, folder.context_texts, size, seed)


class FolderEncoder(NamedTuple):
    """An encoder with the name of a folder, by which prompts are chosen (see `task_prompt`), and the context."""

    encoder: Encoder
    name: str = ""
    prompt_name: str | None = None
    context: Context | None = None

    def options(self, task_type: str, role: TextRole | None = None) -> dict[str, Any]:
        """The arguments of the encoder for the texts in a role; None for sentences."""
        text = self.encoder.embedder.text
        if self.prompt_name is not None and role != "document":
            prompt = text.prompt(self.prompt_name, "query")
        else:
            # The task of a folder has dots in its name instead of slashes (see `folder_tasks`).
            prompt = task_prompt(text, self.name.replace("/", "."), task_type, role)
        return {"context": self.context, "role": role or "document", "prompt": prompt}

    def query_and_tiles(self, folder: RetrievalFolder) -> tuple[Vectors, Iterator[Vectors]]:
        """The vectors of the queries, (Q, D), and those of the documents in tiles, which are encoded on demand."""
        queries, documents = self.options("Retrieval", "query"), self.options("Retrieval", "document")
        query_QD = self.encoder.encode(folder.queries, **queries)
        blocks, per_tile = self.encoder.encode_blocks(folder.documents, **documents), DOCUMENT_TILE // TEXTS_PER_BLOCK
        return query_QD, map(np.concatenate, lists_of(blocks, per_tile))


def _score_pairs(
    texts: FolderEncoder, folder: TaskFolder, widths: Sequence[int]
) -> list[tuple[Metrics, Counts, float]]:
    """Metrics, counts and seconds at each width."""
    vector_ND = texts.encoder.encode(folder.context_texts, **texts.options("STS"))
    sides, score_N = np.split(vector_ND, 2), folder.splits["test"]["score"]
    scored = []
    for width in widths:
        start = time.perf_counter()
        unit = (unit_rows(side_ND[:, :width]) for side_ND in sides)
        cosine_N = np.einsum("nd,nd->n", *unit, dtype=np.float64)
        metrics = {"cosine_spearman": spearman(cosine_N, np.array(score_N))}
        scored.append((metrics, folder.counts, time.perf_counter() - start))
    return scored


def _score_retrieval(
    encoder: Encoder, folder: RetrievalFolder, query_QD: Vectors, tiles: Iterable[Vectors], widths: Sequence[int]
) -> list[tuple[Metrics, Counts, float]]:
    """Metrics, counts and seconds at each width; of the documents only a tile and the best are in memory."""
    searches = [
        TopKSearch(encoder.comparable(query_QD[:, :width]), max(CUTOFFS), encoder.device, folder.tie_order_N)
        for width in widths
    ]
    seconds = [0.0] * len(widths)
    for tile_TD in tiles:
        for number, (width, search) in enumerate(zip(widths, searches, strict=True)):
            start = time.perf_counter()
            search.add(encoder.comparable(tile_TD[:, :width]))
            seconds[number] += time.perf_counter() - start
    scored = []
    for search, of_tiles in zip(searches, seconds, strict=True):
        start = time.perf_counter()
        metrics = retrieval_metrics(search.result().index_QK, folder.qrels, CUTOFFS)
        counts = {**folder.counts, "num_skipped": folder.num_skipped}
        scored.append((metrics, counts, of_tiles + time.perf_counter() - start))
    return scored
