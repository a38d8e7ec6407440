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


def test_title_and_text_are_joined_by_a_space(tmp_path):
    rows = [
        {"_id": "a", "title": "Title", "text": "body"},
        {"_id": "b", "title": "", "text": "body"},
        {"_id": "c", "title": "Title", "text": ""},
        {"_id": "d", "text": "tëxt", "metadata": {"url": 1}},
        {"_id": 7, "text": ""},
    ]
    assert list(read_corpus(write(tmp_path / "corpus.jsonl", rows))) == [
        Document("a", "Title body"),
        Document("b", "body"),
        Document("c", "Title"),
        Document("d", "tëxt"),
        Document("7", ""),
    ]


def test_rows_without_ids_are_numbered_from_0(tmp_path):
    found = read_corpus(write(tmp_path / "corpus.jsonl", [{"text": "x"}, {"text": "y"}]))
    assert [document.document_id for document in found] == ["0", "1"]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_an_id_without_an_underscore_serves_where_there_is_no_other(suffix, tmp_path):
    path = tmp_path / f"corpus{suffix}"
    for rows, expected in (
        ([{"id": "a", "text": "x"}, {"id": 7, "text": "y"}], ["a", "7"]),
        ([{"_id": "a", "id": "x", "text": "x"}, {"_id": "b", "id": "x", "text": "y"}], ["a", "b"]),
    ):
        if suffix == ".parquet":
            pq.write_table(
                pa.Table.from_pylist([{key: str(value) for key, value in row.items()} for row in rows]), path
            )
        else:
            write(path, rows)
        assert [document.document_id for document in read_corpus(path)] == expected
    path = write(tmp_path / "both.jsonl", [{"id": "the text", "key": "k"}])
    assert list(read_corpus(path, {"text": "id"})) == [Document("0", "the text")]
    path = write(tmp_path / "twice.jsonl", [{"id": 1, "text": "x"}, {"id": 1, "text": "y"}])
    with pytest.raises(InputError, match=r"twice\.jsonl:2: the id '1' occurs a second time"):
        list(read_corpus(path))


def test_columns_may_have_other_names(tmp_path):
    rows = [{"id": "a", "query": "x", "title": "T"}, {"id": "b", "query": "y", "text": "no"}]
    path = write(tmp_path / "corpus.jsonl", rows)
    found = list(read_corpus(path, {"text": "query", "_id": "id", "title": "heading"}))
    assert found == [Document("a", "x"), Document("b", "y")]
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
