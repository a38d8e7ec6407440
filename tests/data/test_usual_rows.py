"""Rows that are checked column by column, against the parsers of single rows."""

import math
import random

import pytest

from embeddings.common import InputError
from embeddings.data import Negative
from embeddings.data.records import (
    Cell,
    parse_labelled_text,
    parse_record,
    parse_scored_pair,
    usual_labelled_texts,
    usual_pairs,
    usual_scored_pairs,
)

TEXTS = ["a", " b ", "caf\u00e9", "cafe\u0301", "東京", "c\n", "d" * 99]
ODD = [None, "", " \u2003", "x\x00", "\ud800", 1, True, 1.5, {}, [], ["a", "a "], ["a", None], b"a", Cell("[1]"), "[n]"]
LISTS = [["e"], ["f", "g"], ["\u212b", "h"], None, [{"text": "n", "level": 2}], ["[1]"], Cell('["i", "j"]'), "n"]
VALUES = {
    "query": TEXTS,
    "positive": [*"pqr", "\u212b", ["s", "t"], ["s", "s"], Cell("u")],
    "negatives": LISTS,
    "instruction": ["find", None, Cell("seek")],
    "label": ["l", " l", 3, None, Cell("4")],
    "score": [1, 0.5, None, 10**30, math.nan, Cell("2")],
    "id": ["i", 7, None],
    "language": ["de", None],
    "scores": [None, None, [1.0, 2.0]],
    "text": TEXTS,
    "sentence1": TEXTS,
    "sentence2": TEXTS,
}
# Columns with other names, and those that a mapping names.
RENAMED = {
    "query": "anchor",
    "positive": "answer",
    "negatives": "negative",
    "instruction": "prompt",
    "text": "sentence",
}
KINDS = {
    "pairs": (("query", "positive"), ("negatives", "instruction", "label", "score", "id", "language", "scores")),
    "labelled": (("text", "label"), ("other",)),
    "scored": (("sentence1", "sentence2", "score"), ("other",)),
}


def rows_of(draw, kind):
    """A few rows with the same columns: sometimes with odd values, missing columns or other names."""
    required, optional = KINDS[kind]
    names = [*required, *draw.sample(optional, k=min(len(optional), draw.choice([0, 0, 1, 3])))]
    renamed = {name: RENAMED[name] for name in names if name in RENAMED and draw.random() < 0.2}
    rows = []
    for _ in range(draw.choice([1, 1, 2, 5])):
        row = {}
        for name in names:
            pool = ODD if draw.random() < 0.05 else VALUES.get(name, TEXTS)
            if draw.random() > 0.03:
                row[renamed.get(name, name)] = draw.choice(pool)
        rows.append(row)
    columns = {name: draw.choice([other, other, "nowhere", None]) for name, other in renamed.items()}
    if columns and draw.random() < 0.5:
        columns |= {name: None for name in ("label", "id") if name in optional and draw.random() < 0.5}
    return rows, draw.choice([{}, columns])


def pairs_of(rows, columns):
    usual = usual_pairs(rows, columns)
    if usual is None:
        return None
    names = ("query", "positives", "negatives", "label", "score", "id", "instruction", "language")
    records = [dict(zip(names, values, strict=True)) for values in zip(*usual, strict=True)]
    return [record | {"negatives": tuple(map(Negative, record["negatives"])), "scores": ()} for record in records]


@pytest.mark.parametrize(
    ("kind", "usual", "parse"),
    [
        ("pairs", pairs_of, lambda *row: parse_record(*row)._asdict()),
        ("labelled", usual_labelled_texts, parse_labelled_text),
        ("scored", usual_scored_pairs, parse_scored_pair),
    ],
)
def test_usual_rows_have_the_values_that_the_parser_of_one_row_returns(kind, usual, parse):
    draw, num_usual, num_odd = random.Random(0), 0, 0
    for _ in range(4000):
        rows, columns = rows_of(draw, kind)
        found = usual(rows, columns)
        num_usual += found is not None
        try:
            expected = [parse(row, columns, "f:1") for row in rows]
        except InputError:
            num_odd += 1
            assert found is None, (rows, columns)
            continue
        if found is not None:
            assert found == expected, (rows, columns)
            if kind == "pairs":
                assert all(parse_record(row, columns, "f:1").suspicion is None for row in rows)
    assert num_usual > 900
    assert num_odd > 200
