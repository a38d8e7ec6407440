"""Retrieval metrics with graded relevance, and rank correlation, as array operations.

nDCG uses the linear gain of trec_eval and BEIR: gain = relevance, discount = log2(1 + rank). Every metric of a query
is a number from 0 to 1; a query without a relevant document has no such number, so it is skipped and counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Qrels:
    """Which documents are relevant to which queries: J judged pairs. A pair that is not listed is not relevant.

    Attributes:
        query_J: Row of the query, (J,) int64.
        document_J: Row of the document, (J,) int64; no pair occurs twice.
        relevance_J: Grade, (J,) float64; 0 and below is not relevant.
        num_queries: Number of queries, Q.
        num_documents: Number of documents.
    """

    query_J: Ints
    document_J: Ints
    relevance_J: Floats
    num_queries: int
    num_documents: int

    def gain(self, ranked_QK: Ints) -> Floats:
        """The grade of each ranked document, (Q, K); 0 where it is not relevant, or the row is -1 (no document)."""
        if not len(self.query_J):
            return np.zeros(ranked_QK.shape)
        key_J = self.query_J * self.num_documents + self.document_J
        order_J = np.argsort(key_J)
        key_QK = np.arange(self.num_queries)[:, None] * self.num_documents + ranked_QK
        place_QK = np.minimum(np.searchsorted(key_J[order_J], key_QK), len(key_J) - 1)
        is_judged_QK = (key_J[order_J][place_QK] == key_QK) & (ranked_QK >= 0)
        return np.where(is_judged_QK, np.maximum(self.relevance_J[order_J][place_QK], 0.0), 0.0)

    def ideal_gain(self, cutoff: int) -> Floats:
        """The grades of the best possible ranking of each query, (Q, cutoff), padded with 0."""
        relevant_J = self.relevance_J > 0
        query_J, relevance_J = self.query_J[relevant_J], self.relevance_J[relevant_J]
        order_J = np.lexsort((-relevance_J, query_J))
        query_J, relevance_J = query_J[order_J], relevance_J[order_J]
        rank_J = np.arange(len(query_J)) - np.searchsorted(query_J, query_J)
        kept_J = rank_J < cutoff
        ideal_QK = np.zeros((self.num_queries, cutoff))
        ideal_QK[query_J[kept_J], rank_J[kept_J]] = relevance_J[kept_J]
        return ideal_QK

    def num_relevant(self) -> Ints:
        """Relevant documents of each query, (Q,)."""
        return np.bincount(self.query_J[self.relevance_J > 0], minlength=self.num_queries).astype(np.int64)


class RetrievalScores(NamedTuple):
    """Means over the `num_queries` queries that have a relevant document; `num_skipped` have none.

    `metrics` holds `ndcg_at_<k>`, `mrr_at_<k>`, `recall_at_<k>` and `map_at_<k>` for each cutoff k; it is empty where
    nothing was counted.
    """

    metrics: dict[str, float]
    num_queries: int
    num_skipped: int


def retrieval_metrics(ranked_QK: Ints, qrels: Qrels, cutoffs: Sequence[int] = (10, 100)) -> RetrievalScores:
    """The metrics of rankings (Q, K), -1 for no document, at each cutoff: means over queries with a relevant document.

    A cutoff larger than K counts what was found.
    """
    gain_QK = qrels.gain(ranked_QK)
    counted_Q = qrels.num_relevant() > 0
    num_counted = int(counted_Q.sum())
    metrics: dict[str, float] = {}
    for cutoff in cutoffs if num_counted else ():
        values = _metrics_of_each(gain_QK[:, :cutoff], qrels, cutoff)
        metrics |= {f"{name}_at_{cutoff}": float(value_Q[counted_Q].mean()) for name, value_Q in values.items()}
    return RetrievalScores(metrics, num_counted, qrels.num_queries - num_counted)


def _metrics_of_each(gain_QK: Floats, qrels: Qrels, cutoff: int) -> dict[str, Floats]:
    """The metrics of each query, (Q,) each, from the grades of its first documents; 0 where nothing is relevant."""
    relevant_QK, rank_K = gain_QK > 0, np.arange(gain_QK.shape[1]) + 1.0
    precision_QK = relevant_QK.cumsum(axis=1) / rank_K
    return {
        "ndcg": _ratio(dcg(gain_QK), dcg(qrels.ideal_gain(cutoff))),
        # One over the rank of the first relevant document.
        "mrr": np.max(relevant_QK / rank_K, axis=1, initial=0.0),
        "recall": _ratio(relevant_QK.sum(axis=1), qrels.num_relevant()),
        # Documents beyond the cutoff count in the denominator, as in trec_eval's `map_cut`.
        "map": _ratio((precision_QK * relevant_QK).sum(axis=1), qrels.num_relevant()),
    }


def dcg(gain_QK: Floats) -> Floats:
    """Discounted cumulative gain of each query: sum over ranks r of gain / log2(1 + r), (Q,)."""
    value_Q: Floats = gain_QK @ (1.0 / np.log2(np.arange(gain_QK.shape[1]) + 2.0))
    return value_Q


def spearman(first_N: Floats, second_N: Floats) -> float:
    """Spearman's rank correlation, ties at their average rank; 0 where either side is constant."""
    from scipy.stats import spearmanr

    if np.ptp(first_N) == 0 or np.ptp(second_N) == 0:
        return 0.0
    return float(spearmanr(first_N, second_N).statistic)


def _ratio(part_Q: Floats | Ints, whole_Q: Floats | Ints) -> Floats:
    whole = np.asarray(whole_Q, dtype=np.float64)
    ratio_Q: Floats = np.divide(part_Q, whole, out=np.zeros_like(whole), where=whole > 0)
    return ratio_Q
