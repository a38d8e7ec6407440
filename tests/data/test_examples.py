import pickle

import pytest

from embeddings.data.records import Example, Negative
from embeddings.data.samplers.base import PlanEntry


def test_an_example_has_nothing_but_a_query_and_positives_by_default():
    example = Example(row=3, draw=5, source=0, query="q", positives=("p",))
    assert (example.negatives, example.label, example.negative_labels) == ((), -1, ())
    assert (example.query_prompt, example.document_prompt, example.in_batch_negatives) == ("", "", True)


def test_a_negative_without_a_level_has_level_zero():
    assert Negative("text") == ("text", 0)


@pytest.mark.parametrize("value", [PlanEntry(1, 2), Negative("a", 3), Example(0, 1, 2, "q", ("p",), (Negative("n"),))])
def test_what_crosses_to_a_worker_comes_back_equal(value):
    assert pickle.loads(pickle.dumps(value)) == value
