"""Grades become levels by how far they lie below the positives, as a loop over the judgments finds it."""

import numpy as np
import pytest

from embeddings.common import InputError
from embeddings.mining import negatives as module
from embeddings.mining.negatives import DocumentQrels, TextQrels
from embeddings.mining.pair_index import index_pairs
from tests.data.rows import write_jsonl
from tests.mining.test_pair_index import source

ROWS = [
    {"query": "q0", "positive": "a"},
    {"query": "q1", "positive": ["b", "c"]},
    {"query": "q2", "positive": "nobody judged this"},
    {"query": "q0", "positive": "b"},
    {"query": "q3", "positive": "d"},
]
JUDGED = [
    *(("q0", text, grade) for text, grade in (("a", 3), ("b", 2), ("c", 3), ("d", 1), ("e", 0), ("f", 2))),
    *(("q1", text, grade) for text, grade in (("b", 3), ("d", 2), ("e", 1), ("f", -1), ("not there", 1), ("c", 4))),
    *(("q2", text, grade) for text, grade in (("a", 1), ("b", 0), ("c", 3))),
    ("another query", "a", 3),
]


def loop(judged, positives):
    """For each query text the documents judged as good as its positives, and the levels of the others."""
    scale = sorted({grade for *_, grade in judged if grade > 0})
    found = {}
    for query, own in positives.items():
        grades = {text: grade for asked, text, grade in judged if asked == query}
        least = max(min((grades[text] for text in own if text in grades), default=0), scale[0])
        equal = {text for text, grade in grades.items() if grade >= least} - own
        levels = {}
        for text, grade in grades.items():
            if text not in own and grade < least:
                levels[text] = 3 if grade <= 0 else min(scale.index(least) - scale.index(grade), 2)
        found[query] = (equal, levels)
    return found


@pytest.mark.parametrize("block", [2, 1 << 16])
def test_levels_and_further_positives_equal_a_loop(block, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "BLOCK", block)
    corpus = write_jsonl(tmp_path / "corpus.jsonl", [{"text": text} for text in "fedcba"])
    index = index_pairs(source(tmp_path, ROWS), tmp_path / "index", corpus)
    rows = np.arange(len(ROWS))
    known = index.known_positives(rows)
    judgments = DocumentQrels(TextQrels.of(JUDGED, "qrels"), index, "qrels")
    judged = judgments.of_queries(np.asarray(index.query_hashes), known)
    positives = {"q0": {"a", "b"}, "q1": {"b", "c"}, "q2": {"nobody judged this"}, "q3": {"d"}}
    expected = loop([row for row in JUDGED if row[1] != "not there"], positives)
    assert expected["q0"] == ({"c", "f"}, {"d": 1, "e": 3})
    assert expected["q1"] == (set(), {"d": 1, "e": 2, "f": 3})
    assert expected["q2"] == ({"a", "c"}, {"b": 3})
    for query, row in (("q0", 0), ("q1", 1), ("q2", 2), ("q0", 3), ("q3", 4)):
        group = known.group_Q[row]
        equal = set(index.document_texts(judged.positive_row_P[judged.positive_group_P == group]))
        own = judged.lower_group_L == group
        pairs = zip(judged.lower_row_L[own].tolist(), judged.lower_level_L[own].tolist(), strict=True)
        levels = {index.document_texts([document])[0]: level for document, level in pairs}
        assert (equal, levels) == expected[query]
        assert judged.is_judged_G[group] == (query != "q3")
    assert (np.diff(judged.lower_group_L) >= 0).all()


def test_of_a_pair_judged_twice_the_higher_grade_counts_and_order_does_not():
    first = TextQrels.of([("q", "a", 1), ("q", "b", 0), ("q", " a", 2)], "qrels")
    second = TextQrels.of([("q", "a ", 2), ("q", "a", 1), ("q", "b", 0)], "qrels")
    assert sorted(first.grade_J.tolist()) == [0, 2]
    assert first.sha256() == second.sha256()
    assert first.sha256() != TextQrels.of([("q", "a", 1), ("q", "b", 0)], "qrels").sha256()


@pytest.mark.parametrize(
    ("judged", "says"),
    [
        ([], "qrels: no document is relevant"),
        ([("q", "a", 0), ("q", "b", -1)], "qrels: no document is relevant"),
        ([("q", "a", 1), ("q", "b", 1)], "qrels: every judged document has the score 1, .*--levels quantiles"),
    ],
)
def test_judgments_that_set_nothing_apart_are_refused(judged, says):
    with pytest.raises(InputError, match=says):
        TextQrels.of(judged, "qrels")


@pytest.mark.parametrize("judged", [[("q9", "a", 1), ("q9", "b", 0)], [("q0", "x", 1), ("q0", "y", 0)]])
def test_judgments_of_other_queries_or_documents_are_refused(judged, tmp_path):
    index = index_pairs(source(tmp_path, ROWS), tmp_path / "index")
    with pytest.raises(InputError, match="qrels: judges no document for any query of the source"):
        DocumentQrels(TextQrels.of(judged, "qrels"), index, "qrels")
