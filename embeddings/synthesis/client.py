"""Requests to an OpenAI-compatible chat endpoint, a token budget, and a journal of the answers."""

import asyncio
import hashlib
import io
import json
import os
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, dataclass
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
_REFUSAL_STATUSES = frozenset({400, 403, 413, 422})
_TEMPORARY_STATUSES = frozenset({402, 408, 409, 425, 429})
_MAX_SHOWN_CHARACTERS = 160
# Tokens that an endpoint's chat template adds to a prompt. Otherwise a prompt has at most one token per byte.
_PROMPT_OVERHEAD = 64


class EndpointError(UserError):
    """The endpoint has stopped answering. Earlier answers are saved; the same command resumes."""

    exit_code = 74

    def __init__(self, endpoint: str, problem: str) -> None:
        super().__init__(f"{endpoint}: {problem}; check the endpoint and its account; the same command resumes")


class Request(NamedTuple):
    """One prompt, sent as one user message; `key` is its name in the journal.

    `wants_object` says whether the answer should be a JSON object.
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
        max_retries: Maximum retries of a failed request before the job stops. The waits are those that the endpoint
            requests by `Retry-After`, up to two minutes, else 0.5 to 8 seconds.
        timeout_seconds: Longest wait for a part of an answer.
    """

    max_attempts: int = 3
    concurrency: int = 8
    requests_per_minute: float | None = None
    max_retries: int = 16
    timeout_seconds: float = 120.0

    def __post_init__(self) -> None:
        for name, minimum in (("max_attempts", 1), ("concurrency", 1), ("max_retries", 0)):
            if getattr(self, name) < minimum:
                raise OptionError(name, getattr(self, name), f"must be >= {minimum}", "leave it out for the default")
        for name in ("requests_per_minute", "timeout_seconds"):
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


class ChatClient:
    """A client of one endpoint; the API key is read from the environment. OpenAI's client retries failed requests.

    Args:
        endpoint: Base URL, such as `http://localhost:8000/v1`.
        sampling: The model and its sampling options.
        limits: Limits on the use of the endpoint.

    Attributes:
        retries: Number of retries.
        stopped: Whether failed requests are no longer retried.
    """

    def __init__(self, endpoint: str, sampling: Sampling, limits: Limits | None = None) -> None:
        if not _is_http_url(endpoint):
            raise OptionError("endpoint", endpoint, "must be an HTTP URL", "write it as http://HOST:PORT/v1")
        self.endpoint, self.sampling, self.limits = endpoint, sampling, limits or Limits()
        self.retries, self.stopped = 0, False
        self._openai: Any = require("openai", "synthesis")
        self._client: Any = None
        self._next_start = 0.0

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[None]:
        """The context in which `ask` may be called; connections belong to the current event loop."""
        async with self._openai.AsyncOpenAI(
            base_url=self.endpoint,
            # The client requires a key; a server without authentication ignores it.
            api_key=os.environ.get(API_KEY_VARIABLE) or "none",
            timeout=self.limits.timeout_seconds,
            max_retries=self.limits.max_retries,
            http_client=self._openai.DefaultAsyncHttpxClient(
                event_hooks={"request": [self._before_request], "response": [_check_response]}
            ),
        ) as self._client:
            yield

    async def _before_request(self, request: Any) -> None:
        """Count a retry, and wait until the request may be sent."""
        if int(request.headers.get("x-stainless-retry-count", 0)):
            if self.stopped:
                raise self._openai.OpenAIError("the job has stopped")
            if not self.retries:
                logger.warning("%s: retrying, each request at most %d times", self.endpoint, self.limits.max_retries)
            self.retries += 1
        if self.limits.requests_per_minute is not None:
            now = asyncio.get_running_loop().time()
            start = max(now, self._next_start)
            self._next_start = start + 60 / self.limits.requests_per_minute
            await asyncio.sleep(start - now)

    async def ask(self, request: Request) -> Answer:
        """The answer to a request; a refusal of the prompt is an answer too.

        An `EndpointError` says that the last retry failed, an `InputError` that the URL, the key or the model is wrong.
        """
        body, extra = self.sampling.body(request), dict(self.sampling.extra_body or {})
        try:
            return _read_answer(await self._client.chat.completions.create(**body, extra_body=extra))
        except self._openai.APITimeoutError:
            raise EndpointError(self.endpoint, f"no answer in {self.limits.timeout_seconds:g} s") from None
        except self._openai.APIStatusError as error:
            return self._refusal(error)
        except self._openai.OpenAIError as error:
            reason = one_line(str(error.__cause__ or error), _MAX_SHOWN_CHARACTERS)
            raise EndpointError(self.endpoint, f"no connection ({reason})") from None

    def _refusal(self, error: Any) -> Answer:
        """The refusal that an HTTP error status means; other statuses raise one of the errors of `ask`."""
        status, body = int(error.status_code), error.body
        text = body.get("message") if isinstance(body, dict) else body
        message = one_line(str(text), _MAX_SHOWN_CHARACTERS)
        if status in _REFUSAL_STATUSES:
            return Answer(None, refused=f"status {status}: {message}")
        if status in _TEMPORARY_STATUSES or status >= 500:
            raise EndpointError(self.endpoint, f"status {status} ({message})")
        fix = f"check --endpoint, --model and the environment variable {API_KEY_VARIABLE}"
        raise InputError(self.endpoint, f"answers with status {status} ({message})", fix)


async def _check_response(response: Any) -> None:
    """Turn a response without `choices`, such as a proxy's page, into a server error, which is retried."""
    if response.status_code == 200:
        try:
            is_completion = "choices" in json.loads(await response.aread())
        except (ValueError, TypeError, RecursionError):
            is_completion = False
        if not is_completion:
            response.status_code = 502


def _read_answer(completion: Any) -> Answer:
    """The answer in a response, whose fields OpenAI's client does not validate."""
    try:
        choice, usage = completion.choices[0], completion.usage
        text, refusal = choice.message.content, choice.message.refusal
        return Answer(
            text if isinstance(text, str) else None,
            choice.finish_reason,
            one_line(refusal, _MAX_SHOWN_CHARACTERS) if refusal else None,
            usage.prompt_tokens if usage else None,
            usage.completion_tokens if usage else None,
        )
    except (AttributeError, LookupError, TypeError):
        return Answer(None, refused="the response is not a chat completion")


def _is_http_url(endpoint: str) -> bool:
    try:
        parts = urlsplit(endpoint)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


class Journal:
    """A file of answers by the key of their request, one JSON line each, on disk before `append` returns.

    An incomplete last line, from a killed process, is removed when the file is opened again. Any earlier line that is
    not an answer is an `InputError`.

    Attributes:
        prompt_tokens: Tokens of all prompts so far, as reported by the endpoint.
        completion_tokens: Tokens of all answers so far, as reported by the endpoint.
        num_answers: Answers so far without refusals.
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
        """The answer to a request, or None if there is none yet."""
        return self._answers.get(key)

    def append(self, key: str, answer: Answer) -> None:
        """Save the first and only answer to a request."""
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
    sent that could exceed it, if the endpoint's tokenizer makes at most one token per byte; `exhausted` says whether a
    request was not sent for this reason.
    """

    def __init__(self, client: ChatClient, journal: Journal, budget: Budget) -> None:
        self.client, self.journal, self.budget = client, journal, budget
        self.exhausted = client.stopped = False
        self._failure: Exception | None = None
        # One event loop for the whole job, since connections belong to an event loop.
        self._loop, self._connection = asyncio.Runner(), client.connected()

    def __enter__(self) -> Self:
        self._loop.run(self._connection.__aenter__())
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.run(self._connection.__aexit__(None, None, None))
        self._loop.close()

    def run(self, requests: Iterable[Request], total: int, title: str) -> None:
        """Send the requests that have no answer yet, iterating lazily; the errors are those of `ChatClient.ask`."""
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
        """Whether so many more tokens might exceed the budget."""
        spent = self.journal.prompt_tokens + self.journal.completion_tokens
        return self.budget.token_budget is not None and spent + num_tokens > self.budget.token_budget

    async def _ask(self, request: Request, bar: "tqdm[Any]") -> None:
        try:
            self._save(request, await self.client.ask(request))
            bar.update()
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
        if answer.refused is None and answer.prompt_tokens is None and self.budget.needs_counts:
            hint = "leave token_budget and the prices out"
            raise InputError(self.client.endpoint, "does not report the tokens of its answers", hint)
