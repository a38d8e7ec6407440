"""An endpoint that speaks OpenAI's chat-completions protocol: single requests, and many within limits and a budget."""

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
# Not sent with every prompt, whatever the option says: they are the request itself.
_OWN_FIELDS = frozenset({"messages", "model", "stream", "n"})
_RETRIED = frozenset({408, 409, 425, 429})
_REFUSED = frozenset({400, 403, 413, 422})
_SHOWN = 160


class EndpointError(UserError):
    """An endpoint that no longer answers. What it has answered is kept; the same command resumes."""

    exit_code = 74

    def __init__(self, endpoint: str, what: str, hint: str) -> None:
        super().__init__(f"{endpoint}: {what}; {hint}")


class UnansweredError(Exception):
    """A request that got no answer this time; `kind` is counted, and a final one is not worth another try."""

    def __init__(
        self, kind: str, detail: str = "", retry_after_seconds: float | None = None, is_final: bool = False
    ) -> None:
        super().__init__(f"{kind} ({detail})" if detail else kind)
        self.kind, self.retry_after_seconds, self.is_final = kind, retry_after_seconds, is_final


class Request(NamedTuple):
    """One prompt, sent as one user message.

    Attributes:
        key: Its name in the journal.
        prompt: What the model reads.
        seed: The endpoint's own random seed for it.
        wants_object: Whether the answer is to be a JSON object.
    """

    key: str
    prompt: str
    seed: int
    wants_object: bool = True


def make_request(name: str, prompt: str, seed: int, wants_object: bool = True) -> Request:
    """A request whose key holds its name and a hash of its prompt, so that an answer never serves another prompt."""
    digest = hashlib.blake2b(prompt.encode(), digest_size=8).hexdigest()
    return Request(f"{name}/{digest}", prompt, derive_seed(seed, "request", name) % 2**31, wants_object)


@dataclass(frozen=True)
class Sampling:
    """How the model answers.

    Args:
        model: Its name at the endpoint.
        temperature: Temperature of sampling; None leaves it to the endpoint.
        max_answer_tokens: Maximum tokens of an answer.
        token_limit_field: Field of a request that carries this limit; newer models of OpenAI's take
            `max_completion_tokens`.
        json_mode: Whether to ask for a JSON object by the endpoint's own means, where one is wanted.
        extra_body: More fields of every request.

    Raises:
        OptionError: If a value is impossible.
    """

    model: str
    temperature: float | None = 1.0
    max_answer_tokens: int = 4096
    token_limit_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    json_mode: bool = False
    extra_body: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.temperature is not None and not 0 <= self.temperature <= 2:
            raise OptionError("temperature", self.temperature, "must lie between 0 and 2", "null leaves it out")
        if self.max_answer_tokens < 1:
            raise OptionError("max_answer_tokens", self.max_answer_tokens, "must be >= 1", "4096 is the default")
        if own := sorted(_OWN_FIELDS & set(self.extra_body or {})):
            raise OptionError("extra_body", own[0], "must not set what the job itself sets", "take it out")

    @property
    def fields(self) -> dict[str, Any]:
        """What decides the answers, for manifests."""
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
    """Requests to one endpoint, each tried once; the key comes from the environment, and is none where there is none.

    Args:
        endpoint: Base address, as `http://localhost:8000/v1`.
        sampling: How the model answers.
        timeout_seconds: Longest wait for a whole answer.

    Raises:
        OptionError: If the address is none.
        MissingExtraError: If OpenAI's client is not installed.
    """

    def __init__(self, endpoint: str, sampling: Sampling, timeout_seconds: float = 120.0) -> None:
        if not _is_address(endpoint):
            raise OptionError("endpoint", endpoint, "must be an address", "write it as http://HOST:PORT/v1")
        self.endpoint, self.sampling, self.timeout_seconds = endpoint, sampling, timeout_seconds
        self._openai: Any = require("openai", "synthesis")
        self._client: Any = None

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[None]:
        """The time in which requests may be made: connections belong to one event loop."""
        async with self._openai.AsyncOpenAI(
            base_url=self.endpoint,
            # The client insists on a key; a server that asks for none ignores it.
            api_key=os.environ.get(API_KEY_VARIABLE) or "none",
            timeout=self.timeout_seconds,
            max_retries=0,
        ) as self._client:
            yield

    async def ask(self, request: Request) -> Answer:
        """The answer to a request; a refusal of this one prompt is an answer too.

        Raises:
            UnansweredError: If there was none this time.
            InputError: If the endpoint does not know the address, the key or the model.
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
            raise UnansweredError("no connection", one_line(str(error.__cause__ or error), _SHOWN)) from None
        except self._openai.APIStatusError as error:
            return self._of_status(error)
        return _answer_of(content)

    def _of_status(self, error: Any) -> Answer:
        """What an HTTP status that is an error means: a refusal, or one of the errors of `ask`."""
        status, body = int(error.status_code), error.body
        says = one_line(str(body.get("message") if isinstance(body, dict) else body), _SHOWN)
        if status in _REFUSED:
            return Answer(None, refused=f"status {status}: {says}")
        if status in (401, 404):
            fix = f"check --endpoint, --model and the environment variable {API_KEY_VARIABLE}"
            raise InputError(self.endpoint, f"answers with status {status} ({says})", fix)
        out_of_money = status == 402 or error.code == "insufficient_quota"
        if status in _RETRIED or status >= 500 or out_of_money:
            wait = _seconds(error.response.headers.get("retry-after"))
            raise UnansweredError(f"status {status}", says, wait, out_of_money)
        raise InputError(self.endpoint, f"answers with status {status} ({says})", "check --endpoint")


def _answer_of(content: bytes) -> Answer:
    """The answer in the body of a response; an `UnansweredError` if that is no chat completion."""
    try:
        body = json.loads(content)
        choice = body["choices"][0]
        message = choice["message"]
        text, reason, refusal = message.get("content"), choice.get("finish_reason"), message.get("refusal")
        usage = body.get("usage") or {}
        counts = [usage.get(name) for name in ("prompt_tokens", "completion_tokens")]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise UnansweredError("the response is no chat completion") from None
    prompt_tokens, completion_tokens = (
        count if isinstance(count, int) and not isinstance(count, bool) and count >= 0 else None for count in counts
    )
    return Answer(
        text if isinstance(text, str) else None,
        reason if isinstance(reason, str) else None,
        one_line(refusal, _SHOWN) if isinstance(refusal, str) and refusal else None,
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


def _is_address(endpoint: str) -> bool:
    try:
        parts = urlsplit(endpoint)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


# Many requests at once, and a journal that keeps each answer before the next request goes out.

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
        return _kept_answer(json.loads(self._reader.readline()))

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
                key, answer = fields["key"], _kept_answer(fields)
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


def _kept_answer(fields: dict[str, Any]) -> Answer:
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
