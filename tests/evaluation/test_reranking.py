"""Queries with candidates: read strictly, and scored by where the relevant ones come."""

import numpy as np
import pytest

from embeddings.common import InputError
from embeddings.evaluation.reranking import read_reranking, reranking_metrics
from tests.evaluation.data import write_reranking, write_rows


def test_each_text_is_one_document_and_one_candidate_of_a_query(tmp_path):
    folder = read_reranking(write_reranking(tmp_path) / "test.jsonl")
    assert folder.queries == ["brown fox", "length"]
    assert folder.documents == ["the quick brown fox", "brown dog", "two numbers", "one length", "lazy dog"]
    assert folder.candidate_rows == [[0, 1, 2, 3], [3, 4, 0]]
    assert folder.num_relevant == [2, 1]


def row(**changes):
    return {"query": "q", "positive": "a", "negatives": ["b"]} | changes


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([row(), row(negatives=[])], r"test\.jsonl:2: the query has no negatives; list texts .* as 'negatives'"),
        ([{"query": "q", "positive": ["a"], "negative": ["b"]}], r"test\.jsonl:1: the query has no negatives"),
        ([row(negatives=["b", "a"])], r"test\.jsonl:1: a text is both positive and negative; keep it on one side"),
        ([row(negatives=3)], r"test\.jsonl:1: negatives is a number, expected text or a list"),
        ([row(positive=[])], r"test\.jsonl:1: positive is an empty list"),
        ([row(positive=["a", ""])], r"test\.jsonl:1: positive\[1\] is an empty text"),
        ([row(query=3)], r"test\.jsonl:1: query is a number, expected text"),
        ([row(), {"query": "q", "negatives": ["b"]}], r"test\.jsonl:2: field 'positive': no column"),
    ],
)
def test_a_bad_row_is_named(rows, message, tmp_path):
    write_rows(tmp_path / "test.jsonl", rows)
    with pytest.raises(InputError, match=message) as caught:
        read_reranking(tmp_path / "test.jsonl")
    assert "\n" not in str(caught.value)


def angles(*degrees):
    """Unit vectors at these angles: the cosine of two falls with the angle between them."""
    radians = np.deg2rad(np.array(degrees))
    return np.stack([np.cos(radians), np.sin(radians)], axis=1).astype(np.float32)


def test_the_order_of_the_candidates_by_hand(tmp_path):
    folder = read_reranking(write_reranking(tmp_path) / "test.jsonl")
    # Of query 0 the relevant documents 0 and 1 come 1st and 3rd of 4; of query 1 document 3 comes 2nd of 3.
    scores = reranking_metrics(folder, angles(0, 0), angles(10, 30, 20, 40, 5))
    assert scores["map_at_1000"] == pytest.approx(((1 / 1 + 2 / 3) / 2 + 1 / 3) / 2)
    assert scores["mrr_at_10"] == pytest.approx((1 + 1 / 3) / 2)
    ideal = 1 + 1 / np.log2(3)
    assert scores["ndcg_at_10"] == pytest.approx(((1 + 1 / 2) / ideal + 1 / 2) / 2)
    assert next(iter(scores)) == "map_at_1000"


def test_a_document_that_is_no_candidate_of_a_query_has_no_say(tmp_path):
    folder = read_reranking(write_reranking(tmp_path) / "test.jsonl")
    far, near = (reranking_metrics(folder, angles(0, 90), angles(10, 30, 20, 40, a)) for a in (180, 0))
    assert far == near


def test_vectors_that_are_all_alike_come_last(tmp_path):
    folder = read_reranking(write_reranking(tmp_path) / "test.jsonl")
    scores = reranking_metrics(folder, angles(0, 0), angles(7, 7, 7, 7, 7))
    # Ranks 3 and 4 of 4, and 3 of 3.
    assert scores["map_at_1000"] == pytest.approx(((1 / 3 + 2 / 4) / 2 + 1 / 3) / 2)
