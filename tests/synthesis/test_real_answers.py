"""What validation does with real answers of a language model that is too small for the task."""

import json
from collections import Counter
from pathlib import Path

from embeddings.synthesis.prompts import METHODS, Templates
from embeddings.synthesis.validate import Answer, RejectedAnswer, parse_answer, read_example, read_tasks

ROWS = Path(__file__).parents[1] / "fixtures" / "example_answers.jsonl"


def cause_of(row):
    """Why an answer is not used."""
    method = METHODS[row["method"]]
    category = method.category(row["category"])
    try:
        value = parse_answer(Answer(row["answer"], row["finish_reason"]))
        if "call" in row:
            return read_tasks(value)
        prompt = Templates(method).example(category, row["task"], 0, row["index"])
        return read_example(value, category, row["task"], prompt, "x")
    except RejectedAnswer as error:
        return error.cause


def test_no_answer_of_a_weak_model_is_accepted():
    rows = [json.loads(line) for line in ROWS.read_text("utf-8").splitlines()]
    causes = [("tasks" if "call" in row else "example", cause_of(row)) for row in rows]
    assert Counter(causes) == {
        ("example", "cut off"): 23,
        ("example", "missing field"): 4,
        ("example", "copied seed"): 1,
        ("example", "not json"): 4,
        ("example", "repeated key"): 3,
        ("tasks", "not json"): 4,
        ("tasks", "no tasks"): 1,
        ("tasks", "cut off"): 2,
    }
