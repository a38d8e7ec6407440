"""Copies and near-copies of pairs equal those of a loop over all earlier records."""

import os
import random
import re
from pathlib import Path

import numpy as np
import pytest

from embeddings.common import InputError, OptionError
from embeddings.common.jobs import ArrayTask
from embeddings.data import SourceConfig
from embeddings.data.store import open_cached
from embeddings.mining import duplicates
from embeddings.mining.duplicates import COPY, KEPT, NEAR_COPY, find_duplicates
from tests.data.rows import pairs, write_jsonl

DATA = Path(os.environ.get("EMBED_DATA", Path(__file__).parents[3] / "shared" / "data"))


def source(folder, rows):
    return open_cached(SourceConfig("a", str(write_jsonl(folder / "a.jsonl", rows))), folder / "cache")


def varied_rows(seed=0):
    """Families of records: changed queries, changed positives, both changed, and whole copies."""
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


def test_two_questions_about_one_document_are_two_records(tmp_path):
    document = " ".join(f"word{number}" for number in range(400))
    rows = [{"query": f"question {number} of another kind {number * 7}", "positive": document} for number in range(9)]
    found = find_duplicates(source(tmp_path, rows), tmp_path / "work", near_duplicates=0.8)
    assert found.tolist() == [KEPT] * 9


@pytest.mark.parametrize("count", [1, 2])
def test_few_records_are_no_special_case(count, tmp_path):
    found = find_duplicates(source(tmp_path, pairs(1) * count), tmp_path / "work", near_duplicates=0.8)
    assert found.tolist() == [KEPT, COPY][:count]


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


def test_hashes_that_collide_take_nothing_out(tmp_path, monkeypatch):
    monkeypatch.setattr(duplicates, "text_hash", lambda text: 5)
    rows = [*pairs(6), *pairs(2)]
    found = find_duplicates(source(tmp_path, rows), tmp_path / "work")
    assert found.tolist() == [KEPT] * 6 + [COPY] * 2


def test_characters_find_what_words_cannot(tmp_path):
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
    with pytest.raises(InputError, match="field 'source_key'"):
        find_duplicates(source(tmp_path, pairs(5)), tmp_path / "work", near_duplicates=0.8)
    with pytest.raises(OptionError, match="near_duplicates must lie between"):
        find_duplicates(pairs_source, tmp_path / "other", near_duplicates=2.0)
    assert not (tmp_path / "other").exists()


@pytest.mark.skipif(not (DATA / "tldr_pairs").is_dir(), reason="the shared data sets are not here (EMBED_DATA)")
def test_on_real_text_nothing_goes_that_no_earlier_record_is_near_to(tmp_path):
    config = SourceConfig("tldr", str(DATA / "tldr_pairs" / "train.jsonl.gz"), suspect_rows="keep")
    cached = open_cached(config, tmp_path / "cache")
    found = find_duplicates(cached, tmp_path / "work", near_duplicates=0.8)
    near = np.flatnonzero(found == NEAR_COPY)
    assert 0 < len(near) < len(found) / 10
    rule = duplicates.NearDuplicates(0.8, num_parts=2)
    kept = np.flatnonzero(found == KEPT)

    def sets_of(row):
        return rule.sets(duplicates._parts(cached.table.row(row)))

    for row in near[:2]:
        own = sets_of(int(row))
        assert any(rule.alike(sets_of(int(other)), own) for other in kept[kept < row])
