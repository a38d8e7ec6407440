"""Lists of tasks are asked for until there are enough different ones."""

import json

import pytest

from embeddings.common import InputError
from embeddings.synthesis.client import Sampling
from embeddings.synthesis.generate import MAX_ROUNDS, brainstorm, read_task_file, task_lines
from embeddings.synthesis.prompts import MGH, NV_EMBED, Templates
from embeddings.synthesis.runner import Spending
from tests.helpers.chat_server import Reply
from tests.synthesis.models import FakeClient, make_asker

SHORT_LONG = MGH.category("short_long")


def run(folder, client, num_tasks, spending=None):
    with make_asker(folder, client, spending=spending) as (asker, journal):
        return brainstorm(SHORT_LONG, num_tasks, Templates(MGH), asker, journal, 0)


def lists_of(size, repeated=0):
    """A model whose lists have so many tasks, some of them in every list."""

    def behaviour(prompt, seed, count):
        common = [f"common task {n}" for n in range(repeated)]
        return Reply(json.dumps([*common, *(f"task {seed} {n}" for n in range(size - repeated))]))

    return FakeClient(behaviour, shuffled=True)


def test_one_list_is_asked_for_each_twenty_tasks(tmp_path):
    client = lists_of(20)
    found = run(tmp_path, client, 45)
    assert len(client.asked) == 3
    assert len(set(found.tasks)) == len(found.tasks) == 45
    assert not any(request.wants_object for request in client.asked)


def test_copies_are_dropped_and_more_is_asked_for(tmp_path):
    client = lists_of(20, repeated=15)
    found = run(tmp_path, client, 45)
    assert len(set(found.tasks)) == 45
    assert len(client.asked) > 3
    assert found.num_copies >= 30


def test_tasks_come_in_the_order_of_the_lists_and_again_without_asking(tmp_path):
    first = run(tmp_path, lists_of(20, repeated=2), 50)
    client = lists_of(20)
    assert run(tmp_path, client, 50) == first
    assert client.asked == []


def test_a_model_that_repeats_itself_gives_fewer_with_a_warning(tmp_path, caplog):
    client = lists_of(6, repeated=6)
    assert len(run(tmp_path, client, 40).tasks) == 6
    assert len(client.asked) == MAX_ROUNDS * 2
    assert "6 different tasks of 40" in caplog.text


def test_lists_that_are_none_are_counted_and_asked_for_anew(tmp_path):
    def behaviour(prompt, seed, count):
        answers.append(prompt)
        return Reply("no list" if len(answers) <= 2 else json.dumps([f"task {seed}"]))

    answers = []
    found = run(tmp_path, FakeClient(behaviour), 1)
    assert [rejection.reason for rejection in found.rejections] == ["not_json", "not_json"]
    assert found.rejections[1].id == "tasks-short_long-1"
    assert len(found.tasks) == 1


def test_a_model_without_any_task_is_the_users_to_mend(tmp_path):
    with pytest.raises(InputError, match=r"model: gave no task of short_long in 8 answers \(empty_answer\)"):
        run(tmp_path, FakeClient(lambda prompt, seed, count: Reply("")), 5)


def test_a_budget_ends_the_list(tmp_path):
    client = lists_of(20)
    client.sampling = Sampling("m", max_answer_tokens=200)
    assert run(tmp_path, client, 400, Spending(token_budget=2000)).tasks
    assert 0 < len(client.asked) < 20


def test_a_task_file_comes_back_by_category(tmp_path):
    tasks = {category.name: [f"{category.name} {n} é" for n in range(2)] for category in MGH.categories}
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(task_lines(tasks)) + '{"category": "sts", "task": "STS 1 é!"}\n')
    assert read_task_file(path, MGH.categories) == tasks
    assert list(read_task_file(path, NV_EMBED.categories)) == ["short_long", "long_short", "short_short"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "no such file"),
        ("", "is empty"),
        ('{"category": "short_long"}\n', "tasks.jsonl:1: is no task"),
        ('{"category": "short_long", "task": "a\\u0000"}\n', "tasks.jsonl:1: is no task"),
        ('{"category": "short_long", "task": " "}\n', "tasks.jsonl:1: is no task"),
        ('{"category": "short_long", "task": "a"}\n', "holds no task of long_short"),
        ("[]\n", "tasks.jsonl:1"),
    ],
)
def test_a_file_that_is_no_task_file_is_refused(tmp_path, content, says):
    path = tmp_path / "tasks.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(InputError, match=says):
        read_task_file(path, MGH.categories)
