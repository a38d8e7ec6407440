"""A language model without a network, and jobs over it."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from embeddings.synthesis.client import ChatClient, Limits, Request, Sampling
from embeddings.synthesis.runner import Journal, RequestRunner, open_journal
from embeddings.synthesis.validate import Answer
from tests.helpers.chat_server import Reply, answers_well

EAGER = Limits(concurrency=4)


def answer_of(reply: Reply, prompt: str) -> Answer:
    """The answer that the real client would return for a reply."""
    counts = (len(prompt) // 4, len(reply.content or "") // 4) if reply.usage else (None, None)
    return Answer(reply.content, reply.finish_reason, reply.refusal, *counts)


class FakeClient(ChatClient):
    """A client that sends nothing.

    Args:
        behaviour: Returns the reply, or an exception to raise, for a prompt, a seed and the number of earlier requests.
        shuffled: Whether answers arrive in another order than the requests.
        sampling: The model and its sampling options.
        limits: Limits on the use of the endpoint.
    """

    def __init__(
        self,
        behaviour: Callable[[str, int, int], Any] = answers_well,
        shuffled: bool = False,
        sampling: Sampling | None = None,
        limits: Limits = EAGER,
    ) -> None:
        super().__init__("http://fake/v1", sampling or Sampling("model"), limits)
        self.behaviour, self.shuffled = behaviour, shuffled
        self.asked: list[Request] = []
        self.max_in_flight = self.in_flight = 0

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[None]:
        yield

    async def ask(self, request: Request) -> Answer:
        count = sum(other.key == request.key for other in self.asked)
        self.asked.append(request)
        self.in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.in_flight)
        try:
            await asyncio.sleep(random.random() * 0.004 if self.shuffled else 0)
            reply = self.behaviour(request.prompt, request.seed, count)
            await asyncio.sleep(getattr(reply, "seconds", 0))
        finally:
            self.in_flight -= 1
        if isinstance(reply, Exception):
            raise reply
        return answer_of(reply, request.prompt)


@contextmanager
def make_runner(folder: Path, client: FakeClient) -> Iterator[tuple[RequestRunner, Journal]]:
    """A runner with a journal in a folder."""
    with open_journal(folder) as journal, RequestRunner(client, journal) as runner:
        yield runner, journal


def contents(folder: Path) -> dict[str, bytes]:
    """The bytes of all files of a finished job that do not depend on the order of answers or on retries."""
    return {
        path.name: path.read_bytes()
        for path in sorted(folder.iterdir())
        if not path.name.startswith("journal") and path.name != "manifest.json"
    }
