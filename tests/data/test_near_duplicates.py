"""Near-copies against a loop over all pairs."""

import random
import re

import numpy as np
import pytest

from embeddings.common import OptionError
from embeddings.data import near_duplicates
from embeddings.data.near_duplicates import KEY_BYTES, LEAST_THRESHOLD, MAX_COMPARED, NearDuplicates
from tests.helpers.processes import run_command
from tests.helpers.refusals import refused


def shingles(text, unit):
    if unit == "character":
        units, size = " ".join(text.split()), 5
    else:
        units, size = re.findall(r"\w+", text), 3
    return {tuple(units[start : start + size]) for start in range(max(1, len(units) - size + 1))}


def jaccard(first, second, unit="word"):
    one, other = shingles(first, unit), shingles(second, unit)
    return len(one & other) / len(one | other)


def varied(count, num_words, seed=0):
    """Groups of texts: a text, and copies of it with some words changed."""
    generator = random.Random(seed)
    texts = []
    for _ in range(count):
        base = [f"w{generator.randrange(9999)}" for _ in range(num_words)]
        for changes in (0, 1, 2, 4):
            changed = list(base)
            for place in generator.sample(range(num_words), changes):
                changed[place] = f"new{generator.randrange(9999)}"
            texts.append(" ".join(changed))
    return texts


def loop_copies(items, are_alike):
    copies = []
    for row, item in enumerate(items):
        kept = [other for other in range(row) if not copies[other]]
        copies.append(any(are_alike(items[other], item) for other in kept))
    return copies


def marked(rule, items, **options):
    return rule.mark_copies(rule.signatures(items), lambda rows: [items[row] for row in rows], **options)


@pytest.mark.parametrize("unit", ["word", "character"])
@pytest.mark.parametrize("threshold", [0.5, 0.8, 1.0])
def test_copies_of_two_part_items_equal_those_of_a_loop_over_all_pairs(unit, threshold):
    queries, documents = varied(12, 12), varied(12, 40, seed=1)
    items = [(query, document) for query, document in zip(queries, documents, strict=True)]
    # One document with many questions, one question with many documents, and exact copies.
    items += [(query, documents[0]) for query in queries[8:20]] + [(queries[0], text) for text in documents[8:20]]
    items += items[::5]

    def are_alike(first, second):
        return all(jaccard(*pair, unit) >= threshold for pair in zip(first, second, strict=True))

    found = marked(NearDuplicates(threshold, num_parts=2, shingle=unit), items)
    assert found.tolist() == loop_copies(items, are_alike)
    assert len(items) // 6 <= found.sum() < len(items) - 24


@pytest.mark.parametrize("unit", ["word", "character"])
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("a b c d", "a b c e"),
        ("one", "one two"),
        ("x y", "y x"),
        ("", "..."),
        ("!?", "??"),
        ("a-b c", "a b, c"),
        ("ab c_d é٣", "a bc _ d é٣"),
        ("naïve café 東京 – x", "naïve café 東京 - x"),
        ("same same same same", "same same same"),
    ],
)
def test_the_similarity_is_that_of_the_sets_of_shingles(unit, first, second):
    rule = NearDuplicates(0.7, shingle=unit)
    hashes, sizes = rule.sets([first, second, first])
    one, other, again = np.split(hashes, np.cumsum(sizes)[:-1])
    assert one.tolist() == again.tolist() == sorted(set(one.tolist()))
    shared = len(np.intersect1d(one, other))
    has_units = re.search(r"\w", first) or unit == "character"
    assert shared / (len(one) + len(other) - shared) == (jaccard(first, second, unit) if has_units else 0)
    expected = bool(has_units) and jaccard(first, second, unit) >= 0.7
    assert marked(rule, [(first,), (second,), (first,)]).tolist() == [False, expected, True]


def test_words_that_differ_in_vowel_signs_are_different():
    words = ["कि", "की", "कु", "कू", "के", "को"]
    assert marked(NearDuplicates(0.7), [(" ".join(words),), (" ".join(reversed(words)),)]).tolist() == [False, False]


@pytest.mark.parametrize("num_parts", [1, 2])
def test_copies_are_missed_no_more_often_than_documented(num_parts):
    generator = random.Random(3)
    rule, missed, tried = NearDuplicates(0.8, num_parts), 0, 0
    for _ in range(400):
        base = [f"w{generator.randrange(9999)}" for _ in range(60)]
        changed = list(base)
        for place in generator.sample(range(60), 2):
            changed[place] = "new"
        items = [(" ".join(base),) * num_parts, (" ".join(changed),) * num_parts]
        if jaccard(items[0][0], items[1][0]) >= 0.8:
            tried, missed = tried + 1, missed + int(not marked(rule, items)[1])
    assert tried > 300
    assert missed <= 1


def test_templated_texts_take_linear_work_and_their_copies_are_found():
    generator, words = random.Random(0), [f"w{word}" for word in range(90)]
    items = []
    for row in range(1500):
        # Words that differ between any two texts are so few that all texts are nearly similar enough.
        changed = list(words)
        for place in (20, 70):
            changed[place] = f"name{row}x{place}"
        changed[45] = f"place{generator.randrange(9)}"
        items.append((" ".join(changed),))
    copies = generator.sample(range(1, 1500), 30)
    for row in copies:
        items[row] = (items[row - 1 if row - 1 not in copies else 0][0] + " end",)
    compared = []

    class Counted(NearDuplicates):
        def _are_alike(self, rows, others, sets):
            compared.append(len(others))
            return super()._are_alike(rows, others, sets)

    rule = Counted(0.9)
    assert jaccard(items[0][0], items[1][0]) > 0.7
    found = np.flatnonzero(marked(rule, items))
    assert len(items) < sum(compared) <= MAX_COMPARED * len(items)
    assert set(found) <= set(copies)
    assert len(found) >= 28


@pytest.mark.parametrize("num_parts", [1, 2])
@pytest.mark.parametrize("threshold", [0.5, 0.8])
def test_the_number_of_rows_that_are_compared_at_once_changes_nothing(num_parts, threshold, monkeypatch):
    # Each family has more copies than the texts that are compared with one.
    bases = varied(12, 40)[::4]
    items = [((base + f" new{copy}" * (copy > 0),) * num_parts) for base in bases for copy in range(MAX_COMPARED + 3)]
    items += [(text,) * num_parts for text in varied(12, 40, seed=1)]
    random.Random(0).shuffle(items)
    expected = loop_copies([item[0] for item in items], lambda first, second: jaccard(first, second) >= threshold)
    rule = NearDuplicates(threshold, num_parts)
    for rows, hashes in ((1, 1), (5, 400), (10_000, 1 << 20)):
        monkeypatch.setattr(near_duplicates, "_BATCH_KEYS", rows * rule.num_keys)
        for name in ("_CACHED_HASHES", "_COMPARED_HASHES"):
            monkeypatch.setattr(near_duplicates, name, hashes)
        monkeypatch.setattr(near_duplicates, "_BATCH_TEXTS", min(rows, 512))
        assert marked(rule, items).tolist() == expected
    assert sum(expected) > 12 * MAX_COMPARED


def test_a_comparison_goes_on_after_the_results_that_were_saved(monkeypatch):
    monkeypatch.setattr(near_duplicates, "_SAVE_SECONDS", 0.0)
    monkeypatch.setattr(near_duplicates, "_BATCH_KEYS", 1)
    rule, items, saved = NearDuplicates(0.8), [(text,) for text in varied(12, 30)], []
    whole = marked(rule, items, save=lambda results: saved.append(results.copy()))
    assert [len(results) for results in saved[:3]] == [1, 2, 3]
    asked = []
    resumed = rule.mark_copies(
        rule.signatures(items), lambda rows: (asked.extend(rows), [items[row] for row in rows])[1], decided=saved[29]
    )
    assert resumed.tolist() == whole.tolist()
    assert min(row for row in asked if whole[row]) >= 30


def test_signatures_do_not_depend_on_the_process_or_on_the_other_texts():
    rule = NearDuplicates(0.8, num_parts=2)
    items = [("a question of words", "a document of some more words"), ("other", "text"), ("", "")]
    found = rule.signatures(items)
    assert (found.shape, found.dtype) == ((3, rule.num_keys, KEY_BYTES), np.uint8)
    assert all((rule.signatures([item])[0] == own).all() for item, own in zip(items, found, strict=True))
    name = "embeddings.data.near_duplicates"
    code = f"from {name} import NearDuplicates as N; print(N(0.8, 2).signatures({items!r}).tolist())"
    finished = run_command(["-c", code], check=True)
    assert finished.stdout.strip() == str(found.tolist())


@pytest.mark.parametrize("threshold", [0.0, 0.49, 1.01, float("nan"), -1.0])
def test_a_threshold_out_of_its_range_is_refused(threshold):
    refused(OptionError, f"must lie between {LEAST_THRESHOLD} and 1", NearDuplicates, threshold)
