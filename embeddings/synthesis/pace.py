"""How fast requests may go out: so many, and so many tokens, a minute, and none while the endpoint asks to wait."""

import asyncio
import time
from collections.abc import Awaitable, Callable

from embeddings.common.errors import OptionError

_MINUTE = 60.0
# Longest sleep at a time: how soon a waiting request learns that the job has stopped.
_TICK_SECONDS = 1.0


class Pace:
    """Spaces requests evenly, without bursts.

    A request waits until it has its turn by number, and until the tokens of earlier answers have been worked off.

    Args:
        requests_per_minute: Most requests a minute, retries included; None for any number.
        tokens_per_minute: Tokens of prompts and answers a minute, None for any number. An answer's tokens are known
            only when it is there, so requests already under way exceed the rate, and later ones wait the longer.
        clock: Seconds on a clock that never goes back.
        sleep: Waits for some seconds.

    Raises:
        OptionError: If a rate is not above 0.
    """

    def __init__(
        self,
        requests_per_minute: float | None = None,
        tokens_per_minute: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        rates = {"requests_per_minute": requests_per_minute, "tokens_per_minute": tokens_per_minute}
        for name, rate in rates.items():
            if rate is not None and not rate > 0:
                raise OptionError(name, rate, "must be > 0", "leave it out for no limit")
        self._seconds_per_request = _MINUTE / requests_per_minute if requests_per_minute else 0.0
        self._seconds_per_token = _MINUTE / tokens_per_minute if tokens_per_minute else 0.0
        self._clock, self._sleep = clock, sleep
        self._next_request = self._next_token = self._pause_end = clock()
        self._is_stopped = False

    async def turn(self) -> None:
        """Wait until a request may go out, or the job has stopped."""
        turn = max(self._next_request, self._clock())
        self._next_request = turn + self._seconds_per_request
        # What others spend, or a pause that begins, while this one waits moves its turn on.
        while not self._is_stopped:
            wait = max(turn, self._next_token, self._pause_end) - self._clock()
            if wait <= 0:
                return
            await self._sleep(min(wait, _TICK_SECONDS))

    def spend(self, num_tokens: int) -> None:
        """Count the tokens of an answer."""
        self._next_token = max(self._next_token, self._clock()) + num_tokens * self._seconds_per_token

    def pause(self, seconds: float) -> None:
        """Let no request go out for some seconds from now."""
        self._pause_end = max(self._pause_end, self._clock() + seconds)

    def stop(self) -> None:
        """Let nobody wait any longer: the job has stopped, and no request will go out."""
        self._is_stopped = True
