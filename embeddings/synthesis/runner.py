"""Many requests of one job: the journal of their answers, the share of each process, the budget, and concurrency."""

import asyncio
import io
import json
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

from tqdm import tqdm

from embeddings.common.errors import InputError, OptionError
from embeddings.common.io import file_lock, fsync_path
from embeddings.common.jobs import ArrayTask
from embeddings.common.process import logger
from embeddings.common.progress import progress_bar
from embeddings.common.text import one_line
from embeddings.synthesis.client import FIRST_CONCURRENCY, MAX_SHOWN_CHARACTERS, ChatClient, Request, Sampling
from embeddings.synthesis.validate import Answer, RejectedAnswer

# Answers of which a job reads the share of unusable ones: at least the first number, at most the second.
FEW_ANSWERS, MANY_ANSWERS = 20, 50
# Tokens that an endpoint's chat template adds to a prompt. Otherwise a prompt has at most one token per byte.
_PROMPT_OVERHEAD = 64
# Bytes of a token, to estimate what prompts cost.
_TOKEN_BYTES = 4
# Interval at which progress is shown, and at which the work of other processes is looked at.
_POLL_SECONDS = 1.0

# The requests of a job, made anew at each call, each with the number that decides which process sends it.
Numbered = Callable[[], Iterable[tuple[int, Request]]]


class Journal:
    """The answers of a job by the key of their request, on disk before `append` returns.

    Each process appends to its own file, one JSON line per answer, and reads those of the others (`journal*.jsonl`). An
    incomplete last line, from a killed process, is removed when the process opens its file again.

    Attributes:
        limit: Maximum tokens of an answer: one that was cut off at fewer counts as missing. None for no limit.
    """

    def __init__(self, path: Path, file: io.FileIO, task: ArrayTask) -> None:
        self.path, self._file, self._task = path, file, task
        self.limit: int | None = None
        self.prompt_tokens = self.completion_tokens = self.num_answers = 0
        self._answers: dict[str, Answer] = {}
        # Tokens of each file, and the bytes and lines of it that were read.
        self._tokens, self._read = Counter[Path](), dict[Path, tuple[int, int]]()
        self._load(path)
        file.truncate(self._read[path][0])
        self.refresh()

    def __len__(self) -> int:
        return len(self._answers)

    def get(self, key: str) -> Answer | None:
        answer = self._answers.get(key)
        if answer is not None and answer.limit is not None and answer.limit < (self.limit or 0):
            return None
        return answer

    def refresh(self) -> None:
        """Read what other processes have saved since the last call."""
        for path in journal_paths(self.path.parent):
            if path != self.path:
                self._load(path)

    def _load(self, path: Path) -> None:
        size, number = self._read.get(path, (0, 0))
        with open(path, "rb") as file:
            file.seek(size)
            lines = file.read().splitlines(keepends=True)
        for position, line in enumerate(lines, start=1):
            try:
                if not line.endswith(b"\n"):
                    raise ValueError
                fields = json.loads(line)
                fields.setdefault("limit", None)
                key, answer = fields["key"], Answer(**{name: fields[name] for name in Answer._fields})
            except (ValueError, KeyError, TypeError, AttributeError):
                if position < len(lines):
                    hint = "remove the line, or use another folder"
                    raise InputError(f"{path}:{number + 1}", "is not a saved answer", hint) from None
                break
            self._register(path, key, answer)
            size, number = size + len(line), number + 1
        self._read[path] = size, number

    def append(self, key: str, answer: Answer) -> None:
        """Write an answer and wait until it is on the disk; an `OSError` leaves the file as it was."""
        assert self.get(key) is None
        # ASCII escapes, since an answer may contain unpaired surrogates.
        line = json.dumps({"key": key, **answer._asdict()}).encode("ascii") + b"\n"
        size = self._file.seek(0, os.SEEK_END)
        try:
            view = memoryview(line)
            while view:
                view = view[self._file.write(view) or 0 :]
            os.fsync(self._file.fileno())
        except OSError:
            # After a full disk, the next line must not follow an incomplete one.
            with suppress(OSError):
                self._file.truncate(size)
            raise
        self._register(self.path, key, answer)

    def _register(self, path: Path, key: str, answer: Answer) -> None:
        known = self._answers.get(key)
        # Of two answers, as of a share that two processes had, the one that was cut off later or not at all.
        if known is None or (known.limit is not None and (answer.limit is None or answer.limit > known.limit)):
            self._answers[key] = answer
        prompt, completion = answer.prompt_tokens or 0, answer.completion_tokens or 0
        self.prompt_tokens += prompt
        self.completion_tokens += completion
        self._tokens[path] += prompt + completion
        self.num_answers += answer.refused is None

    def tokens_left(self, budget: int) -> int:
        """The tokens that this process may spend: all, or an equal share of what is not spent outside its array."""
        if self._task.count == 1:
            return budget - self.prompt_tokens - self.completion_tokens
        names = {journal_name(ArrayTask(index, self._task.count)) for index in range(self._task.count)}
        elsewhere = sum(tokens for path, tokens in self._tokens.items() if path.name not in names)
        return (budget - elsewhere) // self._task.count - self._tokens[self.path]


def journal_name(task: ArrayTask) -> str:
    return "journal.jsonl" if task.count == 1 else f"journal-{task.index:05d}.jsonl"


def journal_paths(folder: Path) -> list[Path]:
    return sorted(folder.glob("journal*.jsonl"))


@contextmanager
def open_journal(folder: Path, task: ArrayTask | None = None) -> Iterator[Journal]:
    """A task's journal in a folder, locked by this process, and closed at the end of the context."""
    task = task or ArrayTask()
    path = folder / journal_name(task)
    with _locked(path):
        for other in journal_paths(folder):
            # A process alone and the tasks of an array would send the same requests.
            is_checked = (task.count == 1 or other.name == journal_name(ArrayTask())) and other != path
            if is_checked and _lock_of(other).exists():
                with _locked(other):
                    pass
        with open(path, "ab", buffering=0) as file:
            fsync_path(folder)
            yield Journal(path, file, task)


def _lock_of(journal: Path) -> Path:
    return journal.with_name(f".{journal.name}.lock")


@contextmanager
def _locked(journal: Path) -> Iterator[None]:
    """The lock of a journal; refused if another process has it."""
    lock = _lock_of(journal)
    with file_lock(lock, wait=False) as is_locked:
        if not is_locked:
            raise InputError(str(journal), "is in use by another process", "wait for it, or use another folder")
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


class Concurrency:
    """The number of concurrent requests: it doubles from 2 while the answers then come faster, up to a maximum.

    The rate is measured in tokens, over three answers for each request in flight, after one for each as a warm-up. If a
    doubling does not raise it by a fifth, it is taken back, and tried again eight measurements later (`num_rests`).
    Retries halve the number (`value`).
    """

    def __init__(self, maximum: int) -> None:
        self.maximum, self.value = maximum, min(FIRST_CONCURRENCY, maximum)
        self.num_rests, self._num_retries = 0, 0
        # The rate before the last doubling, and whether this doubling is still on trial.
        self._rate, self._is_trial = 0.0, False
        self.restart()

    def restart(self) -> None:
        self._num_answers, self._num_tokens, self._start = 0, 0, 0.0

    def record(self, answer: Answer, num_retries: int, now: float) -> None:
        """Register an answer that came `now`, in seconds, and the number of retries of the job so far."""
        self._num_answers += 1
        if self._num_answers <= self.value:
            self._start = now
            return
        self._num_tokens += (answer.completion_tokens or len(answer.content or "") // 4) + 1
        if self._num_answers < 4 * self.value:
            return
        rate = self._num_tokens / max(now - self._start, 1e-9)
        if num_retries > self._num_retries or (self._is_trial and rate < 1.2 * self._rate):
            self.value, self._is_trial, self.num_rests = max(1, self.value // 2), False, 8
        elif self.num_rests:
            self.num_rests -= 1
        else:
            self._is_trial = self.value < self.maximum
            self.value, self._rate = min(2 * self.value, self.maximum), rate
        self._num_retries = num_retries
        self.restart()


class RequestRunner:
    """Sends requests to an endpoint and saves the answers in a journal; an answered request is never sent again.

    If the job must stop, answers to requests in flight are still awaited and saved. With a token budget, no request is
    sent that could exceed it, if the endpoint's tokenizer makes at most one token per byte.

    Attributes:
        num_tokens_needed: Tokens that the first request which exceeded the budget could take; 0 if none has.
        hint: What to do about a model whose answers cannot be used; None for the advice of a synthesis job.
    """

    def __init__(self, client: ChatClient, journal: Journal, task: ArrayTask | None = None) -> None:
        self.client, self.journal, self.task = client, journal, task or ArrayTask()
        journal.limit = client.sampling.max_answer_tokens
        client.stopped, client.num_tasks = False, self.task.count
        self.num_tokens_needed = 0
        self.hint: str | None = None
        self._failure: Exception | None = None
        self._concurrency = Concurrency(client.limits.concurrency)
        self._num_answers = self._num_usable = 0
        # The last answers: None for a usable one.
        self._recent: deque[str | None] = deque(maxlen=MANY_ANSWERS)
        # One event loop for the whole job, since connections belong to an event loop.
        self._loop, self._connection = asyncio.Runner(), client.connected()

    def __enter__(self) -> Self:
        self._loop.run(self._connection.__aenter__())
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.run(self._connection.__aexit__(None, None, None))
        self._loop.close()

    @property
    def exhausted(self) -> bool:
        return self.num_tokens_needed > 0

    def _announce(self, requests: Iterable[Request]) -> None:
        """Say what the requests without an answer may cost, before the first is sent."""
        sizes = [request.num_bytes for request in requests if self.journal.get(request.key) is None]
        if sizes:
            model, max_tokens = self.client.sampling.model, self.client.sampling.max_answer_tokens
            prompts = f"some {sum(sizes) // _TOKEN_BYTES:,} tokens of prompts (estimated)"
            answers = f"at most {max_tokens * len(sizes):,} of answers; {len(self.journal):,} answers are saved"
            logger.info("%s: %s requests, %s and %s", model, f"{len(sizes):,}", prompts, answers)

    def run(self, requests: Numbered, total: int, title: str) -> None:
        """Send the requests that have no answer yet, and those that follow unusable answers (`Request.retry`).

        The tasks of an array first send their own share, then the shares of tasks that do not run; at the end all
        requests are answered, also those that other tasks sent, unless the budget is used up.
        """
        count = self.task.count
        shares = [(self.task.index + step) % count for step in range(count)]
        self._announce(request for _, request in requests())
        with progress_bar(total, title, "answer") as bar:
            for wait in (False, True):
                shares = [share for share in shares if not self._run_share(requests, share, title, bar, wait)]

    def _run_share(self, requests: Numbered, share: int, title: str, bar: "tqdm[Any]", wait: bool) -> bool:
        """Send the requests of one share; False if another process does and `wait` is not set."""
        lock = self.journal.path.with_name(f".{title}-{share:05d}.lock")
        while not self.exhausted:
            with file_lock(lock, wait=False) as is_held:
                if is_held:
                    # A process that waits for this lock finds the answers in the journals.
                    self.journal.refresh()
                    chosen = (request for number, request in requests() if number % self.task.count == share)
                    self._loop.run(self._run(chosen, bar, title))
                    lock.unlink(missing_ok=True)
                    if self._failure is not None:
                        raise self._failure
                    return True
            if not wait:
                return False
            self.journal.refresh()
            bar.set_description(f"{title}, waiting for other tasks ({len(self.journal):,} answers of all)")
            time.sleep(_POLL_SECONDS)
        return True

    async def _run(self, requests: Iterable[Request], bar: "tqdm[Any]", title: str) -> None:
        # The maximum tokens of each request in flight.
        running: dict[asyncio.Task[None], int] = {}
        retries = deque[Request]()
        fresh = iter(requests)
        self._concurrency.restart()
        clock = asyncio.create_task(self._show(bar, title))
        try:
            while self._failure is None and not self.exhausted:
                if len(running) >= self._concurrency.value:
                    await _first_done(running)
                    continue
                request = retries.popleft() if retries else next(fresh, None)
                if request is None:
                    if not running:
                        break
                    await _first_done(running)
                    continue
                if (answer := self.journal.get(request.key)) is not None:
                    # Not counted in the bar's rate.
                    before = bar.n
                    self._settle(request, answer, retries, bar)
                    bar.initial += bar.n - before
                    continue
                num_tokens = self._maximum_tokens(request)
                while running and self._exceeds(num_tokens + sum(running.values())):
                    await _first_done(running)
                if self.client.stopped:
                    break
                if self._exceeds(num_tokens):
                    if not len(self.journal):
                        fix = f"allow at least {num_tokens * self.task.count:,}, or fewer tokens per answer"
                        budget = self.client.limits.token_budget
                        raise OptionError("token_budget", budget, "must be enough for one request", fix)
                    self.num_tokens_needed = num_tokens
                    break
                running[asyncio.create_task(self._ask(request, retries, bar))] = num_tokens
            await asyncio.gather(*running)
        finally:
            clock.cancel()

    def _maximum_tokens(self, request: Request) -> int:
        return (
            request.num_bytes + _PROMPT_OVERHEAD * (1 + len(request.examples)) + self.client.sampling.max_answer_tokens
        )

    def _exceeds(self, num_tokens: int) -> bool:
        budget = self.client.limits.token_budget
        return budget is not None and num_tokens > self.journal.tokens_left(budget)

    async def _ask(self, request: Request, retries: deque[Request], bar: "tqdm[Any]") -> None:
        try:
            answer = await self.client.ask(request)
            self._save(request, answer)
            self._concurrency.record(answer, self.client.retries, time.monotonic())
            self._num_answers += 1
            problem = self._settle(request, answer, retries, bar)
            self._num_usable += problem is None
            self._recent.append(problem)
            self._check_recent()
        except Exception as error:
            self._failure = self._failure or error
            self.client.stopped = True

    def _save(self, request: Request, answer: Answer) -> None:
        """Add an answer to the journal, unless it shows that the endpoint cannot be used."""
        if answer.refused is not None and answer.prompt_tokens is None and not self.journal.num_answers:
            # No request has been answered yet, so the cause is not this prompt.
            hint = "check the model and the options of the request (--no-stream, if the endpoint cannot stream)"
            raise InputError(self.client.endpoint, f"refuses the request ({answer.refused})", hint)
        if answer.finish_reason == "length":
            answer = answer._replace(limit=self.client.sampling.max_answer_tokens)
        self.journal.append(request.key, answer)
        has_no_count = answer.refused is None and answer.prompt_tokens is None
        if has_no_count and self.client.limits.token_budget is not None:
            raise InputError(
                self.client.endpoint, "does not report the tokens of its answers", "leave token_budget out"
            )

    def _settle(self, request: Request, answer: Answer, retries: deque[Request], bar: "tqdm[Any]") -> str | None:
        """Read an answer; if it is unusable, queue the next request of its record. Returns the problem, if any."""
        problem = None
        try:
            request.read(request.parse(answer))
        except RejectedAnswer as rejected:
            problem = described(rejected.cause, answer.content or rejected.detail)
            if request.retry is not None:
                retries.append(request.retry())
                return problem
        bar.update()
        return problem

    def _check_recent(self) -> None:
        unusable, number = [reason for reason in self._recent if reason is not None], len(self._recent)
        if number >= FEW_ANSWERS and len(unusable) > self.client.limits.max_unusable * number:
            raise unusable_error(self.client.sampling, f"{len(unusable)} of the last {number}", unusable, self.hint)

    async def _show(self, bar: "tqdm[Any]", title: str) -> None:
        """Show the numbers of this run in the bar, also while no answer is complete."""
        while True:
            await asyncio.sleep(_POLL_SECONDS)
            facts = [f"{self.client.num_parts:,} parts received"] if self.client.num_parts else []
            if self._num_answers:
                facts.append(f"{self._num_usable} of {self._num_answers} answers usable")
            facts.append(f"{self.journal.prompt_tokens + self.journal.completion_tokens:,} tokens")
            bar.set_description(", ".join([title, *facts]))


async def _first_done(running: dict[asyncio.Task[None], int]) -> None:
    """Wait for the first of the running tasks, and remove those that are done."""
    done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        del running[task]


def described(reason: str, text: str) -> str:
    """A rejected answer in a few words: the reason, and an excerpt of its text."""
    return f"{reason.replace('_', ' ')}: {one_line(text, MAX_SHOWN_CHARACTERS // 2)!r}"


class UnusableAnswersError(InputError):
    """Too few answers of a model can be used."""


def unusable_error(
    sampling: Sampling, share: str, answers: Sequence[str], hint: str | None = None
) -> UnusableAnswersError:
    """The error of a model whose answers cannot be used; two of them are shown."""
    problem = f"{share} answers are unusable, such as {' and '.join(answers[-2:])}"
    if hint is not None:
        return UnusableAnswersError(sampling.model, problem, hint)
    hint = "name another model or other prompts, and a new folder (all answers are in the journal of this one)"
    if 2 * sum(answer.startswith("cut off") for answer in answers) > len(answers):
        hint = f"raise max_answer_tokens above {sampling.max_answer_tokens}: the same folder then asks for them again"
    return UnusableAnswersError(sampling.model, problem, hint)
