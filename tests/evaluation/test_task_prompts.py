"""The rule for prompts is mteb's."""

from itertools import chain, combinations
from typing import get_args

import pytest

from embeddings.evaluation.mteb_library import load_mteb, quiet
from embeddings.evaluation.task_prompts import TASK_TYPES, task_prompt

load_mteb()
with quiet():
    from mteb.abstasks.task_metadata import TaskType
    from mteb.models.abs_encoder import get_prompt_name
    from mteb.types import PromptType

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


def test_every_kind_of_folder_has_one_of_mtebs_types():
    assert {*TASK_TYPES.values()} <= {*get_args(TaskType)}
    assert len(TASK_TYPES) == 7


def test_a_folder_without_a_name_takes_no_prompt_without_one():
    assert task_prompt({"": "x "}, "", "STS", None) == ""
