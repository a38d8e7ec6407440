"""Requests to an OpenAI-compatible chat endpoint: sampling options, limits, streamed answers and retries."""

import asyncio
import hashlib
import json
import os
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from email.utils import parsedate_to_datetime
from itertools import chain
from typing import Any, Literal, NamedTuple, TypeVar

from embeddings.common.errors import InputError, OptionError, UserError, require
from embeddings.common.process import logger
from embeddings.common.random import derive_seed
from embeddings.common.text import one_line
from embeddings.synthesis.validate import Answer, parse_answer

Value = TypeVar("Value")

API_KEY_VARIABLE = "OPENAI_API_KEY"
# `extra_body` must not set these fields: the job sets them itself.
_RESERVED_FIELDS = frozenset({"messages", "model", "stream", "stream_options", "n"})
_REFUSAL_STATUSES = frozenset({400, 403, 413, 422})
_NO_MONEY = 402
_TEMPORARY_STATUSES = frozenset({_NO_MONEY, 408, 409, 425, 429})
MAX_SHOWN_CHARACTERS = 160
# The first wait before a retry, and the longest wait that an endpoint may ask for.
FIRST_DELAY = 0.5
_MAX_WAIT_SECONDS = 120.0
# The longest wait for an endpoint's list of models.
_LIST_SECONDS = 30.0
# Concurrent requests at the start of a job.
FIRST_CONCURRENCY = 2
# Refusals in succession that end the job: `max_retries` for each of so many requests.
_MAX_REFUSED_REQUESTS = 8


class EndpointError(UserError):
    """The endpoint has stopped answering. Earlier answers are saved; the same command resumes."""

    exit_code = 74

    def __init__(self, endpoint: str, problem: str) -> None:
        super().__init__(f"{endpoint}: {problem}; check the endpoint and its account; the same command resumes")


class Request(NamedTuple):
    """One prompt, sent as one user message after those of `examples`; `key` is its name in the journal.

    `read` raises `RejectedAnswer` for an answer that cannot be used; `retry` makes the request that then follows.
    `schema` is the JSON schema of an answer. `parse` makes the value that `read` gets, by default that of JSON.
    `examples` are prompts with good answers.
    """

    key: str
    prompt: str
    seed: int
    read: Callable[[Any], object]
    retry: Callable[[], "Request"] | None = None
    schema: Mapping[str, Any] | None = None
    parse: Callable[[Answer], Any] = parse_answer
    examples: Sequence[tuple[str, str]] = ()

    @property
    def num_bytes(self) -> int:
        return sum(len(text.encode()) for text in (self.prompt, *chain(*self.examples)))


def make_request(name: str, prompt: str, seed: int, read: Callable[[Any], object], **others: Any) -> Request:
    """A request; its key contains a hash of the prompt, so that a saved answer is never used for another prompt."""
    text = "\0".join([prompt, *chain(*others.get("examples", ()))])
    digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    return Request(f"{name}/{digest}", prompt, derive_seed(seed, "request", name) % 2**31, read, **others)


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
        max_answer_tokens: Maximum tokens of an answer. A job that is resumed with more asks again for cut-off answers.
        token_limit_field: Request field for this limit; OpenAI's newer models require `max_completion_tokens`.
        extra_body: Additional fields of every request.
        stream: Whether answers come in parts, so that `timeout_seconds` limits the wait for each part, and an answer
            that is given up is not generated further. False for an endpoint that cannot stream.
        json_schema: Whether to set `response_format` to the JSON schema of an example, for an endpoint that follows it.
    """

    model: str
    temperature: float | None = 1.0
    max_answer_tokens: int = 4096
    token_limit_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    extra_body: Mapping[str, Any] | None = None
    stream: bool = True
    json_schema: bool = False

    def __post_init__(self) -> None:
        check_numbers(self, "max_answer_tokens", from_zero="temperature")
        if reserved := sorted(_RESERVED_FIELDS & set(self.extra_body or {})):
            raise OptionError("extra_body", reserved[0], "must not contain fields that the job sets", "remove it")

    @property
    def fields(self) -> dict[str, Any]:
        """The options that determine the answers, for the manifest."""
        other = ("token_limit_field", "max_answer_tokens", "stream", "json_schema")
        values = {name: value for name, value in asdict(self).items() if name not in other}
        return {**values, "extra_body": dict(self.extra_body or {})}

    def body(self, request: Request) -> dict[str, Any]:
        """The JSON body of a chat completion, with the fields that the server takes."""
        messages = [
            {"role": role, "content": text}
            for example in request.examples
            for role, text in zip(("user", "assistant"), example, strict=True)
        ]
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [*messages, {"role": "user", "content": request.prompt}],
            "seed": request.seed,
            self.token_limit_field: self.max_answer_tokens,
        }
        if self.temperature is not None:
            body["temperature"] = self.temperature
        if self.json_schema and request.schema is not None:
            schema = {"name": "example", "strict": True, "schema": dict(request.schema)}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        if self.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body


@dataclass(frozen=True)
class Limits:
    """Limits on the use of an endpoint.

    The tasks of an array have equal shares of `requests_per_minute` and `token_budget`; `concurrency` is each task's.

    Args:
        max_attempts: Maximum requests for one record, if its answers are rejected.
        concurrency: Maximum concurrent requests. A job begins with two, and doubles them while that speeds it up.
        requests_per_minute: Maximum requests per minute, including retries; None for no limit.
        max_retries: Maximum retries of a failed request before the job stops. A wait that the endpoint asks for
            (`Retry-After`, up to two minutes) is obeyed and not counted; requests then follow at a lower rate.
        timeout_seconds: Longest wait for a part of an answer; without `stream`, for the whole answer.
        max_unusable: Share of unusable answers among the last 50, at least 20, above which the job stops.
        token_budget: Maximum tokens of the job, prompts and answers, including earlier runs in the same folder. When it
            is used up, the job ends with the records so far. None for no limit.
    """

    max_attempts: int = 3
    concurrency: int = 64
    requests_per_minute: float | None = None
    max_retries: int = 16
    timeout_seconds: float = 120.0
    max_unusable: float = 0.95
    token_budget: int | None = None

    def __post_init__(self) -> None:
        above_zero = ("max_attempts", "concurrency", "requests_per_minute", "timeout_seconds", "token_budget")
        check_numbers(self, *above_zero, from_zero="max_retries")
        if not 0 <= self.max_unusable <= 1:
            raise OptionError("max_unusable", self.max_unusable, "must be from 0 to 1", "1 never stops the job")


def check_endpoint(endpoint: str) -> None:
    if not endpoint.startswith(("http://", "https://")):
        raise OptionError("endpoint", endpoint, "must be an HTTP URL", "write it as http://HOST:PORT/v1")


def _key() -> str:
    return os.environ.get(API_KEY_VARIABLE) or "none"


def find_model(endpoint: str, name: str | None = None) -> str:
    """The given name, or that of the only model that an endpoint lists; an `InputError` if nothing answers there."""
    openai: Any = require("openai", "synthesis")
    problem, names = "does not list its models", list[str]()
    try:
        with openai.OpenAI(base_url=endpoint, api_key=_key(), timeout=_LIST_SECONDS, max_retries=0) as client:
            names = [model.id for model in client.models.list().data]
    except openai.APITimeoutError:
        problem = f"lists no models in {_LIST_SECONDS:g} s"
    except openai.APIConnectionError as error:
        cause = one_line(str(error.__cause__ or error), MAX_SHOWN_CHARACTERS)
        raise InputError(endpoint, f"no connection ({cause})", "start the server, or correct the address") from None
    except openai.APIStatusError as error:
        problem = f"does not list its models (status {error.status_code}: {_reason(error.response.text)})"
    except (openai.OpenAIError, ValueError, AttributeError, TypeError):
        pass
    if name is None and len(names) != 1:
        if names:
            problem = f"lists {len(names)} models ({one_line(', '.join(names), MAX_SHOWN_CHARACTERS)})"
        raise InputError(endpoint, problem, "name the model by --endpoint-model")
    return names[0] if name is None else name


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
        check_endpoint(endpoint)
        self.endpoint, self.sampling, self.limits = endpoint, sampling, limits or Limits()
        self.retries, self.num_parts, self.stopped = 0, 0, False
        # Processes that share the limits.
        self.num_tasks = 1
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
            api_key=_key(),
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
            is_last |= self._num_refused > self.limits.max_retries * min(self.limits.concurrency, _MAX_REFUSED_REQUESTS)
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
            interval = max(self._interval, 60 * self.num_tasks / per_minute if per_minute else 0.0)
            self._next_start = max(now, self._next_start) + interval

    def _slow_down(self, wait: float) -> None:
        """Obey a rate limit: no request before the wait, and then one at a time instead of all that waited."""
        self._num_refused += 1
        self._next_start = max(self._next_start, asyncio.get_running_loop().time() + wait)
        self._interval = min(wait, max(2 * self._interval, wait / self.limits.concurrency))

    async def _send(self, request: Request) -> Answer | _Failure:
        create = self._client.chat.completions.with_streaming_response.create
        body, extra = self.sampling.body(request), dict(self.sampling.extra_body or {})
        try:
            # Leaving the context closes the connection of an answer that is given up, so that the endpoint ends it.
            async with create(**body, extra_body=extra) as response:
                if response.headers.get("content-type", "").startswith("text/event-stream"):
                    # Parts as plain values: building the client's types would take most of the time.
                    parts = await response.parse(to=self._openai.AsyncStream[object])
                    answer = _read_answer(await self._joined(parts))
                    return answer or _Failure("the answer ended early")
                text = await response.text()
                return _read_answer(_json(text)) or _Failure(f"status 200 without an answer: {_reason(text)}")
        except self._openai.APITimeoutError:
            part = "part of an answer" if self.sampling.stream else "answer"
            return _Failure(f"no {part} in {self.limits.timeout_seconds:g} s")
        except self._openai.APIStatusError as error:
            status, problem = error.status_code, f"status {error.status_code}: {_reason(error.response.text)}"
            if status in _REFUSAL_STATUSES:
                return Answer(None, refused=problem)
            if status in _TEMPORARY_STATUSES or status >= 500:
                wait = _retry_after(error.response.headers.get("retry-after", ""))
                return _Failure(problem, wait, may_retry=status != _NO_MONEY and (wait or 0) <= _MAX_WAIT_SECONDS)
            fix = f"check the endpoint, the model's name and the environment variable {API_KEY_VARIABLE}"
            raise InputError(self.endpoint, f"answers with {problem}", fix) from None
        except self._openai.APIConnectionError as error:
            return _Failure(f"no connection ({one_line(str(error.__cause__ or error), MAX_SHOWN_CHARACTERS)})")
        # A damaged answer raises errors of several libraries.
        except Exception as error:
            return _Failure(f"the answer broke off ({one_line(str(error), MAX_SHOWN_CHARACTERS)})")

    async def _joined(self, parts: Any) -> dict[str, Any] | None:
        """The fields of a response that comes in parts; None if its end is missing."""
        texts: dict[str, list[str]] = {"content": [], "refusal": []}
        end, usage = None, None
        async for part in parts:
            self.num_parts += 1
            usage = part.get("usage") or usage
            for choice in (part.get("choices") or [])[:1]:
                end = choice.get("finish_reason") or end
                for name, pieces in texts.items():
                    if isinstance(piece := (choice.get("delta") or {}).get(name), str):
                        pieces.append(piece)
        if end is None:
            return None
        message = {name: "".join(pieces) for name, pieces in texts.items() if pieces}
        return {"choices": [{"message": message, "finish_reason": end}], "usage": usage}


def _json(text: str) -> Any:
    with suppress(ValueError, RecursionError):
        return json.loads(text)


def _read_answer(fields: Any) -> Answer | None:
    """The answer in the fields of a response; None if they are no completion, such as a proxy's page."""
    if not isinstance(fields, dict) or "choices" not in fields:
        return None
    try:
        choice, usage = fields["choices"][0], fields.get("usage") or {}
        refusal = choice["message"].get("refusal")
        return Answer(
            _typed(choice["message"], "content", str),
            _typed(choice, "finish_reason", str),
            one_line(str(refusal), MAX_SHOWN_CHARACTERS) if refusal else None,
            _typed(usage, "prompt_tokens", int),
            _typed(usage, "completion_tokens", int),
        )
    except (AttributeError, LookupError, TypeError):
        return Answer(None, refused="the response is not a chat completion")


def _typed(fields: Mapping[str, Any], name: str, kind: type[Value]) -> Value | None:
    """A field of a response; None if it is missing or of another type."""
    value = fields.get(name)
    return value if isinstance(value, kind) else None


def _reason(text: str) -> str:
    """The reason in the body of a response without an answer, or an excerpt of it."""
    with suppress(ValueError, AttributeError, RecursionError):
        fields = json.loads(text)
        reason = fields.get("error") or fields.get("detail") or fields.get("message") or text
        text = str(reason.get("message") or reason) if isinstance(reason, dict) else str(reason)
    return one_line(text, MAX_SHOWN_CHARACTERS) or "an empty response"


def _retry_after(value: str) -> float | None:
    """The wait that an endpoint asks for, a number of seconds or a date; None if there is none."""
    seconds = 0.0
    with suppress(ValueError):
        seconds = parsedate_to_datetime(value).timestamp() - time.time()
    with suppress(ValueError):
        seconds = float(value)
    return seconds if seconds > 0 else None
