"""CSV and TSV tables: accepted forms, and error messages with file and row."""

import csv
import gzip
import re
from pathlib import Path

import pytest

from embeddings.common import InputError
from embeddings.data import SourceConfig, readers
from embeddings.data.readers import open_reader
from embeddings.data.records import Negative
from embeddings.data.store import open_cached, read_records, record_place
from tests.helpers.refusals import refused

ROWS = [
    {"query": "plain", "positive": "text"},
    {"query": 'a "quoted" word', "positive": "a, b; c\td"},
    {"query": "over\n\nseveral\r\nlines", "positive": " spaces "},
    {"query": "東京", "positive": "x" * 200_000},
]


def write_csv(path, rows, **options):
    """Write the rows with the `csv` module, gzipped if the name ends in .gz."""
    with (gzip.open if path.suffix == ".gz" else open)(path, "wt", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), **options)
        writer.writeheader()
        writer.writerows(rows)
    return path


def read(path):
    return list(open_reader(path, ("query", "positive"), ("query", "positive")))


@pytest.mark.parametrize("ends", ["\r\n", "\n"])
@pytest.mark.parametrize("quoting", [csv.QUOTE_MINIMAL, csv.QUOTE_ALL])
@pytest.mark.parametrize(
    ("name", "separator"), [("a.csv", ","), ("a.csv", ";"), ("A.CSV", "\t"), ("a.tsv", "\t"), ("a.csv.gz", ",")]
)
def test_tables_of_the_csv_module_are_read_back(tmp_path, name, separator, quoting, ends):
    path = write_csv(tmp_path / name, ROWS, delimiter=separator, quoting=quoting, lineterminator=ends)
    reader = open_reader(path, ("query", "positive"), ("query", "positive"))
    found = list(reader)
    assert [row.fields for row in found] == ROWS
    assert [row.where for row in found] == [f"{path}:{line}" for line in (2, 3, 4, 8)]
    assert reader.bytes_read == reader.total_bytes == path.stat().st_size


def test_numbers_labels_and_empty_cells_are_understood(tmp_path):
    (tmp_path / "a.csv").write_text('query,positive,negatives,label,score,id\nq,p,,3,,7\nr,s,n,"x, y",0.5,\n')
    config = SourceConfig("a", str(tmp_path / "a.csv"))
    cached = open_cached(config, tmp_path / "cache")
    (_, first), (_, second) = read_records(config, cached)
    assert (first.negatives, first.label, first.score, first.id) == ((), "3", None, "7")
    assert ([each.text for each in second.negatives], second.label, second.score) == (["n"], "x, y", 0.5)
    assert record_place(config, cached, 1) == f"{tmp_path}/a.csv:3"
    (tmp_path / "b.csv").write_text("sentence1,sentence2,score\na,b,4.5\nc,d,1\n")
    scored = SourceConfig("b", str(tmp_path / "b.csv"), conversion="sts", instruction="i", symmetric=True)
    assert len(open_cached(scored, tmp_path / "cache").table) == 2
    (tmp_path / "c.csv").write_text("sentence1,sentence2,score\na,b,high\n")
    text = SourceConfig("c", str(tmp_path / "c.csv"), conversion="sts")
    refused(InputError, r"c\.csv:2: score is text, expected a finite number", open_cached, text, tmp_path / "cache")


def test_byte_order_marks_blank_lines_spaced_headers_and_json_are_accepted(tmp_path):
    for data in (
        b"\xef\xbb\xbfquery,positive\nq,p\n",
        b"\n \nquery,positive\n\nq,p\n,\n\n",
        b" query , positive \nq,p",
        b'\xef\xbb\xbf{"query": "q", "positive": "p"}\n',
    ):
        (tmp_path / "a.csv").write_bytes(data)
        assert [row.fields for row in read(tmp_path / "a.csv")] == [{"query": "q", "positive": "p"}]


HEADER = b"query,positive\n"


@pytest.mark.parametrize(
    ("data", "where", "message"),
    [
        (HEADER, "", "contains no rows"),
        (b"\n\n", "", "contains no rows"),
        (HEADER + b"q,p,r\n", ":2", "the row has 3 cells, and the header 2; quote texts that contain the separator"),
        (HEADER + b'q,"p\nr"\nq\n', ":4", "the row has 1 cells, and the header 2"),
        (HEADER + b'q,"p"r\n', ":2", "the row is not CSV ("),
        (
            HEADER + b'q,p\nq,"p\n' + b"r,s\n" * 9,
            ":3",
            "the row is not CSV (unexpected end of data); close the quotes of its cells",
        ),
        (HEADER + b"q,\xff\n", ":2", "byte 3 of the row is not valid UTF-8"),
        (HEADER + b'q,"' + b"x" * 999 + b"\n" + b"x" * 999 + b'"\n', ":2", "the row is not CSV (field larger than"),
        (b"query,query\nq,p\n", "", "has two columns 'query'"),
    ],
)
def test_a_bad_table_is_refused_with_file_and_row_on_one_line(tmp_path, monkeypatch, data, where, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(readers, "MAX_LINE_BYTES", 1500)
    limit = csv.field_size_limit()
    (tmp_path / "bad.csv").write_bytes(data)
    try:
        text = refused(InputError, re.escape(message), read, Path("bad.csv"))
    finally:
        csv.field_size_limit(limit)
    assert text.startswith(f"bad.csv{where}: " if where else "bad.csv")


def test_cells_with_json_lists_are_lists_and_python_lists_are_refused_with_the_row(tmp_path):
    path, rows = (
        tmp_path / "a.csv",
        [
            {"query": "q", "positive": '["p", "r"]', "negatives": '["n"]', "scores": "[1, null, 0.5]"},
            {"query": "[q]", "positive": "[1] see", "negatives": '[{"text": "m", "level": 2}]', "scores": ""},
            {"query": "r", "positive": "[1, 2]", "negatives": "[]", "scores": ""},
        ],
    )
    config = SourceConfig("a", str(write_csv(path, rows)))
    first, second, third = (record for _, record in read_records(config, open_cached(config, tmp_path / "cache")))
    assert (first.positives, first.negatives, first.scores[::2]) == (("p", "r"), (Negative("n"),), (1.0, 0.5))
    assert (second.query, second.positives, second.negatives) == ("[q]", ("[1] see",), (Negative("m", 2),))
    assert (third.positives, third.negatives) == (("[1, 2]",), ())
    for name, text in (("negatives", "['n1', 'n2']"), ("positive", "['p1' 'p2']")):
        source = SourceConfig("a", str(write_csv(path, [*rows, {**rows[0], name: text}])))
        says = rf"a\.csv:5: {name} is a list as text; write it as a JSON list, such as"
        refused(InputError, says, open_cached, source, tmp_path / "cache")


def test_a_quote_that_merges_rows_of_a_tsv_table_is_refused_with_the_row(tmp_path):
    table = 'query\tpositive\nq\tp\n"loose\tr\ns\tt\nu"\tw\n'
    (tmp_path / "a.tsv").write_text(table)
    says = r"a\.tsv:3: a cell that opens with a quote here contains the next rows; double the quote"
    refused(InputError, says, read, tmp_path / "a.tsv")
    # A comma, or a line break without cells, is part of a text.
    (tmp_path / "a.csv").write_text('query,positive\n"a, b\nc",p\n')
    (tmp_path / "b.tsv").write_text('query\tpositive\n"a\nc\td\te"\tp\n')
    assert [row.fields["query"] for name in ("a.csv", "b.tsv") for row in read(tmp_path / name)] == [
        "a, b\nc",
        "a\nc\td\te",
    ]


def test_a_table_without_a_header_names_its_first_row_as_columns(tmp_path):
    (tmp_path / "a.csv").write_text("how do I pad,with pad\nhow do I cut,with cut\n")
    says = r"a\.csv:2: field 'query': no column 'query' among how do I pad, with pad"
    refused(InputError, says, open_cached, SourceConfig("a", str(tmp_path / "a.csv")), tmp_path / "cache")
