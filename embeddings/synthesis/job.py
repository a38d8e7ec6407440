"""A job's folder: its journal, the files that come of it, and a manifest that says from what."""

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from embeddings.common.errors import InputError, UserError
from embeddings.common.io import atomic_path, check_manifest, file_sha256, text_hash, write_manifest
from embeddings.synthesis.client import ChatClient, Request, make_request
from embeddings.synthesis.runner import Asker, Journal, Spending, Traffic, open_journal
from embeddings.synthesis.validate import Answer, Draft, Parsed, Reason, RejectedAnswer, normalised, parse_answer


@dataclass(frozen=True, slots=True)
class Item:
    """One record that is to be.

    Attributes:
        id: Its name, unique in the job.
        file: Name of the file that it goes to.
        prompt: What the model reads.
        read: The record in an answer's JSON; raises `RejectedAnswer`.
        is_unique: Whether its query must differ from those of earlier records of the same file.
    """

    id: str
    file: str
    prompt: str
    read: Callable[[Parsed], Draft]
    is_unique: bool = True

    def request(self, seed: int, attempt: int) -> Request:
        """The request of one attempt, a pure function of the item, the job's seed and the attempt's number."""
        return make_request(f"example/{self.id}/{attempt}", self.prompt, seed)

    def draft(self, answer: Answer) -> Draft:
        """The record in an answer.

        Raises:
            RejectedAnswer: If there is none that may go to the data.
        """
        return self.read(parse_answer(answer))


class Rejection(NamedTuple):
    """An answer that was rejected: whose, at which attempt, and why."""

    id: str
    attempt: int
    reason: Reason
    detail: str


@dataclass
class Outcome:
    """What became of the items.

    Attributes:
        attempts: The attempt whose answer was accepted, by the item's place among all.
        rejections: The answers rejected.
        repairs: Accepted answers that had to be repaired, by what was repaired.
        num_unasked: Items without any answer: the budget kept them from being asked.
    """

    attempts: dict[int, int] = field(default_factory=dict)
    rejections: list[Rejection] = field(default_factory=list)
    repairs: Counter[str] = field(default_factory=Counter)
    num_unasked: int = 0

    @property
    def reasons(self) -> Mapping[str, int]:
        """Rejected answers by reason."""
        return Counter(rejection.reason for rejection in self.rejections)


def run_rounds(
    items: Callable[[], Iterable[Item]],
    total: int,
    asker: Asker,
    journal: Journal,
    *,
    seed: int,
    max_attempts: int,
) -> Outcome:
    """Ask for all items, and again for those whose answer is rejected, up to `max_attempts` times each.

    A round is judged when all of its answers are there, in the order of the items. So what is accepted, copies of
    earlier queries included, follows from the answers alone, not from the order in which they came or from kills.

    Args:
        items: The items from the first, anew at each call and always the same.
        total: How many they are.
        asker: Asks.
        journal: Where its answers are.
        seed: Seed of the requests.
        max_attempts: Most answers for one item.

    Memory: a hash of each accepted query, and the rejections.

    Raises:
        InputError: As in `Asker.ask_all`.
        EndpointError: The same.
    """
    outcome, seen = Outcome(), set[tuple[str, int]]()
    for attempt in range(max_attempts):
        left = total - len(outcome.attempts)
        requests = (item.request(seed, attempt) for place, item in enumerate(items()) if place not in outcome.attempts)
        asker.ask_all(requests, left, "examples" if attempt == 0 else f"examples, attempt {attempt + 1}")
        for place, item in enumerate(items()):
            if place in outcome.attempts:
                continue
            answer = journal.get(item.request(seed, attempt).key)
            if answer is None:
                outcome.num_unasked += attempt == 0
                continue
            try:
                draft = item.draft(answer)
                key = (item.file, text_hash(normalised(draft.fields["query"])))
                if item.is_unique and key in seen:
                    raise RejectedAnswer("duplicate_query", draft.fields["query"])
            except RejectedAnswer as rejected:
                outcome.rejections.append(Rejection(item.id, attempt, rejected.reason, rejected.detail))
                continue
            seen.add(key)
            outcome.attempts[place] = attempt
            outcome.repairs.update(set(draft.repairs))
        if asker.exhausted or len(outcome.attempts) == total:
            break
    return outcome


JOURNAL_FILE, REJECTED_FILE = "journal.jsonl", "rejected.jsonl"


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
        prompt_tokens: Tokens of their prompts, as far as the endpoint says.
        completion_tokens: Tokens of the answers.
        retries: Requests of the last run that were tried again, by what had happened.
        cost: Price of the tokens, or None where no prices were given.
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


class Job:
    """A folder in which a job works and leaves its files.

    Attributes:
        folder: The folder.
        journal: What has been answered.
        asker: Asks for the rest.
        task_rejections: Rejected answers of stage one.
    """

    def __init__(self, folder: Path, journal: Journal, asker: Asker, fields: Mapping[str, Any]) -> None:
        self.folder, self.journal, self.asker, self.fields = folder, journal, asker, dict(fields)
        self.task_rejections: list[Rejection] = []

    def finish(
        self,
        items: Callable[[], Iterable[Item]],
        total: int,
        seed: int,
        outcome: Outcome,
        extra_files: Mapping[str, Iterable[str]],
    ) -> SynthesisReport:
        """Write every file from the journal, each whole or not at all, and then the manifest.

        Args:
            items: The items, as `run_rounds` got them.
            total: How many they are.
            seed: Seed of the requests.
            outcome: What became of them.
            extra_files: Lines of more files by name.
        """
        counts = self._write_records(items, seed, outcome)
        rejections = [*self.task_rejections, *outcome.rejections]
        lines = {**extra_files, REJECTED_FILE: (json.dumps(item._asdict()) + "\n" for item in rejections)}
        for name, content in lines.items():
            with atomic_path(self.folder / name) as temporary, open(temporary, "w", encoding="utf-8") as file:
                file.writelines(content)
        report = SynthesisReport(
            num_wanted=total,
            num_records=counts,
            rejected=dict(Counter(item.reason for item in rejections).most_common()),
            repaired=dict(outcome.repairs.most_common()),
            num_given_up=total - len(outcome.attempts) - outcome.num_unasked,
            num_unasked=outcome.num_unasked,
            num_answers=len(self.journal),
            prompt_tokens=self.journal.prompt_tokens,
            completion_tokens=self.journal.completion_tokens,
            retries=dict(self.asker.retries.most_common()),
            cost=self.asker.spending.cost(self.journal.prompt_tokens, self.journal.completion_tokens),
            complete=not self.asker.exhausted,
        )
        before = check_manifest(self.folder, {}).get("files", {})
        hashes = {name: file_sha256(self.folder / name) for name in sorted({*counts, *lines})}
        write_manifest(
            self.folder, {**self.fields, "complete": report.complete, "files": hashes, "report": asdict(report)}
        )
        # An earlier run may have asked for more.
        for name in set(before) - set(hashes):
            (self.folder / name).unlink(missing_ok=True)
        return report

    def _write_records(self, items: Callable[[], Iterable[Item]], seed: int, outcome: Outcome) -> dict[str, int]:
        """Write the records of all accepted answers in the order of the items; returns how many each file has."""
        counts: Counter[str] = Counter()
        if not outcome.attempts:
            return {}
        with ExitStack() as stack:
            files: dict[str, TextIO] = {}
            for place, item in enumerate(items()):
                if place not in outcome.attempts:
                    continue
                if item.file not in files:
                    temporary = stack.enter_context(atomic_path(self.folder / item.file))
                    files[item.file] = stack.enter_context(open(temporary, "w", encoding="utf-8"))
                answer = self.journal.get(item.request(seed, outcome.attempts[place]).key)
                assert answer is not None
                files[item.file].write(json.dumps(item.draft(answer).fields, ensure_ascii=False) + "\n")
                counts[item.file] += 1
        return dict(sorted(counts.items()))


def finished_report(folder: Path, fields: Mapping[str, Any]) -> SynthesisReport | None:
    """The report of a job that was finished with these fields and whose files are as it left them, or None.

    Raises:
        InputError: If a file is there and is another one.
    """
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
    folder: Path,
    identity: Mapping[str, Any],
    size: Mapping[str, Any],
    client: ChatClient,
    traffic: Traffic,
    spending: Spending,
) -> Iterator[Job]:
    """A job's folder, made if there is none, and held by this process until leaving.

    A folder that a mistake of the user's leaves without any answer is removed again if it is new.

    Args:
        folder: The folder: new, empty, or an earlier run's of the same job.
        identity: What decides prompts and records: an earlier run must have the same. JSON types.
        size: How much is asked for, which may change from run to run.
        client: The endpoint.
        traffic: How it is used.
        spending: What it may cost.

    Raises:
        InputError: If the folder holds something else, or a job of another identity; the message names the field.
    """
    fields = json.loads(json.dumps({**identity, **size}))
    was_there = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    _check_folder(folder, {name: fields[name] for name in identity})
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    is_empty = False
    try:
        with open_journal(folder / JOURNAL_FILE) as journal:
            try:
                if not (folder / "manifest.json").exists():
                    write_manifest(folder, {**fields, "complete": False})
                with Asker(client, journal, traffic, spending) as asker:
                    yield Job(folder, journal, asker, fields)
            finally:
                is_empty = not len(journal)
    except UserError:
        if is_empty and not was_there:
            for path in folder.iterdir():
                path.unlink()
            for path in made:
                shutil.rmtree(path) if path == folder else path.rmdir()
        raise


def _check_folder(folder: Path, identity: Mapping[str, Any]) -> None:
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not (folder / "manifest.json").is_file():
        # A kill before the first manifest leaves an empty journal, at most.
        left = [path for path in folder.iterdir() if path.name != JOURNAL_FILE] if folder.is_dir() else [folder]
        if any(not path.name.startswith(".manifest.json.") for path in left):
            raise InputError(str(folder), "something else lies there already", "name a new folder")
        return
    found = check_manifest(folder, {})
    for name, value in identity.items():
        if found.get(name) != value:
            raise InputError(
                str(folder),
                f"was begun with {name} {found.get(name)!r}, this line has {value!r}",
                "repeat the line that began it, or name a new folder",
            )
