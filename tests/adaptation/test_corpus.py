"""The file of passages: repeated paragraphs, near copies, the log, and what is refused or replaced."""

import json
import os
from collections import Counter

import pytest

from embeddings.adaptation import Splitter, TokenCounter, write_passages
from embeddings.adaptation.corpus import log_path
from embeddings.common import TextSettings
from embeddings.common.errors import InputError
from embeddings.common.io import write_json_lines, write_manifest
from embeddings.common.jobs import manifest_path
from embeddings.inference.vector_folder import read_corpus
from tests.helpers.interrupts import interrupted_at
from tests.helpers.refusals import refused
from tests.helpers.tiny import wordpiece_tokenizer


@pytest.fixture(scope="module")
def splitter():
    return Splitter(TokenCounter(wordpiece_tokenizer(), TextSettings()), 512)


@pytest.fixture
def write(tmp_path, splitter):
    """Write files, then their passages; returns the report and the rows."""
    folder, output = tmp_path / "docs", tmp_path / "out" / "passages.jsonl"

    def run(files, **options):
        for name, text in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        report = write_passages(folder, output, splitter, **options)
        return report, [json.loads(line) for line in output.read_text("utf-8").splitlines()]

    return run


def log(report):
    return [json.loads(line) for line in log_path(report.output).read_text("utf-8").splitlines()]


def words(topic, count=30):
    """A text whose words no other topic has."""
    return " ".join(f"{topic}{number}" for number in range(count))


def test_passages_are_a_corpus(write):
    rows = [{"_id": "r1", "title": "Row", "text": words("row")}, {"text": words("other")}]
    folder_files = {
        "a.md": f"# A\n\n{words('alpha')} [to b](sub/b.md#part), [out](https://x.org), [lost](c.md).",
        "sub/b.md": f"## B\n\n{words('beta')} [up](../a.md)",
        "sub/code.py": 'def f():\n    """Beta."""\n    return alpha + beta + gamma',
        "t.jsonl": "".join(json.dumps(row) + "\n" for row in rows),
    }
    report, found = write(folder_files)
    assert [(row["_id"], row["file"], row["document"], row["title"]) for row in found] == [
        ("p000000", "a.md", "a.md", "A"),
        ("p000001", "sub/b.md", "sub/b.md", "B"),
        ("p000002", "sub/code.py", "sub/code.py", "sub.code.f"),
        ("p000003", "t.jsonl", "r1", "Row"),
        ("p000004", "t.jsonl", "t.jsonl#2", ""),
    ]
    assert [row.get("links") for row in found] == [[["to b", "sub/b.md#part"]], [["up", "a.md"]], None, None, None]
    assert [row["position"] for row in found] == [3, 3, 0, 0, 0]
    documents = list(read_corpus(report.output))
    assert [document.document_id for document in documents] == [row["_id"] for row in found]
    assert documents[0].text.startswith("A alpha0 alpha1")
    manifest = json.loads(manifest_path(report.output).read_text())
    assert (manifest["kind"], manifest["num_passages"], manifest["num_documents"]) == ("passages", 5, 5)
    assert report.tokens[0] <= report.tokens[1] <= report.tokens[2] <= 512


def test_the_letters_that_the_tokenizer_does_not_know_are_those_of_one_call(write):
    for files, share in (({"a.txt": "თბილისი fox"}, 7 / 11), ({"a.txt": "the quick fox"}, 0.0)):
        assert write(files)[0].unknown == share


def test_the_same_documents_give_the_same_bytes(write):
    files = {f"{n}.md": f"# T{n}\n\n{words(f'w{n}x')}" for n in range(5)}
    report, _ = write(files)
    first = report.output.read_bytes()
    assert write({})[0].output.read_bytes() == first
    _, found = write({"0.md": "# New\n\nother words here"})
    assert found[0]["title"] == "New"


LICENCE = "Copyright 2021 the authors. Permission is granted to use this text for any purpose."


def test_a_paragraph_of_many_documents_is_retained_once(write):
    files = {f"{n}.md": f"{words(f'w{n}x')}\n\n{LICENCE.upper() if n % 2 else LICENCE}" for n in range(6)}
    files["6.md"] = f"{words('solo')}\n\nWritten twice."
    files["7.md"] = f"{words('duet')}\n\nWritten twice."
    report, found = write(files)
    with_licence = [row["file"] for row in found if "permission" in row["text"].lower()]
    assert with_licence == ["0.md"]
    assert report.num_repeated == 5
    assert report.repeated == [(LICENCE, 6)]
    assert sum("Written twice." in row["text"] for row in found) == 2
    (line,) = [line for line in log(report) if line["cause"] == "repeated paragraph"]
    assert line == {"cause": "repeated paragraph", "documents": 6, "text": LICENCE}


def test_passages_do_not_span_a_paragraph_that_was_left_out(write):
    files = {f"{n}.md": f"{words(f'a{n}x')}\n\n{LICENCE}\n\n{words(f'b{n}x')}" for n in range(4)}
    _, found = write(files)
    texts = {row["text"] for row in found}
    assert {words("a3x"), words("b3x")} <= texts
    assert sum(LICENCE in text for text in texts) == 1


def test_repeated_rows_of_one_paragraph_are_no_boilerplate(write):
    rows = [{"title": f"Is {words(f'q{n}x', 12)} supported?", "text": "Yes, it is."} for n in range(8)]
    _, found = write({"faq.jsonl": "".join(json.dumps(row) + "\n" for row in rows)})
    assert len(found) == 8


def test_near_copies_are_left_out_and_listed(write):
    files = {"a.md": words("same", 60), "b.md": words("same", 60) + " end", "c.md": words("else", 60)}
    report, found = write(files)
    assert [row["file"] for row in found] == ["a.md", "c.md"]
    assert report.num_copies == 1
    (line,) = log(report)
    assert (line["file"], line["cause"], line["position"]) == ("b.md", "near copy", 0)
    assert len(write({}, near_duplicates=None)[1]) == 3


def test_near_copies_are_found_in_scripts_without_spaces(write):
    text = "".join(chr(0x4E00 + 7 * n) for n in range(240))
    other = "".join(chr(0x4E01 + 9 * n) for n in range(99))
    files = {"a.txt": text, "b.txt": f"{text[:60]}改{text[61:]}", "c.txt": other}
    report, found = write(files)
    assert [row["file"] for row in found] == ["a.txt", "c.txt"]
    assert report.num_copies == 1


def test_all_copies_leave_one_document(write):
    report, found = write({f"{n}.md": f"# Title\n\n{words('same', 20)}\n\n{words('more', 20)}" for n in range(9)})
    assert [row["file"] for row in found] == ["0.md"]
    assert report.num_copies + report.num_repeated >= 8


def test_files_that_cannot_be_read_are_listed(write, tmp_path):
    (tmp_path / "docs").mkdir()
    for number in range(50):
        (tmp_path / "docs" / f"{number:02d}.epub").write_bytes(b"PK broken")
        (tmp_path / "docs" / f"{number:02d}.png").write_bytes(b"\x89PNG\0\0")
    report, found = write({"z.md": words("alpha")})
    assert len(found) == 1
    assert report.left_out == Counter(damaged=50, binary=50)
    assert [example.file for example in report.examples] == [f"{number:02d}.epub" for number in range(6)]
    assert report.num_examples == 50
    assert Counter(line["cause"] for line in log(report)) == report.left_out
    assert log(report)[0]["file"] == "00.epub"


def test_a_folder_without_text_is_refused(tmp_path, splitter):
    folder, output = tmp_path / "docs", tmp_path / "new" / "passages.jsonl"
    folder.mkdir()
    (folder / "a.png").write_bytes(b"\x89PNG\0\0")
    (folder / ".git").mkdir()
    refused(
        InputError,
        r"contains no text that can be read \(1 folder of generated or hidden files, 1 binary\); give documents",
        write_passages,
        folder,
        output,
        splitter,
    )
    (folder / "rows.jsonl").write_text('{"text": "---"}\n')
    refused(InputError, "contains no text that can be read", write_passages, folder, output, splitter)
    assert not output.parent.exists()


def test_foreign_files_are_not_replaced(write, tmp_path):
    output = tmp_path / "out" / "passages.jsonl"
    output.parent.mkdir()
    output.write_text("mine")
    refused(InputError, "passages.jsonl: already exists and has no manifest", write, {"a.md": "text"})
    output.unlink()
    log_path(output).write_text("mine")
    refused(InputError, "passages.log.jsonl: already exists and has no manifest", write, {})
    log_path(output).unlink()
    write({})
    output.write_text("changed")
    refused(InputError, "is not the file that its manifest describes", write, {})
    assert output.read_text() == "changed"
    output.unlink()
    assert len(write({})[1]) == 1


def test_a_failure_leaves_nothing(write, tmp_path, monkeypatch):
    write({"a.md": words("alpha")})
    before = {path: path.read_bytes() for path in (tmp_path / "out").iterdir()}

    def fail(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Splitter, "split", fail)
    with pytest.raises(KeyboardInterrupt):
        write({"b.md": words("beta")})
    assert {path: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


@pytest.mark.parametrize("call", [2, 3])
def test_after_a_kill_between_two_files_the_same_call_works(write, monkeypatch, call):
    """The manifest, the passages and the log are renamed one after another."""
    write({"a.md": words("alpha")})
    monkeypatch.setattr(os, "replace", interrupted_at(os.replace, call))
    with pytest.raises(KeyboardInterrupt):
        write({"b.md": words("beta")})
    monkeypatch.undo()
    assert len(write({})[1]) == 2


def test_a_folder_whose_name_is_not_utf8_is_read(tmp_path, splitter):
    folder, output = tmp_path / os.fsdecode(b"f\xfcr"), tmp_path / "passages.jsonl"
    folder.mkdir()
    (folder / "a.md").write_text(words("alpha"))
    assert write_passages(folder, output, splitter).num_passages == 1


def test_the_output_is_no_document(write, tmp_path, splitter):
    write({"a.md": words("alpha")})
    output = tmp_path / "docs" / "passages.jsonl"
    for _ in range(2):
        assert write_passages(tmp_path / "docs", output, splitter).num_documents == 1


def test_outputs_of_earlier_commands_are_no_documents(write, tmp_path, splitter):
    docs = tmp_path / "docs"
    write({"a.md": words("alpha"), "passages.md": words("beta"), "web/manifest.json": "{}", "web/b.md": words("gamma")})
    write_passages(docs, docs / "passages.jsonl", splitter)
    write_json_lines(docs / "queries" / "evaluation" / "queries.jsonl", [{"_id": "q", "text": words("delta")}])
    write_manifest(docs / "queries", {"kind": "queries"})
    report, rows = write({})
    assert {row["file"] for row in rows} == {"a.md", "passages.md", "web/b.md"}
    assert report.left_out["output of this library"] == 3
    assert {line["file"] for line in log(report)} >= {"queries", "passages.jsonl", "passages.log.jsonl"}
