"""Parsing of rows, error messages that name the field, and round trips of written records."""

import math
import re

import pyarrow.parquet as pq
import pytest

from embeddings.common import InputError
from embeddings.common.io import text_hash
from embeddings.data import SourceConfig
from embeddings.data.readers import open_reader
from embeddings.data.records import (
    RECORD_FIELDS,
    Negative,
    Record,
    parse_labelled_text,
    parse_record,
    parse_scored_pair,
    write_records,
)
from embeddings.data.store import open_cached
from tests.data.rows import pairs, write_jsonl
from tests.helpers.refusals import refused

GOOD = {"query": "q", "positive": "p"}


def test_a_record_has_all_given_fields_and_optional_ones_may_be_missing_or_null():
    row = {**GOOD, "negatives": ["hard", "easy"], "label": 3, "score": 2, "id": 17, "other": float("nan")}
    row |= {"instruction": "find", "language": "de"}
    negatives = (Negative("hard"), Negative("easy"))
    assert parse_record(row, {}, "f:1") == Record("q", ("p",), negatives, "3", 2.0, "17", "find", "de")
    null = dict.fromkeys(("negatives", "instruction", "label", "score", "id", "language"))
    assert parse_record(GOOD, {}, "f:1") == parse_record({**GOOD, **null}, {}, "f:1") == Record("q", ("p",))


LEVELED = [{"text": "d", "level": 4}, {"text": "a", "level": 1}, {"text": "c", "level": 4, "score": 0.1}]
HARDEST_FIRST = (Negative("a", 1), Negative("d", 4), Negative("c", 4))


@pytest.mark.parametrize(
    ("row", "columns", "expected"),
    [
        ({"query": "q", "positive": ["a", "b"]}, {}, Record("q", ("a", "b"))),
        ({**GOOD, "negative": "n"}, {"negatives": "negative"}, Record("q", ("p",), (Negative("n"),))),
        ({"Q": "q", "A": "p", "query": "ignored"}, {"query": "Q", "positive": "A"}, Record("q", ("p",))),
        # A column that is mapped to another field is not used for the field of its name.
        ({"instruction": "q", "out": "p"}, {"query": "instruction", "positive": "out"}, Record("q", ("p",))),
        ({**GOOD, "label": 1}, {"label": None}, Record("q", ("p",))),
        # A text that a record repeats is one text: the hardest, and the first, are kept.
        ({"query": "q", "positive": ["p", "p ", "r"]}, {}, Record("q", ("p", "r"))),
        ({**GOOD, "negatives": ["n", "m", " n"]}, {}, Record("q", ("p",), (Negative("n"), Negative("m")))),
        (
            {**GOOD, "negatives": [{"text": "n", "level": 4}, {"text": "n", "level": 2}], "scores": [9, 1, 2]},
            {},
            Record("q", ("p",), (Negative("n", 2),), scores=(9.0, 2.0)),
        ),
        # Within a level negatives keep their order.
        ({**GOOD, "negatives": LEVELED}, {}, Record("q", ("p",), HARDEST_FIRST)),
    ],
)
def test_lists_mapped_columns_and_levels_are_understood(row, columns, expected):
    assert parse_record(row, columns, "f:1") == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": None}, "query is null, expected text"),
        ({"positive": None}, "positive is null, expected text or a list; give it a text, or leave the row out"),
        ({"query": True}, "query is true or false, expected text"),
        ({"query": {}}, "query is an object, expected text"),
        ({"query": ""}, "query is an empty text"),
        ({"query": " \n\t\u2003"}, "query is white space"),
        ({"query": "a\x00b"}, "query contains a NUL character"),
        ({"query": "\ud800"}, "query contains half of a character"),
        ({"positive": []}, "positive is an empty list"),
        ({"positive": ["p", " "]}, "positive[1] is white space"),
        ({"negatives": " "}, "negatives is white space"),
        ({"negatives": 5}, "negatives is a number, expected text or a list"),
        ({"negatives": {"text": ["n"]}}, "negatives is an object, expected text or a list"),
        ({"negatives": ["n", None]}, "negatives[1] is null"),
        ({"negatives": ["n", {"text": "m", "level": 1}]}, "negatives[1] is an object, expected text"),
        ({"negatives": [{"text": "m", "level": 1}, "n"]}, "negatives[1] is text where negatives[0] is an object"),
        ({"negatives": [{"text": "m", "level": 5}]}, "negatives[0].level is 5, expected an integer from 1"),
        *(({"negatives": [{"text": "m", "level": v}]}, f"negatives[0].level is {v}") for v in (0, True, 1.0)),
        ({"negatives": [{"text": "m"}]}, "negatives[0].level is None"),
        ({"negatives": [{"level": 1}]}, "negatives[0].text is null"),
        ({"label": 1.5}, "label is a number, expected text or an integer"),
        ({"label": ""}, "label is an empty text"),
        ({"score": math.nan}, "score is nan, expected a finite number"),
        ({"score": "4"}, "score is text, expected a finite number"),
        ({"id": []}, "id is a list, expected text"),
        ({"scores": 1.5}, "scores is a number, expected a list of 1 numbers, one for each of the positives (1)"),
        ({"scores": []}, "scores has 0, expected a list of 1"),
        ({"scores": [1, 2], "negatives": ["n", "m"]}, "scores has 2, expected a list of 3 numbers"),
        ({"scores": [1, "2"], "negatives": "n"}, "scores[1] is text, expected a finite float32 number, or null"),
        ({"scores": [math.inf]}, "scores[0] is inf, expected a finite float32 number"),
        ({"scores": [1e39]}, "scores[0] is 1e+39, expected a finite float32 number"),
        ({"scores": [10**400]}, "scores[0] is a number, expected a finite float32 number"),
    ],
)
def test_a_fault_names_row_and_field_on_one_line(change, message):
    text = refused(InputError, re.escape(message), parse_record, {**GOOD, **change}, {}, "train.jsonl:17")
    assert text.startswith("train.jsonl:17: ")
    assert "; " in text
    assert len(text) <= 200


NFC, NFD = "caf\u00e9", "cafe\u0301"


def test_texts_and_labels_are_compared_in_one_unicode_form_without_outer_white_space():
    assert parse_record({**GOOD, "label": f" {NFD}"}, {}, "f:1").label == NFC
    assert parse_labelled_text({"text": "t", "label": "x "}, {}, "f:1") == ("t", "x")
    assert text_hash(f"{NFD} ") == text_hash(NFC)
    assert Record(NFC, (NFD,)).suspicion == "a positive is the query itself"
    assert Record(NFC, ("p",), (Negative(NFD),)).suspicion == "a negative is the query itself"
    assert Record("q", (NFC,), (Negative(NFD),)).suspicion == "a negative is also a positive"
    record = parse_record({**GOOD, "negatives": [NFD, NFC], "positive": [NFC, "p", NFD]}, {}, "f:1")
    assert (record.positives, record.negatives) == ((NFC, "p"), (Negative(NFD),))


@pytest.mark.parametrize("text", ['["a", "b"]', "['a', 'b']", "['a' 'b']"])
def test_negatives_that_are_a_list_as_text_are_refused_and_a_positive_may_be_one(text):
    says = r"^f:1: negatives is a list as text; write it as a JSON list, such as .* is a list of one$"
    refused(InputError, says, parse_record, {**GOOD, "negatives": text}, {}, "f:1")
    record = parse_record({"query": "q", "positive": text, "negatives": [f" {text}", "[1]"]}, {}, "f:1")
    assert record == Record("q", (text,), (Negative(f" {text}"), Negative("[1]")))


def test_a_missing_field_names_the_existing_columns_and_a_fix():
    says = "^f:2: field 'positive': no column 'positive' among query, reply; "
    says += r"map it with columns: \{positive: YOUR_COLUMN\}$"
    refused(InputError, says, parse_record, {"query": "q", "reply": "a"}, {}, "f:2")
    says = r"'positive' among q, answer; map it with columns: \{positive: answer\}$"
    refused(InputError, says, parse_record, {"q": "q", "answer": "a"}, {"query": "q"}, "f:2")
    # A mapped field must exist, even an optional one.
    refused(InputError, "no column 'bad' among query, positive", parse_record, GOOD, {"negatives": "bad"}, "f:1")


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"anchor": "q", "positive": "p", "negative": "n"}, Record("q", ("p",), (Negative("n"),))),
        (
            {"anchor": "q", "positive": "p", "negative_10": "c", "negative_1": "a", "negative_2": ["b", "d"]},
            Record("q", ("p",), (Negative("a"), Negative("b"), Negative("d"), Negative("c"))),
        ),
        (
            {"anchor": "q", "positive": "p", "negative_1": None, "negative_2": "b", "neg": None},
            Record("q", ("p",), (Negative("b"),)),
        ),
        ({"sentence1": "q", "sentence2": "p", "score": None}, Record("q", ("p",))),
        ({"query": "q", "answer": "p", "language": "de"}, Record("q", ("p",), language="de")),
        ({"Question": "q", "passage": ["p", "r"]}, Record("q", ("p", "r"))),
        (
            {
                "query": "q",
                "pos": ["p", "r"],
                "neg": ["n"],
                "pos_scores": [1, None],
                "neg_scores": [-2],
                "prompt": "find",
            },
            Record("q", ("p", "r"), (Negative("n"),), instruction="find", scores=(1.0, math.nan, -2.0)),
        ),
        (
            {**GOOD, "negatives": "n", "neg_scores": [2], "prompt": ""},
            Record("q", ("p",), (Negative("n"),), scores=(math.nan, 2.0)),
        ),
        # A column with the name of the field takes precedence, unless it is null.
        ({"query": "q", "anchor": "x", "positive": "p", "answer": "y"}, Record("q", ("p",))),
        ({"query": None, "anchor": "q", "positive": "p"}, Record("q", ("p",))),
        ({"query": "q", "positive": "p", "neg": LEVELED, "score": 1}, Record("q", ("p",), HARDEST_FIRST, score=1.0)),
    ],
)
def test_the_column_names_of_other_libraries_are_recognised(row, expected):
    assert repr(parse_record(row, {}, "f:1")) == repr(expected)  # NaN differs from itself


def test_scored_pairs_and_labelled_texts_are_parsed_with_these_names_too():
    assert parse_labelled_text({"text": "t", "label": 0, "x": 1}, {}, "f:1") == ("t", "0")
    assert parse_scored_pair({"a": "s", "sentence2": "t", "score": 4}, {"sentence1": "a"}, "f:1") == ("s", "t", 4.0)
    assert parse_scored_pair({"anchor": "s", "positive": "t", "label": 1}, {}, "f:1") == ("s", "t", 1.0)
    assert parse_labelled_text({"sentence": "t", "category": "c"}, {}, "f:1") == ("t", "c")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"anchor": "q", "question": "r", "positive": "p"},
            "field 'query': several columns match (anchor, question); choose one: columns: {query: anchor}",
        ),
        (
            {"query": "q", "answer": "p", "passage": "r", "neg": "n"},
            "field 'positive': several columns match (answer, passage); choose one: columns: {positive: answer, neg",
        ),
        ({**GOOD, "negative_1": "n", "hard_negative": "m"}, "field 'negatives': several columns match (hard_negative,"),
        ({**GOOD, "negative_1": "n", "negative_2": " "}, "negatives[1] is white space"),
        (
            {"sentence1": "q", "sentence2": "p", "score": 1.0},
            "'score' beside sentence1 and sentence2 may mark which pairs match; set conversion: sts for scored pairs, "
            "or, if all pairs match, columns: {query: sentence1, positive: sentence2}",
        ),
        (
            {"anchor": "q", "positive": "p", "label": 1},
            "'label' beside anchor may mark which pairs match; set conversion: sts for scored pairs, or, if all pairs "
            "match, columns: {query: anchor, positive: positive, label: null}",
        ),
        (
            {"query": "q", "pos": ["p"], "neg": ["n"], "pos_scores": [1], "neg_scores": [1, 2]},
            "neg_scores has 2, expected a list of 1 numbers",
        ),
        ({"query": "q", "answer": "p", "label": 0}, "'label' beside answer may mark which pairs match; set"),
        ({"text": "t", "label": 1}, "for texts with classes set conversion: class_by_example, or map it with columns:"),
    ],
)
def test_ambiguous_columns_are_refused_in_one_line(row, message):
    assert refused(InputError, re.escape(message), parse_record, row, {}, "f:3").startswith("f:3: ")


PLAIN = [
    Record("a query", ("a positive",)),
    Record("q", ("p", "r", "東京 é\n"), (Negative("n"), Negative("m")), "a class", -0.5, "id 7", "what it is for"),
    Record("third", ("x",), (Negative("n"),), label="1", score=1e-300, language="sw"),
]
SCORED = [PLAIN[1]._replace(scores=(0.1, -2.0, 3.5, 1e-30, 4.0)), PLAIN[2]._replace(scores=(7.0, -7.0)), PLAIN[0]]
GRADED = [*PLAIN[:1], Record("q", ("p",), (Negative("n", 1), Negative("m", 1), Negative("o", 4)), id="2")]


@pytest.mark.parametrize(
    ("records", "graded", "scored"),
    [(PLAIN, False, False), (GRADED, True, False), (GRADED[:1], False, False), (SCORED, False, True)],
)
def test_every_field_is_read_back_as_it_was(records, graded, scored, tmp_path, monkeypatch):
    monkeypatch.setattr("embeddings.data.records.GROUP_ROWS", 2)
    path = tmp_path / "records.parquet"
    assert write_records(path, iter(records), graded, scored=scored) == len(records)
    content = path.read_bytes()
    write_records(path, records, graded, scored=scored)
    assert path.read_bytes() == content
    assert ("scores" in pq.read_schema(path).names) is scored
    rows = open_reader(path, RECORD_FIELDS, ("query",))
    assert [parse_record(row, {}, where) for where, row in rows] == records
    cached = open_cached(SourceConfig("a", str(path)), tmp_path / "cache")
    assert [cached.table.row(row).query for row in range(len(records))] == [record.query for record in records]
    assert cached.table.has_levels("a") is graded


def test_negatives_of_which_some_have_levels_are_refused(tmp_path):
    for negatives in ([None, ["n"], [{"text": "n", "level": 2}]], [[{"text": "n", "level": 2}], ["n"], None]):
        rows = [{**pair, "negatives": value} for pair, value in zip(pairs(3), negatives, strict=True)]
        cached = open_cached(SourceConfig("a", str(write_jsonl(tmp_path / "a.jsonl", rows))), tmp_path / "cache")
        says = "mine: some negatives have a level and others have none; give all of them"
        refused(InputError, says, cached.table.has_levels, "mine")
