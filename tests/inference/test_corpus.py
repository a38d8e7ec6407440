"""A corpus file is read strictly, and every mistake names its row."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embeddings.common import InputError, OptionError
from embeddings.inference.vector_folder import Document, read_corpus


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("rows", "documents"),
    [
        ([{"_id": "a", "title": "Title", "text": "body"}], [("a", "Title body")]),
        ([{"_id": "b", "title": "", "text": "body"}], [("b", "body")]),
        ([{"_id": "c", "title": "Title", "text": ""}], [("c", "Title")]),
        ([{"_id": "d", "text": "tëxt", "metadata": {"url": 1}}, {"_id": 7, "text": ""}], [("d", "tëxt"), ("7", "")]),
        # Rows without ids are numbered from 0, and `id` serves where there is no `_id`.
        ([{"text": "x"}, {"text": "y"}], [("0", "x"), ("1", "y")]),
        ([{"id": "a", "text": "x"}, {"id": 7, "text": "y"}], [("a", "x"), ("7", "y")]),
        ([{"_id": "a", "id": "x", "text": "x"}, {"_id": "b", "id": "x", "text": "y"}], [("a", "x"), ("b", "y")]),
    ],
)
def test_a_row_has_an_id_and_title_and_text_joined_by_a_space(rows, documents, tmp_path):
    assert list(read_corpus(write(tmp_path / "corpus.jsonl", rows))) == documents
    table = pa.Table.from_pylist([{key: str(value) for key, value in row.items()} for row in rows])
    pq.write_table(table, tmp_path / "corpus.parquet")
    assert list(read_corpus(tmp_path / "corpus.parquet")) == documents


def test_columns_may_have_other_names(tmp_path):
    rows = [{"id": "a", "query": "x", "title": "T"}, {"id": "b", "query": "y", "text": "no"}]
    path = write(tmp_path / "corpus.jsonl", rows)
    found = list(read_corpus(path, {"text": "query", "_id": "id", "title": "heading"}))
    assert found == [Document("a", "x"), Document("b", "y")]
    both = write(tmp_path / "both.jsonl", [{"id": "the text", "key": "k"}])
    assert list(read_corpus(both, {"text": "id"})) == [Document("0", "the text")]
    with pytest.raises(InputError, match=r"corpus\.jsonl:1: field 'answer' is missing"):
        list(read_corpus(path, {"text": "answer"}))
    with pytest.raises(OptionError, match="columns must be the column of _id, title or text, got 'query'"):
        list(read_corpus(path, {"query": "text"}))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"_id": "b"}, r"field 'text' is missing \(found: _id\)"),
        ({"_id": "b", "text": None}, "field 'text' is null, expected text"),
        ({"_id": "b", "text": "x", "title": 3}, "field 'title' is a number, expected text"),
        ({"_id": "a", "text": "x"}, "the id 'a' occurs a second time"),
        ({"id": "a", "text": "x"}, "the id 'a' occurs a second time"),
        ({"_id": "", "text": "x"}, "field '_id' is empty"),
        ({"_id": True, "text": "x"}, "field '_id' is true or false, expected text"),
        ({"_id": 1.5, "text": "x"}, "field '_id' is a number, expected text"),
        ({"_id": "b", "text": "\ud800"}, "field 'text' holds half of a character"),
    ],
)
def test_a_bad_row_is_named(row, message, tmp_path):
    path = write(tmp_path / "corpus.jsonl", [{"_id": "a", "text": "x"}, row])
    with pytest.raises(InputError, match=rf"corpus\.jsonl:2: {message}; ") as caught:
        list(read_corpus(path))
    assert "\n" not in str(caught.value)
