"""Synthesis jobs: tasks and examples of a method's categories, or new negatives for existing records."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from embeddings.common.errors import InputError, OptionError, PreemptedError, require_minimum
from embeddings.common.io import check_manifest, file_hash, file_sha256, text_hash, write_json_lines, write_manifest
from embeddings.common.jobs import ArrayTask, JobFolder, discard_on_user_error
from embeddings.common.process import EXIT_INTERRUPTED, logger
from embeddings.data.readers import open_reader
from embeddings.data.records import Record
from embeddings.data.samplers.base import Apportionment
from embeddings.data.sources import SourceConfig
from embeddings.data.store import CachedSource, open_cached, read_records
from embeddings.synthesis.client import ChatClient, Request, make_request
from embeddings.synthesis.prompts import (
    METHODS,
    NEGATIVES_SCHEMA,
    REGENERATED_FIELD,
    Category,
    Method,
    MethodName,
    Templates,
    answer_schema,
    reference_tasks,
)
from embeddings.synthesis.runner import (
    Journal,
    RequestRunner,
    UnusableAnswersError,
    described,
    journal_paths,
    open_journal,
    unusable_error,
)
from embeddings.synthesis.validate import (
    Reason,
    RejectedAnswer,
    normalised,
    parse_answer,
    read_example,
    read_negatives,
    read_tasks,
)

# A job's folder: requests in rounds, the files that are written from the answers, and the report.

Fields = Mapping[str, Any]
REJECTED = "rejected.jsonl"


@dataclass(frozen=True, slots=True)
class Item:
    """One record to generate; `read` converts an answer's JSON to the record, or raises `RejectedAnswer`."""

    id: str
    file: str
    prompt: str
    read: Callable[[Any], dict[str, Any]]
    is_unique: bool = True
    schema: Fields | None = None

    def request(self, seed: int, attempt: int, max_attempts: int) -> Request:
        """The request of an attempt; an unusable answer is followed by the next attempt."""
        is_last = attempt + 1 == max_attempts
        retry = None if is_last else partial(self.request, seed, attempt + 1, max_attempts)
        name = f"example/{self.id}/{attempt}"
        return make_request(name, self.prompt, seed, self.read, retry=retry, schema=self.schema)


class Rejection(NamedTuple):
    id: str
    attempt: int
    reason: Reason
    detail: str


@dataclass
class Outcome:
    """The rejected answers so far and, by the item's index, the file and fields of each accepted record.

    `wanted` is the attempt that each unfinished item needs next.
    """

    records: dict[int, tuple[str, Fields]] = field(default_factory=dict)
    rejections: list[Rejection] = field(default_factory=list)
    wanted: dict[int, int] = field(default_factory=dict)

    @property
    def num_unasked(self) -> int:
        return sum(attempt == 0 for attempt in self.wanted.values())


MakeItems = Callable[[], Iterable[Item]]


def read_outcome(items: MakeItems, total: int, journal: Journal, seed: int, max_attempts: int) -> Outcome:
    """Check the answers of all items attempt by attempt, each in the order of the items.

    So the accepted records do not depend on the order of arrival or on the process that asked. More answers only add
    queries that others may repeat: what is wanted now is wanted then.
    """
    outcome, seen = Outcome(wanted=dict.fromkeys(range(total), 0)), set[tuple[str, int]]()
    for attempt in range(max_attempts):
        for index, item in enumerate(items()):
            if outcome.wanted.get(index) != attempt:
                continue
            answer = journal.get(item.request(seed, attempt, max_attempts).key)
            if answer is None:
                continue
            del outcome.wanted[index]
            try:
                fields = item.read(parse_answer(answer))
                key = (item.file, text_hash(normalised(fields["query"])))
                if item.is_unique and key in seen:
                    raise RejectedAnswer("duplicate_query", fields["query"])
            except RejectedAnswer as rejected:
                outcome.rejections.append(Rejection(item.id, attempt, rejected.reason, rejected.detail))
                if attempt + 1 < max_attempts:
                    outcome.wanted[index] = attempt + 1
                continue
            seen.add(key)
            outcome.records[index] = item.file, fields
        if attempt + 1 not in outcome.wanted.values():
            break
    return outcome


def ask_items(items: MakeItems, total: int, runner: RequestRunner, seed: int) -> Outcome:
    """Request all items, and again those whose answers are rejected, up to the client's `max_attempts`.

    An answer that is unusable by itself is followed by the item's next attempt. Which of two items with one query is
    asked again is known once all other answers are there.
    """
    max_attempts = runner.client.limits.max_attempts
    if runner.exhausted:
        return Outcome(wanted=dict.fromkeys(range(total), 0))
    while True:
        runner.journal.refresh()
        outcome = read_outcome(items, total, runner.journal, seed, max_attempts)
        if not outcome.wanted or runner.exhausted:
            return outcome
        runner.run(
            partial(_wanted_requests, items, outcome.wanted, seed, max_attempts), len(outcome.wanted), "examples"
        )


def _wanted_requests(
    items: MakeItems, wanted: Mapping[int, int], seed: int, max_attempts: int
) -> Iterator[tuple[int, Request]]:
    for index, item in enumerate(items()):
        if index in wanted:
            yield index, item.request(seed, wanted[index], max_attempts)


@dataclass(frozen=True)
class SynthesisReport:
    """The results of a job over all of its runs.

    Attributes:
        num_wanted: Records requested.
        num_records: Records written, by file.
        rejected: Rejected answers, by reason.
        num_given_up: Records of which all answers were rejected.
        num_unasked: Records that were not requested because the token budget was used up.
        retries: Retries in the last run.
        complete: Whether all requests were sent.
        num_unfinished: Records with rejected answers only, not requested again because the budget was used up.
        num_tokens_needed: Tokens that the next request could take, more than the budget leaves; 0 if complete.
    """

    num_wanted: int
    num_records: dict[str, int]
    rejected: dict[str, int]
    num_given_up: int
    num_unasked: int
    num_answers: int
    prompt_tokens: int
    completion_tokens: int
    retries: int = 0
    complete: bool = True
    num_unfinished: int = 0
    num_tokens_needed: int = 0


@dataclass
class Job:
    folder: JobFolder
    runner: RequestRunner
    fields: Fields
    rejections: list[Rejection] = field(default_factory=list)

    @property
    def path(self) -> Path:
        return self.folder.folder

    def run(self, items: MakeItems, total: int, seed: int, extra: Mapping[str, Sequence[Fields]]) -> SynthesisReport:
        """Request the items, then write each file, the rows of `extra`, and the manifest.

        Of several tasks each writes what it knows, until one of them has all answers.
        """
        if (finished := self.finished_report()) is not None:
            return finished
        try:
            outcome = ask_items(items, total, self.runner, seed)
        except UnusableAnswersError:
            max_attempts = self.runner.client.limits.max_attempts
            self.rejections += read_outcome(items, total, self.runner.journal, seed, max_attempts).rejections
            raise
        self.rejections += outcome.rejections
        if total and not outcome.records and not self.runner.exhausted:
            self.fail(f"all {len(outcome.rejections)}", outcome.rejections)
        with self.folder.lock():
            return self.finished_report() or self._write(outcome, total, extra)

    def fail(self, share: str, rejections: Sequence[Rejection]) -> NoReturn:
        """Raise the error of a model whose answers cannot be used."""
        shown = [described(rejection.reason, rejection.detail) for rejection in rejections]
        raise unusable_error(self.runner.client.sampling, share, shown)

    def _write(self, outcome: Outcome, total: int, extra: Mapping[str, Sequence[Fields]]) -> SynthesisReport:
        records: dict[str, list[Fields]] = {}
        for _, (name, fields) in sorted(outcome.records.items()):
            records.setdefault(name, []).append(fields)
        files = {**records, **extra, REJECTED: [*map(Rejection._asdict, self.rejections)]}
        for name, rows in files.items():
            write_json_lines(self.path / name, rows)
        journal = self.runner.journal
        report = SynthesisReport(
            num_wanted=total,
            num_records={name: len(rows) for name, rows in sorted(records.items())},
            rejected=dict(Counter(item.reason for item in self.rejections).most_common()),
            num_given_up=total - len(outcome.records) - len(outcome.wanted),
            num_unasked=outcome.num_unasked,
            num_answers=len(journal),
            prompt_tokens=journal.prompt_tokens,
            completion_tokens=journal.completion_tokens,
            retries=self.runner.client.retries,
            complete=not self.runner.exhausted,
            num_unfinished=len(outcome.wanted) - outcome.num_unasked,
            num_tokens_needed=self.runner.num_tokens_needed,
        )
        previous = check_manifest(self.path, {}).get("files", {})
        hashes = {name: file_hash(self.path / name) for name in sorted(files)}
        facts = {"complete": report.complete, "files": hashes, "report": asdict(report)}
        write_manifest(self.path, {**self.fields, **facts})
        # An earlier run may have written more files.
        for name in set(previous) - set(files):
            (self.path / name).unlink(missing_ok=True)
        return report

    def finished_report(self) -> SynthesisReport | None:
        """The report of an earlier run that finished this job, if all of its files exist; none may have changed."""
        manifest = check_manifest(self.path, {})
        if not manifest["complete"] or any(manifest.get(name) != value for name, value in self.fields.items()):
            return None
        for name, digest in manifest["files"].items():
            path = self.path / name
            if not path.is_file():
                return None
            if file_hash(path) != digest:
                raise InputError(str(path), "is not the file that the job wrote", "delete it and run again")
        return SynthesisReport(**manifest["report"])


@contextmanager
def open_job(
    folder: Path, identity: Fields, size: Fields, client: ChatClient, task: ArrayTask | None = None
) -> Iterator[Job]:
    """The job of a folder, which is created if needed; this process locks its journal during the context.

    `identity` determines prompts and records, so an earlier run must have the same; `size` may change between runs.
    """
    size = {**size, "max_attempts": client.limits.max_attempts, "max_answer_tokens": client.sampling.max_answer_tokens}
    with discard_on_user_error(folder, unless=lambda: _has_answers(folder), task=task):
        job_folder = JobFolder(folder, {**identity, **client.sampling.fields}, defaults=size)
        fields = {**job_folder.fields, **size}
        with open_journal(folder, task) as journal, RequestRunner(client, journal, task) as runner:
            job = Job(job_folder, runner, fields)
            try:
                yield job
            except UnusableAnswersError:
                if job.rejections:
                    write_json_lines(folder / REJECTED, map(Rejection._asdict, job.rejections))
                raise
            except KeyboardInterrupt:
                line = f"{len(journal):,} answers are saved in {folder}; the same command continues after them"
                raise PreemptedError(line, EXIT_INTERRUPTED) from None


def _has_answers(folder: Path) -> bool:
    return any(path.stat().st_size > 0 for path in journal_paths(folder))


# The plan of a job.

# Increase it when the same answers would result in other records or prompts, so that older folders are not resumed.
RECIPE = 3
# Maximum rounds of brainstorming: a model that repeats itself produces ever fewer new tasks.
MAX_ROUNDS = 8


@dataclass(frozen=True)
class Plan:
    """The number of examples per category, in an order in which every section has the categories' shares.

    Args:
        method: `mgh` generates four negatives of graded similarity in five categories, `nv_embed` the paper's three
            categories.
        num_examples: Records to request.
        num_brainstormed: Tasks to brainstorm; None for half of `num_examples`, as in NV-Embed.
        shares: Relative share of each category, such as `{short_long: 2, sts: 1}`; a missing category has share 0. None
            for the method's shares.
        tasks: The `tasks.jsonl` of another job, to use instead of brainstorming.
        seed: Seed of tasks, placeholders and requests.
    """

    method: MethodName = "mgh"
    num_examples: int = 1_000
    num_brainstormed: int | None = None
    shares: Mapping[str, float] | None = None
    tasks: Path | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        require_minimum("num_examples", self.num_examples, 1)
        require_minimum("num_brainstormed", self.num_brainstormed, 1, optional=True)
        names = {category.name for category in self.recipe.categories}
        for name, share in (self.shares or {}).items():
            if name not in names:
                raise OptionError("shares", name, f"must name categories of {self.method}", ", ".join(sorted(names)))
            if not 0 <= share < float("inf"):
                raise OptionError(f"shares.{name}", share, "must be >= 0", "0 excludes the category")
        if not any(self.weights.values()):
            raise OptionError("shares", dict(self.shares or {}), "must include a category", "set one share above 0")

    @property
    def recipe(self) -> Method:
        return METHODS[self.method]

    @property
    def weights(self) -> dict[str, float]:
        """The share of each category with a share above 0, in the method's order."""
        shares = self.recipe.shares if self.shares is None else self.shares
        names = (category.name for category in self.recipe.categories)
        return {name: shares[name] for name in names if shares.get(name, 0) > 0}

    @property
    def categories(self) -> list[Category]:
        return [self.recipe.category(name) for name in self.weights]

    @cached_property
    def _apportionment(self) -> Apportionment:
        return Apportionment(list(self.weights.values()))

    def tasks_wanted(self) -> dict[str, int]:
        half = max(1, self.num_examples // 2)
        counts = self._apportionment.counts(half if self.num_brainstormed is None else self.num_brainstormed)
        return {name: max(1, count) for name, count in zip(self.weights, counts, strict=True)}

    def order(self) -> Iterator[tuple[Category, int]]:
        """The category of each example, and its index within the category."""
        previous, categories = [0] * len(self.weights), self.categories
        for number in range(1, self.num_examples + 1):
            counts = self._apportionment.counts(number)
            index = next(index for index, (old, new) in enumerate(zip(previous, counts, strict=True)) if new > old)
            yield categories[index], previous[index]
            previous = counts


def synthesize(
    output: Path, plan: Plan, templates: Templates, client: ChatClient, task: ArrayTask | None = None
) -> SynthesisReport:
    """Write synthetic training records in two stages, with one file per category.

    Stage one requests lists of tasks until each category has enough different ones. Stage two requests one example for
    each item of the plan: item `i` of a category uses task `i` modulo the number of tasks, and its placeholders are
    drawn by (seed, category, i). Malformed but unambiguous answers are repaired. Other invalid answers (see
    `read_example`), and those that repeat the query of an earlier record, are rejected, and the item is requested
    again. Every written record is valid training data.

    The folder contains `CATEGORY.jsonl`, `tasks.jsonl`, `rejected.jsonl` (items, attempts and reasons), `journal.jsonl`
    (all answers) and `manifest.json` (the options that determine the records, and the report). An answered request is
    never sent again; a request in flight when the process is killed is.

    The tasks of an array share the folder: each sends its share of the requests and saves the answers in its own
    `journal-00000.jsonl`. It then sends the shares of tasks that do not run, and waits for those of tasks that do. The
    files have the bytes of one process that gets the same answers.

    Args:
        output: A folder that is new, empty, or from an earlier run of the same job, which is resumed. A resumed job may
            request more examples if `num_brainstormed` is the same.
        plan: What to generate.
        templates: The prompts.
        client: The endpoint, and the limits on its use. The tasks of an array have equal shares of the token budget and
            of the requests per minute.
        task: The task of an array; None for one process.

    Source: Pan et al. 2025 (MGH), sections 2.1 and 3.1, Appendix A; Lee et al. 2024 (NV-Embed), arXiv:2405.17428,
        section 4.3, Tables 15 and 16. Differs: the prompts are ours, written to the papers' specification;
        brainstorming prompts show two reference tasks drawn by the seed. MGH's second model is a second job, whose
        `Templates` use the first job's folder as seeds.
    """
    tasks = {} if plan.tasks is None else read_task_file(plan.tasks, plan.categories)
    identity = {
        "kind": "synthesis",
        "recipe": RECIPE,
        "method": plan.method,
        "seed": plan.seed,
        "shares": plan.weights,
        "num_tasks": None if plan.tasks is not None else plan.tasks_wanted(),
        "task_file_sha256": None if plan.tasks is None else file_sha256(plan.tasks),
        "templates_sha256": templates.sha256,
    }
    with open_job(output, identity, {"num_examples": plan.num_examples}, client, task) as job:
        if (finished := job.finished_report()) is not None:
            return finished
        if plan.tasks is None:
            # If the budget ends stage one, the lists are shorter than those of a full run.
            tasks = brainstorm(plan.tasks_wanted(), templates, job.runner, plan.seed, job.rejections)
            for name, found in tasks.items():
                if not found and not job.runner.exhausted:
                    rejections = [item for item in job.rejections if item.id.startswith(f"tasks-{name}-")]
                    job.fail(f"{name}: all {len(rejections)}", rejections)
        rows = [{"category": name, "task": text} for name, found in tasks.items() for text in found]
        items = partial(plan_items, plan, templates, tasks)
        return job.run(items, plan.num_examples, plan.seed, {"tasks.jsonl": rows})


def plan_items(plan: Plan, templates: Templates, tasks: Mapping[str, Sequence[str]]) -> Iterator[Item]:
    schemas = {category.name: answer_schema(category) for category in plan.categories}
    for category, index in plan.order():
        task = tasks[category.name][index % len(tasks[category.name])]
        prompt, name = templates.example(category, task, plan.seed, index), f"{category.name}-{index}"
        read = partial(read_example, category=category, task=task, prompt=prompt, id=name)
        yield Item(name, f"{category.name}.jsonl", prompt, read, schema=schemas[category.name])


def dry_run(plan: Plan, templates: Templates) -> str:
    """The first prompts of both stages for each category, with the minimum number of requests, as text."""
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


# Stage one: the tasks of a category, brainstormed by the model or read from another job's file.


def brainstorm(
    wanted: Mapping[str, int], templates: Templates, runner: RequestRunner, seed: int, rejections: list[Rejection]
) -> dict[str, list[str]]:
    """Request lists of tasks of all categories at once, until each has enough different ones, at most eight times.

    Returns up to as many tasks as are `wanted`, by category, and appends the rejected lists to `rejections`.
    """
    tasks: dict[str, dict[str, str]] = {name: {} for name in wanted}
    method, num_calls = templates.method, Counter[str]()
    for _ in range(MAX_ROUNDS):
        requests: dict[tuple[str, int], Request] = {}
        for name, num_tasks in wanted.items():
            num_lists = -(-max(0, num_tasks - len(tasks[name])) // method.tasks_per_list)
            for number in range(num_calls[name], num_calls[name] + num_lists):
                prompt = templates.brainstorm(method.category(name), seed, number)
                request = make_request(f"tasks/{name}/{number}", prompt, seed, read_tasks)
                requests[name, number] = request
            num_calls[name] += num_lists
        if not requests or runner.exhausted:
            break
        try:
            runner.run(partial(enumerate, requests.values()), len(requests), "tasks")
        finally:
            # Also if the job stops because most lists are unusable.
            for (name, number), request in requests.items():
                answer = runner.journal.get(request.key)
                if answer is None:
                    continue
                try:
                    for task in read_tasks(parse_answer(answer)):
                        tasks[name].setdefault(normalised(task), task)
                except RejectedAnswer as rejected:
                    rejections.append(Rejection(f"tasks-{name}-{number}", 0, rejected.reason, rejected.detail))
    for name, num_tasks in wanted.items():
        if len(tasks[name]) < num_tasks:
            logger.warning("%s: %d different tasks, %d were requested", name, len(tasks[name]), num_tasks)
    return {name: list(found.values())[: wanted[name]] for name, found in tasks.items()}


def read_task_file(path: Path, categories: Sequence[Category]) -> dict[str, list[str]]:
    """The tasks that another job wrote (`tasks.jsonl`), by category; those of other categories are ignored."""
    tasks: dict[str, dict[str, str]] = {category.name: {} for category in categories}
    for where, fields in open_reader(path, ("category", "task"), ("category", "task")):
        name, task = fields.get("category"), fields.get("task")
        if not isinstance(name, str) or not isinstance(task, str) or not task.strip() or not task.isprintable():
            raise InputError(where, "is not a task", 'write {"category": "short_long", "task": "…"}')
        if name in tasks:
            tasks[name].setdefault(normalised(task), task.strip())
    for name, category_tasks in tasks.items():
        if not category_tasks:
            raise InputError(str(path), f"contains no task of {name}", "add some, or exclude the category by shares")
    return {name: list(category_tasks.values()) for name, category_tasks in tasks.items()}


# New negatives for existing records.


def regenerate_negatives(
    source: SourceConfig,
    output: Path,
    templates: Templates,
    client: ChatClient,
    *,
    seed: int = 0,
    task: ArrayTask | None = None,
) -> SynthesisReport:
    """Write the records of a source with four new negatives each, of the levels 1 (hardest) to 4.

    All other fields are unchanged. The prompt shows the query and the first positive. A record of which all answers are
    rejected is omitted, and `rejected.jsonl` contains its row and the reasons: `row-0` is the source's first record.
    The records are written to `records.jsonl`; for all else see `synthesize`. The templates are MGH's.

    Source: Pan et al. 2025 (MGH), section 2.1. Differs: the prompt is ours.
    """
    cached = open_cached(source)
    identity = {
        "kind": "regenerated negatives",
        "recipe": RECIPE,
        "source_key": cached.key,
        "seed": seed,
        "templates_sha256": templates.sha256,
    }
    passes = itertools.count(1)

    def items() -> Iterable[Item]:
        return pair_items(source, cached, templates, f"pass {next(passes)} over")

    with open_job(output, identity, {}, client, task) as job:
        return job.run(items, len(cached.table), seed, {})


def pair_items(source: SourceConfig, cached: CachedSource, templates: Templates, title: str) -> Iterable[Item]:
    for row, (_, record) in enumerate(read_records(source, cached, title)):
        prompt = templates.negatives(record.query, record.positives[0])
        read = partial(read_negatives, record=_fields(record), field=REGENERATED_FIELD, prompt=prompt)
        yield Item(f"row-{row}", "records.jsonl", prompt, read, is_unique=False, schema=NEGATIVES_SCHEMA)


def regenerate_dry_run(source: SourceConfig, templates: Templates) -> str:
    """The prompt of a source's first pair, with the minimum number of requests, as text."""
    cached = open_cached(source)
    first = next(iter(pair_items(source, cached, templates, "reading")))
    return f"=== negatives for {len(cached.table)} pairs ===\n{first.prompt}"


def _fields(record: Record) -> Mapping[str, Any]:
    optional = {name: getattr(record, name) for name in ("id", "label", "score", "instruction", "language")}
    present = {name: value for name, value in optional.items() if value is not None}
    return {"query": record.query, "positive": list(record.positives), **present}
