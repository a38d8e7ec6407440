"""Summaries with marks: read strictly, and scored within each text."""

import numpy as np
import pytest
from scipy.stats import spearmanr

from embeddings.common import InputError
from embeddings.evaluation.summarisation import SummarisationFolder, read_summarisation, summarisation_metrics
from tests.evaluation.data import write_rows, write_summarisation


def test_rows_are_lists_of_each_text(tmp_path):
    folder = read_summarisation(write_summarisation(tmp_path) / "test.jsonl")
    assert [len(texts) for texts in folder.human_summaries] == [2, 1, 1]
    assert folder.machine_summaries[0] == ["quick brown fox", "lazy dog", "two numbers"]
    assert folder.relevance == [[3.0, 2.0, 1.0], [1.5, 4.0], [2.0, 2.0]]


def row(**changes):
    return {"human_summaries": ["a"], "machine_summaries": ["b", "c"], "relevance": [1, 2]} | changes


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([row(), row(relevance=[1])], r"test\.jsonl:2: relevance has length 1, machine_summaries 2; give each"),
        ([row(relevance=[1, "2"])], r"test\.jsonl:1: relevance\[1\] is text, expected a finite number"),
        ([row(human_summaries=[])], r"test\.jsonl:1: field 'human_summaries' is an empty list"),
        ([row(machine_summaries=["b", " "])], r"test\.jsonl:1: field 'machine_summaries\[1\]' is empty"),
        ([row(), {"machine_summaries": ["b"], "relevance": [1]}], r"test\.jsonl:2: field 'human_summaries' is missing"),
        ([row(relevance=[2, 2])], r"test\.jsonl: no row has two different numbers in relevance"),
    ],
)
def test_a_bad_row_is_named(rows, message, tmp_path):
    write_rows(tmp_path / "test.jsonl", rows)
    with pytest.raises(InputError, match=message) as caught:
        read_summarisation(tmp_path / "test.jsonl")
    assert "\n" not in str(caught.value)


def unit(rows, seed):
    vectors = np.random.default_rng(seed).normal(size=(rows, 4)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def test_the_best_cosine_is_ranked_within_each_text_that_has_different_marks(tmp_path):
    folder = read_summarisation(write_summarisation(tmp_path) / "test.jsonl")
    human_ND, machine_ND = unit(4, 0), unit(7, 1)
    first = [max(float(human_ND[h] @ machine_ND[m]) for h in (0, 1)) for m in (0, 1, 2)]
    second = [float(human_ND[2] @ machine_ND[m]) for m in (3, 4)]
    by_text = [spearmanr(first, [3, 2, 1]).statistic, spearmanr(second, [1.5, 4]).statistic]
    scores, num_skipped = summarisation_metrics(folder, human_ND, machine_ND)
    assert scores == {"cosine_spearman": pytest.approx(np.mean(by_text))}
    assert num_skipped == 1


def test_the_nearest_of_peoples_summaries_counts_and_not_their_mean():
    folder = SummarisationFolder([["a", "b"]], [["c", "d", "e"]], [[3.0, 2.0, 1.0]])
    human_ND = np.eye(3, dtype=np.float32)[:2]
    # Cosines 1 and 0, 0.7 and 0.7, 0.6 and 0.6: the means have another order.
    machine_ND = np.array([[1, 0, 0], [0.7, 0.7, 0.02**0.5], [0.6, 0.6, 0.28**0.5]], np.float32)
    assert summarisation_metrics(folder, human_ND, machine_ND)[0] == {"cosine_spearman": pytest.approx(1.0)}


def test_vectors_that_are_all_alike_gain_nothing(tmp_path):
    folder = read_summarisation(write_summarisation(tmp_path) / "test.jsonl")
    same = np.repeat(unit(1, 0), 7, axis=0)
    assert summarisation_metrics(folder, same[:4], same) == ({"cosine_spearman": 0.0}, 3)
