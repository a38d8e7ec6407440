"""Logs of real queries, their judgements, and the file that asks for more."""

import gzip
import json

import numpy as np
import pytest

from embeddings.adaptation.candidates import read_passages
from embeddings.adaptation.real_queries import Judgements, Label, deciding_items, read_log, write_label_file
from embeddings.common import InputError, OptionError
from tests.adaptation.world import passage_rows, read_rows
from tests.data.rows import write_rows
from tests.docs.pages import ROOT, blocks
from tests.helpers.refusals import refused


@pytest.fixture
def passages(tmp_path):
    return write_rows(tmp_path / "passages.jsonl", passage_rows(10, 3))


def log_of(tmp_path, content, name="log.jsonl", **options):
    path = tmp_path / name
    if isinstance(content, list):
        write_rows(path, content)
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_log(path, **options)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("log.txt", "first one\nsecond  one\n\nFirst one?\n"),
        ("log", "\ufefffirst one\r\nsecond one\r\nfirst one"),
        ("log.txt.gz", gzip.compress(b"first one\nsecond one\n", mtime=0)),
        ("log.csv", "when,query\n1,first one\n2,second one\n"),
        ("log.tsv", "question\tuser\nfirst one\t3\nsecond one\t4\n"),
        ("log.jsonl", '{"text": "first one"}\n{"text": "second one"}\n'),
    ],
)
def test_a_log_without_judgements_is_its_different_queries(tmp_path, name, content):
    log = log_of(tmp_path, content, name)
    assert log.queries == ["first one", "second one"]
    assert log.labels == []


def test_the_most_frequent_queries_come_first(tmp_path):
    log = log_of(tmp_path, "rare\noften\noften\nmore\noften\nmore\n", "log.txt")
    assert log.queries == ["often", "more", "rare"]


def test_judgements_name_passages_documents_or_answers(tmp_path):
    rows = [
        {"query": "a", "passage": "p1"},
        {"query": "a", "passage": "p2", "relevant": 3},
        {"query": "b", "document": "folder/x.md", "relevant": True},
        {"query": "c", "answer": "some text"},
        {"query": "d", "positive": ["one text", "other text"], "negatives": ["no"]},
        {"query": "e", "passage": 12, "relevant": False},
        {"query": "f", "passage": "p3", "relevant": None},
    ]
    log = log_of(tmp_path, rows)
    assert log.queries == ["a", "b", "c", "d", "e", "f"]
    assert log.labels == [
        Label(0, 1.0, "p1", ""),
        Label(0, 3.0, "p2", ""),
        Label(1, 1.0, "folder/x.md", ""),
        Label(2, 1.0, "", "some text"),
        Label(3, 1.0, "", "one text"),
        Label(3, 1.0, "", "other text"),
        Label(4, 0.0, "12", ""),
    ]
    assert log.num_unjudged == 1


def test_columns_with_other_names_are_mapped(tmp_path):
    content = "text,page,grade\nfirst one,p1,2\nsecond one,p2,\n"
    log = log_of(tmp_path, content, "log.csv", columns={"query": "text", "passage": "page", "relevant": "grade"})
    assert (log.queries, log.labels) == (["first one", "second one"], [Label(0, 2.0, "p1", "")])
    assert log.num_unjudged == 1
    refused(OptionError, "query_columns must map", read_log, tmp_path / "log.csv", {"title": "x"})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"body": "x"}\n', "log.jsonl:1: has no query"),
        ('{"query": " "}\n', "log.jsonl:1: has no query"),
        ('{"query": "x", "passage": "p1", "relevant": "maybe"}\n', "relevant is 'maybe'"),
        ('{"query": "x", "passage": "p1", "relevant": 4}\n', "relevant is 4"),
        ('{"query": "x", "passage": ["p1"]}\n', "passage is"),
        ('{"query": "x", "answer": 3}\n', "answer is 3"),
        ('{"query": "x"}\n[1]\n', "log.jsonl:2"),
        (b"caf\xe9\n", "is not valid UTF-8"),
        ("", "is empty"),
    ],
)
def test_a_wrong_row_is_named(tmp_path, content, message):
    refused(InputError, message, log_of, tmp_path, content)


def judgements_of(path, log):
    found = Judgements(log)
    for passage in read_passages(path):
        found.add(passage)
    return found


def test_a_document_stands_for_all_its_passages(tmp_path, passages):
    document = read_rows(passages)[3]["document"]
    rows = [{"query": "a", "document": document}, {"query": "a", "passage": "p000004", "relevant": 3},
            {"query": "b", "passage": "p000000", "relevant": 0}, {"query": "c", "passage": "unknown"}]  # fmt: skip
    found = judgements_of(passages, log_of(tmp_path, rows))
    assert found.grades == {0: {"p000003": 1.0, "p000004": 3.0, "p000005": 1.0}, 1: {"p000000": 0.0}}
    assert found.documents == {0: {document}}
    assert [label.name for label in found.missing] == ["unknown"]


def test_a_judged_passage_is_also_that_of_its_document_for_other_queries(tmp_path, passages):
    document = read_rows(passages)[3]["document"]
    rows = [{"query": "a", "document": document}, {"query": "a", "passage": "p000004", "relevant": 0},
            {"query": "b", "passage": "p000003"}]  # fmt: skip
    found = judgements_of(passages, log_of(tmp_path, rows))
    assert found.grades == {0: {"p000003": 1.0, "p000004": 0.0, "p000005": 1.0}, 1: {"p000003": 1.0}}
    assert not found.missing


def test_answers_are_found_by_their_words(tmp_path, passages):
    rows = read_rows(passages)
    part = ". ".join(rows[7]["text"].split(". ")[1:4]).upper()
    both = f"{rows[10]['title']} {rows[10]['text']}\n{rows[11]['title']} {rows[11]['text']}"
    asked = [{"query": "a", "answer": part}, {"query": "b", "answer": both}]
    asked += [{"query": "c", "answer": "not in any of them"}, {"query": "d", "answer": "the"}]
    # An answer is looked for only if no passage has the name.
    asked += [{"query": "e", "document": name, "answer": part} for name in ("unknown", rows[0]["document"])]
    asked[-1]["query"] = "f"
    found = judgements_of(passages, log_of(tmp_path, asked))
    found.find_answers(passages)
    of_document = {row["_id"]: 1.0 for row in rows if row["document"] == rows[0]["document"]}
    assert found.grades == {
        0: {"p000007": 1.0},
        1: {"p000010": 1.0, "p000011": 1.0},
        4: {"p000007": 1.0},
        5: of_document,
    }


def test_a_labelled_folder_is_matched_by_id_and_else_by_text(tmp_path, passages):
    rows = read_rows(passages)
    folder = tmp_path / "folder"
    folder.mkdir()
    for names in ([row["_id"] for row in rows], [f"other{row}" for row in range(len(rows))]):
        corpus = [
            {"_id": name, "title": row["title"], "text": row["text"]} for name, row in zip(names, rows, strict=True)
        ]
        write_rows(folder / "corpus.jsonl", corpus)
        write_rows(folder / "queries.jsonl", [{"_id": "1", "text": "a question"}, {"_id": "2", "text": "another"}])
        lines = [f"1\t{names[4]}\t2", f"1\t{names[9]}\t0", f"2\t{names[5]}\t1"]
        (folder / "qrels.tsv").write_text("\n".join(["query-id\tcorpus-id\tscore", *lines]))
        log = read_log(folder)
        assert log.queries == ["a question", "another"]
        found = judgements_of(passages, log)
        found.find_answers(passages)
        relevant = {
            query: {name: grade for name, grade in grades.items() if grade} for query, grades in found.grades.items()
        }
        assert relevant == {0: {"p000004": 2.0}, 1: {"p000005": 1.0}}


def test_the_code_of_the_page_writes_a_file_of_labels(tmp_path, passages, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (code,) = (block.text for block in blocks(ROOT / "docs" / "adapt.md") if block.language == "python")
    exec(code, {})
    rows = read_rows(tmp_path / "label_me.jsonl")
    assert {row["passage"] for row in rows} == {"p000001", "p000002", "p000004", "p000007"}
    assert {row["query"] for row in rows} == {"how do I reset it"}


def test_the_items_that_decide_are_those_on_which_variants_differ():
    first = np.array([[0, 1, 2, 3], [5, 6, 7, 8]])
    second = np.array([[1, 0, 2, 9], [5, 6, 7, 8]])
    items = deciding_items({"first": first, "second": second})
    gain = 1 / np.log2(1 + np.arange(1, 5))
    expected = {(0, 0): gain[0] - gain[1], (0, 1): gain[0] - gain[1], (0, 3): gain[3], (0, 9): gain[3]}
    assert items == sorted(expected, key=lambda item: (-expected[item], item))
    assert deciding_items({"first": first, "second": second}, limit=2) == items[:2]
    assert deciding_items({"first": first, "same": first}) == []
    with pytest.raises(ValueError, match="two or more"):
        deciding_items({"first": first})


def test_one_query_has_at_most_five_items_and_only_the_top_ten_count():
    first, second = np.arange(40).reshape(2, 20), np.arange(40).reshape(2, 20)[:, ::-1]
    items = deciding_items({"first": first, "second": second})
    assert len(items) == 10
    assert {query for query, _ in items[:4]} == {0, 1}
    # The best of each variant decide most.
    assert set(items[:4]) == {(0, 0), (0, 19), (1, 20), (1, 39)}
    late = np.where(np.arange(20) < 10, first, first[:, ::-1])
    assert deciding_items({"first": first, "late": late}) == []
    missing = np.full((2, 20), -1)
    assert len(deciding_items({"first": first, "missing": missing}, limit=100)) == 10


def test_the_file_of_labels_is_a_log_once_it_is_filled_in(tmp_path, passages):
    path = tmp_path / "label_me.jsonl"
    queries = ["where is it", "what is it", "who is it"]
    assert write_label_file(path, queries, passages, [(2, 4), (0, 3), (2, 1)]) == 3
    rows = read_rows(path)
    passage = read_rows(passages)
    expected = [(2, 4), (2, 1), (0, 3)]
    for row, (query, number) in zip(rows, expected, strict=True):
        texts = {"title": passage[number]["title"], "text": passage[number]["text"]}
        assert row == {"query": queries[query], "passage": passage[number]["_id"], **texts, "relevant": None}
    log = read_log(path)
    assert (log.queries, log.labels, log.num_unjudged) == (["who is it", "where is it"], [], 3)
    rows[0]["relevant"], rows[1]["relevant"] = True, 0
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    log = read_log(path)
    assert log.labels == [Label(0, 1.0, "p000004", ""), Label(0, 0.0, "p000001", "")]
    assert log.num_unjudged == 1
