"""Planted evaluation texts are found, in whatever dress, and nothing else is."""

import gzip
import json
import math
import os
import random
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from embeddings.common import InputError, OptionError
from embeddings.common.jobs import ArrayTask
from embeddings.data import SourceConfig
from embeddings.data.store import open_cached
from embeddings.data.table import StoredRow
from embeddings.inference.bm25 import WordTokenizer
from embeddings.mining import duplicates as decontaminate
from embeddings.mining.duplicates import (
    EQUAL,
    KEPT,
    LEAST_TOKENS,
    SIMILAR,
    Decontaminator,
    EvaluationTexts,
    find_contaminated,
)
from tests.data.rows import write_jsonl

DATA = Path(os.environ.get("EMBED_DATA", Path(__file__).parents[3] / "shared" / "data"))


def words(seed, count):
    generator = random.Random(seed)
    return " ".join(f"w{generator.randrange(150)}" for _ in range(count))


def source(folder, rows):
    config = SourceConfig("a", str(write_jsonl(folder / "a.jsonl", rows)), suspect_rows="keep")
    return open_cached(config, folder / "cache")


def loop_coverage(texts, text):
    """The largest share of a text's BM25 weight that another text holds, with the formula written out."""
    tokenize = WordTokenizer()
    documents = [tokens for tokens in map(tokenize, texts) if len(set(tokens)) >= LEAST_TOKENS]
    mean_length = sum(map(len, documents)) / max(1, len(documents))
    frequency = Counter(token for document in documents for token in set(document))
    best = 0.0
    for document in documents:
        weights = {
            token: math.log(1 + (len(documents) - frequency[token] + 0.5) / (frequency[token] + 0.5))
            * (count := document.count(token))
            / (count + 1.5 * (1 - 0.75 + 0.75 * len(document) / mean_length))
            for token in set(document)
        }
        shared = sum(weight for token, weight in weights.items() if token in set(tokenize(text)))
        best = max(best, shared / sum(weights.values()))
    return best


@pytest.mark.parametrize("threshold", [0.3, 0.45, 0.6, 1.0])
def test_reasons_equal_a_loop(threshold):
    evaluation = EvaluationTexts([words(seed, 3 + seed % 7) for seed in range(20)], [words(99, 30), words(98, 4)])
    records = [StoredRow(words(1000 + seed, 20), [words(2000 + seed, 25)] * (1 + seed % 2)) for seed in range(60)]
    records += [StoredRow(evaluation.queries[4].upper() + "?", ["x"]), StoredRow("y", ["z", evaluation.documents[0]])]

    def normal(text):
        return re.findall(r"\w+", text.lower())

    everything = [normal(text) for texts in evaluation for text in texts]
    expected = []
    for record in records:
        coverage = [loop_coverage(evaluation.queries, record.query)]
        coverage += [loop_coverage(evaluation.documents, text) for text in record.positives]
        is_equal = any(normal(text) in everything for text in (record.query, *record.positives))
        expected.append(EQUAL if is_equal else SIMILAR if max(coverage) >= threshold - 1e-5 else KEPT)
    assert Decontaminator(evaluation, threshold).reasons(records).tolist() == expected
    assert expected.count(EQUAL) == 2
    assert (SIMILAR in expected) == (threshold < 1)
    assert KEPT in expected


@pytest.mark.parametrize(
    ("query", "positive", "reason"),
    [
        ("What is the capital city of France?", "p", EQUAL),
        ("  what IS the   capital (city) of france", "p", EQUAL),
        ("q", "what is the capital city of france", EQUAL),
        ("The Seine runs through Paris and many other towns.", "p", EQUAL),
        ("tell me: is Paris the capital of France", "p", KEPT),
        ("say again what the capital city of France is", "p", SIMILAR),
        ("q", "say again what the capital city of France is", KEPT),
        ("q", "In Paris and through other towns the Seine runs, many say", SIMILAR),
        ("the Seine runs through Paris and many other towns today", "p", KEPT),
        ("what is C", "p", KEPT),
        ("what is c#!", "p", EQUAL),
        ("capital", "France", KEPT),
        ("...", "!!!", KEPT),
    ],
)
def test_equal_texts_go_whatever_their_role_and_similar_ones_within_it(query, positive, reason):
    evaluation = EvaluationTexts(
        ["what is the capital city of France", "what is C#", "???"],
        ["The Seine runs through Paris and many other towns"],
    )
    record = StoredRow(query, [positive])
    assert Decontaminator(evaluation, 0.9).reasons([record]).tolist() == [reason]
    assert Decontaminator(evaluation).reasons([record]).tolist() == [EQUAL if reason == EQUAL else KEPT]


def test_negatives_are_not_looked_at_and_every_positive_is():
    rule = Decontaminator(EvaluationTexts(["one evaluation query with words"], []), 0.9)
    text = "one evaluation query with words"
    assert rule.reasons([StoredRow("q", ["p"], [text], [0])]).tolist() == [KEPT]
    assert rule.reasons([StoredRow("q", ["p", "o", text])]).tolist() == [EQUAL]
    assert rule.reasons([]).tolist() == []


def test_a_text_repeated_is_no_nearer_than_once():
    rule = Decontaminator(EvaluationTexts(["alpha beta gamma delta epsilon zeta"], []), 0.6)
    once, often = StoredRow("alpha beta gamma", ["p"]), StoredRow("alpha beta gamma " * 20, ["p"])
    assert rule.reasons([once, often]).tolist() == [KEPT, KEPT]


@pytest.mark.parametrize("shard_size", [1, 4, 100])
def test_shards_and_tasks_change_nothing(shard_size, tmp_path, monkeypatch):
    evaluation = EvaluationTexts([words(seed, 8) for seed in range(9)], [])
    rows = [{"query": words(seed, 14), "positive": words(500 + seed, 3)} for seed in range(21)]
    rows[5]["query"] = evaluation.queries[3]
    pairs_source, rule = source(tmp_path, rows), Decontaminator(evaluation, 0.5)
    whole = rule.reasons([pairs_source.table.row(row) for row in range(21)]).tolist()
    assert whole[5] == EQUAL
    assert SIMILAR in whole
    monkeypatch.setattr(decontaminate, "_CHECKED_TOGETHER", 3)
    for index in (1, 0):
        found = find_contaminated(
            pairs_source, tmp_path / "work", rule, shard_size=shard_size, task=ArrayTask(index, 2)
        )
        assert found.tolist() == whole
    with pytest.raises(InputError, match="field 'evaluation'"):
        find_contaminated(pairs_source, tmp_path / "work", Decontaminator(evaluation, 0.6), shard_size=shard_size)


def test_texts_and_roles_both_decide_the_hash():
    hashes = [
        EvaluationTexts(*texts).sha256()
        for texts in ((["a", "b"], []), (["a"], ["b"]), (["ab"], []), (["b", "a"], []), (["a\n1", "b"], []))
    ]
    assert len(set(hashes)) == 5
    assert EvaluationTexts(("a", "b"), ()).sha256() == hashes[0]


@pytest.mark.parametrize("threshold", [0.0, -0.5, 1.1, float("nan")])
def test_impossible_options_are_refused(threshold):
    with pytest.raises(OptionError, match="bm25_threshold must lie above 0 and be at most 1"):
        Decontaminator(EvaluationTexts(["a"], []), threshold)
    with pytest.raises(OptionError, match="decontaminate must bring at least one text"):
        Decontaminator(EvaluationTexts([], []))


@pytest.mark.skipif(not (DATA / "nq_pairs").is_dir(), reason="the shared data sets are not here (EMBED_DATA)")
def test_evaluation_questions_planted_among_real_ones_are_found(tmp_path):
    with gzip.open(DATA / "nq_pairs" / "train.jsonl.gz", "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    held_out, rows = [row["query"] for row in rows[:200]], rows[200:1200]
    planted = {row: held_out[number] for number, row in enumerate(range(3, 1000, 97))}
    for row, text in planted.items():
        rows[row]["query"] = f"Please, {text.upper()}?"
    found = find_contaminated(
        source(tmp_path, rows), tmp_path / "work", Decontaminator(EvaluationTexts(held_out, []), 0.9)
    )
    assert (found[list(planted)] != KEPT).all()
    assert (found != KEPT).sum() <= len(planted) + 10
    assert np.isin(found, [KEPT, EQUAL, SIMILAR]).all()
