"""What the filters do with real queries of a language model that is too small for the task."""

import json
from collections import Counter
from pathlib import Path

import pytest

from embeddings.adaptation.candidates import Candidate, Passage, WordStatistics
from embeddings.adaptation.model_queries import read_line, read_query
from embeddings.synthesis.validate import Answer, RejectedAnswer

FILE = Path(__file__).parents[1] / "fixtures" / "query_answers.jsonl"
HEAD, *ROWS = map(json.loads, FILE.read_text("utf-8").splitlines())
EXAMPLES = [Candidate(each["query"], "sentence", "", each["positive"], "example", "") for each in HEAD["examples"]]


@pytest.fixture(scope="module")
def passages():
    return [Passage(f"p{row}", each["title"], each["text"], "d", "d.md") for row, each in enumerate(ROWS)]


@pytest.fixture(scope="module")
def statistics(passages):
    return WordStatistics([(each.id, f"{each.title} {each.text}") for each in passages])


def causes_of(answers, passages, statistics):
    """Why each answer is not used, or its text if it is."""
    for answer, passage in zip(answers, passages, strict=True):
        try:
            yield read_query(read_line(answer), passage, EXAMPLES, statistics).query
        except RejectedAnswer as error:
            yield error.cause


def test_queries_of_a_weak_model_are_rejected_by_cause(passages, statistics):
    answers = [Answer(row["answer"], row["finish_reason"]) for row in ROWS]
    causes = list(causes_of(answers, passages, statistics))
    assert Counter(causes) == {
        "cut off": 22,
        "shares too little with the rest": 4,
        "echoed prompt": 4,
        "copied from the rest": 2,
        "several sentences": 2,
        "little prose": 1,
        # Nonsense that has the form of a query, and words of its passage.
        "A comparison of the inputs with all their own outputs.": 1,
    }
    # The same from a server that stops at the end of the line.
    lines = [answer.content.partition("\n") for answer in answers]
    stopped = [
        Answer(line, "stop" if end else answer.finish_reason)
        for (line, end, _), answer in zip(lines, answers, strict=True)
    ]
    assert list(causes_of(stopped, passages, statistics)) == causes


def test_most_answers_that_were_cut_off_would_be_poor_queries_too(passages, statistics):
    count = Counter(causes_of([Answer(row["answer"], "stop") for row in ROWS], passages, statistics))
    assert (count["several sentences"], count["repeats itself"], count["repeats the title"]) == (12, 2, 3)
    assert len([cause for cause in count if cause in {row["answer"] for row in ROWS}]) == 5


@pytest.mark.parametrize(
    ("query", "fault"),
    [
        ("the recall of exact search. It is high", "several sentences"),
        ("whether recall of exact search decides if recall of exact search wins", "repeats itself"),
        ("I searched the lists. What is the recall of exact search?", None),
        ("whether recall of exact search helps musicians", None),
    ],
)
def test_a_query_is_one_sentence_or_ends_with_a_question(query, fault, passages, statistics):
    if fault is None:
        assert read_query(query, passages[0], EXAMPLES, statistics).query == query
    else:
        with pytest.raises(RejectedAnswer) as raised:
            read_query(query, passages[0], EXAMPLES, statistics)
        assert raised.value.cause == fault
