"""`passages`: its output, and one line and code 2 for user errors."""

import json
from pathlib import Path

import pytest

from embeddings.cli.main import main
from tests.helpers.refusals import assert_refused

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
