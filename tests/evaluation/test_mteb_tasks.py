"""mteb loaded quietly, the names of its tasks, and evaluation folders as its tasks."""

import logging
import warnings

import datasets
import pytest
import tqdm
import tqdm.auto

from embeddings.common import InputError, OptionError
from embeddings.evaluation.mteb_library import Instructions, quiet
from embeddings.evaluation.mteb_tasks import folder_tasks
from embeddings.evaluation.task_runs import GROUPS, MGH_26, find_tasks
from tests.evaluation.data import write_labelled, write_retrieval, write_similarity


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
    with pytest.raises(InputError, match=r"the grade 0\.5 is not an integer"):
        loaded(folder)


def test_libraries_are_quiet_inside_and_as_they_were_after(capfd):
    def talk():
        logging.getLogger("mteb.somewhere").warning("a line")
        for _ in tqdm.auto.tqdm(range(2), desc="a bar"):
            pass
        datasets.Dataset.from_dict({"a": [1]}).map(lambda row: row)

    with quiet():
        warnings.warn("a warning", stacklevel=1)
        talk()
        assert capfd.readouterr() == ("", "")
        for _ in tqdm.tqdm(range(2), desc="our bar"):
            pass
        assert "our bar" in capfd.readouterr().err
    with quiet(keep_bars=True):
        talk()
        said = capfd.readouterr().err
        assert "a bar" in said
        assert "Map" in said
        assert "a line" not in said
    talk()
    said = capfd.readouterr().err
    assert "a bar" in said
    assert "Map" in said
    with pytest.raises(UserWarning, match="a warning"):
        warnings.warn("a warning", stacklevel=1)


def names_of(tasks):
    return [task.metadata.name for task in tasks]


def test_the_groups_hold_what_they_are_known_to_hold():
    english, beir, mgh, miracl = map(find_tasks, ("mteb-english-56", "beir", "mgh-26", "miracl"))
    assert set(GROUPS) == {"mteb-english-56", "beir", "mgh-26", "miracl", "air-bench"}
    assert (len(english), len(beir), len(mgh), len(miracl)) == (56, 15, 26, 1)
    kinds = [task.metadata.type for task in english]
    expected = {"Classification": 12, "Clustering": 11, "PairClassification": 3, "Reranking": 4, "Retrieval": 15}
    assert {kind: kinds.count(kind) for kind in set(kinds)} == {**expected, "STS": 10, "Summarization": 1}
    assert set(names_of(mgh)) == set(MGH_26) < set(names_of(english))
    assert {task.metadata.name: task.hf_subsets for task in mgh}["STS17"] == ["en-en"]
    assert {task.metadata.name: list(task.eval_splits) for task in beir}["MSMARCO"] == ["dev"]
    assert len(miracl[0].hf_subsets) == 18


def test_tasks_are_as_good_as_new():
    """mteb keeps the tasks of a benchmark, and a run draws from their generators."""
    first, second = find_tasks("mgh-26")[0], find_tasks("mgh-26")[0]
    assert first is not second
    assert first.rng_state is not second.rng_state


def test_the_published_instructions_cover_the_english_suite():
    lacking = {}
    for table in ("nv-embed", "mgh"):
        read = Instructions.read(table)
        tasks = find_tasks("mteb-english-56")
        lacking[table] = [t.metadata.name for t in tasks if read.of(t.metadata.name, t.metadata.type) is None]
        used = {name for name in read.texts if any(name in (t.metadata.name, t.metadata.type) for t in tasks)}
        assert used == set(read.texts)
    assert lacking == {"nv-embed": [], "mgh": []}


def test_names_are_taken_once_each_in_their_order(tmp_path):
    write_similarity(tmp_path / "sets" / "b")
    write_retrieval(tmp_path / "sets" / "a" / "deep")
    names = f"SciFact,{tmp_path}/sets , STSBenchmark,SciFact"
    assert names_of(find_tasks(names)) == ["SciFact", "sets.a.deep", "sets.b", "STSBenchmark"]
    assert names_of(find_tasks("BEIR, MTEB(eng, v1)"))[:15] == names_of(find_tasks("beir"))
    assert len(find_tasks("BEIR, MTEB(eng, v1)")) == 56


@pytest.mark.parametrize(
    ("names", "says"),
    [
        ("SciFakt", "tasks must name a task, a group or a folder, got 'SciFakt'; did you mean SciFact?"),
        ("xyzxyz", "tasks must name a task, a group or a folder, got 'xyzxyz'; a group is mteb-english-56, mgh-26"),
        ("", "tasks must name a task, a group or a folder, got ''"),
        ([], r"tasks must name a task, got \[\]"),
        ("SciFact,", "got ''"),
        ("Birdsnap", "must be tasks of texts only, got 'Birdsnap with Birdsnap'"),
    ],
)
def test_an_unknown_name_is_refused(names, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OptionError, match=says):
        find_tasks(names)


def test_two_folders_of_one_name_are_refused(tmp_path):
    one, two = write_similarity(tmp_path / "a" / "pairs"), write_retrieval(tmp_path / "b" / "pairs")
    assert names_of(find_tasks([str(one), str(one)])) == ["pairs"]
    with pytest.raises(OptionError, match=r"gives a second task pairs, got .*; rename its folder"):
        find_tasks([str(one), str(two)])


def test_a_task_in_two_extents_is_refused():
    assert len(find_tasks("STS17, STS17")) == 1
    says = r"gives STS17 in other languages or splits .*, got 'STS17'; run them one after"
    with pytest.raises(OptionError, match=says):
        find_tasks("mgh-26, STS17")
