"""Queries with candidates of their own, and how high the relevant ones come when cosines order them."""

from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from embeddings.common.errors import InputError
from embeddings.data.records import parse_record
from embeddings.data.sources import open_reader
from embeddings.evaluation.metrics import Judgments, retrieval_metrics

RERANKING_FIELDS = ("query", "positive", "negatives")
METRICS = ("map_at_1000", "mrr_at_10", "ndcg_at_10")


@dataclass(frozen=True, eq=False)
class RerankingFolder:
    """Queries, and which of each one's candidates are relevant.

    Attributes:
        queries: Text of each query.
        documents: The candidates of all queries, each text once.
        candidate_rows: Rows of each query's candidates among the documents, the relevant ones first.
        num_relevant: How many of them are relevant.
    """

    kind: ClassVar[str] = "reranking"
    queries: list[str]
    documents: list[str]
    candidate_rows: list[list[int]]
    num_relevant: list[int]


def read_reranking(path: Path) -> RerankingFolder:
    """The queries of a file of rows {"query", "positive", "negatives"}: a text or a list of texts, and a list of texts.

    These are training records, read as `parse_record` reads them. A text that a row names twice is one candidate.

    Raises:
        InputError: If a row cannot be used, has no negatives, or has a text on both sides; the message names it.
    """
    queries: list[str] = []
    row_of: dict[str, int] = {}
    candidate_rows, num_relevant = [], []
    for where, fields in open_reader(path, RERANKING_FIELDS, RERANKING_FIELDS):
        record = parse_record({name: fields[name] for name in RERANKING_FIELDS if name in fields}, {}, where)
        relevant = dict.fromkeys(record.positives)
        others = dict.fromkeys(negative.text for negative in record.negatives)
        if not others:
            raise InputError(where, "the query has no negatives", "list texts that are not relevant as 'negatives'")
        if relevant.keys() & others.keys():
            raise InputError(where, "a text is both positive and negative", "keep it on one side")
        queries.append(record.query)
        candidate_rows.append([row_of.setdefault(text, len(row_of)) for text in chain(relevant, others)])
        num_relevant.append(len(relevant))
    return RerankingFolder(queries, list(row_of), candidate_rows, num_relevant)


def reranking_metrics(
    folder: RerankingFolder, query_QD: npt.NDArray[np.float32], document_ND: npt.NDArray[np.float32]
) -> dict[str, float]:
    """Retrieval metrics of each query's candidates in the order of their cosines, averaged over the queries.

    Of candidates with one cosine the relevant ones come last, so that vectors that are all alike gain nothing.

    Args:
        folder: The queries and their candidates.
        query_QD: Vectors of the queries, (Q, D) of unit length.
        document_ND: Vectors of the documents, (N, D), the same.

    Returns:
        `map_at_1000` (mteb's main score of reranking), `mrr_at_10` and `ndcg_at_10`, from 0 to 1.
    """
    ranked_QK = np.full((len(query_QD), max(map(len, folder.candidate_rows))), -1, dtype=np.int64)
    for query, (rows, num_relevant) in enumerate(zip(folder.candidate_rows, folder.num_relevant, strict=True)):
        is_relevant_k = np.arange(len(rows)) < num_relevant
        order_k = np.lexsort((is_relevant_k, -(document_ND[rows] @ query_QD[query])))
        ranked_QK[query, : len(rows)] = np.array(rows)[order_k]
    scores = retrieval_metrics(ranked_QK, _judgments(folder), (1000, 10)).metrics
    return {name: scores[name] for name in METRICS}


def _judgments(folder: RerankingFolder) -> Judgments:
    query_J = np.repeat(np.arange(len(folder.queries)), folder.num_relevant)
    relevant = zip(folder.candidate_rows, folder.num_relevant, strict=True)
    document_J = np.array([row for rows, number in relevant for row in rows[:number]], dtype=np.int64)
    return Judgments(query_J, document_J, np.ones(len(query_J)), len(folder.queries), len(folder.documents))
