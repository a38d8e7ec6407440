"""Records that are written and read again are the records."""

import pytest

from embeddings.common import InputError
from embeddings.data import Negative, SourceConfig
from embeddings.data.records import RECORD_FIELDS, Record, has_levels, parse_record, write_records
from embeddings.data.sources import open_reader
from embeddings.data.store import open_cached
from tests.data.rows import pairs, write_jsonl

PLAIN = [
    Record("a query", ("a positive",)),
    Record("q", ("p", "r", "東京 é\n"), (Negative("n"), Negative("m")), "a class", -0.5, "id 7", "what it is for"),
    Record("third", ("x",), (Negative("n"),), label="1", score=1e-300, language="sw"),
]
GRADED = [*PLAIN[:1], Record("q", ("p",), (Negative("n", 1), Negative("m", 1), Negative("o", 4)), id="2")]


@pytest.mark.parametrize("group_rows", [1, 2, 4096])
@pytest.mark.parametrize(("records", "graded"), [(PLAIN, False), (GRADED, True), (GRADED[:1], False)])
def test_every_field_is_read_back_as_it_was(records, graded, group_rows, tmp_path, monkeypatch):
    monkeypatch.setattr("embeddings.data.records.GROUP_ROWS", group_rows)
    path = tmp_path / "records.parquet"
    assert write_records(path, iter(records), graded) == len(records)
    rows = open_reader(path, RECORD_FIELDS, ("query",))
    assert [parse_record(row, {}, where) for where, row in rows] == records
    cached = open_cached(SourceConfig("a", str(path)), tmp_path / "cache")
    assert [cached.table.row(row).query for row in range(len(records))] == [record.query for record in records]
    assert has_levels(cached.table, "a") is graded


def test_the_same_records_give_the_same_bytes(tmp_path):
    for name in "ab":
        write_records(tmp_path / name, PLAIN, graded=False)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize("order", [1, -1])
def test_negatives_of_which_some_have_levels_are_refused(order, tmp_path):
    negatives = [None, ["n"], [{"text": "n", "level": 2}]][::order]
    rows = [{**pair, "negatives": value} for pair, value in zip(pairs(3), negatives, strict=True)]
    cached = open_cached(SourceConfig("a", str(write_jsonl(tmp_path / "a.jsonl", rows))), tmp_path / "cache")
    with pytest.raises(InputError, match="mine: some negatives have a level and others have none; give all of them"):
        has_levels(cached.table, "mine")
