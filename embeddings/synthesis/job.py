"""A synthesis job's folder: items asked for in rounds, the files that come of the answers, and the report."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from embeddings.common.errors import InputError
from embeddings.common.io import atomic_path, check_manifest, file_sha256, text_hash, write_manifest
from embeddings.common.jobs import JobFolder, discard_on_user_error
from embeddings.synthesis.client import ChatClient, Request, make_request
from embeddings.synthesis.runner import Budget, Limits, RequestRunner, open_journal
from embeddings.synthesis.validate import Draft, Parsed, Reason, RejectedAnswer, normalised, parse_answer

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
