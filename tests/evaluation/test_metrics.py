"""Metrics against loops, against torchmetrics, and against numbers small enough to verify by eye."""

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import ndcg_score
from torchmetrics.retrieval import RetrievalMRR, RetrievalNormalizedDCG, RetrievalRecall

from embeddings.evaluation.folders import Qrels, dcg, retrieval_metrics, spearman


def judged(relevance, num_documents):
    """Qrels from one {document: grade} a query."""
    triples = [(query, doc, grade) for query, grades in enumerate(relevance) for doc, grade in grades.items()]
    query_J, document_J, relevance_J = (np.array(column) for column in zip(*triples, strict=True))
    return Qrels(query_J, document_J, relevance_J.astype(float), len(relevance), num_documents)


def by_hand(ranking, grades, cutoff):
    """The reference: the metrics of one query, each a loop over ranks."""
    found, best = 0.0, 0.0
    for rank, document in enumerate(ranking[:cutoff], start=1):
        found += max(0, grades.get(document, 0)) / math.log2(1 + rank)
    for rank, grade in enumerate(sorted((g for g in grades.values() if g > 0), reverse=True)[:cutoff], start=1):
        best += grade / math.log2(1 + rank)
    relevant = {document for document, grade in grades.items() if grade > 0}
    reciprocal, hits, precisions = 0.0, 0, 0.0
    for rank, document in enumerate(ranking[:cutoff], start=1):
        if document in relevant:
            hits += 1
            precisions += hits / rank
            reciprocal = reciprocal or 1 / rank
    return {"ndcg": found / best, "mrr": reciprocal, "recall": hits / len(relevant), "map": precisions / len(relevant)}


def random_case(seed, num_queries=12, num_documents=40, depth=15):
    """Rankings, and graded judgments (negative and zero grades too) with at least one relevant document a query."""
    generator = np.random.default_rng(seed)
    ranked_QK = np.stack([generator.permutation(num_documents)[:depth] for _ in range(num_queries)])
    relevance = []
    for _ in range(num_queries):
        documents = generator.choice(num_documents, generator.integers(1, 9), replace=False)
        grades = {int(document): int(generator.integers(-1, 4)) for document in documents}
        grades[int(documents[0])] = int(generator.integers(1, 4))
        relevance.append(grades)
    return ranked_QK, relevance


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("cutoff", [1, 3, 10, 15, 30])
def test_means_equal_those_of_a_loop_over_queries_and_ranks(seed, cutoff):
    ranked_QK, relevance = random_case(seed)
    scores = retrieval_metrics(ranked_QK, judged(relevance, 40), (cutoff,))
    each = [by_hand(ranking, grades, cutoff) for ranking, grades in zip(ranked_QK.tolist(), relevance, strict=True)]
    expected = {f"{name}_at_{cutoff}": np.mean([query[name] for query in each]) for name in each[0]}
    assert scores.metrics == pytest.approx(expected, abs=1e-12)
    assert scores.metrics["ndcg_at_" + str(cutoff)] > 0
    assert (scores.num_queries, scores.num_skipped) == (12, 0)


@pytest.mark.parametrize("seed", range(2))
def test_values_equal_torchmetrics_and_sklearn(seed):
    ranked_QK, relevance = random_case(seed, num_documents=15)
    scores = retrieval_metrics(ranked_QK, judged(relevance, 15), (10,)).metrics
    target_QN, score_QN = np.zeros((12, 15)), np.zeros((12, 15))
    for query, grades in enumerate(relevance):
        for document, grade in grades.items():
            target_QN[query, document] = max(0, grade)
    np.put_along_axis(score_QN, ranked_QK, np.linspace(1.0, 0.1, 15)[None, :].repeat(12, 0), axis=1)
    score, target = torch.from_numpy(score_QN).flatten(), torch.from_numpy(target_QN).long().flatten()
    query = torch.arange(12).repeat_interleave(15)
    for name, metric, wanted in (
        ("ndcg", RetrievalNormalizedDCG(top_k=10), target),
        ("mrr", RetrievalMRR(top_k=10), target > 0),
        ("recall", RetrievalRecall(top_k=10), target > 0),
    ):
        assert scores[f"{name}_at_10"] == pytest.approx(float(metric(score, wanted, indexes=query)), abs=1e-6)
    assert scores["ndcg_at_10"] == pytest.approx(ndcg_score(target_QN, score_QN, k=10), abs=1e-12)


def test_hand_numbers():
    # Ranks 1, 2, 3 have grades 0, 3, 1; a document of grade 2 was not found.
    scores = retrieval_metrics(np.array([[5, 6, 7]]), judged([{6: 3, 7: 1, 8: 2}], 9), (3,)).metrics
    gained = 3 / math.log2(3) + 1 / 2
    assert scores["ndcg_at_3"] == pytest.approx(gained / (3 + 2 / math.log2(3) + 1 / 2))
    assert scores["mrr_at_3"] == 0.5
    assert scores["recall_at_3"] == pytest.approx(2 / 3)
    assert scores["map_at_3"] == pytest.approx((1 / 2 + 2 / 3) / 3)
    assert dcg(np.array([[0.0, 3.0, 1.0]])) == pytest.approx([gained])


def test_queries_without_a_relevant_document_are_skipped_and_counted():
    qrels = Qrels(np.array([0, 2]), np.array([1, 0]), np.array([1.0, 0.0]), 4, 3)
    scores = retrieval_metrics(np.array([[1, 0]] * 4), qrels, (2,))
    assert (scores.num_queries, scores.num_skipped) == (1, 3)
    assert scores.metrics["ndcg_at_2"] == 1.0


def test_no_judgment_at_all_gives_no_metrics_and_no_error():
    nothing = np.array([], dtype=np.int64)
    scores = retrieval_metrics(np.array([[0, 1]]), Qrels(nothing, nothing, nothing.astype(float), 1, 2))
    assert scores == ({}, 0, 1)


def test_rows_of_minus_one_are_no_documents():
    # Row -1 of query 1 must not be read as the last document of query 0.
    qrels = judged([{2: 1}, {0: 1}], 3)
    scores = retrieval_metrics(np.array([[-1, -1], [-1, 0]]), qrels, (2,)).metrics
    assert scores["recall_at_2"] == 0.5
    assert scores["mrr_at_2"] == 0.25


def test_spearman_of_hand_numbers():
    assert spearman(np.array([1.0, 2.0, 3.0]), np.array([10.0, 20.0, 90.0])) == pytest.approx(1.0)
    assert spearman(np.array([1.0, 2.0, 3.0]), np.array([3.0, 2.0, 1.0])) == pytest.approx(-1.0)
    assert spearman(np.array([1.0, 2.0]), np.array([5.0, 5.0])) == 0.0
    # Ranks 3.5, 1, 3.5, 2 against 1, 2, 3, 4: covariance -1 over the root of 4.5 x 5.
    assert spearman(np.array([30.0, 10.0, 30.0, 20.0]), np.arange(4.0)) == pytest.approx(-1 / (4.5 * 5) ** 0.5)
