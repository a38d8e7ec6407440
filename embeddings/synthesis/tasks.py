"""Stage one: the tasks of a category, brainstormed by the model or read from another job's list."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from embeddings.common.errors import InputError
from embeddings.common.log import logger
from embeddings.data.readers import open_reader
from embeddings.synthesis.answers import RejectedAnswer, parse_answer
from embeddings.synthesis.asker import Asker
from embeddings.synthesis.categories import Category
from embeddings.synthesis.client import Request, make_request
from embeddings.synthesis.journal import Journal
from embeddings.synthesis.prompts import Templates
from embeddings.synthesis.rounds import Rejection
from embeddings.synthesis.validate import normalised, read_tasks

TASKS_FILE = "tasks.jsonl"
# A model that repeats itself brings ever fewer new tasks: after so many rounds the list is what it is.
MAX_ROUNDS = 8


@dataclass
class TaskList:
    """The tasks of a category and what became of the answers.

    Attributes:
        tasks: The tasks, all different.
        rejections: Answers without a task.
        num_copies: Tasks that had been there before.
    """

    tasks: list[str] = field(default_factory=list)
    rejections: list[Rejection] = field(default_factory=list)
    num_copies: int = 0


def brainstorm(
    category: Category, num_tasks: int, templates: Templates, asker: Asker, journal: Journal, seed: int
) -> TaskList:
    """Ask for lists of tasks until there are enough different ones.

    Each round asks for as many lists as the missing tasks would fill, and takes them in order; what a round asks for
    follows from the answers of the rounds before.

    Args:
        category: Which kind of task.
        num_tasks: How many are wanted; there may be fewer.
        templates: The prompts.
        asker: Asks.
        journal: Where its answers are.
        seed: Seed of the prompts and requests.

    Raises:
        InputError: If no answer holds a task.
    """
    found, known, call = TaskList(), set[str](), 0
    for _ in range(MAX_ROUNDS):
        missing = num_tasks - len(found.tasks)
        if missing <= 0 or asker.exhausted:
            break
        calls = range(call, call + -(-missing // templates.method.tasks_per_list))
        call = calls.stop
        requests = [_request(category, templates, seed, number) for number in calls]
        asker.ask_all(requests, len(requests), f"tasks, {category.name}")
        for number, request in zip(calls, requests, strict=True):
            answer = journal.get(request.key)
            if answer is None:
                continue
            try:
                tasks = read_tasks(parse_answer(answer))
            except RejectedAnswer as rejected:
                found.rejections.append(
                    Rejection(f"tasks-{category.name}-{number}", 0, rejected.reason, rejected.detail)
                )
                continue
            for task in tasks:
                if normalised(task) in known:
                    found.num_copies += 1
                else:
                    known.add(normalised(task))
                    found.tasks.append(task)
    del found.tasks[num_tasks:]
    if not found.tasks and not asker.exhausted:
        reasons = ", ".join(sorted({rejection.reason for rejection in found.rejections}))
        raise InputError(
            asker.client.sampling.model,
            f"gave no task of {category.name} in {call} answers ({reasons})",
            "try another model, or more max_answer_tokens",
        )
    if len(found.tasks) < num_tasks:
        logger.warning("%s: %d different tasks of %d asked for", category.name, len(found.tasks), num_tasks)
    return found


def _request(category: Category, templates: Templates, seed: int, call: int) -> Request:
    prompt = templates.brainstorm(category, seed, call)
    return make_request(f"tasks/{category.name}/{call}", prompt, seed, wants_object=False)


def read_task_file(path: Path, categories: Sequence[Category]) -> dict[str, list[str]]:
    """The tasks that another job wrote (`tasks.jsonl`), by category; those of other categories are left out.

    Raises:
        InputError: If the file cannot be read, a row is no task, or one of the categories has none.
    """
    tasks: dict[str, dict[str, str]] = {category.name: {} for category in categories}
    for where, fields in _rows(path):
        name, task = fields.get("category"), fields.get("task")
        if not isinstance(name, str) or not isinstance(task, str) or not task.strip() or not task.isprintable():
            raise InputError(where, "is no task", 'write {"category": "short_long", "task": "…"}')
        if name in tasks:
            tasks[name].setdefault(normalised(task), task.strip())
    for name, found in tasks.items():
        if not found:
            raise InputError(str(path), f"holds no task of {name}", "add some, or leave the category out by shares")
    return {name: list(found.values()) for name, found in tasks.items()}


def task_lines(tasks: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """The lines of a task file."""
    for name, found in tasks.items():
        for task in found:
            yield json.dumps({"category": name, "task": task}, ensure_ascii=False) + "\n"


def _rows(path: Path) -> Iterator[tuple[str, Mapping[str, object]]]:
    if not path.is_file():
        raise InputError(str(path), "no such file", "give the tasks.jsonl of another job")
    yield from open_reader(path, ("category", "task"), ("category", "task"))
