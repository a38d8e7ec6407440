"""Scores of dense search, BM25 and their fusion side by side on retrieval folders."""

import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from os import PathLike
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from embeddings.common.io import check_disk_space
from embeddings.common.text import format_table
from embeddings.evaluation.bootstrap import Difference, paired_bootstrap
from embeddings.evaluation.folders import Qrels, RetrievalFolder, query_ndcg, read_retrieval_folder, retrieval_metrics
from embeddings.evaluation.runner import (
    CUTOFFS,
    EvaluationResult,
    FolderEncoder,
    Metrics,
    checked_folders,
    copied_tiles,
    folder_context,
)
from embeddings.inference.bm25 import ANY_LANGUAGE, BM25, tokenizer
from embeddings.inference.context import require_context_size
from embeddings.inference.encoder import Encoder, Vectors, check_widths
from embeddings.inference.hybrid import WEIGHT, FusionRule, fused_top_k
from embeddings.inference.search import CorpusSearch, TopK, search_top_k
from embeddings.inference.vector_folder import DOCUMENT_TILE

Rows = npt.NDArray[np.int64]
# The weights of BM25 among which one is chosen.
WEIGHTS = tuple(step / 10 for step in range(1, 10))


class TunedWeight(NamedTuple):
    """A fusion, the best weight of BM25 on some queries, and its nDCG@10 - that of the default weight."""

    rule: FusionRule
    best: float
    difference: Difference
    num_queries: int

    def __str__(self) -> str:
        choice = f"weight {self.rule.weight:g} of BM25, chosen on {self.num_queries} queries"
        if self.best == WEIGHT:
            return f"{choice}: no other is better"
        return f"{choice}: nDCG@10 of {self.best:g} is {self.difference} compared with {WEIGHT:g}"


def tune_weight(rule: FusionRule, qrels: Qrels, rank: Callable[[Sequence[FusionRule]], list[Rows]]) -> TunedWeight:
    """The fusion with the weight from 0.1 to 0.9 of the highest nDCG@10, if it is significantly above the default's.

    Otherwise the default stays, because the best of nine weights on few queries is often the best by chance. Of equal
    ones the nearest to the default is compared. `qrels` should not be those of a test; `rank` returns the documents of
    each query by each fusion, best first, (Q, K).
    """
    ranked = rank([replace(rule, weight=weight) for weight in WEIGHTS])
    ndcg = {weight: query_ndcg(row_QK, qrels) for weight, row_QK in zip(WEIGHTS, ranked, strict=True)}
    best = max(WEIGHTS, key=lambda weight: (float(ndcg[weight].mean()), -abs(weight - WEIGHT)))
    difference = paired_bootstrap(ndcg[best], ndcg[WEIGHT])
    chosen = best if difference.low > 0 else WEIGHT
    return TunedWeight(replace(rule, weight=chosen), best, difference, len(ndcg[best]))


def tune_search(searched: CorpusSearch, words: BM25, folder: RetrievalFolder) -> TunedWeight:
    """The best weight for searching an encoded corpus, on judged queries for the same documents in the same order."""
    query_QD = searched.query_vectors(folder.queries)

    def rank(rules: Sequence[FusionRule]) -> list[Rows]:
        work: dict[str, Any] = {"tiles": searched.tiles, "nearest": searched.nearest}
        device = searched.encoder.device
        found = fused_top_k(folder.queries, query_QD, words, min(CUTOFFS), rules, device=device, **work)
        return [each.index_QK for each in found]

    return tune_weight(FusionRule.of(compares_all=searched.compares_all), folder.qrels, rank)


@dataclass(frozen=True)
class FolderSearch:
    """A retrieval folder whose documents are ranked for its queries by inner products; ties as in trec_eval."""

    folder: RetrievalFolder
    query_QD: Vectors
    tiles: Callable[[], Iterable[Vectors]]  # the vectors of all documents, in blocks
    device: torch.device

    def nearest(self, query_QD: Vectors, top_k: int) -> TopK:
        return search_top_k(query_QD, self.tiles(), top_k, self.device, self.folder.tie_order_N)

    def dense(self) -> Rows:
        """The best 100 documents of each query by its vector, (Q, K)."""
        return self.nearest(self.query_QD, max(CUTOFFS)).index_QK

    def words(self, words: BM25) -> Rows:
        """The best 100 documents of each query by BM25, (Q, K)."""
        return words.search(self.folder.queries, max(CUTOFFS), self.folder.tie_order_N)[0]

    def fused(self, words: BM25, rules: Sequence[FusionRule]) -> list[Rows]:
        """The best 100 documents of each query by both, (Q, K), for each rule."""
        work: dict[str, Any] = {"tiles": self.tiles, "nearest": self.nearest, "device": self.device}
        work["tie_order_N"] = self.folder.tie_order_N
        found = fused_top_k(self.folder.queries, self.query_QD, words, max(CUTOFFS), rules, **work)
        return [each.index_QK for each in found]


@dataclass(frozen=True)
class HybridResult:
    """Scores of dense search, BM25 and their fusion on one retrieval folder.

    Attributes:
        dense: The result of `evaluate_folder`; its seconds include the other two searches.
        bm25: Metrics of BM25.
        hybrid: Metrics of the fusion.
        difference: nDCG@10 of hybrid - dense with its 95 % interval over the queries.
        rule: How scores were fused.
        language: Language of the tokens of BM25.
        tuned: How the weight was chosen, if it was.
    """

    dense: EvaluationResult
    bm25: Metrics
    hybrid: Metrics
    difference: Difference
    rule: FusionRule
    language: str
    tuned: TunedWeight | None = None

    def row(self) -> dict[str, Any]:
        """The result as `evaluate --output` writes it: that of the dense search, and `hybrid` with all else."""
        difference = {"metric": "ndcg_at_10", **self.difference._asdict()}
        other = {"bm25": self.bm25, "metrics": self.hybrid, "difference": difference, "language": self.language}
        other |= {} if self.tuned is None else {"tuned": self.tuned.difference._asdict()}
        rule: dict[str, Any] = {"fusion": "rrf"} if self.rule.fusion == "rrf" else asdict(self.rule)
        return {**asdict(self.dense), "hybrid": {**rule, **other}}


def evaluate_hybrid(
    encoder: Encoder,
    roots: Iterable[str | PathLike[str]],
    rule: FusionRule | None = None,
    language: str = ANY_LANGUAGE,
    *,
    prompt_name: str | None = None,
    context_size: int | None = None,
    context_seed: int = 0,
    widths: Sequence[int] | None = None,
    tune: bool = False,
) -> list[HybridResult]:
    """The scores on every retrieval folder at or below `roots`, in order, at each of `widths`.

    The vectors of a folder's documents are in a temporary file while it is scored.

    Args:
        encoder: The model.
        roots: Retrieval folders, or folders of them; all are read before the first is scored.
        rule: How scores are fused; None for z-scores with weight 0.2 of BM25.
        language: Language of the texts (see `bm25.tokenizer`).
        widths: Numbers of leading dimensions to compare; None for full width.
        tune: Whether the weight is chosen on the queries of each folder, for each width.

    The other arguments are those of `evaluate_widths`.

    Raises:
        InputError: If a folder has data of another kind.
    """
    rule, tokenize = rule or FusionRule(), tokenizer(language)
    widths = [encoder.embedding_dim] if widths is None else widths
    check_widths(encoder, widths)
    if context_size is not None:
        require_context_size(encoder, context_size)
    results: list[HybridResult] = []
    for name, folder in checked_folders(roots, read_retrieval_folder):
        words, start = BM25(folder.documents, tokenize), time.perf_counter()
        context = folder_context(encoder, folder, context_size, context_seed)
        query_QD, tiles = FolderEncoder(encoder, name, prompt_name, context).query_and_tiles(folder)
        with _stored(tiles, len(folder.documents), query_QD.shape[1]) as document_ND:
            encoding_seconds = time.perf_counter() - start
            for width in widths:
                start = time.perf_counter()
                of_width = partial(_comparable_tiles, encoder, document_ND[:, :width])
                search = FolderSearch(folder, encoder.comparable(query_QD[:, :width]), of_width, encoder.device)
                tuned = tune_weight(rule, folder.qrels, partial(search.fused, words)) if tune else None
                used = rule if tuned is None else tuned.rule
                rankings = search.dense(), search.words(words), *search.fused(words, [used])
                dense, of_words, fused = (retrieval_metrics(row_QK, folder.qrels, CUTOFFS) for row_QK in rankings)
                dense_Q, _, hybrid_Q = (query_ndcg(row_QK, folder.qrels) for row_QK in rankings)
                counts = {**folder.counts, "num_skipped": folder.num_skipped}
                if context_size is not None:
                    counts["num_context"] = context_size
                seconds = encoding_seconds + time.perf_counter() - start
                result = EvaluationResult(name, folder.kind, dense, counts, seconds, width)
                difference = paired_bootstrap(hybrid_Q, dense_Q)
                results.append(HybridResult(result, of_words, fused, difference, used, language, tuned))
    return results


@contextmanager
def _stored(tiles: Iterable[Vectors], num_rows: int, width: int) -> Iterator[Vectors]:
    """The vectors of all tiles in a temporary file, mapped into memory, (N, D) float32."""
    check_disk_space(tempfile.gettempdir(), 4 * num_rows * width)
    with tempfile.TemporaryFile() as file:
        vector_ND = np.memmap(file, np.float32, "w+", shape=(num_rows, width))
        for _ in copied_tiles(tiles, vector_ND):
            pass
        yield vector_ND


def _comparable_tiles(encoder: Encoder, document_ND: Vectors) -> Iterator[Vectors]:
    for start in range(0, len(document_ND), DOCUMENT_TILE):
        yield encoder.comparable(np.array(document_ND[start : start + DOCUMENT_TILE]))


def format_hybrid(results: Sequence[HybridResult]) -> str:
    """The results as a text table of nDCG@10, one row per folder and width, and a line on the fusion."""
    rows: list[tuple[str, ...]] = [
        ("data", "BM25", "dense", "hybrid", "hybrid - dense", "queries", "skipped", "seconds")
    ]
    several = len({result.dense.dimensions for result in results}) > 1
    for result in results:
        dense = result.dense
        values = (f"{metrics['ndcg_at_10']:.4f}" for metrics in (result.bm25, dense.metrics, result.hybrid))
        name = f"{dense.name} [{dense.dimensions}]" if several else dense.name
        counts = (str(dense.counts[key]) for key in ("num_queries", "num_skipped"))
        rows.append((name, *values, str(result.difference), *counts, f"{dense.seconds:.1f}"))
    rule, language = results[0].rule, results[0].language
    is_fixed = rule.fusion != "rrf" and results[0].tuned is None
    weight = f", weight {rule.weight:g} of BM25" if is_fixed else ""
    note = f"ndcg_at_10; fusion {rule.fusion}{weight}, language {language}; 95 % bootstrap intervals over the queries"
    tuned = [f"{row[0]}: {result.tuned}" for row, result in zip(rows[1:], results, strict=True) if result.tuned]
    return "\n".join([format_table(rows, "<"), note, *tuned])
