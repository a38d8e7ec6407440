"""Evaluation folders of every kind are recognised by their files, and every mistake names its row."""

import gzip
import json
import shutil

import pytest

from embeddings.common import InputError
from embeddings.evaluation.folders import (
    ClassificationFolder,
    ClusteringFolder,
    PairClassificationFolder,
    RerankingFolder,
    RetrievalFolder,
    SimilarityFolder,
    SummarisationFolder,
    find_evaluation_folders,
    read_evaluation_folder,
    read_qrels,
    read_retrieval_files,
    retrieval_files_of,
)
from tests.evaluation.data import (
    write_labelled,
    write_pair_classification,
    write_reranking,
    write_retrieval,
    write_rows,
    write_similarity,
    write_summarisation,
)

QRELS_HEADER = "query-id\tcorpus-id\tscore\n"


def check_retrieval(folder):
    assert isinstance(folder, RetrievalFolder)
    assert folder.documents[0] == "the quick brown fox"
    assert folder.document_ids == ["d0", "d1", "d2", "d3", "d4", "d5"]
    assert (folder.queries, folder.query_ids, folder.num_skipped) == (["brown fox", "numbers"], ["a", "b"], 2)
    qrels = folder.qrels
    assert (qrels.num_queries, qrels.num_documents) == (2, 6)
    triples = zip(qrels.query_J, qrels.document_J, qrels.relevance_J, strict=True)
    assert {(int(q), int(d), float(r)) for q, d, r in triples} == {(0, 0, 2), (0, 5, 1), (0, 1, 0), (1, 4, 1)}


def test_a_retrieval_folder_keeps_the_queries_that_have_something_to_find(tmp_path):
    check_retrieval(read_evaluation_folder(write_retrieval(tmp_path)))


def test_gzipped_files_and_the_benchmarks_own_place_of_judgments_are_read(tmp_path):
    write_retrieval(tmp_path)
    corpus = tmp_path / "corpus.jsonl"
    (tmp_path / "corpus.jsonl.gz").write_bytes(gzip.compress(corpus.read_bytes()))
    corpus.unlink()
    (tmp_path / "qrels").mkdir()
    shutil.move(tmp_path / "qrels.tsv", tmp_path / "qrels" / "test.tsv")
    check_retrieval(read_evaluation_folder(tmp_path))


@pytest.mark.parametrize("name", ["qrels.tsv", "qrels/train.tsv"])
def test_judgments_of_one_split_are_read_with_the_folder_around_them(name, tmp_path):
    write_retrieval(tmp_path)
    (tmp_path / "qrels").mkdir()
    qrels = shutil.move(tmp_path / "qrels.tsv", tmp_path / name)
    files = retrieval_files_of(qrels)
    assert (files.corpus, files.queries) == (tmp_path / "corpus.jsonl", tmp_path / "queries.jsonl")
    check_retrieval(read_retrieval_files(files))
    with pytest.raises(InputError, match=r"qrels/dev\.tsv: no such file"):
        retrieval_files_of(tmp_path / "qrels" / "dev.tsv")
    files.queries.unlink()
    with pytest.raises(InputError, match=r"queries\.jsonl is missing"):
        retrieval_files_of(qrels)


def test_labels_are_classes_with_a_training_part_and_clusters_without(tmp_path):
    classes = read_evaluation_folder(write_labelled(tmp_path / "classes", with_train=True))
    clusters = read_evaluation_folder(write_labelled(tmp_path / "clusters", with_train=False))
    assert isinstance(classes, ClassificationFolder)
    assert isinstance(clusters, ClusteringFolder)
    assert classes.train_labels == classes.test_labels == clusters.labels == ["animal"] * 3 + ["1"] * 3
    assert classes.train_texts[0] == "fox jumps over 1"
    assert classes.test_texts == clusters.texts


def test_a_pair_with_a_score_is_similarity_whatever_label_is_beside_it(tmp_path):
    rows = [{"sentence1": "a", "sentence2": "b", "score": score, "label": "x"} for score in (1, 2)]
    write_rows(tmp_path / "test.jsonl", rows)
    assert isinstance(read_evaluation_folder(tmp_path), SimilarityFolder)


def test_broken_bytes_are_refused_in_one_line(tmp_path):
    row = json.dumps({"text": "a", "label": "x"}).encode() + b"\n"
    for content, message in (
        (row + row[:12], r"test\.jsonl:2: "),
        (row + row.replace(b"a", b"\xff", 1), r"test\.jsonl:2: "),
        (b"", "is empty"),
        (gzip.compress(row * 1000, mtime=0)[:-20], "gzip data"),
    ):
        (tmp_path / "test.jsonl").write_bytes(content)
        with pytest.raises(InputError, match=message) as caught:
            read_evaluation_folder(tmp_path)
        assert "\n" not in str(caught.value)


def test_a_folder_without_evaluation_data_is_told_what_one_looks_like(tmp_path):
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(InputError, match=r"; write corpus\.jsonl, queries\.jsonl and qrels\.tsv"):
            read_evaluation_folder(path)
        with pytest.raises(InputError, match=r"holds no evaluation data; write corpus\.jsonl"):
            find_evaluation_folders(path)


def test_two_files_of_one_name_are_refused(tmp_path):
    write_labelled(tmp_path, with_train=False)
    (tmp_path / "test.jsonl.gz").write_bytes(gzip.compress((tmp_path / "test.jsonl").read_bytes()))
    with pytest.raises(InputError, match=r"test\.jsonl and test\.jsonl\.gz are both there; keep one"):
        read_evaluation_folder(tmp_path)


def test_folders_are_found_at_any_depth_in_order(tmp_path):
    write_similarity(tmp_path / "z")
    write_retrieval(tmp_path / "b" / "deep" / "er")
    write_labelled(tmp_path / "a", with_train=True)
    (tmp_path / "c").mkdir()
    (tmp_path / "b" / "deep" / "er" / "qrels").mkdir()
    assert find_evaluation_folders(tmp_path) == [tmp_path / "a", tmp_path / "b" / "deep" / "er", tmp_path / "z"]
    assert find_evaluation_folders(tmp_path / "z") == [tmp_path / "z"]


@pytest.mark.parametrize(
    "content",
    [
        QRELS_HEADER + "q1\td1\t2\nq1\td2\t0\nq 2\td1\t1\n",
        "q1\td1\t2\nq1\td2\t0\nq 2\td1\t1",
        "q1\t0\td1\t2\nq1\t0\td2\t0\nq 2\t0\td1\t1\n",
        "\ufeff" + QRELS_HEADER + "q1\td1\t2\r\nq1\td2\t0.0\r\n\r\nq 2\td1\t1\r\n",
        QRELS_HEADER + "q1\td1\t2\nq1\td1\t2\nq1\td2\t0\nq 2\td1\t1\n",
    ],
    ids=["beir", "no header", "trec", "windows", "twice the same"],
)
def test_every_layout_of_qrels_gives_the_same_grades(content, tmp_path):
    (tmp_path / "qrels.tsv").write_bytes(content.encode())
    found = read_qrels(tmp_path / "qrels.tsv", {"q1", "q 2"}, {"d1", "d2"})
    assert found == {"q1": {"d1": 2.0, "d2": 0.0}, "q 2": {"d1": 1.0}}
    (tmp_path / "qrels.tsv").write_text("q1 0 d1 3\n")
    assert read_qrels(tmp_path / "qrels.tsv", {"q1"}, {"d1"}) == {"q1": {"d1": 3.0}}


def test_pairs_candidates_and_summaries_are_recognised_by_the_fields_of_their_first_row(tmp_path):
    pairs = read_evaluation_folder(write_pair_classification(tmp_path / "p"))
    assert isinstance(pairs, PairClassificationFolder)
    assert (pairs.first[2], pairs.second[2], pairs.label_N.tolist()) == ("pad sequences", "lazy dog", [1, 1, 0, 0])
    reranked = read_evaluation_folder(write_reranking(tmp_path / "q"))
    assert isinstance(reranked, RerankingFolder)
    assert reranked.documents == ["the quick brown fox", "brown dog", "two numbers", "one length", "lazy dog"]
    assert (reranked.candidate_rows, reranked.num_relevant) == ([[0, 1, 2, 3], [3, 4, 0]], [2, 1])
    summaries = read_evaluation_folder(write_summarisation(tmp_path / "s"))
    assert isinstance(summaries, SummarisationFolder)
    assert [len(texts) for texts in summaries.human_summaries] == [2, 1, 1]
    assert summaries.relevance == [[3.0, 2.0, 1.0], [1.5, 4.0], [2.0, 2.0]]


def pair(**changes):
    return {"sentence1": "a", "sentence2": "b", "label": 1} | changes


def candidates(**changes):
    return {"query": "q", "positive": "a", "negatives": ["b"]} | changes


def summary(**changes):
    return {"human_summaries": ["a"], "machine_summaries": ["b", "c"], "relevance": [1, 2]} | changes


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"sentence1": "a", "sentence2": "b", "score": 1}] * 2, "every score is 1.0; a rank correlation needs two"),
        ([{"sentence1": "a", "sentence2": "b", "score": "high"}], r"test\.jsonl:1: .*score"),
        ([{"text": "a", "label": "x"}] * 2, "every label is 'x'; two different labels"),
        ([{"text": "a", "label": "x"}, {"text": 5, "label": "y"}], r"test\.jsonl:2: .*text"),
        ([{"eng": "a", "deu": "b"}], r"test\.jsonl:1: is a row of no known kind \(found: eng, deu\)"),
        (
            [pair(), pair(label=2)],
            r"test\.jsonl:2: label is 2, expected 0 or 1; write 1 for a pair that means the same",
        ),
        ([pair(label="yes")], r"test\.jsonl:1: label is the text 'yes', expected 0 or 1"),
        ([pair(label=1.0)], r"test\.jsonl:1: label is 1\.0, expected 0 or 1"),
        ([pair(label=[1])], r"test\.jsonl:1: label is a list, expected 0 or 1"),
        ([pair(sentence2=" ")], r"test\.jsonl:1: field 'sentence2' is empty"),
        ([pair(), pair()], r"test\.jsonl: every label is 1; pairs of both labels are needed, 0 and 1"),
        ([candidates(), candidates(negatives=[])], r"test\.jsonl:2: the query has no negatives; list texts"),
        ([candidates(negatives=["b", "a"])], r"test\.jsonl:1: a text is both positive and negative; keep it on one"),
        ([candidates(query=3)], r"test\.jsonl:1: query is a number, expected text"),
        ([summary(), summary(relevance=[1])], r"test\.jsonl:2: relevance has length 1, machine_summaries 2; give each"),
        ([summary(relevance=[1, "2"])], r"test\.jsonl:1: relevance\[1\] is text, expected a finite number"),
        ([summary(relevance=[1, float("nan")])], r"test\.jsonl:1: .*nan"),
        ([summary(human_summaries=[])], r"test\.jsonl:1: field 'human_summaries' is an empty list"),
        ([summary(machine_summaries=["b", " "])], r"test\.jsonl:1: field 'machine_summaries\[1\]' is empty"),
        ([{"machine_summaries": ["b"], "relevance": [1]}], r"test\.jsonl:1: field 'human_summaries' is missing"),
        ([summary(relevance=[2, 2])], r"test\.jsonl: no row has two different numbers in relevance"),
    ],
)
def test_a_bad_row_is_named(rows, message, tmp_path):
    write_rows(tmp_path / "test.jsonl", rows)
    with pytest.raises(InputError, match=message) as caught:
        read_evaluation_folder(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("file", "rows", "message"),
    [
        ("corpus.jsonl", [{"_id": "d0", "title": "x"}], r"corpus\.jsonl:1: field 'text' is missing"),
        ("corpus.jsonl", [{"_id": "d0", "text": "x"}], r"qrels\.tsv:2: no document has the id 'd4'"),
        ("queries.jsonl", [{"_id": "a", "text": "x"}] * 2, r"queries\.jsonl:2: the id 'a' occurs a second time"),
        ("queries.jsonl", [{"_id": "a", "text": " "}], r"queries\.jsonl:1: field 'text' is empty"),
        ("queries.jsonl", [{"_id": "z", "text": "x"}], r"qrels\.tsv:2: no query has the id 'b'"),
        ("queries.jsonl", [], r"queries\.jsonl: is empty"),
        ("qrels.tsv", "a\td0\n", r"qrels\.tsv:2: has 2 columns; write query-id, corpus-id, score"),
        ("qrels.tsv", "a\td0\tnan\n", r"qrels\.tsv:2: the score must be a number, got 'nan'"),
        ("qrels.tsv", "a\td0\t1\na\td0\t2\n", r"qrels\.tsv:3: 'a' and 'd0' were judged 1 above, here 2"),
        ("qrels.tsv", "a\td0\t0\na\td1\t-1\n", r"qrels\.tsv: no document is relevant to any query"),
        ("qrels.tsv", "", r"qrels\.tsv: holds no judgment"),
        ("qrels.tsv", "a\td\udcff\t1\n", r"qrels\.tsv:2: is not valid UTF-8"),
    ],
)
def test_a_bad_row_of_a_retrieval_folder_is_named(file, rows, message, tmp_path):
    write_retrieval(tmp_path)
    if isinstance(rows, str):
        (tmp_path / file).write_bytes((QRELS_HEADER + rows).encode("utf-8", "surrogateescape"))
    else:
        write_rows(tmp_path / file, rows)
    with pytest.raises(InputError, match=message) as caught:
        read_evaluation_folder(tmp_path)
    assert "\n" not in str(caught.value)
