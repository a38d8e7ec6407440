import gzip
import json
import tracemalloc

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embeddings.common import InputError
from embeddings.data import sources
from embeddings.data.sources import open_reader
from tests.data.rows import pairs, write_jsonl

LINE = b'{"query": "q", "positive": "p"}\n'


def read(path, fields=("query", "positive"), required=("query", "positive")):
    return list(open_reader(path, fields, required))


def test_json_lines_gzip_and_parquet_give_the_same_rows_whatever_their_names(tmp_path):
    rows = pairs(2500)
    plain = write_jsonl(tmp_path / "plain.jsonl", rows)
    zipped = write_jsonl(tmp_path / "zipped.jsonl.gz", rows).rename(tmp_path / "zipped.jsonl")
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "columns.dat")
    for path in (plain, zipped, tmp_path / "columns.dat"):
        found = read(path)
        assert [row.fields for row in found] == rows
        assert [found[i].where for i in (0, 1024, -1)] == [f"{path}:1", f"{path}:1025", f"{path}:2500"]


def test_rows_are_numbered_as_an_editor_numbers_lines(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n" + LINE + b"  \n" + LINE.rstrip())
    assert [row.where for row in read(path)] == [f"{path}:2", f"{path}:4"]


@pytest.mark.parametrize("data", [b"\xef\xbb\xbf" + LINE, LINE.replace(b"\n", b"\r\n"), b"\xef\xbb\xbf\n" + LINE])
def test_a_byte_order_mark_and_windows_line_ends_are_passed_over(tmp_path, data):
    (tmp_path / "a.jsonl").write_bytes(data)
    assert [row.fields for row in read(tmp_path / "a.jsonl")] == [{"query": "q", "positive": "p"}]


@pytest.mark.parametrize(
    ("data", "where", "message"),
    [
        (b"", "", "is empty"),
        (b"\n \n", "", "holds no rows"),
        (b"\xef\xbb\xbf", "", "holds no rows"),
        (gzip.compress(b"", mtime=0), "", "holds no rows"),
        (LINE + b'{"query": "\xff"}\n', ":2", "byte 12 of the row is not valid UTF-8"),
        ('{"query": "q"}'.encode("utf-16"), ":1", "the file is UTF-16"),
        (LINE + b'{"query": "q", "posi', ":2", "the file ends in the middle of this row"),
        (LINE + '{"query": "naï'.encode()[:-1], ":2", "the file ends in the middle of this row"),
        (LINE + b'{"query": }\n' + LINE, ":2", "the row is not JSON at column 11"),
        (b"query,positive\nq,p\n", ":1", "the row is not JSON"),
        (b"query,positive", ":1", "the row is not JSON"),
        (b'["q", "p"]\n', ":1", "the row is a JSON array, expected an object"),
        (b'"q"\n', ":1", "the row is a JSON value, expected an object"),
        (b"[\n" + LINE + b"]\n", ":1", "a JSON array begins here"),
        (b'{"query": "a\x00b"}\n', ":1", "the row holds a NUL byte"),
        (b"{" + b'"a":{' * 100_000 + b"}" * 100_001 + b"\n", ":1", "the JSON is nested too deep"),
        (b'{"id": ' + b"9" * 5000 + b"}\n", ":1", "the row is not JSON"),
        (gzip.compress(LINE * 1000, mtime=0)[:-9], "", "the gzip data is cut off or damaged here"),
        (gzip.compress(LINE, mtime=0)[:-8] + b"\0" * 8, ":2", "the gzip data is cut off or damaged here"),
        (b"\x1f\x8b\x08 is no gzip", ":1", "the gzip data is cut off or damaged here"),
        (b"\x1f\x8b", ":1", "the gzip data is cut off or damaged here"),
        (b"PAR1 is no Parquet", ":1", "the Parquet data is cut off or damaged"),
        ('{"query": "q"}'.encode("utf-32"), ":1", "the file is UTF-32"),
        (gzip.compress('{"query": "q"}'.encode("utf-16"), mtime=0), ":1", "the file is UTF-16"),
        (b"BZh91AY&SY", ":1", "the file is compressed by bzip2; unpack it, or compress it by gzip"),
        (b"\xfd7zXZ\x00", ":1", "the file is compressed by xz"),
        (b"\x28\xb5\x2f\xfd\x24", ":1", "the file is compressed by zstd"),
        (b"PK\x03\x04\n", ":1", "the file is a zip archive; unpack it"),
        (b"ARROW1\0\0", ":1", "the file is an Arrow file; write it as Parquet"),
        (LINE.strip() + b"\r" + LINE.strip() + b"\r", ":1", "rows end in carriage returns alone"),
    ],
)
def test_a_bad_file_is_refused_with_file_and_row_on_one_line(tmp_path, monkeypatch, data, where, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.jsonl").write_bytes(data)
    from pathlib import Path

    with pytest.raises(InputError) as error:
        read(Path("bad.jsonl"))
    text = str(error.value)
    assert text.startswith(f"bad.jsonl{where}")
    assert message in text
    assert "\n" not in text
    assert len(text) <= 200


def test_a_column_of_parquet_that_is_there_twice_is_refused_where_it_is_asked_for(tmp_path):
    columns = [pa.array(["a"]), pa.array(["b"]), pa.array(["c"])]
    pq.write_table(pa.Table.from_arrays(columns, ["query", "positive", "positive"]), tmp_path / "a.parquet")
    with pytest.raises(InputError, match=r"a\.parquet: has two columns 'positive'; rename one of them"):
        read(tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet", ["query"], ["query"])[0].fields == {"query": "a"}


def test_a_line_without_end_is_refused_before_it_fills_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "MAX_LINE_BYTES", 2**20)
    (tmp_path / "a.jsonl").write_bytes(LINE + b'{"query": "' + b"x" * 2**20 + b'"}\n')
    with pytest.raises(InputError, match=r"a\.jsonl:2: the row is longer than 1 MiB"):
        read(tmp_path / "a.jsonl")


def test_a_file_named_parquet_that_is_none_is_refused(tmp_path):
    (tmp_path / "a.parquet").write_bytes(LINE)
    with pytest.raises(InputError, match="is not a Parquet file"):
        read(tmp_path / "a.parquet")


def test_parquet_reads_no_column_that_is_not_asked_for(tmp_path):
    pq.write_table(pa.table({"query": ["q"], "positive": ["p"], "vector": [[0.5]]}), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet")[0].fields == {"query": "q", "positive": "p"}


def test_parquet_without_a_required_column_shows_the_columns_it_has(tmp_path):
    pq.write_table(pa.table({"question": ["q"], "answer": ["p"]}), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet")[0].fields == {"question": "q", "answer": "p"}


def test_parquet_cut_off_without_rows_or_with_broken_text_is_refused(tmp_path):
    whole = tmp_path / "whole.parquet"
    pq.write_table(pa.table({"query": ["q"] * 9, "positive": ["p"] * 9}), whole)
    (tmp_path / "cut.parquet").write_bytes(whole.read_bytes()[:-20])
    with pytest.raises(InputError, match=r"cut\.parquet:1: the Parquet data is cut off or damaged"):
        read(tmp_path / "cut.parquet")
    pq.write_table(pa.table({"query": pa.array([], pa.string())}), tmp_path / "none.parquet")
    with pytest.raises(InputError, match="holds no rows"):
        read(tmp_path / "none.parquet")
    texts = pa.array([b"good", b"good", b"\xff"]).view(pa.string())
    pq.write_table(pa.table({"query": texts, "positive": texts}), tmp_path / "text.parquet")
    with pytest.raises(InputError, match=r"text\.parquet:3: a text is not valid UTF-8"):
        read(tmp_path / "text.parquet")


def test_a_file_that_may_not_be_read_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"gone\.jsonl: cannot be read \(No such file"):
        open_reader(tmp_path / "gone.jsonl", (), ())


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet"])
def test_reading_ends_with_all_bytes_read(tmp_path, name):
    path = tmp_path / name
    if name.endswith("parquet"):
        pq.write_table(pa.Table.from_pylist(pairs(3000)), path)
    else:
        write_jsonl(path, pairs(3000))
    reader = open_reader(path, ("query", "positive"), ("query", "positive"))
    assert reader.bytes_read == 0
    assert sum(1 for _ in reader) == 3000
    assert reader.bytes_read == reader.total_bytes == path.stat().st_size


def test_a_literal_nan_reaches_the_field_that_holds_it(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"query": "q", "score": float("nan")}) + "\n")
    assert str(read(tmp_path / "a.jsonl")[0].fields["score"]) == "nan"


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_blank_lines_without_an_end_are_refused_in_bounded_memory(tmp_path, monkeypatch, suffix):
    """A few kilobytes of gzip unpack to hours of them."""
    monkeypatch.setattr("embeddings.data.sources.MAX_BLANK_LINES", 1000)
    path = tmp_path / f"blank{suffix}"
    with (gzip.open if suffix.endswith("gz") else open)(path, "wb") as file:
        file.write(b'{"query": "q"}\n' + b" \n" * 1000 + b'{"query": "r"}\n')
        for _ in range(20):
            file.write(b"\n" * 2**20)
    rows = iter(open_reader(path, ["query"], ["query"]))
    assert [next(rows).fields["query"] for _ in range(2)] == ["q", "r"]
    tracemalloc.start()
    with pytest.raises(InputError, match=rf"blank{suffix}:2003: 1000 blank lines follow each other; take them out"):
        next(rows)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20
