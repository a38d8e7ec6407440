from collections import Counter

import numpy as np
import pytest

from embeddings.data.dataset import ClassExamples, LabelTexts, StoredCandidates
from embeddings.data.records import Negative
from embeddings.data.store import ClassIndex, write_class_index
from embeddings.data.table import StoredRow, Table, write_table


def class_examples(folder, texts_by_class, num_negatives):
    """The rule, and its rows as a plain list; classes take turns."""
    longest = max(map(len, texts_by_class))
    rows = [
        StoredRow(texts[i], label=label)
        for i in range(longest)
        for label, texts in enumerate(texts_by_class)
        if i < len(texts)
    ]
    write_table(folder, rows)
    write_class_index(folder, np.array([row.label for row in rows], dtype=np.int32), len(texts_by_class))
    return ClassExamples(Table(folder), ClassIndex(folder), num_negatives), rows


def test_stored_candidates_are_the_rows_own():
    stored = StoredRow("q", ["a", "b"], ["n", "m"], [1, 2], 3)
    found = StoredCandidates()(stored, 0, draw=5)
    assert found == (("a", "b"), (Negative("n", 1), Negative("m", 2)), ())


@pytest.mark.parametrize("num_negatives", [1, 7, 100])
def test_class_examples_are_what_a_loop_over_all_rows_allows(tmp_path, num_negatives):
    texts = [[f"{label} {i}" for i in range(size)] for label, size in enumerate((2, 9, 5))]
    rule, rows = class_examples(tmp_path, texts, num_negatives)
    for index, stored in enumerate(rows):
        same = {row.query for row in rows if row.label == stored.label and row.query != stored.query}
        other = {row.query: row.label for row in rows if row.label != stored.label}
        for draw in range(20):
            found = rule(stored, index, draw)
            assert len(found.positives) == 1
            assert found.positives[0] in same
            negatives = [negative.text for negative in found.negatives]
            assert len(set(negatives)) == len(negatives) == min(num_negatives, len(other))
            assert list(found.negative_labels) == [other[text] for text in negatives]
            assert {negative.level for negative in found.negatives} == {0}


def test_class_examples_are_drawn_by_the_key_and_evenly(tmp_path):
    rule, rows = class_examples(tmp_path, [[f"a{i}" for i in range(5)], [f"b{i}" for i in range(6)]], 2)
    assert rule(rows[0], 0, draw=1) == rule(rows[0], 0, draw=1)
    drawn = [rule(rows[0], 0, draw) for draw in range(3000)]
    positives = Counter(found.positives[0] for found in drawn)
    negatives = Counter(negative.text for found in drawn for negative in found.negatives)
    assert set(positives) == {"a1", "a2", "a3", "a4"}
    assert set(negatives) == {f"b{i}" for i in range(6)}
    # Five standard deviations of a binomial count.
    assert all(abs(count - 750) < 5 * (3000 * 0.25 * 0.75) ** 0.5 for count in positives.values())
    assert all(abs(count - 1000) < 5 * (3000 * 2 / 6 * 4 / 6) ** 0.5 for count in negatives.values())


def test_the_query_is_never_its_own_positive_even_where_its_text_is_repeated(tmp_path):
    rule, rows = class_examples(tmp_path, [["same"] * 50 + [" same "] * 50 + ["different"], ["b"]], 1)
    index = next(i for i, row in enumerate(rows) if row.query == "same")
    for draw in range(50):
        assert rule(rows[index], index, draw).positives == ("different",)


def test_no_negative_repeats_the_query_the_positive_or_another_negative(tmp_path):
    rule, rows = class_examples(tmp_path, [["x", "y"], ["x", "y", "z", "z", "z", "w"]], 4)
    index = next(i for i, row in enumerate(rows) if row.query == "x" and row.label == 0)
    for draw in range(50):
        found = rule(rows[index], index, draw)
        assert found.positives == ("y",)
        assert sorted(negative.text for negative in found.negatives) == ["w", "z"]
        assert found.negative_labels == (1, 1)


@pytest.mark.parametrize(("num_texts", "num_negatives"), [(2, 7), (5, 3), (5, 4), (20, 7)])
def test_label_texts_are_the_rows_own_and_different_others(num_texts, num_negatives):
    texts = [f"label {code}" for code in range(num_texts)]
    rule = LabelTexts(texts, num_negatives)
    for label in range(num_texts):
        seen = set()
        for draw in range(60):
            found = rule(StoredRow("q", label=label), 0, draw)
            assert found == rule(StoredRow("q", label=label), 0, draw)
            assert found.positives == (texts[label],)
            assert len(set(found.negative_labels)) == len(found.negatives) == min(num_negatives, num_texts - 1)
            assert [texts[code] for code in found.negative_labels] == [negative.text for negative in found.negatives]
            seen.update(found.negative_labels)
        assert seen == set(range(num_texts)) - {label}
