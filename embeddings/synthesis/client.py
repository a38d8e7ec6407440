"""One request to an endpoint that speaks OpenAI's chat-completions protocol, through OpenAI's own client."""

import asyncio
import hashlib
import json
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

from embeddings.common.errors import InputError, OptionError, UserError, require
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
