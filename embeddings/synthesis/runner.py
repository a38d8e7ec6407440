"""Many requests at once: limits and budget, and a journal that keeps each answer before the next request goes out."""

import asyncio
import io
import json
import os
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Self

from tqdm import tqdm

from embeddings.common.errors import InputError, OptionError, UserError
from embeddings.common.io import file_lock, fsync_path
from embeddings.common.jobs import progress_bar
from embeddings.common.process import logger
from embeddings.synthesis.client import ChatClient, EndpointError, Request, UnansweredError
from embeddings.synthesis.validate import Answer

BACKOFF_SECONDS = 1.0
_MAX_BACKOFF_SECONDS = 60.0
_MAX_RETRY_AFTER_SECONDS = 600.0
# Tokens that an endpoint adds to a prompt. A byte-level tokenizer makes at most one token a byte of the rest.
_PROMPT_OVERHEAD = 64
_MINUTE = 60.0


@dataclass(frozen=True)
class Limits:
    """How an endpoint is used.

    Args:
        max_attempts: Maximum answers for one record, where answers are rejected.
        concurrency: Requests in flight at once.
        requests_per_minute: Maximum requests a minute, retries included; None for no limit.
        tokens_per_minute: Maximum tokens a minute, on average; None for no limit. The tokens of an answer are known
            only once it is there, so requests in flight may exceed the rate, and later ones wait longer.
        max_retries: Times that a failed request is retried, each after a longer wait, before the job stops.
        timeout_seconds: Longest wait for one answer.

    Raises:
        OptionError: If a value is impossible.
    """

    max_attempts: int = 3
    concurrency: int = 8
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    max_retries: int = 8
    timeout_seconds: float = 120.0

    def __post_init__(self) -> None:
        for name, least in (("max_attempts", 1), ("concurrency", 1), ("max_retries", 0)):
            if getattr(self, name) < least:
                raise OptionError(name, getattr(self, name), f"must be >= {least}", "leave it out for the default")
        for name in ("requests_per_minute", "tokens_per_minute", "timeout_seconds"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise OptionError(name, value, "must be > 0", "leave it out for the default")


@dataclass(frozen=True)
class Budget:
    """What the answers may cost.

    Args:
        token_budget: Maximum tokens of the whole job, prompts and answers, earlier runs in the same folder included.
            The job then ends with the records that are there. None for no limit.
        price_per_million_prompt_tokens: Price of a million prompt tokens, for the cost report, in any currency.
        price_per_million_completion_tokens: Price of a million answer tokens.

    Raises:
        OptionError: If a value is impossible, or one price is given without the other.
    """

    token_budget: int | None = None
    price_per_million_prompt_tokens: float | None = None
    price_per_million_completion_tokens: float | None = None

    def __post_init__(self) -> None:
        if self.token_budget is not None and self.token_budget < 1:
            raise OptionError("token_budget", self.token_budget, "must be >= 1", "leave it out for no limit")
        names = ("price_per_million_prompt_tokens", "price_per_million_completion_tokens")
        prices = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        for name, price in prices.items():
            if not 0 <= price < float("inf"):
                raise OptionError(name, price, "must be >= 0", "leave it out for no cost report")
            if len(prices) == 1:
                raise OptionError(name, price, "needs the other price", "give both or neither")

    @property
    def needs_counts(self) -> bool:
        return self.token_budget is not None or self.price_per_million_prompt_tokens is not None

    def cost(self, prompt_tokens: int, completion_tokens: int) -> float | None:
        prices = self.price_per_million_prompt_tokens, self.price_per_million_completion_tokens
        if prices[0] is None or prices[1] is None:
            return None
        return (prompt_tokens * prices[0] + completion_tokens * prices[1]) / 1e6


class RateLimiter:
    """Spaces requests evenly, without bursts; each waits until the tokens of earlier answers are worked off."""

    def __init__(
        self,
        limits: Limits,
        sleep: Callable[[float], Awaitable[None]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._seconds_per_request = _MINUTE / limits.requests_per_minute if limits.requests_per_minute else 0.0
        self._seconds_per_token = _MINUTE / limits.tokens_per_minute if limits.tokens_per_minute else 0.0
        self._clock, self._sleep = clock, sleep
        self._next_request = self._next_token = self._pause_end = clock()

    async def wait(self) -> None:
        """Wait until a request may go out."""
        turn = max(self._next_request, self._clock())
        self._next_request = turn + self._seconds_per_request
        # Tokens spent, or a pause that begins, during the wait postpone the turn.
        while (seconds := max(turn, self._next_token, self._pause_end) - self._clock()) > 0:
            await self._sleep(seconds)

    def spend(self, num_tokens: int) -> None:
        self._next_token = max(self._next_token, self._clock()) + num_tokens * self._seconds_per_token

    def pause(self, seconds: float) -> None:
        """Let no request go out for some seconds from now."""
        self._pause_end = max(self._pause_end, self._clock() + seconds)


class Journal:
    """Answers by the key of their request, one JSON line each, on disk before `append` returns.

    A line that a kill cut off is dropped when the file is opened again; all lines before it stay. A line before the
    last that is no answer is an `InputError`. In memory are a key and a number an answer.

    Attributes:
        prompt_tokens: Tokens of all prompts so far, where the endpoint says.
        completion_tokens: Tokens of all answers so far.
        num_answers: Answers so far, refusals not counted.
    """

    def __init__(self, path: Path, file: io.FileIO, reader: io.BufferedReader) -> None:
        self.path, self._file, self._reader = path, file, reader
        self.prompt_tokens = self.completion_tokens = self.num_answers = 0
        self._places: dict[str, int] = {}
        self._read()

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, key: str) -> bool:
        return key in self._places

    def get(self, key: str) -> Answer | None:
        """The answer to a request, or None where there is none yet."""
        place = self._places.get(key)
        if place is None:
            return None
        self._reader.seek(place)
        return _answer_of(json.loads(self._reader.readline()))

    def append(self, key: str, answer: Answer) -> None:
        """Keep the answer to a request; it is on disk on return. A request is answered once."""
        assert key not in self._places
        # ASCII, so that half a surrogate pair in an answer can be written.
        line = json.dumps({"key": key, **answer._asdict()}).encode("ascii") + b"\n"
        place = self._file.seek(0, os.SEEK_END)
        try:
            view = memoryview(line)
            while view:
                view = view[self._file.write(view) or 0 :]
            os.fsync(self._file.fileno())
        except OSError:
            # On a full disk the beginning of a line must not stand before the next one.
            with suppress(OSError):
                self._file.truncate(place)
            raise
        self._note(key, place, answer)

    def _note(self, key: str, place: int, answer: Answer) -> None:
        self._places[key] = place
        self.prompt_tokens += answer.prompt_tokens or 0
        self.completion_tokens += answer.completion_tokens or 0
        self.num_answers += answer.refused is None

    def _read(self) -> None:
        """Note the place of each answer, and cut off what a kill left behind the last complete one."""
        place = 0
        for number, line in enumerate(self._reader, start=1):
            try:
                if not line.endswith(b"\n"):
                    raise ValueError
                fields = json.loads(line)
                key, answer = fields["key"], _answer_of(fields)
            except (ValueError, KeyError, TypeError):
                if self._reader.read(1):
                    hint = "take the line out, or name another folder"
                    raise InputError(f"{self.path}:{number}", "is no answer", hint) from None
                break
            if key not in self._places:
                self._note(key, place, answer)
            place += len(line)
        self._file.truncate(place)


@contextmanager
def open_journal(path: Path) -> Iterator[Journal]:
    """A journal that this process alone holds, closed on leaving."""
    lock = path.with_name(f".{path.name}.lock")
    with file_lock(lock, wait=False) as held:
        if not held:
            raise InputError(str(path), "another process is at work on it", "wait for it, or name another folder")
        try:
            with open(path, "ab", buffering=0) as file, open(path, "rb") as reader:
                fsync_path(path.parent)
                yield Journal(path, file, reader)
        finally:
            lock.unlink(missing_ok=True)


def _answer_of(fields: dict[str, Any]) -> Answer:
    return Answer(**{name: fields[name] for name in Answer._fields})


class RequestRunner:
    """Gets answers from an endpoint into a journal; a request that has an answer there is never sent again.

    A request that fails is retried after a wait that doubles, or that the endpoint asks for. Where the job has to stop,
    requests in flight are awaited and kept.

    Guarantees: with a token budget, no request goes out that could exceed it, given that the endpoint's tokenizer makes
        at most one token a byte: a request in flight counts in full until its answer is known.

    Attributes:
        retries: Requests retried, by what had happened.
        exhausted: Whether the budget has kept a request from going out.
    """

    def __init__(self, client: ChatClient, journal: Journal, limits: Limits, budget: Budget) -> None:
        self.client, self.journal, self.limits, self.budget = client, journal, limits, budget
        self.retries: Counter[str] = Counter()
        self.exhausted = False
        self._rate = RateLimiter(limits, sleep=self._sleep)
        self._reserved = 0
        self._failure: UserError | None = None
        self._stopped, self._settled = asyncio.Event(), asyncio.Condition()
        # One event loop for the job, since connections belong to one.
        self._loop, self._connection = asyncio.Runner(), client.connected()

    def __enter__(self) -> Self:
        self._loop.run(self._connection.__aenter__())
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.run(self._connection.__aexit__(None, None, None))
        self._loop.close()

    def run(self, requests: Iterable[Request], total: int, title: str) -> None:
        """Send the requests, drawn one by one, that have no answer yet; a progress bar shows `title` and `total`.

        Raises:
            InputError: If the endpoint does not know the address, the key or the model, or refuses the first request.
            EndpointError: If a request went unanswered to the last retry.
        """
        with progress_bar(total, title, "answer") as bar:
            self._loop.run(self._run(self._unanswered(requests, bar), bar))
        if self._failure is not None:
            raise self._failure

    def _unanswered(self, requests: Iterable[Request], bar: "tqdm[Any]") -> Iterator[Request]:
        """The requests without an answer in the journal; the others count as done before the clock began."""
        for request in requests:
            if request.key in self.journal:
                bar.initial += 1
                bar.update()
            else:
                yield request

    async def _run(self, requests: Iterator[Request], bar: "tqdm[Any]") -> None:
        await asyncio.gather(*(self._work(requests, bar) for _ in range(self.limits.concurrency)))

    async def _work(self, requests: Iterator[Request], bar: "tqdm[Any]") -> None:
        """Take requests, one after another, until none is left or the job has to stop."""
        for request in requests:
            reserve = len(request.prompt.encode()) + _PROMPT_OVERHEAD + self.client.sampling.max_answer_tokens
            if self._stopped.is_set() or not await self._reserve(reserve):
                return
            try:
                self._keep(request, await self._answer(request))
                bar.update()
            except UserError as error:
                self._failure = self._failure or error
                self._stopped.set()
                return
            finally:
                self._reserved -= reserve
                async with self._settled:
                    self._settled.notify_all()

    async def _reserve(self, num_tokens: int) -> bool:
        """Wait until the budget has room for some tokens, and reserve them; False if it never will."""
        budget, journal = self.budget.token_budget, self.journal
        async with self._settled:
            while budget is not None and (
                journal.prompt_tokens + journal.completion_tokens + self._reserved + num_tokens > budget
            ):
                if not self._reserved or self._stopped.is_set():
                    self.exhausted = True
                    return False
                await self._settled.wait()
            self._reserved += num_tokens
        return True

    def _keep(self, request: Request, answer: Answer) -> None:
        """Put an answer into the journal and count its tokens."""
        if answer.refused is not None and answer.prompt_tokens is None and not self.journal.num_answers:
            # Nothing was ever answered: this prompt is not the cause.
            hint = "check the model and the options of the request"
            raise InputError(self.client.endpoint, f"refuses the request ({answer.refused})", hint)
        self.journal.append(request.key, answer)
        if answer.refused is None and answer.prompt_tokens is None and self.budget.needs_counts:
            hint = "leave token_budget and the prices out"
            raise InputError(self.client.endpoint, "does not say how many tokens an answer took", hint)
        self._rate.spend((answer.prompt_tokens or 0) + (answer.completion_tokens or 0))

    async def _answer(self, request: Request) -> Answer:
        """The answer to one request, retried as often as is allowed."""
        for retry in count():
            await self._rate.wait()
            if self._failure is not None:
                raise self._failure
            try:
                return await self.client.ask(request)
            except UnansweredError as failure:
                if failure.is_final or retry >= self.limits.max_retries:
                    tried = f" (tried {retry + 1} times)" if retry else ""
                    hint = "check the endpoint and its account; the same command resumes"
                    raise EndpointError(self.client.endpoint, f"{failure}{tried}", hint) from None
                if failure.kind not in self.retries:
                    most = self.limits.max_retries
                    logger.warning("%s: %s; retrying, at most %d times", self.client.endpoint, failure, most)
                self.retries[failure.kind] += 1
                await self._back_off(retry, failure.retry_after_seconds)
        raise AssertionError

    async def _back_off(self, retry: int, retry_after_seconds: float | None) -> None:
        """Wait before a retry; a wait that the endpoint asks for holds for every request."""
        if retry_after_seconds is not None:
            seconds = min(retry_after_seconds, _MAX_RETRY_AFTER_SECONDS)
            self._rate.pause(seconds)
        else:
            seconds = min(_MAX_BACKOFF_SECONDS, BACKOFF_SECONDS * 2.0**retry) * random.uniform(0.5, 1.0)
        await self._sleep(seconds)

    async def _sleep(self, seconds: float) -> None:
        """Sleep; where the job stops meanwhile, its error ends the request."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._stopped.wait(), seconds)
        if self._failure is not None:
            raise self._failure
