"""What synthesis asks for: tasks and then examples of a method's categories, or new negatives for existing records."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

from embeddings.common.errors import InputError, OptionError
from embeddings.common.io import atomic_path, check_manifest, file_sha256, text_hash, write_manifest
from embeddings.common.jobs import JobFolder, discard_on_user_error
from embeddings.common.process import logger
from embeddings.data.readers import open_reader
from embeddings.data.records import Record
from embeddings.data.samplers.base import Apportionment
from embeddings.data.sources import SourceConfig
from embeddings.data.store import CachedSource, open_cached, read_records
from embeddings.synthesis.client import Budget, ChatClient, Limits, Request, RequestRunner, make_request, open_journal
from embeddings.synthesis.prompts import (
    METHODS,
    REGENERATED_FIELD,
    Category,
    Method,
    MethodName,
    Templates,
    reference_tasks,
)
from embeddings.synthesis.validate import (
    Draft,
    Parsed,
    Reason,
    RejectedAnswer,
    normalised,
    parse_answer,
    read_example,
    read_negatives,
    read_tasks,
)

# A job's folder: items asked for in rounds, the files that come of the answers, and the report.

Fields = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Item:
    """One record to be written.

    Attributes:
        id: Its name, unique in the job.
        file: Name of the file that it goes to.
        prompt: The prompt.
        read: The record in an answer's JSON; raises `RejectedAnswer`.
        is_unique: Whether its query must differ from those of earlier records of the same file.
    """

    id: str
    file: str
    prompt: str
    read: Callable[[Parsed], Draft]
    is_unique: bool = True

    def request(self, seed: int, attempt: int) -> Request:
        return make_request(f"example/{self.id}/{attempt}", self.prompt, seed)


class Rejection(NamedTuple):
    id: str
    attempt: int
    reason: Reason
    detail: str


@dataclass
class Outcome:
    """What became of the items.

    Attributes:
        records: The accepted record and its file, by the item's place among all.
        rejections: The rejected answers.
        repairs: Accepted answers that had to be repaired, by what was repaired.
        num_unasked: Items without any answer, for lack of budget.
    """

    records: dict[int, tuple[str, Fields]] = field(default_factory=dict)
    rejections: list[Rejection] = field(default_factory=list)
    repairs: Counter[str] = field(default_factory=Counter)
    num_unasked: int = 0


def run_rounds(items: Callable[[], Iterable[Item]], total: int, runner: RequestRunner, seed: int) -> Outcome:
    """Ask for all items, and again for those whose answer is rejected, as often as the runner's limits allow.

    `items` gives the same items at each call. A round is judged when all of its answers are there, in the order of the
    items. So what is accepted, copies of earlier queries included, follows from the answers alone, not from their order
    or from kills. Records and rejections are in memory.
    """
    if runner.exhausted:
        return Outcome(num_unasked=total)
    outcome, seen = Outcome(), set[tuple[str, int]]()
    for attempt in range(runner.limits.max_attempts):
        left = total - len(outcome.records)
        requests = (item.request(seed, attempt) for place, item in enumerate(items()) if place not in outcome.records)
        runner.run(requests, left, "examples" if attempt == 0 else f"examples, attempt {attempt + 1}")
        for place, item in enumerate(items()):
            if place in outcome.records:
                continue
            answer = runner.journal.get(item.request(seed, attempt).key)
            if answer is None:
                outcome.num_unasked += attempt == 0
                continue
            try:
                draft = item.read(parse_answer(answer))
                key = (item.file, text_hash(normalised(draft.fields["query"])))
                if item.is_unique and key in seen:
                    raise RejectedAnswer("duplicate_query", draft.fields["query"])
            except RejectedAnswer as rejected:
                outcome.rejections.append(Rejection(item.id, attempt, rejected.reason, rejected.detail))
                continue
            seen.add(key)
            outcome.records[place] = item.file, draft.fields
            outcome.repairs.update(set(draft.repairs))
        if runner.exhausted or len(outcome.records) == total:
            break
    return outcome


@dataclass(frozen=True)
class SynthesisReport:
    """What a job has done, over all of its runs.

    Attributes:
        num_wanted: Records asked for.
        num_records: Records written, by file.
        rejected: Rejected answers, by reason.
        repaired: Accepted answers that were repaired, by what was repaired.
        num_given_up: Records whose every answer was rejected.
        num_unasked: Records that the token budget left no room for.
        num_answers: Answers paid for.
        prompt_tokens, completion_tokens: Their tokens, as far as the endpoint says.
        retries: Requests of the last run that were retried, by what had happened.
        cost: Price of the tokens, or None without prices.
        complete: Whether nothing is left to ask.
    """

    num_wanted: int
    num_records: dict[str, int]
    rejected: dict[str, int]
    repaired: dict[str, int]
    num_given_up: int
    num_unasked: int
    num_answers: int
    prompt_tokens: int
    completion_tokens: int
    retries: dict[str, int] = field(default_factory=dict)
    cost: float | None = None
    complete: bool = True


@dataclass
class Job:
    """A folder in which a synthesis job works and leaves its files; `task_rejections` are those of stage one."""

    folder: Path
    runner: RequestRunner
    fields: Fields
    task_rejections: list[Rejection] = field(default_factory=list)

    def run(
        self, items: Callable[[], Iterable[Item]], total: int, seed: int, extra_files: Mapping[str, Iterable[str]]
    ) -> SynthesisReport:
        """Ask for the items (see `run_rounds`), then write every file from the journal atomically, and the manifest.

        `extra_files` are the lines of more files by name.
        """
        outcome = run_rounds(items, total, self.runner, seed)
        records: dict[str, list[str]] = {}
        for _, (name, fields) in sorted(outcome.records.items()):
            records.setdefault(name, []).append(json.dumps(fields, ensure_ascii=False) + "\n")
        rejections = [*self.task_rejections, *outcome.rejections]
        rejected = (json.dumps(item._asdict()) + "\n" for item in rejections)
        files = {**records, **extra_files, "rejected.jsonl": rejected}
        for name, content in files.items():
            with atomic_path(self.folder / name) as temporary, open(temporary, "w", encoding="utf-8") as file:
                file.writelines(content)
        journal, budget = self.runner.journal, self.runner.budget
        report = SynthesisReport(
            num_wanted=total,
            num_records={name: len(lines) for name, lines in sorted(records.items())},
            rejected=dict(Counter(item.reason for item in rejections).most_common()),
            repaired=dict(outcome.repairs.most_common()),
            num_given_up=total - len(outcome.records) - outcome.num_unasked,
            num_unasked=outcome.num_unasked,
            num_answers=len(journal),
            prompt_tokens=journal.prompt_tokens,
            completion_tokens=journal.completion_tokens,
            retries=dict(self.runner.retries.most_common()),
            cost=budget.cost(journal.prompt_tokens, journal.completion_tokens),
            complete=not self.runner.exhausted,
        )
        before = check_manifest(self.folder, {}).get("files", {})
        hashes = {name: file_sha256(self.folder / name) for name in sorted(files)}
        facts = {"complete": report.complete, "files": hashes, "report": asdict(report)}
        write_manifest(self.folder, {**self.fields, **facts})
        # An earlier run may have asked for more.
        for name in set(before) - set(hashes):
            (self.folder / name).unlink(missing_ok=True)
        return report


def finished_report(folder: Path, fields: Fields) -> SynthesisReport | None:
    """The report of a job that was finished with these fields and whose files are there, or None."""
    if not (folder / "manifest.json").is_file():
        return None
    found = check_manifest(folder, {})
    if not found.get("complete") or any(found.get(name) != value for name, value in fields.items()):
        return None
    for name, digest in found["files"].items():
        if not (folder / name).is_file():
            return None
        if file_sha256(folder / name) != digest:
            raise InputError(str(folder / name), "is not the file that the job wrote", "delete it and run again")
    return SynthesisReport(**found["report"])


@contextmanager
def open_job(
    folder: Path, identity: Fields, size: Fields, client: ChatClient, limits: Limits, budget: Budget | None
) -> Iterator[Job]:
    """A job's folder, made if there is none, and held by this process until leaving.

    A folder that a user's mistake leaves without any answer is removed again if it is new. `identity` decides prompts
    and records: an earlier run must have the same. `size` may change from run to run. Both are JSON types.
    """
    journal_path = folder / "journal.jsonl"
    with discard_on_user_error(folder, unless=lambda: journal_path.exists() and journal_path.stat().st_size > 0):
        fields = {**JobFolder(folder, identity, defaults=size).fields, **size}
        with (
            open_journal(journal_path) as journal,
            RequestRunner(client, journal, limits, budget or Budget()) as runner,
        ):
            yield Job(folder, runner, fields)


# What a job asks for.

# Raised whenever the same answers would give other records or prompts, so that an older folder is not resumed.
RECIPE = 1
# A model that repeats itself brings ever fewer new tasks: after so many rounds the list stays as it is.
MAX_ROUNDS = 8


@dataclass(frozen=True)
class Plan:
    """How many examples of which category, in an order in which every stretch has the categories' shares.

    Args:
        method: `mgh` writes four negatives of graded similarity in five categories, `nv_embed` the paper's three
            categories.
        num_examples: Records to ask for; None for 1,000.
        num_tasks: Tasks to brainstorm; None for half of `num_examples`, as NV-Embed has.
        shares: Share of each category, relative to the others, as `{short_long: 2, sts: 1}`; a category left out has
            none. None for the method's own.
        tasks: The `tasks.jsonl` of another job, in place of brainstorming.
        seed: Seed of tasks, placeholders and requests.

    Raises:
        OptionError: If a number is below 1, or a share is impossible.
    """

    method: MethodName = "mgh"
    num_examples: int | None = None
    num_tasks: int | None = None
    shares: Mapping[str, float] | None = None
    tasks: Path | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_examples", "num_tasks"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise OptionError(name, value, "must be >= 1", "leave it out for the default")
        if self.tasks is not None and self.num_tasks is not None:
            raise OptionError("num_tasks", self.num_tasks, "has no effect beside tasks", "leave one of the two out")
        names = {category.name for category in self.recipe.categories}
        for name, share in (self.shares or {}).items():
            if name not in names:
                raise OptionError("shares", name, f"must name categories of {self.method}", ", ".join(sorted(names)))
            if not 0 <= share < float("inf"):
                raise OptionError(f"shares.{name}", share, "must be >= 0", "0 leaves the category out")
        if not any(self.weights.values()):
            raise OptionError("shares", dict(self.shares or {}), "must leave a category", "give one a share above 0")

    @property
    def recipe(self) -> Method:
        return METHODS[self.method]

    @property
    def total(self) -> int:
        return 1000 if self.num_examples is None else self.num_examples

    @property
    def weights(self) -> dict[str, float]:
        """The share of each category that has one, in the method's order."""
        shares = self.recipe.shares if self.shares is None else self.shares
        names = (category.name for category in self.recipe.categories)
        return {name: shares[name] for name in names if shares.get(name, 0) > 0}

    @property
    def categories(self) -> list[Category]:
        """The categories that have a share."""
        return [self.recipe.category(name) for name in self.weights]

    @cached_property
    def _apportionment(self) -> Apportionment:
        return Apportionment(list(self.weights.values()))

    def tasks_wanted(self) -> dict[str, int]:
        """Tasks of each category, at least one."""
        wanted = self.num_tasks if self.num_tasks is not None else max(1, self.total // 2)
        counts = self._apportionment.counts(wanted)
        return {name: max(1, count) for name, count in zip(self.weights, counts, strict=True)}

    def order(self) -> Iterator[tuple[Category, int]]:
        """The category of each example, and its number within the category."""
        before, categories = [0] * len(self.weights), self.categories
        for draw in range(1, self.total + 1):
            counts = self._apportionment.counts(draw)
            place = next(place for place, (old, new) in enumerate(zip(before, counts, strict=True)) if new > old)
            yield categories[place], before[place]
            before = counts


def synthesize(
    output: Path,
    plan: Plan,
    templates: Templates,
    client: ChatClient,
    *,
    limits: Limits | None = None,
    budget: Budget | None = None,
) -> SynthesisReport:
    """Write synthetic training records, a file for each category, in two stages.

    Stage one asks for lists of tasks until each category has enough different ones. Stage two asks for one example for
    each item of the plan: item `i` of a category takes task `i` modulo their number, and draws each placeholder by
    (seed, category, i). An answer is repaired where its meaning is plain; else it is rejected (see `read_example`), as
    is one with the query of an earlier record, and the item asked again. Training reads every record written.

    The folder gets `CATEGORY.jsonl`, `tasks.jsonl`, `rejected.jsonl` (whose answers, and why), `journal.jsonl` (every
    answer) and `manifest.json` (what decides the records, and the report).

    Determinism: the files but the journal follow from plan, templates, sampling and the answers, not from their order,
    from concurrency or from kills, unless the token budget ends the job.
    Guarantees: an answered request is never made again, in this run or a later one; one in flight at a kill is.

    Args:
        output: The folder: new, empty, or of an earlier run of the same job, which is resumed. More examples may be
            asked for than then, as long as `num_tasks` is the same.
        plan: What to generate.
        templates: The prompts.
        client: The endpoint.
        limits: How the endpoint is used.
        budget: What it may cost; the budget ends a job with the records that are there.

    Raises:
        InputError: If the folder is another job's, or the endpoint does not know the address, the key or the model.
        EndpointError: If it was silent for longer than the retries last.

    Source: Pan et al. 2025 (MGH), sections 2.1 and 3.1, Appendix A; Lee et al. 2024 (NV-Embed), arXiv:2405.17428,
        section 4.3, Tables 15 and 16. Differs: the prompts are ours, to the papers' specification; brainstorming
        prompts show two reference tasks drawn by the seed. MGH's second model is a second job, with the first one's
        folder as the seeds of its `Templates`.
    """
    limits = limits or Limits()
    given = None if plan.tasks is None else read_task_file(plan.tasks, plan.categories)
    identity = {
        "kind": "synthesis",
        "recipe": RECIPE,
        "method": plan.method,
        "seed": plan.seed,
        "shares": plan.weights,
        "num_tasks": None if plan.tasks is not None else plan.tasks_wanted(),
        "task_file_sha256": None if plan.tasks is None else file_sha256(plan.tasks),
        "templates_sha256": templates.sha256,
        **client.sampling.fields,
    }
    size = {"num_examples": plan.total, "max_attempts": limits.max_attempts}
    if (report := finished_report(output, {**identity, **size})) is not None:
        return report
    with open_job(output, identity, size, client, limits, budget) as job:
        tasks = given or {}
        # Where the budget ends stage one, the lists are shorter than those of a full run.
        for name, wanted in plan.tasks_wanted().items() if given is None else ():
            tasks[name], rejections = brainstorm(plan.recipe.category(name), wanted, templates, job.runner, plan.seed)
            job.task_rejections += rejections
        rows = ({"category": name, "task": task} for name, found in tasks.items() for task in found)
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        return job.run(partial(plan_items, plan, templates, tasks), plan.total, plan.seed, {"tasks.jsonl": lines})


def plan_items(plan: Plan, templates: Templates, tasks: Mapping[str, Sequence[str]]) -> Iterator[Item]:
    """The items of a plan, given the tasks of each category."""
    for category, index in plan.order():
        task = tasks[category.name][index % len(tasks[category.name])]
        prompt, name = templates.example(category, task, plan.seed, index), f"{category.name}-{index}"
        read = partial(read_example, category=category, task=task, prompt=prompt, id=name)
        yield Item(name, f"{category.name}.jsonl", prompt, read)


def dry_run(plan: Plan, templates: Templates) -> str:
    """The first prompts of both stages for each category, and the least number of each, as text.

    Without a task file the example's prompt shows a reference task.
    """
    tasks = None if plan.tasks is None else read_task_file(plan.tasks, plan.categories)
    counts, parts = Counter(category.name for category, _ in plan.order()), []
    for category in plan.categories:
        if tasks is None:
            lists = -(-plan.tasks_wanted()[category.name] // plan.recipe.tasks_per_list)
            title = f"{category.name}, stage one: {lists} lists of tasks"
            parts.append(f"=== {title} ===\n{templates.brainstorm(category, plan.seed, 0)}")
        task = reference_tasks(category)[0] if tasks is None else tasks[category.name][0]
        title = f"{category.name}, stage two: {counts[category.name]} examples"
        parts.append(f"=== {title} ===\n{templates.example(category, task, plan.seed, 0)}")
    return "\n\n".join(parts)


# Stage one: the tasks of a category, brainstormed by the model or read from another job's list.


def brainstorm(
    category: Category, num_tasks: int, templates: Templates, runner: RequestRunner, seed: int
) -> tuple[list[str], list[Rejection]]:
    """Ask for lists of tasks until there are enough different ones; gives up to `num_tasks`, and what was rejected.

    Each round asks for as many lists as the missing tasks would fill, so it follows from the answers of those before.
    """
    found: dict[str, str] = {}
    rejections: list[Rejection] = []
    call = 0
    for _ in range(MAX_ROUNDS):
        missing = num_tasks - len(found)
        if missing <= 0 or runner.exhausted:
            break
        calls = range(call, call + -(-missing // templates.method.tasks_per_list))
        call = calls.stop
        requests = [
            make_request(f"tasks/{category.name}/{number}", templates.brainstorm(category, seed, number), seed, False)
            for number in calls
        ]
        runner.run(requests, len(requests), f"tasks, {category.name}")
        for number, request in zip(calls, requests, strict=True):
            answer = runner.journal.get(request.key)
            if answer is None:
                continue
            try:
                tasks = read_tasks(parse_answer(answer))
            except RejectedAnswer as rejected:
                name = f"tasks-{category.name}-{number}"
                rejections.append(Rejection(name, 0, rejected.reason, rejected.detail))
                continue
            for task in tasks:
                found.setdefault(normalised(task), task)
    if not found and not runner.exhausted:
        reasons = ", ".join(sorted({rejection.reason for rejection in rejections}))
        what = f"gave no task of {category.name} in {call} answers ({reasons})"
        raise InputError(runner.client.sampling.model, what, "try another model, or more max_answer_tokens")
    if len(found) < num_tasks:
        logger.warning("%s: %d different tasks of %d asked for", category.name, len(found), num_tasks)
    return list(found.values())[:num_tasks], rejections


def read_task_file(path: Path, categories: Sequence[Category]) -> dict[str, list[str]]:
    """The tasks that another job wrote (`tasks.jsonl`), by category; those of other categories are left out."""
    if not path.is_file():
        raise InputError(str(path), "no such file", "give the tasks.jsonl of another job")
    tasks: dict[str, dict[str, str]] = {category.name: {} for category in categories}
    for where, fields in open_reader(path, ("category", "task"), ("category", "task")):
        name, task = fields.get("category"), fields.get("task")
        if not isinstance(name, str) or not isinstance(task, str) or not task.strip() or not task.isprintable():
            raise InputError(where, "is no task", 'write {"category": "short_long", "task": "…"}')
        if name in tasks:
            tasks[name].setdefault(normalised(task), task.strip())
    for name, found in tasks.items():
        if not found:
            raise InputError(str(path), f"holds no task of {name}", "add some, or leave the category out by shares")
    return {name: list(found.values()) for name, found in tasks.items()}


# Negatives for records that exist: query and positives stay.


def regenerate_negatives(
    source: SourceConfig,
    output: Path,
    templates: Templates,
    client: ChatClient,
    *,
    seed: int = 0,
    limits: Limits | None = None,
    budget: Budget | None = None,
) -> SynthesisReport:
    """Write the records of a source with four new negatives each, of the levels 1 (hardest) to 4.

    Everything else of a record stays. The prompt shows the query and the first positive. A record whose every answer is
    rejected is left out, and `rejected.jsonl` has its row and the reason: `row-0` is the source's first record.

    The folder gets `records.jsonl`; for its other files, arguments, errors, determinism and guarantees see
    `synthesize`. The templates are MGH's.

    Source: Pan et al. 2025 (MGH), section 2.1. Differs: the prompt is ours.
    """
    limits, cached = limits or Limits(), open_cached(source)
    identity = {
        "kind": "regenerated negatives",
        "recipe": RECIPE,
        "source_key": cached.key,
        "seed": seed,
        "templates_sha256": templates.sha256,
        **client.sampling.fields,
    }
    size = {"max_attempts": limits.max_attempts}
    if (report := finished_report(output, {**identity, **size})) is not None:
        return report
    total, items = len(cached.table), partial(pair_items, source, cached, templates)
    with open_job(output, identity, size, client, limits, budget) as job:
        return job.run(items, total, seed, {})


def pair_items(source: SourceConfig, cached: CachedSource, templates: Templates) -> Iterable[Item]:
    for row, (_, record) in enumerate(read_records(source, cached)):
        prompt = templates.negatives(record.query, record.positives[0])
        read = partial(read_negatives, record=_fields(record), field=REGENERATED_FIELD, prompt=prompt)
        yield Item(f"row-{row}", "records.jsonl", prompt, read, is_unique=False)


def regenerate_dry_run(source: SourceConfig, templates: Templates) -> str:
    """The prompt of a source's first pair, and the least number of prompts, as text."""
    cached = open_cached(source)
    first = next(iter(pair_items(source, cached, templates)))
    return f"=== negatives for {len(cached.table)} pairs ===\n{first.prompt}"


def _fields(record: Record) -> Mapping[str, Any]:
    """The record as a row without its negatives."""
    named = {name: getattr(record, name) for name in ("id", "label", "score", "instruction", "language")}
    given = {name: value for name, value in named.items() if value is not None}
    return {"query": record.query, "positive": list(record.positives), **given}
