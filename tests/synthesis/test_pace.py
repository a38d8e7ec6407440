"""Requests go out no faster than they may, on a clock that the test turns."""

import asyncio

import pytest

from embeddings.common import OptionError
from embeddings.synthesis.runner import Pace


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now

    async def sleep(self, seconds):
        self.now += seconds


def turns(pace, clock, count, tokens=0):
    """When each of some requests goes out, one after another, each costing so many tokens."""

    async def run():
        found = []
        for _ in range(count):
            await pace.turn()
            found.append(round(clock.now - 100, 6))
            pace.spend(tokens)
        return found

    return asyncio.run(run())


def make(**rates):
    clock = Clock()
    return Pace(**rates, clock=clock, sleep=clock.sleep), clock


def test_without_a_rate_nobody_waits():
    assert turns(*make(), 3, tokens=10**9) == [0, 0, 0]


def test_requests_are_spaced_evenly():
    assert turns(*make(requests_per_minute=30), 4) == [0, 2, 4, 6]


def test_tokens_are_worked_off_before_the_next_request():
    assert turns(*make(tokens_per_minute=600), 3, tokens=25) == [0, 2.5, 5]
    assert turns(*make(tokens_per_minute=600, requests_per_minute=10), 3, tokens=25) == [0, 6, 12]


def test_time_that_nobody_used_is_not_saved_up():
    pace, clock = make(requests_per_minute=60)
    clock.now += 50
    assert turns(pace, clock, 3) == [50, 51, 52]


def test_a_pause_holds_everyone_back():
    pace, clock = make()
    pace.pause(7)
    pace.pause(3)
    assert turns(pace, clock, 2) == [7, 7]


def test_a_stopped_job_keeps_nobody_waiting():
    pace, clock = make()
    pace.pause(500)
    pace.stop()
    assert turns(pace, clock, 1) == [0]


@pytest.mark.parametrize("name", ["requests_per_minute", "tokens_per_minute"])
@pytest.mark.parametrize("rate", [0, -1, float("nan")])
def test_a_rate_that_is_none_is_refused(name, rate):
    with pytest.raises(OptionError, match=f"{name} must be > 0"):
        Pace(**{name: rate})
