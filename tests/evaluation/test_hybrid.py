"""Scores of dense search, BM25 and their fusion side by side, and intervals of their differences."""

import numpy as np
import pytest

from embeddings.common import InputError
from embeddings.evaluation import bootstrap as bootstrap_module
from embeddings.evaluation import evaluate_folder, evaluate_hybrid, format_hybrid, paired_bootstrap, retrieval_metrics
from embeddings.evaluation import hybrid as module
from embeddings.evaluation.folders import Qrels, read_retrieval_folder
from embeddings.inference import BM25, CorpusSearch, Encoder, FusionRule, HybridSearch
from embeddings.inference.bm25 import tokenizer
from tests.adaptation.data import write_test_set
from tests.evaluation.data import write_retrieval, write_similarity
from tests.helpers.refusals import refused
from tests.inference.models import counted_encodings, tiny_embedder


@pytest.fixture(scope="module")
def encoder():
    return Encoder(tiny_embedder(normalize=False), precision="float32")


def test_the_interval_equals_a_loop_over_resamples():
    generator = np.random.default_rng(3)
    score_Q, baseline_Q = generator.random(30), generator.random(30)
    found = paired_bootstrap(score_Q, baseline_Q, seed=5)
    draws, means = np.random.default_rng(8), []
    for _ in range(20_000):
        rows = draws.integers(30, size=30).tolist()
        means.append(sum(float(score_Q[row]) - float(baseline_Q[row]) for row in rows) / 30)
    means.sort()
    assert found.mean == pytest.approx(float(np.mean(score_Q - baseline_Q)))
    # Another seed, so only about equal: the standard error of these quantiles is some 0.002.
    assert (found.low, found.high) == pytest.approx((means[500], means[19_500]), abs=0.008)
    assert found.high - found.low > 0.15
    assert paired_bootstrap(score_Q, baseline_Q, seed=5) == found
    assert paired_bootstrap(score_Q, baseline_Q, seed=6) != found


def test_the_interval_does_not_depend_on_blocks_and_is_a_point_for_equal_differences(monkeypatch):
    generator = np.random.default_rng(3)
    score_Q, baseline_Q = generator.random(7), generator.random(7)
    whole = paired_bootstrap(score_Q, baseline_Q, num_resamples=100)
    monkeypatch.setattr(bootstrap_module, "_MAX_DRAWN", 3 * 7)
    assert paired_bootstrap(score_Q, baseline_Q, num_resamples=100) == pytest.approx(whole)
    assert paired_bootstrap(baseline_Q + 0.25, baseline_Q) == pytest.approx((0.25, 0.25, 0.25))
    assert str(paired_bootstrap(np.array([0.5]), np.array([1.0]))) == "-0.5000 (-0.5000 to +0.0000)"


@pytest.mark.parametrize(("num_queries", "confidence"), [(5, 0.95), (6, 0.95), (4, 0.9), (5, 0.9)])
def test_too_few_queries_for_a_sign_test_have_no_significant_difference(num_queries, confidence):
    generator = np.random.default_rng(0)
    baseline_Q = generator.random(num_queries)
    score_Q = baseline_Q + 0.1 + generator.random(num_queries)
    # By hand: the differences have one sign by chance in this share of the cases.
    chance = 2 / 2**num_queries
    for pair in ((score_Q, baseline_Q), (baseline_Q, score_Q)):
        found = paired_bootstrap(*pair, confidence=confidence)
        assert found.is_significant == (chance <= 1 - confidence)
        assert found.low <= found.mean <= found.high


@pytest.mark.parametrize("rule", [FusionRule(), FusionRule("minmax", 0.4), FusionRule("rrf")])
def test_the_three_searches_are_scored_as_each_by_itself(rule, encoder, tmp_path, monkeypatch):
    path = write_retrieval(tmp_path / "mine")
    monkeypatch.setattr(module, "DOCUMENT_TILE", 4)
    counts = counted_encodings(monkeypatch)
    full, narrow = evaluate_hybrid(encoder, [tmp_path], rule, "none", widths=[32, 8])
    assert len(counts) == 2
    monkeypatch.undo()
    folder = read_retrieval_folder(path)
    words, _ = BM25(folder.documents, tokenizer("none")).search(folder.queries, 100, folder.tie_order_N)
    assert full.dense.metrics == pytest.approx(evaluate_folder(encoder, path).metrics)
    assert full.bm25 == narrow.bm25 == retrieval_metrics(words, folder.qrels)
    # No two of these documents are equal, so that the order of equal scores does not matter.
    options = {"language": "none", "fusion": rule.fusion} | ({} if rule.fusion == "rrf" else {"weight": rule.weight})
    search = HybridSearch(CorpusSearch(encoder, path / "corpus.jsonl"), **options)
    row_of = {document_id: row for row, document_id in enumerate(folder.document_ids)}
    hits = search.search(folder.queries, 6)
    row_QK = np.array([[row_of[hit.document_id] for hit in of_query] for of_query in hits])
    assert full.hybrid["ndcg_at_10"] == pytest.approx(retrieval_metrics(row_QK, folder.qrels)["ndcg_at_10"])
    assert full.difference.mean == pytest.approx(full.hybrid["ndcg_at_10"] - full.dense.metrics["ndcg_at_10"])
    assert full.difference.low <= full.difference.mean <= full.difference.high
    assert (full.dense.name, full.dense.counts["num_queries"]) == (f"{tmp_path.name}/mine", 3)
    table = format_hybrid([full, narrow]).splitlines()
    assert table[0].split()[:4] == ["data", "BM25", "dense", "hybrid"]
    assert [line.split()[1] for line in table[1:3]] == ["[32]", "[8]"]
    assert f"{full.hybrid['ndcg_at_10']:.4f}" in table[1]
    assert str(full.difference) in table[1]
    assert f"fusion {rule.fusion}" in table[3]
    assert full.row()["hybrid"].get("weight") == options.get("weight")


def test_a_context_is_drawn_from_the_corpus(contextual, tmp_path, monkeypatch):
    path = write_retrieval(tmp_path / "mine")
    (result,) = evaluate_hybrid(contextual, [path], context_size=3)
    assert result.dense.metrics == pytest.approx(evaluate_folder(contextual, path, context_size=3).metrics)
    assert result.dense.counts["num_context"] == 3


def test_data_of_another_kind_is_refused_before_anything_is_encoded(encoder, tmp_path, monkeypatch):
    write_retrieval(tmp_path / "a")
    write_similarity(tmp_path / "b")
    monkeypatch.setattr(Encoder, "encode", lambda *_, **__: pytest.fail("encoded before all was read"))
    refused(InputError, "b: has sts data, not retrieval data", evaluate_hybrid, encoder, [tmp_path])


@pytest.mark.parametrize(
    ("num_better", "chosen", "best", "says"),
    [
        (20, 0.6, 0.6, "nDCG@10 of 0.6 is +1.0000 (+1.0000 to +1.0000) compared with 0.2"),
        (1, 0.2, 0.6, "nDCG@10 of 0.6 is +0.0500 (+0.0000 to +0.1500) compared with 0.2"),
        (0, 0.2, 0.2, "no other is better"),
    ],
)
def test_a_weight_is_chosen_only_if_it_is_significantly_better(num_better, chosen, best, says):
    qrels = Qrels.of([(query, 0, 1.0) for query in range(20)], 20, 11)

    def rank(rules):
        row_RQK = np.tile(np.arange(1, 11), (len(rules), 20, 1))
        row_RQK[[rule.weight for rule in rules].index(0.6), :num_better, 0] = 0
        return [*row_RQK]

    tuned = module.tune_weight(FusionRule(), qrels, rank)
    assert (tuned.rule.weight, tuned.best, tuned.num_queries) == (chosen, best, 20)
    assert str(tuned) == f"weight {chosen} of BM25, chosen on 20 queries: {says}"
    assert tuned.difference.mean == pytest.approx(num_better / 20)


def test_the_tuned_weight_is_the_best_of_all(encoder, tmp_path, monkeypatch):
    found_better = lambda one, other: bootstrap_module.Difference(float((one - other).mean()), 1.0, 1.0)  # noqa: E731
    monkeypatch.setattr(module, "paired_bootstrap", found_better)
    path = write_test_set(tmp_path / "data")
    (found,) = evaluate_hybrid(encoder, [path], tune=True)
    score_of = {}
    for weight in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9):
        (each,) = evaluate_hybrid(encoder, [path], FusionRule(weight=weight))
        score_of[weight] = each.hybrid["ndcg_at_10"]
    best = max(score_of.values())
    assert min(score_of.values()) < best
    assert found.hybrid["ndcg_at_10"] == pytest.approx(best)
    equal = [weight for weight, score in score_of.items() if score == pytest.approx(best)]
    assert found.rule.weight == min(equal, key=lambda weight: abs(weight - 0.2))
    assert found.tuned.difference.mean == pytest.approx(best - score_of[0.2])
    assert str(found.tuned) in format_hybrid([found])
    assert found.row()["hybrid"]["tuned"]["mean"] == found.tuned.difference.mean
