import pytest

from embeddings.common import InputError
from embeddings.evaluation.mteb_library import load_mteb, quiet
from tests.evaluation.data import (
    write_labelled,
    write_pair_classification,
    write_reranking,
    write_retrieval,
    write_similarity,
    write_summarisation,
)

load_mteb()

from embeddings.evaluation.mteb_tasks import folder_tasks  # noqa: E402


def loaded(folder):
    (task,) = folder_tasks(folder)
    assert not task.data_loaded
    with quiet():
        task.load_data()
    return task


def test_retrieval_keeps_graded_and_irrelevant_documents_and_drops_queries_without_one(tmp_path):
    split = loaded(write_retrieval(tmp_path / "r")).dataset["default"]["test"]
    assert split["queries"]["id"] == ["a", "b"]
    assert split["corpus"]["text"][1] == "the lazy dog"
    assert split["relevant_docs"] == {"a": {"d0": 2, "d5": 1, "d1": 0}, "b": {"d4": 1}}


def test_the_other_kinds_hold_their_rows(tmp_path):
    pairs = loaded(write_similarity(tmp_path / "s"))
    assert (pairs.metadata.type, pairs.dataset["test"]["score"]) == ("STS", [5.0, 4.0, 2.0, 0.0])
    topics = loaded(write_labelled(tmp_path / "c", with_train=True))
    assert {split: len(rows) for split, rows in topics.dataset.items()} == {"train": 6, "test": 6}
    assert {split: sorted(rows["label"]) for split, rows in topics.dataset.items()} == {
        "train": [0, 0, 0, 1, 1, 1],
        "test": [0, 0, 0, 1, 1, 1],
    }
    assert topics.dataset["test"]["label"][0] == topics.dataset["train"]["label"][0] == 1  # "animal" is behind "1"
    groups = loaded(write_labelled(tmp_path / "k", with_train=False))
    assert (groups.metadata.type, len(groups.dataset["test"]["sentences"])) == ("Clustering", 6)
    assert groups.max_fraction_of_documents_to_embed is None


def test_pairs_candidates_and_summaries_hold_their_rows(tmp_path):
    pairs = loaded(write_pair_classification(tmp_path / "p"))
    assert (pairs.metadata.type, pairs.metadata.main_score) == ("PairClassification", "max_ap")
    assert pairs.dataset["test"]["labels"] == [1, 1, 0, 0]
    reranked = loaded(write_reranking(tmp_path / "q"))
    assert (reranked.metadata.type, reranked.metadata.main_score) == ("Reranking", "map_at_1000")
    split = reranked.dataset["default"]["test"]
    assert split["top_ranked"] == {"0": ["0", "1", "2", "3"], "1": ["3", "4", "0"]}
    assert split["relevant_docs"] == {"0": {"0": 1, "1": 1}, "1": {"3": 1}}
    assert split["corpus"]["text"][3] == "one length"
    summaries = loaded(write_summarisation(tmp_path / "s"))
    assert summaries.metadata.type == "Summarization"
    assert summaries.dataset["test"]["relevance"] == [[3.0, 2.0, 1.0], [1.5, 4.0], [2.0, 2.0]]


def test_two_tested_labels_are_0_and_1_whatever_training_has_beside(tmp_path):
    folder = write_labelled(tmp_path / "c", with_train=True)
    with open(folder / "train.jsonl", "a") as file:
        file.write('{"text": "a", "label": "a"}\n{"text": "b", "label": 0}\n')
    parts = loaded(folder).dataset
    assert set(parts["test"]["label"]) == {0, 1}
    assert set(parts["train"]["label"]) == {0, 1, 2, 3}


def test_a_task_knows_its_data_by_a_hash(tmp_path):
    folder = write_retrieval(tmp_path / "r")
    ((before,), (same,)) = folder_tasks(folder), folder_tasks(folder)
    assert before.metadata.revision == same.metadata.revision
    (folder / "qrels.tsv").write_text("a\td0\t1\n")
    assert folder_tasks(folder)[0].metadata.revision != before.metadata.revision
    assert before.metadata.name == "r"


def test_a_grade_that_is_no_whole_number_is_refused(tmp_path):
    folder = write_retrieval(tmp_path / "r")
    (folder / "qrels.tsv").write_text("a\td0\t0.5\n")
    with pytest.raises(InputError, match=r"the grade 0\.5 is no whole number"):
        loaded(folder)


def test_qrels_that_name_no_document_are_refused(tmp_path):
    folder = write_retrieval(tmp_path / "r")
    (folder / "qrels.tsv").write_text("a\tnowhere\t1\n")
    with pytest.raises(InputError, match=r"qrels\.tsv:1: no document has the id 'nowhere'"):
        folder_tasks(folder)
