"""Evaluation folders are told apart by their files and read strictly."""

import gzip
import json
import shutil

import numpy as np
import pytest

from embeddings.common import InputError
from embeddings.evaluation.folders import (
    ClassificationFolder,
    ClusteringFolder,
    RetrievalFolder,
    SimilarityFolder,
    find_evaluation_folders,
    read_evaluation_folder,
    read_retrieval_files,
    retrieval_files_of,
)
from embeddings.evaluation.pair_classification import PairClassificationFolder
from embeddings.evaluation.reranking import RerankingFolder
from embeddings.evaluation.summarisation import SummarisationFolder
from tests.evaluation.data import (
    write_labelled,
    write_pair_classification,
    write_reranking,
    write_retrieval,
    write_rows,
    write_similarity,
    write_summarisation,
)


def check_retrieval(folder):
    assert isinstance(folder, RetrievalFolder)
    assert folder.documents[0] == "the quick brown fox"
    assert folder.document_ids == ["d0", "d1", "d2", "d3", "d4", "d5"]
    assert (folder.queries, folder.query_ids, folder.num_skipped) == (["brown fox", "numbers"], ["a", "b"], 2)
    judgments = folder.judgments
    assert (judgments.num_queries, judgments.num_documents) == (2, 6)
    triples = zip(judgments.query_J, judgments.document_J, judgments.relevance_J, strict=True)
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


def test_a_similarity_folder(tmp_path):
    folder = read_evaluation_folder(write_similarity(tmp_path))
    assert isinstance(folder, SimilarityFolder)
    assert (folder.first[3], folder.second[3]) == ("the fox", "lengths")
    np.testing.assert_array_equal(folder.score_N, [5.0, 4.0, 2.0, 0.0])


def test_labels_are_classes_with_a_training_part_and_clusters_without(tmp_path):
    classes = read_evaluation_folder(write_labelled(tmp_path / "classes", with_train=True))
    clusters = read_evaluation_folder(write_labelled(tmp_path / "clusters", with_train=False))
    assert isinstance(classes, ClassificationFolder)
    assert isinstance(clusters, ClusteringFolder)
    assert classes.train_labels == classes.test_labels == clusters.labels == ["animal"] * 3 + ["1"] * 3
    assert classes.train_texts[0] == "fox jumps over 1"
    assert classes.test_texts == clusters.texts


@pytest.mark.parametrize(
    ("write", "kind", "count"),
    [
        (write_pair_classification, PairClassificationFolder, lambda folder: len(folder.first) == 4),
        (write_reranking, RerankingFolder, lambda folder: len(folder.queries) == 2),
        (write_summarisation, SummarisationFolder, lambda folder: len(folder.relevance) == 3),
    ],
)
def test_the_other_kinds_are_known_by_the_fields_of_their_first_row(write, kind, count, tmp_path):
    folder = read_evaluation_folder(write(tmp_path))
    assert isinstance(folder, kind)
    assert count(folder)


def test_a_pair_with_a_score_is_similarity_whatever_label_is_beside_it(tmp_path):
    rows = [{"sentence1": "a", "sentence2": "b", "score": score, "label": "x"} for score in (1, 2)]
    write_rows(tmp_path / "test.jsonl", rows)
    assert isinstance(read_evaluation_folder(tmp_path), SimilarityFolder)


@pytest.mark.parametrize(
    ("file", "rows", "message"),
    [
        ("corpus.jsonl", [{"_id": "d0", "title": "x"}], r"corpus\.jsonl:1: field 'text' is missing"),
        ("corpus.jsonl", [{"_id": "d0", "text": "x"}] * 2, r"corpus\.jsonl:2: the id 'd0' occurs a second time"),
        ("corpus.jsonl", [{"_id": "d0", "text": "x"}], r"qrels\.tsv:2: no document has the id 'd4'"),
        ("queries.jsonl", [{"_id": "a", "text": "x"}] * 2, r"queries\.jsonl:2: the id 'a' occurs a second time"),
        ("queries.jsonl", [{"_id": "a", "text": " "}], r"queries\.jsonl:1: field 'text' is empty"),
        ("queries.jsonl", [{"text": "x"}], r"queries\.jsonl:1: field '_id' is missing"),
        ("queries.jsonl", [{"_id": "z", "text": "x"}], r"qrels\.tsv:2: no query has the id 'b'"),
        ("queries.jsonl", [], r"queries\.jsonl: is empty"),
    ],
)
def test_a_bad_retrieval_row_is_named(file, rows, message, tmp_path):
    write_retrieval(tmp_path)
    write_rows(tmp_path / file, rows)
    with pytest.raises(InputError, match=message) as caught:
        read_evaluation_folder(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["corpus.jsonl", "queries.jsonl", "qrels.tsv"])
def test_a_missing_file_of_a_retrieval_folder_is_named(name, tmp_path):
    write_retrieval(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(InputError, match=f"{name} is missing; write corpus.jsonl"):
        read_evaluation_folder(tmp_path)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"sentence1": "a", "sentence2": "b", "score": 1}] * 2, "every score is 1.0; a rank correlation needs two"),
        ([{"sentence1": "a", "sentence2": "b", "label": 3}], r"test\.jsonl:1: label is 3, expected 0 or 1"),
        ([{"query": "a", "positive": "b"}], r"test\.jsonl:1: the query has no negatives"),
        ([{"machine_summaries": ["b"], "relevance": [1]}], r"test\.jsonl:1: field 'human_summaries' is missing"),
        ([{"sentence1": "a", "sentence2": "b"}], r"test\.jsonl:1: .*score"),
        ([{"sentence1": "a", "sentence2": "b", "score": "high"}], r"test\.jsonl:1: .*score"),
        ([{"text": "a", "label": "x"}, {"text": "b", "label": "x"}], "every label is 'x'; two different labels"),
        ([{"text": "a", "label": "x"}, {"text": "b"}], r"test\.jsonl:2: .*label"),
        ([{"text": "a", "label": "x"}, {"text": 5, "label": "y"}], r"test\.jsonl:2: .*text"),
        ([{"eng": "a", "deu": "b"}], r"test\.jsonl:1: is a row of no kind of set \(found: eng, deu\)"),
    ],
)
def test_a_bad_row_of_the_other_kinds_is_named(rows, message, tmp_path):
    write_rows(tmp_path / "test.jsonl", rows)
    with pytest.raises(InputError, match=message) as caught:
        read_evaluation_folder(tmp_path)
    assert "\n" not in str(caught.value)


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
