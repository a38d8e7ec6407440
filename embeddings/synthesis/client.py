"""Client of OpenAI-compatible chat-completion endpoints: single requests, and many within rate limits and a budget."""

import asyncio
import hashlib
import io
import json
import os
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self
from urllib.parse import urlsplit

from tqdm import tqdm

from embeddings.common.errors import InputError, OptionError, UserError, require
from embeddings.common.io import file_lock, fsync_path
from embeddings.common.jobs import progress_bar
from embeddings.common.process import logger
from embeddings.common.random import derive_seed
from embeddings.common.text import one_line
from embeddings.synthesis.validate import Answer

API_KEY_VARIABLE = "OPENAI_API_KEY"
# `extra_body` must not set these fields: the job sets them itself.
_RESERVED_FIELDS = frozenset({"messages", "model", "stream", "n"})
_RETRIED_STATUSES = frozenset({408, 409, 425, 429})
_REFUSAL_STATUSES = frozenset({400, 403, 413, 422})
_MAX_SHOWN_CHARACTERS = 160


class EndpointError(UserError):
    """The endpoint has stopped answering. Earlier answers are saved; the same command resumes."""

    exit_code = 74

    def __init__(self, endpoint: str, problem: str, hint: str) -> None:
        super().__init__(f"{endpoint}: {problem}; {hint}")


class UnansweredError(Exception):
    """A failed request; reports count failures by `kind`. If `is_final`, a retry would fail too."""

    def __init__(
        self, kind: str, detail: str = "", retry_after_seconds: float | None = None, is_final: bool = False
    ) -> None:
        super().__init__(f"{kind} ({detail})" if detail else kind)
        self.kind, self.retry_after_seconds, self.is_final = kind, retry_after_seconds, is_final


class Request(NamedTuple):
    """One prompt, sent as one user message.

    Attributes:
        key: Name of the request in the journal.
        prompt: Text of the message.
        seed: Random seed that is sent to the endpoint.
        wants_object: Whether the answer should be a JSON object.
    """

    key: str
    prompt: str
    seed: int
    wants_object: bool = True


def make_request(name: str, prompt: str, seed: int, wants_object: bool = True) -> Request:
    """A request; its key contains a hash of the prompt, so that a saved answer is never used for another prompt."""
    digest = hashlib.blake2b(prompt.encode(), digest_size=8).hexdigest()
    return Request(f"{name}/{digest}", prompt, derive_seed(seed, "request", name) % 2**31, wants_object)


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

    Raises:
        OptionError: If a value is invalid.
    """

    model: str
    temperature: float | None = 1.0
    max_answer_tokens: int = 4096
    token_limit_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    json_mode: bool = False
    extra_body: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.temperature is not None and not 0 <= self.temperature <= 2:
            raise OptionError("temperature", self.temperature, "must be between 0 and 2", "null omits it")
        if self.max_answer_tokens < 1:
            raise OptionError("max_answer_tokens", self.max_answer_tokens, "must be >= 1", "4096 is the default")
        if reserved := sorted(_RESERVED_FIELDS & set(self.extra_body or {})):
            raise OptionError("extra_body", reserved[0], "must not contain fields that the job sets", "remove it")

    @property
    def fields(self) -> dict[str, Any]:
        """The options that affect the answers, for the manifest."""
        values = {name: value for name, value in asdict(self).items() if name != "token_limit_field"}
        return {**values, "extra_body": dict(self.extra_body or {})}

    def body(self, request: Request) -> dict[str, Any]:
        """The fields of a request."""
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


class ChatClient:
    """A client of one endpoint that tries each request once; the API key is read from the environment.

    Args:
        endpoint: Base URL, such as `http://localhost:8000/v1`.
        sampling: The model and its sampling options.
        timeout_seconds: Timeout of a request, including its complete answer.

    Raises:
        OptionError: If the endpoint is not an HTTP URL.
        MissingExtraError: If OpenAI's client is not installed.
    """

    def __init__(self, endpoint: str, sampling: Sampling, timeout_seconds: float = 120.0) -> None:
        if not _is_http_url(endpoint):
            raise OptionError("endpoint", endpoint, "must be an HTTP URL", "write it as http://HOST:PORT/v1")
        self.endpoint, self.sampling, self.timeout_seconds = endpoint, sampling, timeout_seconds
        self._openai: Any = require("openai", "synthesis")
        self._client: Any = None

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[None]:
        """The context in which `ask` may be called; connections belong to the current event loop."""
        async with self._openai.AsyncOpenAI(
            base_url=self.endpoint,
            # The client requires a key; a server without authentication ignores it.
            api_key=os.environ.get(API_KEY_VARIABLE) or "none",
            timeout=self.timeout_seconds,
            max_retries=0,
        ) as self._client:
            yield

    async def ask(self, request: Request) -> Answer:
        """The answer to a request; a refusal of the prompt is also returned as an answer.

        Raises:
            UnansweredError: If the request failed.
            InputError: If the URL, the key or the model is wrong.
        """
        try:
            async with asyncio.timeout(self.timeout_seconds):
                response = await self._client.chat.completions.with_raw_response.create(
                    **self.sampling.body(request), extra_body=dict(self.sampling.extra_body or {})
                )
                content = response.http_response.content
        except (TimeoutError, self._openai.APITimeoutError):
            raise UnansweredError(f"no answer in {self.timeout_seconds:g} s") from None
        except self._openai.APIConnectionError as error:
            raise UnansweredError(
                "no connection", one_line(str(error.__cause__ or error), _MAX_SHOWN_CHARACTERS)
            ) from None
        except self._openai.APIStatusError as error:
            return self._error_answer(error)
        return _parse_response(content)

    def _error_answer(self, error: Any) -> Answer:
        """The refusal that an HTTP error status means; other statuses raise one of the errors of `ask`."""
        status, body = int(error.status_code), error.body
        text = body.get("message") if isinstance(body, dict) else body
        message = one_line(str(text), _MAX_SHOWN_CHARACTERS)
        if status in _REFUSAL_STATUSES:
            return Answer(None, refused=f"status {status}: {message}")
        if status in (401, 404):
            fix = f"check --endpoint, --model and the environment variable {API_KEY_VARIABLE}"
            raise InputError(self.endpoint, f"answers with status {status} ({message})", fix)
        quota_exceeded = status == 402 or error.code == "insufficient_quota"
        if status in _RETRIED_STATUSES or status >= 500 or quota_exceeded:
            wait = _seconds(error.response.headers.get("retry-after"))
            raise UnansweredError(f"status {status}", message, wait, quota_exceeded)
        raise InputError(self.endpoint, f"answers with status {status} ({message})", "check --endpoint")


def _parse_response(content: bytes) -> Answer:
    """The answer in the body of a response; an `UnansweredError` if the body is not a chat completion."""
    try:
        body = json.loads(content)
        choice = body["choices"][0]
        message = choice["message"]
        text, reason, refusal = message.get("content"), choice.get("finish_reason"), message.get("refusal")
        usage = body.get("usage") or {}
        counts = [usage.get(name) for name in ("prompt_tokens", "completion_tokens")]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise UnansweredError("the response is not a chat completion") from None
    prompt_tokens, completion_tokens = (
        count if isinstance(count, int) and not isinstance(count, bool) and count >= 0 else None for count in counts
    )
    return Answer(
        text if isinstance(text, str) else None,
        reason if isinstance(reason, str) else None,
        one_line(refusal, _MAX_SHOWN_CHARACTERS) if isinstance(refusal, str) and refusal else None,
        prompt_tokens,
        completion_tokens,
    )


def _seconds(header: str | None) -> float | None:
    """The seconds of a `Retry-After` header; None for a date or anything else."""
    try:
        seconds = float(header or "")
    except ValueError:
        return None
    return seconds if 0 <= seconds < float("inf") else None


def _is_http_url(endpoint: str) -> bool:
    try:
        parts = urlsplit(endpoint)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


# Concurrent requests within limits and a budget, and the journal of their answers.

BACKOFF_SECONDS = 1.0
_MAX_BACKOFF_SECONDS = 60.0
_MAX_RETRY_AFTER_SECONDS = 600.0
# Tokens that an endpoint's chat template adds to a prompt. Otherwise a prompt has at most one token per byte.
_PROMPT_OVERHEAD = 64
_MINUTE = 60.0


@dataclass(frozen=True)
class Limits:
    """Limits on the use of an endpoint.

    Args:
        max_attempts: Maximum requests for one record, if its answers are rejected.
        concurrency: Concurrent requests.
        requests_per_minute: Maximum requests per minute, including retries; None for no limit.
        tokens_per_minute: Maximum tokens per minute, on average; None for no limit. The tokens of an answer are not
            known in advance, so concurrent requests may exceed the rate; later requests then wait longer.
        max_retries: Maximum retries of a failed request, after increasing waits, before the job stops.
        timeout_seconds: Timeout of one request.

    Raises:
        OptionError: If a value is invalid.
    """

    max_attempts: int = 3
    concurrency: int = 8
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    max_retries: int = 8
    timeout_seconds: float = 120.0

    def __post_init__(self) -> None:
        for name, minimum in (("max_attempts", 1), ("concurrency", 1), ("max_retries", 0)):
            if getattr(self, name) < minimum:
                raise OptionError(name, getattr(self, name), f"must be >= {minimum}", "leave it out for the default")
        for name in ("requests_per_minute", "tokens_per_minute", "timeout_seconds"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise OptionError(name, value, "must be > 0", "leave it out for the default")


@dataclass(frozen=True)
class Budget:
    """Token budget and prices of a job.

    Args:
        token_budget: Maximum tokens of the job, prompts and answers, including earlier runs in the same folder. When it
            is used up, the job ends with the records so far. None for no limit.
        price_per_million_prompt_tokens: Price of a million prompt tokens, in any currency, for the cost report.
        price_per_million_completion_tokens: Price of a million answer tokens.

    Raises:
        OptionError: If a value is invalid, or only one price is set.
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
                raise OptionError(name, price, "needs the other price", "set both or neither")

    @property
    def needs_counts(self) -> bool:
        return self.token_budget is not None or self.price_per_million_prompt_tokens is not None

    def cost(self, prompt_tokens: int, completion_tokens: int) -> float | None:
        prices = self.price_per_million_prompt_tokens, self.price_per_million_completion_tokens
        if prices[0] is None or prices[1] is None:
            return None
        return (prompt_tokens * prices[0] + completion_tokens * prices[1]) / 1e6


class RateLimiter:
    """Spaces requests evenly, without bursts; requests also wait until earlier answers fit the token rate."""

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
        """Wait until the next request may be sent."""
        start = max(self._next_request, self._clock())
        self._next_request = start + self._seconds_per_request
        # Tokens spent and pauses set during the wait prolong it.
        while (seconds := max(start, self._next_token, self._pause_end) - self._clock()) > 0:
            await self._sleep(seconds)

    def spend(self, num_tokens: int) -> None:
        self._next_token = max(self._next_token, self._clock()) + num_tokens * self._seconds_per_token

    def pause(self, seconds: float) -> None:
        """Send no request during the next `seconds`."""
        self._pause_end = max(self._pause_end, self._clock() + seconds)


class Journal:
    """A file of answers by the key of their request, one JSON line each, on disk before `append` returns.

    An incomplete last line, from a killed process, is removed when the file is opened again. Any earlier line that is
    not an answer is an `InputError`. Only keys and file offsets are in memory.

    Attributes:
        prompt_tokens: Tokens of all prompts so far, as reported by the endpoint.
        completion_tokens: Tokens of all answers so far, as reported by the endpoint.
        num_answers: Answers so far without refusals.
    """

    def __init__(self, path: Path, file: io.FileIO, reader: io.BufferedReader) -> None:
        self.path, self._file, self._reader = path, file, reader
        self.prompt_tokens = self.completion_tokens = self.num_answers = 0
        self._offsets: dict[str, int] = {}
        self._read()

    def __len__(self) -> int:
        return len(self._offsets)

    def __contains__(self, key: str) -> bool:
        return key in self._offsets

    def get(self, key: str) -> Answer | None:
        """The answer to a request, or None if there is none yet."""
        offset = self._offsets.get(key)
        if offset is None:
            return None
        self._reader.seek(offset)
        return _saved_answer(json.loads(self._reader.readline()))

    def append(self, key: str, answer: Answer) -> None:
        """Save the first and only answer to a request; it is on disk when this returns."""
        assert key not in self._offsets
        # ASCII escapes, since an answer may contain unpaired surrogates.
        line = json.dumps({"key": key, **answer._asdict()}).encode("ascii") + b"\n"
        offset = self._file.seek(0, os.SEEK_END)
        try:
            view = memoryview(line)
            while view:
                view = view[self._file.write(view) or 0 :]
            os.fsync(self._file.fileno())
        except OSError:
            # After a full disk, the next line must not follow an incomplete one.
            with suppress(OSError):
                self._file.truncate(offset)
            raise
        self._register(key, offset, answer)

    def _register(self, key: str, offset: int, answer: Answer) -> None:
        self._offsets[key] = offset
        self.prompt_tokens += answer.prompt_tokens or 0
        self.completion_tokens += answer.completion_tokens or 0
        self.num_answers += answer.refused is None

    def _read(self) -> None:
        """Register all answers, and truncate an incomplete last line."""
        offset = 0
        for number, line in enumerate(self._reader, start=1):
            try:
                if not line.endswith(b"\n"):
                    raise ValueError
                fields = json.loads(line)
                key, answer = fields["key"], _saved_answer(fields)
            except (ValueError, KeyError, TypeError):
                if self._reader.read(1):
                    hint = "remove the line, or use another folder"
                    raise InputError(f"{self.path}:{number}", "is not a saved answer", hint) from None
                break
            if key not in self._offsets:
                self._register(key, offset, answer)
            offset += len(line)
        self._file.truncate(offset)


@contextmanager
def open_journal(path: Path) -> Iterator[Journal]:
    """A journal that is locked by this process, and closed at the end of the context."""
    lock = path.with_name(f".{path.name}.lock")
    with file_lock(lock, wait=False) as is_locked:
        if not is_locked:
            raise InputError(str(path), "is in use by another process", "wait for it, or use another folder")
        try:
            with open(path, "ab", buffering=0) as file, open(path, "rb") as reader:
                fsync_path(path.parent)
                yield Journal(path, file, reader)
        finally:
            lock.unlink(missing_ok=True)


def _saved_answer(fields: dict[str, Any]) -> Answer:
    return Answer(**{name: fields[name] for name in Answer._fields})


class RequestRunner:
    """Sends requests to an endpoint and saves the answers in a journal; an answered request is never sent again.

    A failed request is retried after a wait that doubles each time, or that the endpoint requests. If the job must
    stop, answers to requests in flight are still awaited and saved.

    Guarantees: with a token budget, no request is sent that could exceed it, if the endpoint's tokenizer makes at most
        one token per byte. The maximum tokens of a request in flight are reserved until its answer arrives.

    Attributes:
        retries: Number of retries, by kind of failure.
        exhausted: Whether a request was not sent because of the budget.
    """

    def __init__(self, client: ChatClient, journal: Journal, limits: Limits, budget: Budget) -> None:
        self.client, self.journal, self.limits, self.budget = client, journal, limits, budget
        self.retries: Counter[str] = Counter()
        self.exhausted = False
        self._rate = RateLimiter(limits, sleep=self._sleep)
        self._reserved = 0
        self._failure: UserError | None = None
        self._stopped, self._settled = asyncio.Event(), asyncio.Condition()
        # One event loop for the whole job, since connections belong to an event loop.
        self._loop, self._connection = asyncio.Runner(), client.connected()

    def __enter__(self) -> Self:
        self._loop.run(self._connection.__aenter__())
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.run(self._connection.__aexit__(None, None, None))
        self._loop.close()

    def run(self, requests: Iterable[Request], total: int, title: str) -> None:
        """Send the requests that have no answer yet, iterating lazily; a progress bar shows `title` and `total`.

        Raises:
            InputError: If the URL, the key or the model is wrong, or the endpoint refuses the first request.
            EndpointError: If the last retry of a request failed.
        """
        with progress_bar(total, title, "answer") as bar:
            self._loop.run(self._run(self._unanswered(requests, bar), bar))
        if self._failure is not None:
            raise self._failure

    def _unanswered(self, requests: Iterable[Request], bar: "tqdm[Any]") -> Iterator[Request]:
        """The requests without an answer in the journal; the bar does not count the others in its rate."""
        for request in requests:
            if request.key in self.journal:
                bar.initial += 1
                bar.update()
            else:
                yield request

    async def _run(self, requests: Iterator[Request], bar: "tqdm[Any]") -> None:
        await asyncio.gather(*(self._work(requests, bar) for _ in range(self.limits.concurrency)))

    async def _work(self, requests: Iterator[Request], bar: "tqdm[Any]") -> None:
        """Process requests one after another until none remain or the job must stop."""
        for request in requests:
            reserve = len(request.prompt.encode()) + _PROMPT_OVERHEAD + self.client.sampling.max_answer_tokens
            if self._stopped.is_set() or not await self._reserve(reserve):
                return
            try:
                self._save(request, await self._answer(request))
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
        """Wait until the remaining budget covers the tokens, and reserve them; False if it never will."""
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

    def _save(self, request: Request, answer: Answer) -> None:
        """Add an answer to the journal and count its tokens."""
        if answer.refused is not None and answer.prompt_tokens is None and not self.journal.num_answers:
            # No request has been answered yet, so the cause is not this prompt.
            hint = "check the model and the options of the request"
            raise InputError(self.client.endpoint, f"refuses the request ({answer.refused})", hint)
        self.journal.append(request.key, answer)
        if answer.refused is None and answer.prompt_tokens is None and self.budget.needs_counts:
            hint = "leave token_budget and the prices out"
            raise InputError(self.client.endpoint, "does not report the tokens of its answers", hint)
        self._rate.spend((answer.prompt_tokens or 0) + (answer.completion_tokens or 0))

    async def _answer(self, request: Request) -> Answer:
        """The answer to one request, after up to `max_retries` retries."""
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
                    retries = self.limits.max_retries
                    logger.warning("%s: %s; retrying, at most %d times", self.client.endpoint, failure, retries)
                self.retries[failure.kind] += 1
                await self._back_off(retry, failure.retry_after_seconds)
        raise AssertionError

    async def _back_off(self, retry: int, retry_after_seconds: float | None) -> None:
        """Wait before a retry; a wait that the endpoint requests applies to all requests."""
        if retry_after_seconds is not None:
            seconds = min(retry_after_seconds, _MAX_RETRY_AFTER_SECONDS)
            self._rate.pause(seconds)
        else:
            seconds = min(_MAX_BACKOFF_SECONDS, BACKOFF_SECONDS * 2.0**retry) * random.uniform(0.5, 1.0)
        await self._sleep(seconds)

    async def _sleep(self, seconds: float) -> None:
        """Sleep; if the job stops meanwhile, raise its error to end the request."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._stopped.wait(), seconds)
        if self._failure is not None:
            raise self._failure
