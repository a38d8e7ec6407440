"""Copies and near-copies of pairs equal those of a loop over all earlier records."""

import random
import re
import signal
import unicodedata
from functools import partial

import numpy as np
import pytest

from embeddings.common import InputError, OptionError
from embeddings.common.jobs import ArrayTask
from embeddings.data import near_duplicates
from embeddings.data.store import StoredRow
from embeddings.inference.bm25 import BM25, word_tokens
from embeddings.mining import duplicates
from embeddings.mining.duplicates import (
    COPY,
    EQUAL,
    KEPT,
    MIN_TOKENS,
    NEAR_COPY,
    SIMILAR,
    Decontaminator,
    EvaluationTexts,
    find_contaminated,
    find_duplicates,
)
from tests.data.rows import pairs
from tests.helpers.forks import in_a_child
from tests.helpers.interrupts import interrupted_at
from tests.helpers.refusals import refused
from tests.mining import pair_sources

source = partial(pair_sources.source, suspect_rows="keep")


def varied_rows(seed=0):
    """Families of records: changed queries, changed positives, both changed, and exact copies."""
    generator = random.Random(seed)

    def changed(text, count):
        parts = text.split()
        for place in generator.sample(range(len(parts)), count):
            parts[place] = f"new{generator.randrange(9999)}"
        return " ".join(parts)

    rows = []
    for _ in range(12):
        query, positive = (" ".join(f"W{generator.randrange(9999)}" for _ in range(count)) for count in (15, 50))
        family = [(query, positive), (changed(query, 1), positive), (query, changed(positive, 25))]
        family += [
            (changed(query, 1), changed(positive, 2).lower()),
            (f" {query}\n", positive),
            (query, positive + " x"),
        ]
        rows += [{"query": query, "positive": positive} for query, positive in family]
    rows.append({**rows[0], "positive": [rows[0]["positive"], "another"], "negatives": ["n"]})
    rows.append({**rows[0], "negatives": ["other negatives"]})
    generator.shuffle(rows)
    return rows


def test_texts_in_another_unicode_form_are_copies_and_evaluation_texts(tmp_path):
    words = [f"caf\u00e9{word}" for word in ("ab", "cd", "ef", "gh", "ij")]
    text, other = " ".join(words), unicodedata.normalize("NFD", " ".join(words))
    rows = [
        {"query": text, "positive": "p"},
        {"query": other, "positive": "p"},
        {"query": f"{other} x", "positive": "p"},
    ]
    found = find_duplicates(source(tmp_path, rows), tmp_path / "d", near_duplicates=0.5)
    assert found.tolist() == [KEPT, COPY, NEAR_COPY]
    for threshold, expected in ((None, [EQUAL, EQUAL, KEPT]), (0.9, [EQUAL, EQUAL, SIMILAR])):
        rule = Decontaminator(EvaluationTexts([text], []), threshold)
        assert rule.reasons([StoredRow(row["query"], (row["positive"],)) for row in rows]).tolist() == expected


def loop_reasons(rows, threshold):
    def positives(row):
        return row["positive"] if isinstance(row["positive"], list) else [row["positive"]]

    def pair(row):
        return [row["query"].strip(), *(text.strip() for text in positives(row))]

    def grams(text):
        words = re.findall(r"\w+", text.lower())
        return {tuple(words[place : place + 3]) for place in range(max(1, len(words) - 2))}

    def near(first, second):
        parts = [(grams(row["query"]), grams("\n".join(positives(row)))) for row in (first, second)]
        return all(len(one & other) / len(one | other) >= threshold for one, other in zip(*parts, strict=True))

    found = []
    for number, row in enumerate(rows):
        if any(pair(other) == pair(row) for other in rows[:number]):
            found.append(COPY)
            continue
        kept = [other for other, reason in zip(rows[:number], found, strict=True) if reason == KEPT]
        is_near = threshold is not None and any(near(other, row) for other in kept)
        found.append(NEAR_COPY if is_near else KEPT)
    return found


@pytest.mark.parametrize("threshold", [None, 0.5, 0.6, 0.8, 1.0])
def test_copies_are_those_of_a_loop(threshold, tmp_path):
    rows = varied_rows()
    found = find_duplicates(source(tmp_path, rows), tmp_path / "work", near_duplicates=threshold, shard_size=20)
    assert found.dtype == np.uint8
    assert found.tolist() == loop_reasons(rows, threshold)
    assert (found == COPY).sum() >= 13
    assert (found == KEPT).sum() >= 12


@pytest.mark.parametrize("shard_size", [1, 7, 1000])
def test_shards_and_tasks_change_nothing(shard_size, tmp_path, monkeypatch):
    rows = varied_rows(1)
    pairs_source = source(tmp_path, rows)
    whole = find_duplicates(pairs_source, tmp_path / "whole", near_duplicates=0.7)
    monkeypatch.setattr(duplicates, "_BLOCK", 3)
    for index in (1, 0):
        found = find_duplicates(
            pairs_source, tmp_path / "parts", near_duplicates=0.7, shard_size=shard_size, task=ArrayTask(index, 2)
        )
        assert found.tolist() == whole.tolist()


def test_a_killed_comparison_goes_on_where_it_was_saved(tmp_path, monkeypatch):
    monkeypatch.setattr(near_duplicates, "_SAVE_SECONDS", 0.0)
    monkeypatch.setattr(near_duplicates, "_BATCH_KEYS", 1)
    pairs_source = source(tmp_path, varied_rows(1))
    whole = find_duplicates(pairs_source, tmp_path / "whole", near_duplicates=0.7)

    def killed():
        duplicates.write_array = interrupted_at(duplicates.write_array, 20, killed=True)
        find_duplicates(pairs_source, tmp_path / "killed", near_duplicates=0.7)

    assert in_a_child(killed) == -signal.SIGKILL
    assert len(np.load(tmp_path / "killed" / "compared.npy")) == 19
    found = find_duplicates(pairs_source, tmp_path / "killed", near_duplicates=0.7)
    assert found.tolist() == whole.tolist()
    assert not (tmp_path / "killed" / "compared.npy").exists()


def test_shingles_of_characters_find_copies_without_word_boundaries(tmp_path):
    text = "今日は天気がとても良いので公園まで歩いて行きましょう" * 2
    rows = [{"query": text, "positive": text + "花"}, {"query": text, "positive": text + "犬"}]
    pairs_source = source(tmp_path, rows)
    assert find_duplicates(pairs_source, tmp_path / "words", near_duplicates=0.8).tolist() == [KEPT, KEPT]
    found = find_duplicates(pairs_source, tmp_path / "characters", near_duplicates=0.8, shingle="character")
    assert found.tolist() == [KEPT, NEAR_COPY]


def test_other_options_or_records_are_refused_by_name(tmp_path):
    pairs_source = source(tmp_path, pairs(4))
    find_duplicates(pairs_source, tmp_path / "work", near_duplicates=0.8)
    with pytest.raises(InputError, match=r"field 'near_duplicates' is 0\.8, expected 0\.9"):
        find_duplicates(pairs_source, tmp_path / "work", near_duplicates=0.9)
    with pytest.raises(InputError, match="source_key"):
        find_duplicates(source(tmp_path, pairs(5)), tmp_path / "work", near_duplicates=0.8)
    refused(OptionError, "must lie between", find_duplicates, pairs_source, tmp_path / "other", near_duplicates=2.0)
    assert not (tmp_path / "other").exists()


def words(seed, count):
    generator = random.Random(seed)
    return " ".join(f"w{generator.randrange(150)}" for _ in range(count))


@pytest.mark.parametrize("threshold", [0.3, 0.45, 0.6, 1.0])
def test_reasons_equal_a_loop(threshold):
    evaluation = EvaluationTexts([words(seed, 3 + seed % 7) for seed in range(20)], [words(99, 30), words(98, 4)])
    records = [StoredRow(words(1000 + seed, 20), [words(2000 + seed, 25)] * (1 + seed % 2)) for seed in range(60)]
    records += [StoredRow(evaluation.queries[4].upper() + "?", ["x"]), StoredRow("y", ["z", evaluation.documents[0]])]

    def normal(text):
        return re.findall(r"\w+", text.lower())

    def coverage(texts, text):
        return BM25([own for own in texts if len(set(word_tokens(own))) >= MIN_TOKENS]).coverage([text])[0]

    everything = [normal(text) for texts in evaluation for text in texts]
    expected = []
    for record in records:
        covered = [coverage(evaluation.queries, record.query)]
        covered += [coverage(evaluation.documents, text) for text in record.positives]
        is_equal = any(normal(text) in everything for text in (record.query, *record.positives))
        expected.append(EQUAL if is_equal else SIMILAR if max(covered) >= threshold - 1e-5 else KEPT)
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
        ("दिन!", "p", EQUAL),
        ("दान", "p", KEPT),
    ],
)
def test_equal_texts_of_any_role_and_similar_texts_of_one_role_are_found(query, positive, reason):
    evaluation = EvaluationTexts(
        ["what is the capital city of France", "what is C#", "???", "दिन"],
        ["The Seine runs through Paris and many other towns"],
    )
    record = StoredRow(query, [positive])
    assert Decontaminator(evaluation, 0.9).reasons([record]).tolist() == [reason]
    assert Decontaminator(evaluation).reasons([record]).tolist() == [EQUAL if reason == EQUAL else KEPT]


def test_similar_texts_are_found_in_any_script():
    evaluation = EvaluationTexts(["法国的首都是哪一座城市"], [])
    record = StoredRow("请问法国的首都是哪一座城市呢", ["巴黎"])
    assert Decontaminator(evaluation, 0.9).reasons([record]).tolist() == [SIMILAR]
    assert Decontaminator(evaluation, 0.9).reasons([StoredRow("德国的首都是哪一座", ["柏林"])]).tolist() == [KEPT]


def test_every_positive_is_checked_and_no_negative():
    rule = Decontaminator(EvaluationTexts(["one evaluation query with words"], []), 0.9)
    text = "one evaluation query with words"
    assert rule.reasons([StoredRow("q", ["p"], [text], [0])]).tolist() == [KEPT]
    assert rule.reasons([StoredRow("q", ["p", "o", text])]).tolist() == [EQUAL]
    assert rule.reasons([]).tolist() == []


@pytest.mark.parametrize("shard_size", [1, 4, 100])
def test_shards_and_tasks_change_no_reason(shard_size, tmp_path, monkeypatch):
    evaluation = EvaluationTexts([words(seed, 8) for seed in range(9)], [])
    rows = [{"query": words(seed, 14), "positive": words(500 + seed, 3)} for seed in range(21)]
    rows[5]["query"] = evaluation.queries[3]
    pairs_source, rule = source(tmp_path, rows), Decontaminator(evaluation, 0.5)
    whole = rule.reasons([pairs_source.table.row(row) for row in range(21)]).tolist()
    assert whole[5] == EQUAL
    assert SIMILAR in whole
    monkeypatch.setattr(duplicates, "_CHECK_BLOCK", 3)
    for index in (1, 0):
        found = find_contaminated(
            pairs_source, tmp_path / "work", rule, shard_size=shard_size, task=ArrayTask(index, 2)
        )
        assert found.tolist() == whole
    with pytest.raises(InputError, match=r"field 'evaluation\.bm25_threshold' is"):
        find_contaminated(pairs_source, tmp_path / "work", Decontaminator(evaluation, 0.6), shard_size=shard_size)


@pytest.mark.parametrize("threshold", [0.0, -0.5, 1.1, float("nan")])
def test_invalid_thresholds_are_refused(threshold):
    refused(OptionError, "bm25_threshold must be > 0 and <= 1", Decontaminator, EvaluationTexts(["a"], []), threshold)
    refused(OptionError, "decontaminate must have at least one text", Decontaminator, EvaluationTexts([], []))
