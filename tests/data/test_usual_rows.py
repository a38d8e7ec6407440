"""Rows that are checked column by column, against the parser of single rows."""

import math
import random

from embeddings.common import InputError
from embeddings.data import Negative
from embeddings.data.records import Cell, Record, parse_record, usual_pairs

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
}
# Columns with other names, and those that a mapping names.
RENAMED = {"query": "anchor", "positive": "answer", "negatives": "negative", "instruction": "prompt"}
OPTIONAL = ("negatives", "instruction", "label", "score", "id", "language", "scores")


def rows_of(draw):
    """A few rows with the same columns: sometimes with odd values, missing columns or other names."""
    names = ["query", "positive", *draw.sample(OPTIONAL, k=draw.choice([0, 0, 1, 3]))]
    renamed = {name: RENAMED[name] for name in names if name in RENAMED and draw.random() < 0.2}
    rows = []
    for _ in range(draw.choice([1, 1, 2, 5])):
        row = {}
        for name in names:
            pool = ODD if draw.random() < 0.05 else VALUES[name]
            if draw.random() > 0.03:
                row[renamed.get(name, name)] = draw.choice(pool)
        rows.append(row)
    columns = {name: draw.choice([other, other, "nowhere", None]) for name, other in renamed.items()}
    if columns and draw.random() < 0.5:
        columns |= {name: None for name in ("label", "id") if draw.random() < 0.5}
    return rows, draw.choice([{}, columns])


def test_usual_rows_have_the_values_that_the_parser_of_one_row_returns():
    draw, num_usual, num_odd = random.Random(0), 0, 0
    for _ in range(6000):
        rows, columns = rows_of(draw)
        usual = usual_pairs(rows, columns)
        num_usual += usual is not None
        try:
            expected = [parse_record(row, columns, "f:1") for row in rows]
        except InputError:
            num_odd += 1
            assert usual is None, (rows, columns)
            continue
        if usual is not None:
            negatives = [tuple(map(Negative, texts)) for texts in usual.negatives]
            assert list(map(Record, *usual._replace(negatives=negatives))) == expected, (rows, columns)
            assert {record.suspicion for record in expected} == {None}
    assert num_usual > 1000
    assert num_odd > 1000
