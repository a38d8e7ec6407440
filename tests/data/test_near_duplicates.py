"""Near-copies against a loop over all pairs."""

import random
import re

import numpy as np
import pytest

from embeddings.common import OptionError
from embeddings.data.near_duplicates import LEAST_THRESHOLD, NearDuplicates, mark_copies
from embeddings.data.near_duplicates import jaccard as set_jaccard
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


@pytest.mark.parametrize("unit", ["word", "character"])
@pytest.mark.parametrize("threshold", [0.5, 0.8, 1.0])
def test_copies_of_two_part_items_equal_those_of_a_loop_over_all_pairs(unit, threshold):
    queries, documents = varied(12, 12), varied(12, 40, seed=1)
    items = [(query, document) for query, document in zip(queries, documents, strict=True)]
    # One document with many questions, one question with many documents, and exact copies.
    items += [(query, documents[0]) for query in queries[8:20]] + [(queries[0], text) for text in documents[8:20]]
    items += items[::5]
    rule = NearDuplicates(threshold, num_parts=2, shingle=unit)

    def are_alike(first, second):
        return all(jaccard(*pair, unit) >= threshold for pair in zip(first, second, strict=True))

    keys, asked = rule.keys(items), []

    def are_near(one, other):
        asked.append((one, other))
        return rule.alike(rule.sets(items[one]), rule.sets(items[other]))

    found = mark_copies(keys.T, len(items), are_near)
    assert found.tolist() == loop_copies(items, are_alike)
    # Rows are compared only if they share a key, once, and only with retained rows.
    assert len(asked) == len(set(asked))
    assert all(one < other and not found[one] and (keys[one] == keys[other]).any() for one, other in asked)
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
        ("naïve café 東京 – x", "naïve café 東京 - x"),
        ("same same same same", "same same same"),
    ],
)
def test_the_similarity_is_that_of_the_sets_of_shingles(unit, first, second):
    rule = NearDuplicates(0.7, shingle=unit)
    one, other = (rule.sets([text])[0] for text in (first, second))
    has_units = re.search(r"\w", first) or unit == "character"
    assert set_jaccard(one, other) == set_jaccard(other, one) == (jaccard(first, second, unit) if has_units else 0)
    assert set_jaccard(one, one) == 1


def test_keys_miss_copies_no_more_often_than_documented():
    generator = random.Random(3)
    rule, missed, tried = NearDuplicates(0.8), 0, 0
    for _ in range(400):
        base = [f"w{generator.randrange(9999)}" for _ in range(60)]
        changed = list(base)
        for place in generator.sample(range(60), 2):
            changed[place] = "new"
        items = [(" ".join(base),), (" ".join(changed),)]
        if rule.alike(*map(rule.sets, items)):
            keys = rule.keys(items)
            tried, missed = tried + 1, missed + int(not (keys[0] == keys[1]).any())
    assert tried > 300
    assert missed <= 1


def test_keys_do_not_depend_on_the_process_or_on_the_other_texts():
    rule = NearDuplicates(0.8, num_parts=2)
    items = [("a question of words", "a document of some more words"), ("other", "text"), ("", "")]
    keys = rule.keys(items)
    assert keys.shape == (3, rule.num_keys)
    assert keys.dtype == np.uint32
    assert all((rule.keys([item])[0] == key).all() for item, key in zip(items, keys, strict=True))
    assert rule.keys([]).shape == (0, rule.num_keys)
    code = f"from embeddings.data.near_duplicates import NearDuplicates as N; print(N(0.8, 2).keys({items!r}).tolist())"
    finished = run_command(["-c", code], check=True)
    assert finished.stdout.strip() == str(keys.tolist())


@pytest.mark.parametrize("threshold", [0.0, 0.49, 1.01, float("nan"), -1.0])
def test_a_threshold_out_of_its_range_is_refused(threshold):
    refused(OptionError, f"must lie between {LEAST_THRESHOLD} and 1", NearDuplicates, threshold)
