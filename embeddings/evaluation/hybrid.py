"""Scores of dense search, BM25 and their fusion side by side on retrieval folders."""

import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from os import PathLike
from typing import Any

import numpy as np
import numpy.typing as npt

from embeddings.common.io import check_disk_space
from embeddings.common.text import format_table
from embeddings.evaluation.bootstrap import Difference, paired_bootstrap
from embeddings.evaluation.folders import RetrievalFolder, query_ndcg, read_retrieval_folder, retrieval_metrics
from embeddings.evaluation.runner import CUTOFFS, EvaluationResult, Metrics, checked_folders, query_and_tiles
from embeddings.inference.bm25 import BM25, ENGLISH, tokenizer
from embeddings.inference.context import require_context_size, sample_context
from embeddings.inference.encoder import Encoder, Vectors, check_widths
from embeddings.inference.hybrid import FusionRule, fused_top_k
from embeddings.inference.search import TopK, search_top_k
from embeddings.inference.vector_folder import DOCUMENT_TILE


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
    """

    dense: EvaluationResult
    bm25: Metrics
    hybrid: Metrics
    difference: Difference
    rule: FusionRule
    language: str

    def row(self) -> dict[str, Any]:
        """The result as `evaluate --output` writes it: that of the dense search, and `hybrid` with all else."""
        difference = {"metric": "ndcg_at_10", **self.difference._asdict()}
        other = {"bm25": self.bm25, "metrics": self.hybrid, "difference": difference, "language": self.language}
        return {**asdict(self.dense), "hybrid": {**asdict(self.rule), **other}}


def evaluate_hybrid(
    encoder: Encoder,
    roots: Iterable[str | PathLike[str]],
    rule: FusionRule | None = None,
    language: str = ENGLISH,
    *,
    prompt_name: str | None = None,
    context_size: int | None = None,
    context_seed: int = 0,
    widths: Sequence[int] | None = None,
) -> list[HybridResult]:
    """The scores on every retrieval folder at or below `roots`, in order, at each of `widths`.

    The vectors of a folder's documents are in a temporary file while it is scored.

    Args:
        encoder: The model.
        roots: Retrieval folders, or folders of them; all are read before the first is scored.
        rule: How scores are fused; None for z-scores with weight 0.2 of BM25.
        language: Language of the texts (see `bm25.tokenizer`).
        prompt_name: See `evaluate_widths`.
        context_size: See `evaluate_widths`.
        context_seed: See `evaluate_widths`.
        widths: Numbers of leading dimensions to compare; None for full width.

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
        context = None
        if context_size is not None:
            context = sample_context(encoder, folder.documents, context_size, context_seed)
        query_QD, tiles = query_and_tiles(encoder, folder, prompt_name, context, name)
        with _stored(tiles, len(folder.documents), query_QD.shape[1]) as document_ND:
            encoding_seconds = time.perf_counter() - start
            for width in widths:
                start = time.perf_counter()
                rankings = _rankings(encoder, folder, query_QD[:, :width], document_ND[:, :width], words, rule)
                scores = [retrieval_metrics(row_QK, folder.qrels, CUTOFFS) for row_QK in rankings]
                dense_Q, _, hybrid_Q = (query_ndcg(row_QK, folder.qrels) for row_QK in rankings)
                counts = {**folder.counts, "num_queries": scores[0].num_queries, "num_skipped": folder.num_skipped}
                if context_size is not None:
                    counts["num_context"] = context_size
                seconds = encoding_seconds + time.perf_counter() - start
                dense, of_words, fused = (each.metrics for each in scores)
                result = EvaluationResult(name, folder.kind, dense, counts, seconds, width)
                difference = paired_bootstrap(hybrid_Q, dense_Q)
                results.append(HybridResult(result, of_words, fused, difference, rule, language))
    return results


@contextmanager
def _stored(tiles: Iterable[Vectors], num_rows: int, width: int) -> Iterator[Vectors]:
    """The vectors of all tiles in a temporary file, mapped into memory, (N, D) float32."""
    check_disk_space(tempfile.gettempdir(), 4 * num_rows * width)
    with tempfile.TemporaryFile() as file:
        vector_ND = np.memmap(file, np.float32, "w+", shape=(num_rows, width))
        start = 0
        for tile_TD in tiles:
            vector_ND[start : start + len(tile_TD)] = tile_TD
            start += len(tile_TD)
        yield vector_ND


def _rankings(
    encoder: Encoder, folder: RetrievalFolder, query_QD: Vectors, document_ND: Vectors, words: BM25, rule: FusionRule
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The best documents by dense score, by BM25 and by both, (Q, K) rows each."""
    query_QD, top_k, tie_order_N = encoder.comparable(query_QD), max(CUTOFFS), folder.tie_order_N

    def tiles() -> Iterator[Vectors]:
        for start in range(0, len(document_ND), DOCUMENT_TILE):
            yield encoder.comparable(np.array(document_ND[start : start + DOCUMENT_TILE]))

    def nearest(query_QD: Vectors, top_k: int) -> TopK:
        return search_top_k(query_QD, tiles(), top_k, encoder.device, tie_order_N)

    fused = fused_top_k(
        folder.queries,
        query_QD,
        words,
        top_k,
        rule,
        tiles=tiles,
        nearest=nearest,
        device=encoder.device,
        tie_order_N=tie_order_N,
    )
    by_words, _ = words.search(folder.queries, top_k, tie_order_N)
    return nearest(query_QD, top_k).index_QK, by_words, fused.index_QK


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
    weight = "" if rule.fusion == "rrf" else f", weight {rule.weight:g} of BM25"
    note = f"ndcg_at_10; fusion {rule.fusion}{weight}, language {language}; 95 % bootstrap intervals over the queries"
    return f"{format_table(rows, '<')}\n{note}"
