"""Synthesis in two stages: tasks, then an example for each draw of a task and its placeholders."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from embeddings.common.errors import OptionError
from embeddings.common.fileio import file_sha256
from embeddings.data.samplers.apportion import Apportionment
from embeddings.synthesis.asker import Spending, Traffic
from embeddings.synthesis.categories import Category, Method
from embeddings.synthesis.client import ChatClient, Sampling
from embeddings.synthesis.job import Job, SynthesisReport, finished_report, open_job
from embeddings.synthesis.prompts import Templates, reference_tasks
from embeddings.synthesis.rounds import Item, Outcome, run_rounds
from embeddings.synthesis.tasks import TASKS_FILE, brainstorm, read_task_file, task_lines
from embeddings.synthesis.validate import read_example

# Raised whenever the same answers would give other records or prompts, so that an older folder is not gone on with.
RECIPE = 1


@dataclass(frozen=True)
class Plan:
    """How many examples of which category, in an order in which every stretch has the categories' shares.

    Args:
        method: What a paper generates.
        num_examples: Examples of all categories.
        num_tasks: Tasks of all categories; None for half as many as examples, as NV-Embed has.
        shares: Share of each category, relative to the others, in place of the method's; a category left out has none.
        seed: Seed of prompts and requests.

    Raises:
        OptionError: If a number is below 1, or a share is impossible.
    """

    method: Method
    num_examples: int
    num_tasks: int | None = None
    shares: Mapping[str, float] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_examples < 1:
            raise OptionError("num_examples", self.num_examples, "must be >= 1", "say how many are wanted")
        if self.num_tasks is not None and self.num_tasks < 1:
            raise OptionError("num_tasks", self.num_tasks, "must be >= 1", "leave it out for half of num_examples")
        names = {category.name for category in self.method.categories}
        for name, share in (self.shares or {}).items():
            if name not in names:
                raise OptionError(
                    "shares", name, f"must name categories of {self.method.name}", ", ".join(sorted(names))
                )
            if not 0 <= share < float("inf"):
                raise OptionError(f"shares.{name}", share, "must be >= 0", "0 leaves the category out")
        if not any(self.weights.values()):
            raise OptionError("shares", dict(self.shares or {}), "must leave a category", "give one a share above 0")

    @property
    def weights(self) -> dict[str, float]:
        """The share of each category that has one, in the method's order."""
        shares = self.method.shares if self.shares is None else self.shares
        return {
            category.name: shares[category.name]
            for category in self.method.categories
            if shares.get(category.name, 0) > 0
        }

    @property
    def categories(self) -> list[Category]:
        """The categories that have a share."""
        return [self.method.category(name) for name in self.weights]

    @cached_property
    def _apportionment(self) -> Apportionment:
        return Apportionment(list(self.weights.values()))

    def tasks_wanted(self) -> dict[str, int]:
        """Tasks of each category, one at least."""
        wanted = self.num_tasks if self.num_tasks is not None else max(1, self.num_examples // 2)
        counts = self._apportionment.counts(wanted)
        return {name: max(1, count) for name, count in zip(self.weights, counts, strict=True)}

    def order(self) -> Iterator[tuple[Category, int]]:
        """The category of each example, and its number within the category."""
        before, categories = [0] * len(self.weights), self.categories
        for draw in range(self.num_examples):
            counts = self._apportionment.counts(draw + 1)
            place = next(place for place, (old, new) in enumerate(zip(before, counts, strict=True)) if new > old)
            yield categories[place], before[place]
            before = counts


def synthesize(
    output: Path,
    plan: Plan,
    templates: Templates,
    client: ChatClient,
    *,
    task_file: Path | None = None,
    max_attempts: int = 3,
    traffic: Traffic | None = None,
    spending: Spending | None = None,
) -> SynthesisReport:
    """Write synthetic training records, a file for each category, in two stages.

    Stage one asks for lists of tasks until each category has enough different ones. Stage two asks for one example for
    each item of the plan: item `i` of a category takes task `i` modulo their number, and draws each placeholder by
    (seed, category, i). An answer is repaired where its meaning is plain; one that is not JSON, lacks a field, repeats
    a text, gives its answer away, has other levels than asked for, or whose query an earlier record has, is rejected,
    and the item asked again. Nothing goes to the data that training would not read as a record without a contradiction.

    The folder gets `CATEGORY.jsonl`, `tasks.jsonl`, `rejected.jsonl` (whose answers, and why), `journal.jsonl` (every
    answer) and `manifest.json` (what decides the records, and the report).

    Determinism: the files but the journal follow from plan, templates, sampling and the answers, not from their order,
    from concurrency or from kills, unless the token budget ends the job.
    Guarantees: an answered request is never made again, in this run or a later one; one under way at a kill is.

    Args:
        output: The folder: new, empty, or of an earlier run of the same job, which is gone on with. More examples may
            be asked for than then, as long as `num_tasks` is the same.
        plan: What to generate.
        templates: The prompts.
        client: The endpoint.
        task_file: Tasks that another job wrote, in place of stage one.
        max_attempts: Most answers for one example.
        traffic: How the endpoint is used.
        spending: What it may cost; the budget ends a job with the records that are there.

    Raises:
        OptionError: If an option is impossible or cannot take effect.
        InputError: If the folder is another job's, or the endpoint knows not the address, the key or the model.
        EndpointError: If it went silent for longer than the retries last.

    Source: Pan et al. 2025 (MGH), sections 2.1 and 3.1, Appendix A; Lee et al. 2024 (NV-Embed), arXiv:2405.17428,
        section 4.3, Tables 15 and 16. Differs: the prompts are ours, to the papers' specification; brainstorming
        prompts show two reference tasks drawn by the seed. MGH's second model is a second job, with the first one's
        folder as the seeds of its `Templates`.
    """
    if max_attempts < 1:
        raise OptionError("max_attempts", max_attempts, "must be >= 1", "3 is the default")
    if task_file is not None and plan.num_tasks is not None:
        raise OptionError("num_tasks", plan.num_tasks, "has no effect beside tasks", "leave one of the two out")
    given = None if task_file is None else read_task_file(task_file, plan.categories)
    identity = _identity(plan, templates, client.sampling, task_file)
    size = {"num_examples": plan.num_examples, "max_attempts": max_attempts}
    if (report := finished_report(output, {**identity, **size})) is not None:
        return report
    with open_job(output, identity, size, client, traffic or Traffic(), spending or Spending()) as job:
        tasks = given or _brainstorm(job, plan, templates)
        items = partial(plan_items, plan, templates, tasks)
        outcome = _asked(job, plan, items, max_attempts)
        return job.finish(items, plan.num_examples, plan.seed, outcome, {TASKS_FILE: task_lines(tasks)})


def _identity(plan: Plan, templates: Templates, sampling: Sampling, task_file: Path | None) -> dict[str, Any]:
    """What a job is known by, but for its size."""
    return {
        "kind": "synthesis",
        "recipe": RECIPE,
        "method": plan.method.name,
        "seed": plan.seed,
        "shares": plan.weights,
        "num_tasks": None if task_file is not None else plan.tasks_wanted(),
        "task_file_sha256": None if task_file is None else file_sha256(task_file),
        "templates_sha256": templates.sha256,
        **sampling_fields(sampling),
    }


def _asked(job: Job, plan: Plan, items: Callable[[], Iterable[Item]], max_attempts: int) -> Outcome:
    """What became of the plan's items; nothing is asked where the budget is spent on tasks."""
    if job.asker.exhausted:
        return Outcome(num_unasked=plan.num_examples)
    return run_rounds(items, plan.num_examples, job.asker, job.journal, seed=plan.seed, max_attempts=max_attempts)


def sampling_fields(sampling: Sampling) -> dict[str, Any]:
    """What of the sampling decides the answers, for manifests."""
    return {
        "model": sampling.model,
        "temperature": sampling.temperature,
        "max_answer_tokens": sampling.max_answer_tokens,
        "json_mode": sampling.json_mode,
        "extra_body": dict(sampling.extra_body),
    }


def plan_items(plan: Plan, templates: Templates, tasks: Mapping[str, Sequence[str]]) -> Iterator[Item]:
    """The items of a plan, given the tasks of each category."""
    for category, index in plan.order():
        task = tasks[category.name][index % len(tasks[category.name])]
        prompt, name = templates.example(category, task, plan.seed, index), f"{category.name}-{index}"
        read = partial(read_example, category=category, task=task, prompt=prompt, id=name)
        yield Item(name, f"{category.name}.jsonl", prompt, read)


def dry_run(plan: Plan, templates: Templates, task_file: Path | None = None) -> str:
    """The first prompts of both stages for each category, and how many of each there would be at least, as text.

    Before stage one has run there is no task: the example's prompt shows a reference task in its place.
    """
    tasks = None if task_file is None else read_task_file(task_file, plan.categories)
    counts = {category.name: 0 for category in plan.categories}
    for category, _ in plan.order():
        counts[category.name] += 1
    parts = []
    for category in plan.categories:
        num_tasks = plan.tasks_wanted()[category.name]
        if tasks is None:
            lists = -(-num_tasks // plan.method.tasks_per_list)
            parts.append(
                _titled(
                    f"{category.name}, stage one: {lists} lists of tasks", templates.brainstorm(category, plan.seed, 0)
                )
            )
        task = reference_tasks(category)[0] if tasks is None else tasks[category.name][0]
        prompt = templates.example(category, task, plan.seed, 0)
        parts.append(_titled(f"{category.name}, stage two: {counts[category.name]} examples", prompt))
    return "\n\n".join(parts)


def _titled(title: str, prompt: str) -> str:
    return f"=== {title} ===\n{prompt}"


def _brainstorm(job: Job, plan: Plan, templates: Templates) -> dict[str, list[str]]:
    """Stage one; where the budget ends it, the lists are shorter than those of a whole run."""
    tasks: dict[str, list[str]] = {}
    for name, wanted in plan.tasks_wanted().items():
        found = brainstorm(plan.method.category(name), wanted, templates, job.asker, job.journal, plan.seed)
        job.task_rejections += found.rejections
        tasks[name] = found.tasks
    return tasks
