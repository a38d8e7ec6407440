"""Requests to an OpenAI-compatible chat endpoint, a token budget, and a journal of the answers."""

import asyncio
import hashlib
import io
import json
import os
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

from tqdm import tqdm

from embeddings.common.errors import InputError, OptionError, UserError, require
from embeddings.common.io import file_lock, fsync_path
from embeddings.common.jobs import progress_bar
from embeddings.common.process import logger
from embeddings.common.random import derive_seed
from embeddings.common.text import one_line
from embeddings.synthesis.validate import Answer, RejectedAnswer, parse_answer

API_KEY_VARIABLE = "OPENAI_API_KEY"
# `extra_body` must not set these fields: the job sets them itself.
_RESERVED_FIELDS = frozenset({"messages", "model", "stream", "n"})
_REFUSAL_STATUSES = frozenset({400, 403, 413, 422})
_NO_MONEY = 402
_TEMPORARY_STATUSES = frozenset({_NO_MONEY, 408, 409, 425, 429})
_MAX_SHOWN_CHARACTERS = 160
# The first wait before a retry, and the longest wait that an endpoint may ask for.
FIRST_DELAY = 0.5
_MAX_WAIT_SECONDS = 120.0
# Answers of which a job reads the share of unusable ones: at least the first number, at most the second.
FEW_ANSWERS, MANY_ANSWERS = 20, 50
# Tokens that an endpoint's chat template adds to a prompt. Otherwise a prompt has at most one token per byte.
_PROMPT_OVERHEAD = 64


class EndpointError(UserError):
    """The endpoint has stopped answering. Earlier answers are saved; the same command resumes."""

    exit_code = 74

    def __init__(self, endpoint: str, problem: str) -> None:
        super().__init__(f"{endpoint}: {problem}; check the endpoint and its account; the same command resumes")


class Request(NamedTuple):
    """One prompt, sent as one user message; `key` is its name in the journal.

    `read` raises `RejectedAnswer` for an answer that cannot be used.
    """

    key: str
    prompt: str
    seed: int
    read: Callable[[Any], object]
    wants_object: bool = True


def make_request(
    name: str, prompt: str, seed: int, read: Callable[[Any], object], wants_object: bool = True
) -> Request:
    """A request; its key contains a hash of the prompt, so that a saved answer is never used for another prompt."""
    digest = hashlib.blake2b(prompt.encode(), digest_size=8).hexdigest()
    return Request(f"{name}/{digest}", prompt, derive_seed(seed, "request", name) % 2**31, read, wants_object)


def check_numbers(options: object, *above_zero: str, from_zero: str) -> None:
    for name in (*above_zero, from_zero):
        value = getattr(options, name)
        if value is not None and not (value > 0 or (value == 0 and name == from_zero)):
            rule = "must be >= 0" if name == from_zero else "must be > 0"
            raise OptionError(name, value, rule, "leave it out for the default")


@dataclass(frozen=True)
class Sampling:
    """The model and its sampling options.

    Args:
        model: Name of the model at the endpoint.
        temperature: Sampling temperature; None for the endpoint's default.
        max_answer_tokens: Maximum tokens of an answer.
        token_limit_field: Request field for this limit; OpenAI's newer models require `max_completion_tokens`.
        json_mode: Whether to set `response_format` to a JSON object in requests whose answer should be one.
        extra_body: Additional fields of every request.
    """

    model: str
    temperature: float | None = 1.0
    max_answer_tokens: int = 4096
    token_limit_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    json_mode: bool = False
    extra_body: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        check_numbers(self, "max_answer_tokens", from_zero="temperature")
        if reserved := sorted(_RESERVED_FIELDS & set(self.extra_body or {})):
            raise OptionError("extra_body", reserved[0], "must not contain fields that the job sets", "remove it")

    @property
    def fields(self) -> dict[str, Any]:
        """The options that affect the answers, for the manifest."""
        values = {name: value for name, value in asdict(self).items() if name != "token_limit_field"}
        return {**values, "extra_body": dict(self.extra_body or {})}

    def body(self, request: Request) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": "user", "content": request.prompt}],
            "seed": request.seed,
            self.token_limit_field: self.max_answer_tokens,
        }
        if self.temperature is not None:
            body["temperature"] = self.temperature
        if self.json_mode and request.wants_object:
            body["response_format"] = {"type": "json_object"}
        return body


@dataclass(frozen=True)
class Limits:
    """Limits on the use of an endpoint.

    Args:
        max_attempts: Maximum requests for one record, if its answers are rejected.
        concurrency: Concurrent requests.
        requests_per_minute: Maximum requests per minute, including retries; None for no limit.
        max_retries: Maximum retries of a failed request before the job stops. A wait that the endpoint asks for
            (`Retry-After`, up to two minutes) is obeyed and not counted; requests then follow at a lower rate.
        timeout_seconds: Longest wait for a part of an answer.
        max_unusable: Share of unusable answers among the last 50, at least 20, above which the job stops.
        token_budget: Maximum tokens of the job, prompts and answers, including earlier runs in the same folder. When it
            is used up, the job ends with the records so far. None for no limit.
    """

    max_attempts: int = 3
    concurrency: int = 8
    requests_per_minute: float | None = None
    max_retries: int = 16
    timeout_seconds: float = 120.0
    max_unusable: float = 0.95
    token_budget: int | None = None

    def __post_init__(self) -> None:
        above_zero = ("max_attempts", "concurrency", "requests_per_minute", "timeout_seconds", "token_budget")
        check_numbers(self, *above_zero, from_zero="max_retries")


class _Failure(NamedTuple):
    """A request without an answer: the problem, and the seconds that the endpoint asks to wait, if it does."""

    problem: str
    wait: float | None = None
    may_retry: bool = True


class ChatClient:
    """A client of one endpoint; the API key is read from the environment. Failed requests are retried.

    Args:
        endpoint: Base URL, such as `http://localhost:8000/v1`.
        sampling: The model and its sampling options.
        limits: Limits on the use of the endpoint.
    """

    def __init__(self, endpoint: str, sampling: Sampling, limits: Limits | None = None) -> None:
        if not endpoint.startswith(("http://", "https://")):
            raise OptionError("endpoint", endpoint, "must be an HTTP URL", "write it as http://HOST:PORT/v1")
        self.endpoint, self.sampling, self.limits = endpoint, sampling, limits or Limits()
        self.retries, self.stopped = 0, False
        self._openai: Any = require("openai", "synthesis")
        self._client: Any = None
        # The time of the next request, the seconds between requests, and the refusals since the last answer.
        self._next_start, self._interval, self._num_refused = 0.0, 0.0, 0

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[None]:
        """The context in which `ask` may be called; connections belong to the current event loop."""
        self._turn = asyncio.Lock()
        async with self._openai.AsyncOpenAI(
            base_url=self.endpoint,
            # The client requires a key; a server without authentication ignores it.
            api_key=os.environ.get(API_KEY_VARIABLE) or "none",
            timeout=self.limits.timeout_seconds,
            max_retries=0,
        ) as self._client:
            yield

    async def ask(self, request: Request) -> Answer:
        """The answer to a request; a refusal of the prompt is an answer too."""
        num_failures = 0
        while True:
            await self._wait_for_turn()
            if self.stopped:
                raise EndpointError(self.endpoint, "the job has stopped")
            found = await self._send(request)
            if isinstance(found, Answer):
                self._interval, self._num_refused = self._interval * 0.9, 0
                return found
            if found.wait is None:
                num_failures += 1
            else:
                self._slow_down(found.wait)
            is_last = num_failures > self.limits.max_retries
            is_last |= self._num_refused > self.limits.max_retries * self.limits.concurrency
            if is_last or self.stopped or not found.may_retry:
                raise EndpointError(self.endpoint, found.problem)
            if not self.retries:
                logger.warning(
                    "%s: %s; retrying at most %d times", self.endpoint, found.problem, self.limits.max_retries
                )
            self.retries += 1
            if found.wait is None:
                await asyncio.sleep(min(8.0, FIRST_DELAY * 2 ** (num_failures - 1)) * random.uniform(0.75, 1.0))

    async def _wait_for_turn(self) -> None:
        async with self._turn:
            now = asyncio.get_running_loop().time()
            await asyncio.sleep(self._next_start - now)
            per_minute = self.limits.requests_per_minute
            interval = max(self._interval, 60 / per_minute if per_minute else 0.0)
            self._next_start = max(now, self._next_start) + interval

    def _slow_down(self, wait: float) -> None:
        """Obey a rate limit: no request before the wait, and then one at a time instead of all that waited."""
        self._num_refused += 1
        self._next_start = max(self._next_start, asyncio.get_running_loop().time() + wait)
        self._interval = min(wait, max(2 * self._interval, wait / self.limits.concurrency))

    async def _send(self, request: Request) -> Answer | _Failure:
        create = self._client.chat.completions.with_raw_response.create
        try:
            response = await create(**self.sampling.body(request), extra_body=dict(self.sampling.extra_body or {}))
            answer = _read_answer(response.text)
            return answer or _Failure(f"status 200 without an answer: {_reason(response.text)}")
        except self._openai.APITimeoutError:
            return _Failure(f"no answer in {self.limits.timeout_seconds:g} s")
        except self._openai.APIStatusError as error:
            status, problem = error.status_code, f"status {error.status_code}: {_reason(error.response.text)}"
            if status in _REFUSAL_STATUSES:
                return Answer(None, refused=problem)
            if status in _TEMPORARY_STATUSES or status >= 500:
                wait = _retry_after(error.response.headers.get("retry-after", ""))
                return _Failure(problem, wait, may_retry=status != _NO_MONEY and (wait or 0) <= _MAX_WAIT_SECONDS)
            fix = f"check --endpoint, --model and the environment variable {API_KEY_VARIABLE}"
            raise InputError(self.endpoint, f"answers with {problem}", fix) from None
        except self._openai.OpenAIError as error:
            return _Failure(f"no connection ({one_line(str(error.__cause__ or error), _MAX_SHOWN_CHARACTERS)})")


def _read_answer(text: str) -> Answer | None:
    """The answer in the body of a response; None if it is no completion, such as a proxy's page."""
    try:
        fields = json.loads(text)
        choices = fields["choices"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    try:
        message, usage = choices[0]["message"], fields.get("usage") or {}
        content, refusal = message.get("content"), message.get("refusal")
        return Answer(
            content if isinstance(content, str) else None,
            choices[0].get("finish_reason"),
            one_line(refusal, _MAX_SHOWN_CHARACTERS) if refusal else None,
            usage.get("prompt_tokens"),
            usage.get("completion_tokens"),
        )
    except (AttributeError, LookupError, TypeError):
        return Answer(None, refused="the response is not a chat completion")


def _reason(text: str) -> str:
    """The reason in the body of a response without an answer, or an excerpt of it."""
    with suppress(ValueError, AttributeError, RecursionError):
        fields = json.loads(text)
        reason = fields.get("error") or fields.get("detail") or fields.get("message") or text
        text = str(reason.get("message") or reason) if isinstance(reason, dict) else str(reason)
    return one_line(text, _MAX_SHOWN_CHARACTERS)


def _retry_after(value: str) -> float | None:
    """The wait that an endpoint asks for, a number of seconds or a date; None if there is none."""
    seconds = 0.0
    with suppress(ValueError):
        seconds = parsedate_to_datetime(value).timestamp() - time.time()
    with suppress(ValueError):
        seconds = float(value)
    return seconds if seconds > 0 else None


class Journal:
    """A file of answers by the key of their request, one JSON line each, on disk before `append` returns.

    An incomplete last line, from a killed process, is removed when the file is opened again.
    """

    def __init__(self, path: Path, file: io.FileIO) -> None:
        self._file = file
        self.prompt_tokens = self.completion_tokens = self.num_answers = 0
        self._answers: dict[str, Answer] = {}
        lines, size = path.read_bytes().splitlines(keepends=True), 0
        for number, line in enumerate(lines, start=1):
            try:
                if not line.endswith(b"\n"):
                    raise ValueError
                fields = json.loads(line)
                key, answer = fields["key"], Answer(**{name: fields[name] for name in Answer._fields})
            except (ValueError, KeyError, TypeError):
                if number < len(lines):
                    hint = "remove the line, or use another folder"
                    raise InputError(f"{path}:{number}", "is not a saved answer", hint) from None
                break
            self._register(key, answer)
            size += len(line)
        file.truncate(size)

    def __len__(self) -> int:
        return len(self._answers)

    def get(self, key: str) -> Answer | None:
        return self._answers.get(key)

    def append(self, key: str, answer: Answer) -> None:
        assert key not in self._answers
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
        self._register(key, answer)

    def _register(self, key: str, answer: Answer) -> None:
        self._answers[key] = answer
        self.prompt_tokens += answer.prompt_tokens or 0
        self.completion_tokens += answer.completion_tokens or 0
        self.num_answers += answer.refused is None


@contextmanager
def open_journal(path: Path) -> Iterator[Journal]:
    """A journal that is locked by this process, and closed at the end of the context."""
    lock = path.with_name(f".{path.name}.lock")
    with file_lock(lock, wait=False) as is_locked:
        if not is_locked:
            raise InputError(str(path), "is in use by another process", "wait for it, or use another folder")
        try:
            with open(path, "ab", buffering=0) as file:
                fsync_path(path.parent)
                yield Journal(path, file)
        finally:
            lock.unlink(missing_ok=True)


class RequestRunner:
    """Sends requests to an endpoint and saves the answers in a journal; an answered request is never sent again.

    If the job must stop, answers to requests in flight are still awaited and saved. With a token budget, no request is
    sent that could exceed it, if the endpoint's tokenizer makes at most one token per byte.
    """

    def __init__(self, client: ChatClient, journal: Journal) -> None:
        self.client, self.journal = client, journal
        self.exhausted = client.stopped = False
        self._failure: Exception | None = None
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

    def run(self, requests: Iterable[Request], total: int, title: str) -> None:
        """Send the requests that have no answer yet, iterating lazily."""
        with progress_bar(total, title, "answer") as bar:
            self._loop.run(self._run(requests, bar))
        if self._failure is not None:
            raise self._failure

    async def _run(self, requests: Iterable[Request], bar: "tqdm[Any]") -> None:
        # The maximum tokens of each request in flight.
        running: dict[asyncio.Task[None], int] = {}
        for request in requests:
            if self.journal.get(request.key) is not None:
                # Not counted in the bar's rate.
                bar.initial += 1
                bar.update()
                continue
            num_tokens = len(request.prompt.encode()) + _PROMPT_OVERHEAD + self.client.sampling.max_answer_tokens
            while running and (
                len(running) >= self.client.limits.concurrency or self._exceeds(num_tokens + sum(running.values()))
            ):
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    del running[task]
            if self._failure is not None:
                break
            if self._exceeds(num_tokens):
                self.exhausted = True
                break
            running[asyncio.create_task(self._ask(request, bar))] = num_tokens
        await asyncio.gather(*running)

    def _exceeds(self, num_tokens: int) -> bool:
        spent, budget = self.journal.prompt_tokens + self.journal.completion_tokens, self.client.limits.token_budget
        return budget is not None and spent + num_tokens > budget

    async def _ask(self, request: Request, bar: "tqdm[Any]") -> None:
        try:
            answer = await self.client.ask(request)
            self._save(request, answer)
            bar.update()
            self._check_usable(request, answer)
        except Exception as error:
            self._failure = self._failure or error
            self.client.stopped = True

    def _save(self, request: Request, answer: Answer) -> None:
        """Add an answer to the journal, unless it shows that the endpoint cannot be used."""
        if answer.refused is not None and answer.prompt_tokens is None and not self.journal.num_answers:
            # No request has been answered yet, so the cause is not this prompt.
            hint = "check the model and the options of the request"
            raise InputError(self.client.endpoint, f"refuses the request ({answer.refused})", hint)
        self.journal.append(request.key, answer)
        has_no_count = answer.refused is None and answer.prompt_tokens is None
        if has_no_count and self.client.limits.token_budget is not None:
            raise InputError(
                self.client.endpoint, "does not report the tokens of its answers", "leave token_budget out"
            )

    def _check_usable(self, request: Request, answer: Answer) -> None:
        """Stop the job if most of the last answers are unusable."""
        try:
            request.read(parse_answer(answer))
            self._recent.append(None)
        except RejectedAnswer as rejected:
            self._recent.append(described(rejected.reason, answer.content or rejected.detail))
        unusable, number = [reason for reason in self._recent if reason is not None], len(self._recent)
        if number >= FEW_ANSWERS and len(unusable) > self.client.limits.max_unusable * number:
            raise unusable_error(self.client.sampling.model, f"{len(unusable)} of the last {number}", unusable)


def described(reason: str, text: str) -> str:
    """A rejected answer in a few words: the reason, and an excerpt of its text."""
    return f"{reason.replace('_', ' ')}: {one_line(text, _MAX_SHOWN_CHARACTERS // 2)!r}"


def unusable_error(model: str, share: str, answers: Sequence[str]) -> InputError:
    """The error of a model whose answers cannot be used; two of them are shown."""
    problem = f"{share} answers are unusable, such as {' and '.join(answers[-2:])}"
    return InputError(model, problem, "use another model or other prompts (all answers are in journal.jsonl)")
