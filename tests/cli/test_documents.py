"""`passages` and `queries`: their output, and one line and code 2 for user errors."""

import json
import re
from pathlib import Path

import pytest

from embeddings.cli.main import main
from tests.adaptation.world import passage_rows, read_rows
from tests.data.rows import write_rows
from tests.helpers.chat_server import Reply, chat_server
from tests.helpers.refusals import assert_refused
from tests.helpers.runs import write_retrieval_folder

PART = "It returns the sum of two numbers 0 1 2 3 4 5 6 7."


def passages(model, documents="docs", output="passages.jsonl", *options):
    return main(["passages", str(documents), "--model", model, "--output", output, "--max-tokens", "64", *options])


@pytest.fixture
def docs():
    """A folder of two pages."""
    folder = Path("docs")
    folder.mkdir()
    (folder / "a.md").write_text(
        "# Title\n\nThe quick fox jumps over the lazy dog and the other fox.\n\n## Part\n\n" + PART
    )
    (folder / "b.html").write_text("<h1>Page</h1><p>A sequence of one length.</p>")
    return folder


def test_passages_can_be_searched(docs, model, capsys):
    assert passages(model) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("wrote 3 passages of 2 documents to passages.jsonl: ")
    rows = [json.loads(line) for line in Path("passages.jsonl").read_text().splitlines()]
    assert [(row["title"], row["text"]) for row in rows] == [
        ("Title", "The quick fox jumps over the lazy dog and the other fox."),
        ("Title > Part", PART),
        ("Page", "A sequence of one length."),
    ]
    assert main(["search", "a sequence", "--model", model, "--corpus", "passages.jsonl", "--top-k", "2"]) == 0
    assert "p000002" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("rest", "share"), [(" fox", "64%"), (" the quick fox" * 9, "5%"), (" the quick fox" * 10, None)]
)
def test_many_letters_that_the_tokenizer_does_not_know_are_named(rest, share, model, capsys):
    Path("docs").mkdir()
    Path("docs/a.txt").write_text(f"თბილისი{rest}")
    assert passages(model) == 0
    line = f"the model's tokenizer does not know {share} of the letters: choose another --model\n"
    assert ("not know" in (printed := capsys.readouterr().out)) == (share is not None)
    assert share is None or printed.startswith(line)


def test_ten_thousand_unreadable_files_take_few_lines(docs, model, capsys):
    for number in range(10_000):
        (docs / f"{number}.docx").write_bytes(b"no zip")
    (docs / "logo.png").write_bytes(b"\x89PNG\0\0")
    assert passages(model) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 20
    assert lines[0].startswith("left out 0.docx: ")
    assert lines[6] == "... and 9994 more, listed in passages.log.jsonl"
    assert [line.split() for line in lines if line.startswith("binary")] == [["binary", "1"]]
    assert len(Path("passages.log.jsonl").read_text().splitlines()) == 10_001


def test_rows_of_a_table_need_a_column(model, capsys, tmp_path):
    Path("faq.csv").write_text("question,answer\nWhy?,The lazy dog.\n")
    message = "faq.csv: contains no text that can be read (faq.csv: without a column 'text' (found: question, answer;"
    assert_refused(capsys, tmp_path, message, passages, model, "faq.csv")
    assert passages(model, "faq.csv", "passages.jsonl", "--columns", "{text: answer, title: question}") == 0
    (row,) = map(json.loads, Path("passages.jsonl").read_text().splitlines())
    assert (row["title"], row["text"], row["document"]) == ("Why?", "The lazy dog.", "faq.csv#2")


def test_rows_without_text_are_counted_as_rows(model, capsys):
    Path("faq.jsonl").write_text('{"text": "A sequence of one length."}\n' + '{"text": " "}\n{"text": null}\n')
    assert passages(model, "faq.jsonl") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "left out faq.jsonl: rows without text (2 of 3 rows)"
    assert [line.split() for line in lines if line.startswith("rows")] == [["rows", "without", "text", "2"]]


def test_user_errors_are_one_line(docs, model, capsys, tmp_path):
    Path("empty").mkdir()
    Path("mine.jsonl").write_text("{}")
    for message, arguments in (
        ("nowhere: does not exist; give a folder of documents", ("nowhere",)),
        ("empty: is an empty folder", ("empty",)),
        ("mine.jsonl: already exists and has no manifest", ("docs", "mine.jsonl")),
        ("output must end in .jsonl", ("docs", "passages.csv")),
        ("max_tokens must be from 32 to", ("docs", "passages.jsonl", "--max-tokens", "9")),
        ("columns must map _id, title or text", ("docs", "passages.jsonl", "--columns", "{body: x}")),
        ("near_duplicates must lie between 0.5 and 1", ("docs", "passages.jsonl", "--near-duplicates", "0.2")),
    ):
        assert_refused(capsys, tmp_path, message, passages, model, *arguments)


def test_copies_are_counted(docs, model, capsys):
    for number in range(5):
        (docs / f"copy{number}.md").write_text((docs / "a.md").read_text())
    assert passages(model) == 0
    printed = capsys.readouterr().out
    assert "10 repetitions of paragraphs that many documents share, such as:\n  'The quick fox jumps" in printed
    assert "wrote 3 passages of 7 documents" in printed


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
        (["--no-hold-out-judged"], "hold_out_judged needs --queries"),
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
