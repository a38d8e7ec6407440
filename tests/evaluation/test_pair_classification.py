"""Pairs with labels: read strictly, and scored by average precision."""

import numpy as np
import pytest

from embeddings.common import InputError
from embeddings.evaluation.pair_classification import pair_classification_metrics, read_pair_classification
from tests.evaluation.data import write_pair_classification, write_rows


def test_labels_are_0_and_1_or_false_and_true(tmp_path):
    folder = read_pair_classification(write_pair_classification(tmp_path) / "test.jsonl")
    assert (folder.first[2], folder.second[2]) == ("pad sequences", "lazy dog")
    np.testing.assert_array_equal(folder.label_N, [1, 1, 0, 0])
    assert folder.label_N.dtype == np.int64


def row(**changes):
    return {"sentence1": "a", "sentence2": "b", "label": 1} | changes


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([row(), row(label=2)], r"test\.jsonl:2: label is 2, expected 0 or 1; write 1 for a pair that means the same"),
        ([row(label="yes")], r"test\.jsonl:1: label is the text 'yes', expected 0 or 1"),
        ([row(label=1.0)], r"test\.jsonl:1: label is 1\.0, expected 0 or 1"),
        ([row(label=None)], r"test\.jsonl:1: label is null, expected 0 or 1"),
        ([row(label=[1])], r"test\.jsonl:1: label is a list, expected 0 or 1"),
        ([row(), {"sentence1": "a", "sentence2": "b"}], r"test\.jsonl:2: label is missing"),
        ([row(sentence2=" ")], r"test\.jsonl:1: field 'sentence2' is empty"),
        ([{"sentence1": "a", "label": 1}], r"test\.jsonl:1: field 'sentence2' is missing"),
        ([row(), row()], r"test\.jsonl: every label is 1; pairs of both labels are needed, 0 and 1"),
    ],
)
def test_a_bad_row_is_named(rows, message, tmp_path):
    write_rows(tmp_path / "test.jsonl", rows)
    with pytest.raises(InputError, match=message) as caught:
        read_pair_classification(tmp_path / "test.jsonl")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("cosines", "labels", "expected"),
    [
        ([0.9, 0.8, 0.1, 0.0], [1, 1, 0, 0], 1.0),
        # Ranks 1 and 3 of 4: (1/1 + 2/3) / 2.
        ([0.9, 0.8, 0.7, 0.0], [1, 0, 1, 0], (1 + 2 / 3) / 2),
        ([0.9, 0.8, 0.7, 0.6], [0, 0, 0, 1], 1 / 4),
        # One threshold for all: the share of pairs that mean the same, whatever their order.
        ([0.5, 0.5, 0.5, 0.5], [1, 0, 0, 0], 1 / 4),
        ([0.5, 0.5, 0.5, 0.5], [0, 0, 0, 1], 1 / 4),
    ],
)
def test_average_precision_by_hand(cosines, labels, expected):
    assert pair_classification_metrics(np.array(cosines), np.array(labels)) == {"cosine_ap": pytest.approx(expected)}
