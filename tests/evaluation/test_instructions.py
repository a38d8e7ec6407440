"""Tables of instructions, and mteb's rule for prompts."""

import json
from itertools import chain, combinations

import pytest
from mteb.models.abs_encoder import get_prompt_name
from mteb.types import PromptType

from embeddings.common import InputError, OptionError, TextSettings
from embeddings.evaluation.mteb_library import PUBLISHED, Instructions, task_prompt


def test_an_instruction_is_the_tasks_or_its_types():
    table = Instructions("t", {"SciFact": "claims", "STS": "same?"})
    assert table.of("SciFact", "Retrieval") == table.of("SciFact.v2", "Retrieval") == "claims"
    assert table.of("STS12", "STS") == "same?"
    assert table.of("SciFactHard", "Retrieval") is None


def test_the_published_tables_say_what_their_papers_say():
    assert set(PUBLISHED) == {"nv-embed", "mgh"}
    nv_embed, mgh = map(Instructions.read, PUBLISHED)
    assert nv_embed.of("NQ", "Retrieval") == "Given a question, retrieve passages that answer the question"
    assert mgh.of("NQ", "Retrieval") == "Given a question, retrieve Wikipedia passages that answer the question"
    assert (len(nv_embed.texts), len(mgh.texts)) == (47, 47)
    # Hashes of all texts as they were compared with the papers: a change of one is seen.
    assert (nv_embed.name, mgh.name) == ("nv-embed-0be88c39", "mgh-7668960b")


def test_examples_stand_solved_before_the_instruction_in_the_models_own_template(tmp_path):
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
    for examples, says in (
        ({"NQ": []}, "has examples of 'NQ' and no instruction"),
        ({"STS": {}}, "its examples are no object of lists"),
        ({"STS": [{"query": "a"}]}, "an example of 'STS' lacks a query or a document"),
    ):
        path.write_text(json.dumps({**content, "examples": examples}))
        with pytest.raises(InputError, match=says):
            Instructions.read(str(path))


@pytest.mark.parametrize(
    "content", ["", "[]", '{"SciFact": "a"}', '{"instructions": {}}', '{"instructions": {"SciFact": " "}}', "\xff"]
)
def test_a_file_of_another_kind_is_refused(content, tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(content, encoding="latin-1")
    with pytest.raises(InputError, match=r"mine\.json: .*; write \{\"instructions\""):
        Instructions.read(str(path))


def test_a_name_that_is_no_table_is_refused():
    with pytest.raises(OptionError, match=r"must be a table \(nv-embed, mgh\) or a JSON file, got 'other'"):
        Instructions.read("other")


NAMES = ("mine", "mine-query", "mine-document", "STS", "STS-query", "STS-document", "query", "document", "other")


class Task:
    """What mteb's rule asks of a task."""

    name, type = "mine", "STS"


@pytest.mark.parametrize("role", [None, "query", "document"])
def test_every_set_of_prompts_is_chosen_from_as_mteb_chooses(role):
    sets = [*chain.from_iterable(combinations(NAMES, size) for size in range(len(NAMES) + 1))]
    assert len(sets) == 2 ** len(NAMES)
    found = set()
    for names in sets:
        prompts = {name: f"{name}: " for name in names}
        chosen = get_prompt_name(prompts, Task, None if role is None else PromptType(role))
        assert task_prompt(prompts, "mine", "STS", role) == prompts.get(chosen, "")
        found.add(chosen)
    assert len(found) == (3 if role is None else 6)
