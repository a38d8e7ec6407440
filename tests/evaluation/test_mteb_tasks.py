"""mteb is silent; names of tasks, prompts of tasks, and evaluation folders as tasks."""

import json
from itertools import chain, combinations

import pytest
from mteb.models.abs_encoder import get_prompt_name
from mteb.types import PromptType

from embeddings.common import InputError, OptionError, TextSettings
from embeddings.evaluation.mteb_library import PUBLISHED, Instructions, quiet, task_prompt
from embeddings.evaluation.mteb_tasks import folder_tasks
from embeddings.evaluation.task_runs import GROUPS, MGH_26, find_tasks
from tests.evaluation.data import write_labelled, write_retrieval, write_similarity


def loaded(folder):
    (task,) = folder_tasks(folder)
    assert not task.data_loaded
    with quiet():
        task.load_data()
    return task


def test_retrieval_keeps_graded_and_irrelevant_documents_and_drops_queries_without_a_judgment(tmp_path):
    split = loaded(write_retrieval(tmp_path / "r")).dataset["default"]["test"]
    assert split["queries"]["id"] == ["a", "b", "d"]
    assert split["corpus"]["text"][1] == "the lazy dog"
    assert split["relevant_docs"] == {"a": {"d0": 2, "d5": 1, "d1": 0}, "b": {"d4": 1}, "d": {"d1": 0}}


def test_two_labels_of_the_test_split_are_0_and_1_even_if_training_has_more(tmp_path):
    folder = write_labelled(tmp_path / "c", with_train=True)
    with open(folder / "train.jsonl", "a") as file:
        file.write('{"text": "a", "label": "a"}\n{"text": "b", "label": 0}\n')
    parts = loaded(folder).dataset
    assert set(parts["test"]["label"]) == {0, 1}
    assert set(parts["train"]["label"]) == {0, 1, 2, 3}


def test_the_revision_of_a_task_is_a_hash_of_its_data(tmp_path):
    folder = write_retrieval(tmp_path / "r")
    ((before,), (same,)) = folder_tasks(folder), folder_tasks(folder)
    assert before.metadata.revision == same.metadata.revision
    (folder / "qrels.tsv").write_text("a\td0\t1\n")
    assert folder_tasks(folder)[0].metadata.revision != before.metadata.revision
    assert before.metadata.name == "r"


def test_a_grade_that_is_not_an_integer_is_refused(tmp_path):
    folder = write_retrieval(tmp_path / "r")
    (folder / "qrels.tsv").write_text("a\td0\t0.5\n")
    with pytest.raises(InputError, match=r"the grade 0\.5 is not an integer"):
        loaded(folder)


def names_of(tasks):
    return [task.metadata.name for task in tasks]


def test_the_groups_have_their_known_tasks():
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


def test_the_published_instructions_cover_the_english_suite():
    lacking = {}
    for table in ("nv-embed", "mgh"):
        read = Instructions.read(table)
        tasks = find_tasks("mteb-english-56")
        lacking[table] = [
            t.metadata.name for t in tasks if read.prompt(t.metadata.name, t.metadata.type, TextSettings()) is None
        ]
        used = {name for name in read.texts if any(name in (t.metadata.name, t.metadata.type) for t in tasks)}
        assert used == set(read.texts)
    assert lacking == {"nv-embed": [], "mgh": []}


def test_each_task_is_found_once_in_order(tmp_path):
    write_similarity(tmp_path / "sets" / "b")
    write_retrieval(tmp_path / "sets" / "a" / "deep")
    names = f"SciFact,{tmp_path}/sets , STSBenchmark,SciFact"
    assert names_of(find_tasks(names)) == ["SciFact", "sets.a.deep", "sets.b", "STSBenchmark"]
    assert names_of(find_tasks("BEIR, MTEB(eng, v1)"))[:15] == names_of(find_tasks("beir"))
    assert len(find_tasks("BEIR, MTEB(eng, v1)")) == 56


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("SciFakt", "tasks must name a task, a group or a folder, got 'SciFakt'; did you mean SciFact?"),
        ("xyzxyz", "tasks must name a task, a group or a folder, got 'xyzxyz'; a group is mteb-english-56, mgh-26"),
        ("", "tasks must name a task, a group or a folder, got ''"),
        ([], r"tasks must name a task, got \[\]"),
        ("Birdsnap", "must be tasks with texts only, got 'Birdsnap with Birdsnap'"),
    ],
)
def test_an_unknown_name_is_refused(names, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OptionError, match=message):
        find_tasks(names)


def test_two_folders_of_one_name_are_refused(tmp_path):
    one, two = write_similarity(tmp_path / "a" / "pairs"), write_retrieval(tmp_path / "b" / "pairs")
    assert names_of(find_tasks([str(one), str(one)])) == ["pairs"]
    with pytest.raises(OptionError, match=r"has a second task pairs, got .*; rename its folder"):
        find_tasks([str(one), str(two)])


def test_a_task_with_two_sets_of_languages_is_refused():
    assert len(find_tasks("STS17, STS17")) == 1
    message = r"has STS17 in other languages or splits .*, got 'STS17'; run them one after"
    with pytest.raises(OptionError, match=message):
        find_tasks("mgh-26, STS17")


def test_the_published_tables_equal_those_of_the_papers():
    assert set(PUBLISHED) == {"nv-embed", "mgh"}
    nv_embed, mgh = map(Instructions.read, PUBLISHED)
    assert nv_embed.texts["NQ"] == "Given a question, retrieve passages that answer the question"
    assert mgh.texts["NQ"] == "Given a question, retrieve Wikipedia passages that answer the question"
    assert (len(nv_embed.texts), len(mgh.texts)) == (47, 47)
    # Hashes of the texts that were compared with the papers.
    assert (nv_embed.name, mgh.name) == ("nv-embed-0be88c39", "mgh-7668960b")


def test_examples_come_before_the_instruction_in_the_template_of_the_model(tmp_path):
    path = tmp_path / "mine.json"
    content = {"instructions": {"SciFact": "claims", "STS": "same?"}}
    path.write_text(json.dumps(content))
    plain = Instructions.read(str(path))
    content["examples"] = {"SciFact": [{"query": "is it?", "document": "It is."}]}
    path.write_text(json.dumps(content))
    solved = Instructions.read(str(path))
    assert plain.name != solved.name
    text = TextSettings(instruction_template="[INST] {instruction}: ")
    assert plain.prompt("SciFact", "Retrieval", text) == "[INST] claims: "
    expected = "[INST] claims: is it?\nResponse: It is.\n\n[INST] claims: "
    assert solved.prompt("SciFact.v2", "Retrieval", text) == expected
    assert solved.prompt("STS12", "STS", text) == "[INST] same?: "
    assert solved.prompt("Other", "Retrieval", text) is None
    for examples, message in (
        ({"NQ": []}, "has examples but no instruction for 'NQ'"),
        ({"STS": {}}, "`examples` is not an object of lists"),
        ({"STS": [{"query": "a"}]}, "an example of 'STS' has no query or no document"),
    ):
        path.write_text(json.dumps({**content, "examples": examples}))
        with pytest.raises(InputError, match=message):
            Instructions.read(str(path))


@pytest.mark.parametrize(
    "content", ["", "[]", '{"SciFact": "a"}', '{"instructions": {}}', '{"instructions": {"SciFact": " "}}', "\xff"]
)
def test_an_invalid_file_of_instructions_is_refused(content, tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(content, encoding="latin-1")
    with pytest.raises(InputError, match=r"mine\.json: .*; write \{\"instructions\""):
        Instructions.read(str(path))
    with pytest.raises(OptionError, match=r"must be a table \(nv-embed, mgh\) or a JSON file, got 'other'"):
        Instructions.read("other")


NAMES = ("mine", "mine-query", "mine-document", "STS", "STS-query", "STS-document", "query", "document", "other")


class Task:
    """The attributes of a task that the rule of mteb uses."""

    name, type = "mine", "STS"


@pytest.mark.parametrize("role", [None, "query", "document"])
def test_prompts_are_chosen_as_mteb_chooses_them(role):
    sets = [*chain.from_iterable(combinations(NAMES, size) for size in range(len(NAMES) + 1))]
    assert len(sets) == 2 ** len(NAMES)
    found = set()
    for names in sets:
        prompts = {name: f"{name}: " for name in names}
        chosen = get_prompt_name(prompts, Task, None if role is None else PromptType(role))
        assert task_prompt(TextSettings(prompts=prompts), "mine", "STS", role) == prompts.get(chosen, "")
        found.add(chosen)
    assert len(found) == (3 if role is None else 6)
