"""Options of sources, paths, and readers of files and of the Hub."""

import gzip
import math
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embeddings.common import InputError, OptionError, TextSettings, UserError
from embeddings.data import PlanEntry, SourceConfig, open_source, readers
from embeddings.data.readers import HubReader, open_reader, resolve_revision
from embeddings.data.sources import check_files, resolve_files
from tests.data.killed_runs import configured
from tests.data.rows import pairs, write_jsonl, write_rows
from tests.helpers.refusals import refused


def test_a_list_of_sources_is_read_from_a_config():
    hub = {"split": "train", "revision": "main", "instruction": ["find passages", "answer the question"]}
    toxic = {"label_texts": {0: "harmless", 1: "toxic"}, "in_batch_negatives": False}
    given = [
        {"name": "msmarco", "path": "hub:org/msmarco", **hub},
        {"name": "files", "path": ["a.jsonl", "b.parquet"], "columns": {"query": "question"}, "weight": 2},
        {"name": "toxic", "path": "$DATA/toxic.jsonl", "conversion": "binary_by_label", **toxic},
    ]
    msmarco, files, labelled = configured(sources=given).sources
    assert msmarco == SourceConfig("msmarco", "hub:org/msmarco", **hub)
    assert files == SourceConfig("files", ["a.jsonl", "b.parquet"], columns={"query": "question"}, weight=2.0)
    assert labelled == SourceConfig("toxic", "$DATA/toxic.jsonl", conversion="binary_by_label", **toxic)
    prompts = tuple(f"Instruct: {task}\nQuery: " for task in hub["instruction"])
    assert msmarco.query_prompts(TextSettings()) == prompts
    assert files.query_prompts(TextSettings()) == (None,)
    assert SourceConfig("a", "a", query_prompt="query: ").query_prompts(TextSettings()) == ("query: ",)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": " "}, "data.sources.name must not be empty"),
        *(({"path": path}, "path must not be empty") for path in ("", [], ["a", ""])),
        *(({"path": path}, "path is not the name of a Hub data set") for path in ("hub:", "hub:a/b/c")),
        ({"path": ["hub:a/b"]}, "path must not list a Hub data set"),
        *(({name: "a"}, f"{name} has no effect on files") for name in ("split", "subset", "revision")),
        ({"columns": {"text": "a"}}, "columns may map only query, positive"),
        ({"conversion": "sts", "columns": {"query": "a"}}, "columns may map only sentence1, sentence2, score"),
        *(({"instruction": given}, "instruction must not be empty") for given in ("", [], ["a", " "])),
        ({"instruction": "a", "query_prompt": "b"}, "query_prompt excludes instruction"),
        ({"instruction": "a", "query_prompt": ""}, "query_prompt excludes instruction"),
        ({"symmetric": True}, "symmetric needs an instruction or a query_prompt"),
        ({"symmetric": True, "instruction": "a", "document_prompt": "d"}, "document_prompt excludes symmetric"),
        *(({"weight": weight}, "weight must be a finite number > 0") for weight in (0.0, math.nan, math.inf)),
        ({"max_rows": 0}, "max_rows must be >= 1"),
        ({"num_negatives": 0, "conversion": "class_by_example"}, "num_negatives must be >= 1"),
        ({"num_negatives": 7}, "num_negatives has no effect on conversion pairs"),
        ({"num_negatives": 1, "conversion": "binary_by_label"}, "num_negatives has no effect"),
        ({"single_text_classes": "leave_out"}, "single_text_classes has no effect on conversion pairs"),
        ({"min_score": 4.0}, "min_score has no effect on conversion pairs"),
        ({"label_texts": {"0": "no"}}, "label_texts has no effect on conversion pairs"),
        ({"label_texts": {"0": " "}, "conversion": "binary_by_label"}, "label_texts must not contain an empty text"),
        ({"surrogate_vectors": "v", "conversion": "class_by_example"}, "surrogate_vectors has no effect on conversion"),
    ],
)
def test_an_invalid_or_ineffective_option_is_refused_by_name(options, message):
    options = {"name": "mine", "path": "a.jsonl", **options}
    assert refused(OptionError, re.escape(message), SourceConfig, **options).startswith("data.sources")


@pytest.fixture
def folder(tmp_path):
    for name in ("b.jsonl", "a.jsonl", "c.parquet", "odd[1].jsonl"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "sub").mkdir()
    return tmp_path


def test_glob_matches_are_sorted_lists_keep_their_order_and_variables_are_expanded(folder, monkeypatch):
    found = resolve_files([f"{folder}/c.parquet", f"{folder}/[ab].jsonl"])
    assert [file.name for file in found] == ["c.parquet", "a.jsonl", "b.jsonl"]
    assert [file.name for file in resolve_files(f"{folder}/odd[1].jsonl")] == ["odd[1].jsonl"]
    monkeypatch.setenv("TEST_ROOT", str(folder))
    for written in ("$TEST_ROOT/a.jsonl", "${TEST_ROOT}/a.jsonl"):
        assert resolve_files(written) == [folder / "a.jsonl"]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("${TEST_UNSET}/a.jsonl", "the environment variable TEST_UNSET is not set; run: export TEST_UNSET=FOLDER"),
        ("none.jsonl", "no such file; check the path"),
        ("data/docstrings/train.jsonl.gz", "run: python main.py prepare docstrings --output data/docstrings$"),
        ("data/docstrings_small/train.jsonl.gz", "--output data/docstrings_small --max-rows 10000$"),
        ("data/docstrings_other/train.jsonl.gz", "no such file; check the path"),
        ("*.none", "no file matches"),
        ("sub", "is a folder, expected a file"),
        (["a.jsonl", "?.jsonl"], "the path names this file twice"),
    ],
)
def test_a_path_that_names_no_file_is_refused(folder, monkeypatch, path, message):
    monkeypatch.chdir(folder)
    monkeypatch.delenv("TEST_UNSET", raising=False)
    refused(InputError, message.replace("?", r"\?"), resolve_files, path)


def test_all_missing_files_of_sources_are_named_and_the_hub_is_not_asked(folder, monkeypatch):
    monkeypatch.chdir(folder)
    there, one = SourceConfig("there", ["a.jsonl", "?.parquet"]), SourceConfig("one", "x.jsonl")
    check_files([there, SourceConfig("hub", "hub:org/name")])
    refused(InputError, r"^x\.jsonl: no such file; check the path$", check_files, [there, one])
    says = r"^2 errors: x\.jsonl: no such file; check the path \| y\.jsonl: no such file"
    refused(UserError, says, check_files, [one, there, SourceConfig("two", ["y.jsonl", "b.jsonl"])])


LINE = b'{"query": "q", "positive": "p"}\n'


def read(path, fields=("query", "positive"), required=("query", "positive")):
    return list(open_reader(path, fields, required))


def test_json_lines_gzip_and_parquet_give_the_same_rows_whatever_their_names_with_all_bytes_read(tmp_path):
    rows = pairs(2500)
    plain = write_jsonl(tmp_path / "plain.jsonl", rows)
    zipped = write_jsonl(tmp_path / "zipped.jsonl.gz", rows).rename(tmp_path / "zipped.jsonl")
    columns = write_rows(tmp_path / "columns.parquet", rows).rename(tmp_path / "columns.dat")
    for path in (plain, zipped, columns):
        reader = open_reader(path, ("query", "positive"), ("query", "positive"))
        assert reader.bytes_read == 0
        found = list(reader)
        assert [row.fields for row in found] == rows
        assert [found[i].where for i in (0, 1024, -1)] == [f"{path}:1", f"{path}:1025", f"{path}:2500"]
        assert reader.bytes_read == reader.total_bytes == path.stat().st_size
    # A byte order mark and Windows line ends are skipped.
    for data in (b"\xef\xbb\xbf" + LINE, LINE.replace(b"\n", b"\r\n"), b"\xef\xbb\xbf\n" + LINE):
        plain.write_bytes(data)
        assert [row.fields for row in read(plain)] == [{"query": "q", "positive": "p"}]


@pytest.mark.parametrize(
    ("data", "where", "message"),
    [
        (b"", "", "is empty"),
        (b"\n \n", "", "contains no rows"),
        (gzip.compress(b"", mtime=0), "", "contains no rows"),
        (LINE + b'{"query": "\xff"}\n', ":2", "byte 12 of the row is not valid UTF-8"),
        ('{"query": "q"}'.encode("utf-16"), ":1", "the file is UTF-16"),
        (LINE + b'{"query": "q", "posi', ":2", "the file ends in the middle of this row"),
        (LINE + '{"query": "naï'.encode()[:-1], ":2", "the file ends in the middle of this row"),
        (LINE + b'{"query": }\n' + LINE, ":2", "the row is not JSON at column 11"),
        (LINE + LINE.strip() * 2 + b"\n", ":2", "the row is not JSON at column 32"),
        (LINE + b'{"query": "q",\n"positive": "p"}\n', ":2", "the row is not JSON"),
        (b"query,positive\nq,p\n", ":1", "the row is not JSON"),
        (b'"q"\n', ":1", "the row is a JSON value, expected an object"),
        (b"[\n" + LINE + b"]\n", ":1", "a JSON array starts here, expected an object"),
        (b"{" + b'"a":{' * 100_000 + b"}" * 100_001 + b"\n", ":1", "the JSON is nested too deeply"),
        (b'{"id": ' + b"9" * 5000 + b"}\n", ":1", "the row is not JSON"),
        (gzip.compress(LINE * 1000, mtime=0)[:-9], "", "the gzip data is truncated or damaged here"),
        (gzip.compress(LINE, mtime=0)[:-8] + b"\0" * 8, ":2", "the gzip data is truncated or damaged here"),
        (b"\x1f\x8b", ":1", "the gzip data is truncated or damaged here"),
        (b"PAR1 is no Parquet", ":1", "the Parquet data is truncated or damaged"),
        ('{"query": "q"}'.encode("utf-32"), ":1", "the file is UTF-32"),
        (b"BZh91AY&SY", ":1", "the file is compressed by bzip2; save it as UTF-8 text, plain or gzipped"),
        (b"PK\x03\x04\n", ":1", "the file is a zip archive"),
        (b"ARROW1\0\0", ":1", "the file is an Arrow file"),
    ],
)
def test_a_bad_file_is_refused_with_file_and_row_on_one_line(tmp_path, monkeypatch, data, where, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.jsonl").write_bytes(data)
    text = refused(InputError, re.escape(message), read, Path("bad.jsonl"))
    assert text.startswith(f"bad.jsonl{where}")
    assert len(text) <= 200


def test_parquet_with_a_column_twice_cut_off_without_rows_or_with_broken_text_is_refused(tmp_path):
    def write(name, table):
        pq.write_table(table, tmp_path / name)
        return tmp_path / name

    columns = [pa.array(["a"]), pa.array(["b"]), pa.array(["c"])]
    twice = write("a.parquet", pa.Table.from_arrays(columns, ["query", "positive", "positive"]))
    refused(InputError, r"a\.parquet: has two columns 'positive'; rename one of them", read, twice)
    assert read(twice, ["query"], ["query"])[0].fields == {"query": "a"}
    # Without a required column the row has all existing columns.
    other = write("b.parquet", pa.table({"question": ["q"], "answer": ["p"]}))
    assert read(other)[0].fields == {"question": "q", "answer": "p"}
    whole = write("whole.parquet", pa.table({"query": ["q"] * 9, "positive": ["p"] * 9}))
    (tmp_path / "cut.parquet").write_bytes(whole.read_bytes()[:-20])
    refused(InputError, r"cut\.parquet:1: the Parquet data is truncated or damaged", read, tmp_path / "cut.parquet")
    refused(InputError, "contains no rows", read, write("none.parquet", pa.table({"query": pa.array([], pa.string())})))
    texts = pa.array([b"good", b"good", b"\xff"]).view(pa.string())
    broken = write("text.parquet", pa.table({"query": texts, "positive": texts}))
    refused(InputError, r"text\.parquet:3: a text is not valid UTF-8", read, broken)


def test_a_line_without_end_and_a_file_that_is_not_there_are_refused(tmp_path, monkeypatch):
    refused(InputError, r"gone\.jsonl: cannot be read \(No such file", read, tmp_path / "gone.jsonl")
    monkeypatch.setattr(readers, "MAX_LINE_BYTES", 2**20)
    (tmp_path / "a.jsonl").write_bytes(LINE + b'{"query": "' + b"x" * 2**22 + b'"}\n')
    refused(InputError, r"a\.jsonl:2: the row is longer than 1 MiB", read, tmp_path / "a.jsonl")


COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub(monkeypatch):
    """A Hub with one data set of three pairs; `calls` records the requests."""
    calls = {"info": [], "load": []}

    class HfApi:
        def dataset_info(self, name, revision, timeout):
            calls["info"].append((name, revision))
            return SimpleNamespace(sha=COMMIT)

    def load_dataset(name, subset, *, split, revision, streaming):
        calls["load"].append((name, subset, split, revision, streaming))
        return iter(pairs(3 if split == "train" else 0))

    for name, members in (("huggingface_hub", {"HfApi": HfApi}), ("datasets", {"load_dataset": load_dataset})):
        module = ModuleType(name)
        module.__dict__.update(members)
        monkeypatch.setitem(sys.modules, name, module)
    return calls


def test_a_hub_source_is_streamed_at_its_commit_and_only_once(tmp_path, hub, monkeypatch):
    config = SourceConfig("mine", "hub:org/name", subset="en", revision="main")
    for _ in range(2):
        source = open_source(config, tmp_path)
        assert [source[PlanEntry(row, 0)].query for row in range(len(source))] == ["query 0", "query 1", "query 2"]
    assert hub["info"] == [("org/name", "main"), ("org/name", COMMIT), ("org/name", "main")]
    assert hub["load"] == [("org/name", "en", "train", COMMIT, True)]
    # Another subset is another source; a converted source with a full commit needs no Hub.
    config = SourceConfig("de", "hub:org/name", subset="de", revision=COMMIT)
    open_source(config, tmp_path)
    assert len(hub["load"]) == 2
    says = "hub:org/name: split 'empty' contains no rows"
    refused(InputError, says, list, HubReader("org/name", None, "empty", COMMIT))
    for name in ("datasets", "huggingface_hub"):
        monkeypatch.setitem(sys.modules, name, None)
    assert len(open_source(config, tmp_path)) == 3


def test_an_unreachable_hub_is_reported_in_one_line_with_a_fix(monkeypatch):
    def refuse(*_, **__):
        raise ConnectionError("cannot reach the Hub\nwith a long trace")

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(HfApi=refuse))
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=refuse))
    says = (
        r"^hub:org/name: cannot be read \(cannot reach the Hub\); "
        "check name, split and network, or download it and name its files$"
    )
    refused(InputError, says, resolve_revision, "org/name", None)
    refused(InputError, says, list, HubReader("org/name", None, "train", COMMIT))


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_blank_lines_without_an_end_are_refused(tmp_path, monkeypatch, suffix):
    monkeypatch.setattr(readers, "MAX_BLANK_LINES", 2**19)
    path = tmp_path / f"blank{suffix}"
    with (gzip.open if suffix.endswith("gz") else open)(path, "wb") as file:
        file.write(LINE + b" \n" * 1000 + LINE)
        file.write(b"\n" * 2**21)
    rows = iter(open_reader(path, ["query"], ["query"]))
    assert [next(rows).fields["query"] for _ in range(2)] == ["q", "q"]
    refused(InputError, rf"blank{suffix}:\d+: 524288 consecutive blank lines; remove them", next, rows)
