"""Evaluation folders are recognised by their files, errors name the row, and metrics equal those of loops."""

import gzip
import math
import shutil

import numpy as np
import pytest

from embeddings.common import InputError
from embeddings.evaluation.folders import (
    Qrels,
    RetrievalFolder,
    find_evaluation_folders,
    read_evaluation_folder,
    read_qrels,
    read_retrieval_files,
    retrieval_files_of,
    retrieval_metrics,
    spearman,
)
from embeddings.inference.search import search_top_k
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
    assert list(folder.document_ids) == ["d0", "d1", "d2", "d3", "d4", "d5"]
    assert folder.queries == ["brown fox", "numbers", "judged, none relevant"]
    assert (folder.query_ids, folder.num_skipped) == (["a", "b", "d"], 1)
    qrels = folder.qrels
    assert (qrels.num_queries, qrels.num_documents) == (3, 6)
    triples = zip(qrels.query_J, qrels.document_J, qrels.relevance_J, strict=True)
    assert {(int(q), int(d), float(r)) for q, d, r in triples} == {
        (0, 0, 2),
        (0, 5, 1),
        (0, 1, 0),
        (1, 4, 1),
        (2, 1, 0),
    }


def test_a_retrieval_folder_keeps_the_queries_with_a_judgment(tmp_path):
    check_retrieval(read_evaluation_folder(write_retrieval(tmp_path)))


def test_gzipped_files_and_qrels_in_a_subfolder_are_read(tmp_path):
    write_retrieval(tmp_path)
    corpus = tmp_path / "corpus.jsonl"
    (tmp_path / "corpus.jsonl.gz").write_bytes(gzip.compress(corpus.read_bytes()))
    corpus.unlink()
    (tmp_path / "qrels").mkdir()
    shutil.move(tmp_path / "qrels.tsv", tmp_path / "qrels" / "test.tsv")
    check_retrieval(read_evaluation_folder(tmp_path))


@pytest.mark.parametrize("name", ["qrels.tsv", "qrels/train.tsv"])
def test_the_qrels_of_one_split_are_read_with_the_files_of_their_folder(name, tmp_path):
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
    assert (classes.kind, clusters.kind) == ("classification", "clustering")
    assert clusters.splits["test"]["labels"] == ["animal"] * 3 + ["1"] * 3
    assert classes.splits["train"]["label"] == classes.splits["test"]["label"] == [1] * 3 + [0] * 3
    assert classes.context_texts[0] == "fox jumps over 1"
    assert classes.splits["test"]["text"] == clusters.context_texts


def test_the_error_for_a_folder_without_evaluation_data_describes_the_layouts(tmp_path):
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(InputError, match=r"; write corpus\.jsonl, queries\.jsonl and qrels\.tsv"):
            read_evaluation_folder(path)
        with pytest.raises(InputError, match=r"has no evaluation data; write corpus\.jsonl"):
            find_evaluation_folders(path)


def test_folders_are_found_at_any_depth_in_order(tmp_path):
    write_similarity(tmp_path / "z")
    write_retrieval(tmp_path / "b" / "deep" / "er")
    write_labelled(tmp_path / "a", with_train=True)
    (tmp_path / "c").mkdir()
    (tmp_path / "b" / "deep" / "er" / "qrels").mkdir()
    assert find_evaluation_folders(tmp_path) == [tmp_path / "a", tmp_path / "b" / "deep" / "er", tmp_path / "z"]
    assert find_evaluation_folders(tmp_path / "z") == [tmp_path / "z"]
    # One without its corpus is not passed over.
    (write_retrieval(tmp_path / "m") / "corpus.jsonl").unlink()
    assert tmp_path / "m" in find_evaluation_folders(tmp_path)
    with pytest.raises(InputError, match=r"corpus\.jsonl is missing"):
        read_evaluation_folder(tmp_path / "m")


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
    columns = pairs.splits["test"]
    assert (columns["sentence1"][2], columns["sentence2"][2]) == ("pad sequences", "lazy dog")
    assert (pairs.kind, columns["labels"]) == ("pair_classification", [1, 1, 0, 0])
    reranked = read_evaluation_folder(write_reranking(tmp_path / "q"))
    assert reranked.kind == "reranking"
    assert reranked.documents == ["the quick brown fox", "brown dog", "two numbers", "one length", "lazy dog"]
    assert reranked.candidates == [[0, 1, 2, 3], [3, 4, 0]]
    assert reranked.qrels.gain(np.array(reranked.candidates[1])[None]).tolist() == [[0, 0, 1], [1, 0, 0]]
    summaries = read_evaluation_folder(write_summarisation(tmp_path / "s"))
    columns = summaries.splits["test"]
    assert [len(texts) for texts in columns["human_summaries"]] == [2, 1, 1]
    assert (summaries.kind, columns["relevance"]) == ("summarisation", [[3.0, 2.0, 1.0], [1.5, 4.0], [2.0, 2.0]])


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
        ([{"eng": "a", "deu": "b"}], r"test\.jsonl:1: has the fields of no known kind \(found: eng, deu\)"),
        ([pair(), pair(label=2)], r"test\.jsonl:2: label is '2', expected 0 or 1; write 1"),
        ([pair(label="yes")], r"test\.jsonl:1: label is 'yes', expected 0 or 1"),
        ([pair(label=1.0)], r"test\.jsonl:1: label is '1\.0', expected 0 or 1"),
        ([pair(sentence2=" ")], r"test\.jsonl:1: field 'sentence2' is empty"),
        ([pair(), pair()], r"test\.jsonl: every label is 1; add pairs with the other label"),
        ([candidates(), candidates(negatives=[])], r"test\.jsonl:2: the query has no negatives; list texts"),
        ([candidates(negatives=["b", "a"])], r"test\.jsonl:1: a text is both positive and negative; keep it on one"),
        ([candidates(query=3)], r"test\.jsonl:1: query is a number, expected text"),
        ([summary(), summary(relevance=[1])], r"test\.jsonl:2: relevance has length 1, machine_summaries 2; give each"),
        ([summary(relevance=[1, "2"])], r"test\.jsonl:1: relevance\[1\] is '2', expected a finite number"),
        ([summary(relevance=[1, float("nan")])], r"test\.jsonl:1: .*nan"),
        ([summary(human_summaries=[])], r"test\.jsonl:1: field 'human_summaries' must be a list with an item"),
        ([summary(machine_summaries=["b", " "])], r"test\.jsonl:1: field 'machine_summaries\[1\]' is empty"),
        ([{"machine_summaries": ["b"], "relevance": [1]}], r"test\.jsonl:1: field 'human_summaries' must be a list"),
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
        ("corpus.jsonl", [{"_id": "d0", "text": "x"}], r"qrels\.tsv:2: no document has the id 'd4'"),
        ("queries.jsonl", [{"_id": "a", "text": "x"}] * 2, r"queries\.jsonl:2: the id 'a' occurs a second time"),
        ("queries.jsonl", [{"_id": "z", "text": "x"}], r"qrels\.tsv:2: no query has the id 'b'"),
        ("qrels.tsv", "a\td0\n", r"qrels\.tsv:2: has 2 columns; write query-id, corpus-id, score"),
        ("qrels.tsv", "a\td0\tnan\n", r"qrels\.tsv:2: the score must be a number, got 'nan'"),
        ("qrels.tsv", "a\td0\t1\na\td0\t2\n", r"qrels\.tsv:3: 'a' and 'd0' were judged 1 above, here 2"),
        ("qrels.tsv", "a\td0\t0\na\td1\t-1\n", r"qrels\.tsv: no document is relevant to any query"),
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


def judged(relevance, num_documents):
    """Qrels from one {document: grade} per query."""
    triples = [(query, doc, grade) for query, grades in enumerate(relevance) for doc, grade in grades.items()]
    query_J, document_J, relevance_J = (np.array(column) for column in zip(*triples, strict=True))
    return Qrels(query_J, document_J, relevance_J.astype(float), len(relevance), num_documents)


def by_hand(ranking, grades, cutoff):
    """The reference: the metrics of one query, each a loop over ranks."""
    found, best = 0.0, 0.0
    for rank, document in enumerate(ranking[:cutoff], start=1):
        found += max(0, grades.get(document, 0)) / math.log2(1 + rank)
    for rank, grade in enumerate(sorted((g for g in grades.values() if g > 0), reverse=True)[:cutoff], start=1):
        best += grade / math.log2(1 + rank)
    relevant = {document for document, grade in grades.items() if grade > 0}
    reciprocal, hits, precisions = 0.0, 0, 0.0
    for rank, document in enumerate(ranking[:cutoff], start=1):
        if document in relevant:
            hits += 1
            precisions += hits / rank
            reciprocal = reciprocal or 1 / rank
    return {"ndcg": found / best, "mrr": reciprocal, "recall": hits / len(relevant), "map": precisions / len(relevant)}


def random_case(seed, num_queries=12, num_documents=40, depth=15):
    """Rankings, and graded qrels (also negative and zero) with at least one relevant document per query."""
    generator = np.random.default_rng(seed)
    ranked_QK = np.stack([generator.permutation(num_documents)[:depth] for _ in range(num_queries)])
    relevance = []
    for _ in range(num_queries):
        documents = generator.choice(num_documents, generator.integers(1, 9), replace=False)
        grades = {int(document): int(generator.integers(-1, 4)) for document in documents}
        grades[int(documents[0])] = int(generator.integers(1, 4))
        relevance.append(grades)
    return ranked_QK, relevance


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("cutoff", [1, 3, 10, 15, 30])
def test_metrics_equal_those_of_a_loop_over_queries_and_ranks(seed, cutoff):
    ranked_QK, relevance = random_case(seed)
    metrics = retrieval_metrics(ranked_QK, judged(relevance, 40), (cutoff,))
    each = [by_hand(ranking, grades, cutoff) for ranking, grades in zip(ranked_QK.tolist(), relevance, strict=True)]
    expected = {f"{name}_at_{cutoff}": np.mean([query[name] for query in each]) for name in each[0]}
    assert metrics == pytest.approx(expected, abs=1e-12)
    assert metrics[f"ndcg_at_{cutoff}"] > 0


def test_only_queries_without_a_judgment_are_skipped():
    qrels = Qrels(np.array([0, 2]), np.array([1, 0]), np.array([1.0, 0.0]), 4, 3)
    assert retrieval_metrics(np.array([[1, 0]] * 4), qrels, (2,))["ndcg_at_2"] == 0.5


@pytest.mark.parametrize("seed", range(30))
def test_metrics_and_ties_are_those_of_mteb(seed):
    from mteb._evaluators.retrieval_metrics import calculate_retrieval_scores

    generator = np.random.default_rng(seed)
    num_documents, cutoffs = int(generator.integers(1, 40)), (1, 3, 10)
    # Vectors of few small integers: many scores are equal, and exact in float32.
    query_QD, document_ND = (generator.integers(0, 2, (size, 3)).astype(np.float32) for size in (5, num_documents))
    ids = [f"{'aéß😀'[number % 4]}{number}" for number in generator.permutation(num_documents).tolist()]
    folder = RetrievalFolder(ids, ids, [], [], None)
    grades = generator.integers(-1, 3, (5, num_documents)) * (generator.random((5, num_documents)) < 0.3)
    grades[0] = 0  # judged, and nothing is relevant
    relevance = [dict(enumerate(row.tolist())) for row in grades]
    ranked_QK = search_top_k(query_QD, np.array_split(document_ND, 3), 10, tie_order_N=folder.tie_order_N).index_QK
    ours = retrieval_metrics(ranked_QK, judged(relevance, num_documents), cutoffs)
    qrels = {str(q): {ids[row]: grade for row, grade in judged.items()} for q, judged in enumerate(relevance)}
    results = {
        str(q): dict(zip(ids, scores, strict=True)) for q, scores in enumerate((query_QD @ document_ND.T).tolist())
    }
    theirs = calculate_retrieval_scores(results, qrels, cutoffs)
    for name, values in (("ndcg", theirs.ndcg), ("map", theirs.map), ("recall", theirs.recall), ("mrr", theirs.mrr)):
        for title, value in values.items():
            # mteb rounds to five digits.
            assert ours[f"{name}_at_{title.split('@')[1]}"] == pytest.approx(value, abs=6e-6), (name, title)


def test_empty_qrels_give_no_metrics_and_no_error():
    nothing = np.array([], dtype=np.int64)
    assert retrieval_metrics(np.array([[0, 1]]), Qrels(nothing, nothing, nothing.astype(float), 1, 2)) == {}


def test_rows_of_minus_one_are_not_documents():
    # Row -1 of query 1 must not be read as the last document of query 0.
    qrels = judged([{2: 1}, {0: 1}], 3)
    scores = retrieval_metrics(np.array([[-1, -1], [-1, 0]]), qrels, (2,))
    assert scores["recall_at_2"] == 0.5
    assert scores["mrr_at_2"] == 0.25


def test_spearman_of_hand_numbers():
    assert spearman(np.array([1.0, 2.0, 3.0]), np.array([10.0, 20.0, 90.0])) == pytest.approx(1.0)
    assert spearman(np.array([1.0, 2.0, 3.0]), np.array([3.0, 2.0, 1.0])) == pytest.approx(-1.0)
    assert spearman(np.array([1.0, 2.0]), np.array([5.0, 5.0])) == 0.0
    # Ranks 3.5, 1, 3.5, 2 against 1, 2, 3, 4: covariance -1 over the root of 4.5 x 5.
    assert spearman(np.array([30.0, 10.0, 30.0, 20.0]), np.arange(4.0)) == pytest.approx(-1 / (4.5 * 5) ** 0.5)
