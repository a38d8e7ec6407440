"""`queries`: what it prints, and one line and code 2 for user errors."""

import re

import pytest

from embeddings.cli.main import main
from tests.adaptation.world import passage_rows, read_rows
from tests.data.rows import write_rows
from tests.helpers.chat_server import Reply, chat_server
from tests.helpers.refusals import assert_refused
from tests.helpers.runs import write_retrieval_folder


@pytest.fixture
def run(tmp_path):
    """Run `queries` on some passages with more options; returns the exit code."""
    write_rows(tmp_path / "passages.jsonl", passage_rows())

    def call(*options, passages="passages.jsonl", output="out"):
        return main(["queries", passages, "--output", output, *options])

    return call


def test_passages_become_pairs_and_folders_and_a_table(run, tmp_path, capsys):
    write_retrieval_folder(tmp_path / "other")
    rows = [{"q": f"where is number {number}", "passage": f"p{number:06d}"} for number in range(0, 50, 5)]
    write_rows(tmp_path / "log.jsonl", [*rows, {"q": "who is it", "passage": "unknown"}])
    options = ["--queries", "log.jsonl", "--query-columns", "{query: q}", "--evaluation-data", "other"]
    options += ["--validation-share", "0.5", "--per-passage=2"]
    assert run(*options) == 0
    printed = capsys.readouterr().out
    for line in (
        "held out: 10 of 60 documents, 50 of 300 passages",
        "10 real queries: 5 test, 5 validation",
        "queries of held-out documents in evaluation-pseudo: a weak judge, which may prefer",
        "1 of 11 real queries name no passage, and are left out",
    ):
        assert line in printed
    sentence = next(line.split() for line in printed.splitlines() if line.startswith("sentence"))
    assert int(sentence[1]) >= int(sentence[2]) + int(sentence[3]) > 300
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"pairs.jsonl", "summary.json", "evaluation", "validation", "evaluation-pseudo"} <= names
    assert run(*options) == 0
    assert "out already exists for these inputs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--queries", "lost.jsonl"], "no query names a relevant passage of passages.jsonl (such as 'unknown')"),
        (["--queries", "missing.jsonl"], "cannot be read"),
        (["--query-columns", "{query: q}"], "query_columns needs --queries"),
        (["--queries", "lost.jsonl", "--query-columns", "{title: q}"], "query_columns must map query, passage"),
        (["--evaluation-data", "."], "has no evaluation data"),
        (["--held-out-share", "1.5"], "held_out_share must be >= 0 and < 1"),
        (["--held-out-share", "0"], "there would be no test"),
        (["--training-share", "0.5"], "training_share needs --queries"),
        (["--training-share", "0.75"], "training_share must be below 1 - validation_share, 0.75"),
        (["--max-passages", "0"], "max_passages must be >= 1"),
        (["--endpoint-model", "m"], "endpoint_model needs --endpoint"),
        (["--endpoint-form", "tasks"], "endpoint_form needs --endpoint"),
        (["--max-requests", "5"], "max_requests needs --endpoint"),
        (["--no-stream"], "stream needs --endpoint"),
        (["--endpoint", "localhost"], "endpoint must be an HTTP URL"),
        (["--endpoint", "http://127.0.0.1:9/v1"], "no connection"),
        (["--endpoint", "http://127.0.0.1:9/v1", "--max-requests", "0"], "max_requests must be >= 1"),
        (["--output", "notes"], "must be new, empty or written by this library"),
        (["--output", "lost.jsonl"], "is not a folder"),
    ],
)
def test_a_user_error_is_one_line(run, tmp_path, capsys, options, message):
    write_rows(tmp_path / "lost.jsonl", [{"query": "lost", "passage": "unknown"}])
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("mine")
    assert_refused(capsys, tmp_path, message, run, *options)


def test_a_language_model_writes_queries(run, tmp_path, capsys):
    def behaviour(prompt, seed, count):
        first, second, *_ = re.findall(r"near (\w+) \w+\.", prompt.rpartition("Passage: ")[2])
        return Reply(f"Query: why {first} is before {second} in the reactor")

    with chat_server(behaviour) as server:
        options = ["--endpoint", server.endpoint, "--endpoint-model", "small", "--max-requests", "20", "--no-stream"]
        assert run(*options) == 0
        printed = capsys.readouterr()
        assert "small: 20 requests, some " in printed.err
        assert "small: 20 passages asked about, " in printed.out
        row = next(line.split() for line in printed.out.splitlines() if line.startswith("model "))
        assert int(row[1]) == 20
        assert int(row[2]) > 15
        found = [each["kind"] for each in read_rows(tmp_path / "out" / "pairs-model.jsonl")]
        assert found == ["model"] * int(row[2])
        assert f"{len(found)} more by the language model in pairs-model.jsonl" in printed.out
        assert not any(request.get("stream") for request in server.requests)
        server.requests.clear()
        assert run(*options) == 0
        assert "already exists for these inputs" in capsys.readouterr().out
        assert not server.requests


def test_passages_that_cannot_be_read_are_one_line(run, tmp_path, capsys):
    (tmp_path / "folder").mkdir()
    (tmp_path / "binary").write_bytes(b"\x89PNG\r\n\x1a\n\x00\x00")
    for name, message in (("folder", "Is a directory"), ("binary", "binary:1"), ("absent", "cannot be read")):
        before = sorted(tmp_path.rglob("*"))
        assert run(passages=name) == 2
        assert message in capsys.readouterr().err.strip().splitlines()[-1]
        assert sorted(tmp_path.rglob("*")) == before
