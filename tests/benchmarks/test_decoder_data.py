"""The held-out sets of the experiments on a decoder share nothing with the training pairs; intervals have a sign."""

from dataclasses import asdict

import numpy as np
import pytest

from benchmarks.decoder_data import pairs_folder, sampled, split, topic
from benchmarks.decoder_trials import Recipe, spearman_gain
from benchmarks.trials import Trial
from embeddings.evaluation import Qrels, RetrievalFolder


@pytest.mark.parametrize(
    "question",
    [
        "What is (are) Chronic Lymphocytic Leukemia?",
        "Who is at risk for Chronic Lymphocytic Leukemia??",
        "What are the treatments for Chronic Lymphocytic Leukemia?",
        "What are the genetic changes related to Chronic Lymphocytic Leukemia?",
        "How many people are affected by Chronic Lymphocytic Leukemia?",
        "what research (or clinical trials) is being done for Chronic Lymphocytic Leukemia?",
        "Is Chronic Lymphocytic Leukemia inherited?",
    ],
)
def test_all_questions_about_a_disease_have_one_topic(question):
    assert topic(question) == "chronic lymphocytic leukemia"


@pytest.mark.parametrize("name", ["medquad_pairs", "nq_pairs"])
def test_a_set_is_divided_without_overlap(name):
    parts = [{row["query"] for row in part} for part in split(name, tiny=True)]
    assert all(parts)
    assert len(set.union(*parts)) == sum(map(len, parts)) == 60


def test_a_sample_of_a_folder_keeps_the_relevant_documents_of_its_queries():
    rows = [{"query": f"q{row % 10}", "positive": f"d{row}"} for row in range(40)]
    whole = pairs_folder(rows, 10, 40)
    assert (len(whole.queries), len(whole.documents)) == (10, 40)
    part = sampled(whole, 3, 20)
    assert (len(part.queries), len(part.documents)) == (3, 20)
    judged = {
        (part.queries[query], part.documents[document])
        for query, document in zip(part.qrels.query_J.tolist(), part.qrels.document_J.tolist(), strict=True)
    }
    assert judged == {(row["query"], row["positive"]) for row in rows if row["query"] in part.queries}


def test_relevance_is_kept():
    qrels = Qrels.of([(0, 1, 3.0), (1, 0, 1.0)], 2, 3)
    folder = RetrievalFolder(["A", "B", "C"], ["a", "b", "c"], ["x", "y"], ["1", "2"], qrels)
    part = sampled(folder, 2, 2)
    found = dict(zip((part.queries[row] for row in part.qrels.query_J), part.qrels.relevance_J.tolist(), strict=True))
    assert found == {"x": 3.0, "y": 1.0}


def test_the_difference_of_correlations_is_zero_for_equal_scores_and_positive_for_better_ones():
    generator = np.random.default_rng(0)
    similarity_N = generator.random(60)
    noisy_SN = similarity_N + generator.normal(size=(2, 60))
    assert tuple(spearman_gain(noisy_SN, noisy_SN, similarity_N, 20)) == (0, 0, 0)
    better = spearman_gain(similarity_N[None], noisy_SN, similarity_N, 200)
    assert 0 < better.low < better.mean < better.high < 1


def test_the_key_of_the_main_trial_has_not_changed():
    """Another key would train all variants again."""
    assert Trial("E27", "any", 0, asdict(Recipe())).key == "a7465576"
