"""Many requests: each is paid for once, none exceeds the budget, and what fails is tried again after a wait."""

import asyncio
import os
import time
from contextlib import suppress
from itertools import pairwise

import pytest

from embeddings.common import InputError, OptionError
from embeddings.synthesis import runner as runner_module
from embeddings.synthesis.client import EndpointError, Sampling, UnansweredError, make_request
from embeddings.synthesis.runner import Budget, Limits, RateLimiter, open_journal
from embeddings.synthesis.validate import Answer
from tests.helpers.chat_server import Reply
from tests.synthesis.models import EAGER, FakeClient, make_runner

REQUESTS = [make_request(f"example/a-{number}/0", f"prompt {number}", 0) for number in range(12)]


def ask(folder, client, limits=EAGER, budget=None, requests=REQUESTS):
    with make_runner(folder, client, limits, budget) as (runner, journal):
        runner.run(iter(requests), len(requests), "requests")
    return runner, journal


def test_every_request_is_answered_and_none_twice(tmp_path):
    client = FakeClient(shuffled=True)
    ask(tmp_path, client, requests=REQUESTS[:5])
    _, journal = ask(tmp_path, client)
    assert sorted(request.key for request in client.asked) == sorted(request.key for request in REQUESTS)
    assert len(journal) == 12


@pytest.mark.parametrize("concurrency", [1, 3, 50])
def test_so_many_requests_are_under_way_at_once(tmp_path, concurrency):
    client = FakeClient(lambda prompt, seed, count: Reply("x", seconds=0.005))
    ask(tmp_path, client, Limits(concurrency=concurrency))
    assert client.most_at_once == min(concurrency, 12)


def test_a_request_that_fails_is_tried_again_after_ever_longer_waits(tmp_path, caplog, monkeypatch):
    times = []
    monkeypatch.setattr(runner_module, "BACKOFF_SECONDS", 0.02)

    def behaviour(prompt, seed, count):
        times.append(time.monotonic())
        return Reply("x") if count == 3 else UnansweredError("status 500", "no")

    limits = Limits(concurrency=1, max_retries=3)
    runner, journal = ask(tmp_path, FakeClient(behaviour), limits, requests=REQUESTS[:1])
    assert runner.retries == {"status 500": 3}
    assert len(journal) == 1
    # Whoever watches learns at once why nothing moves, and once.
    (message,) = caplog.messages
    assert "status 500 (no); retrying, at most 3 times" in message
    waits = [after - before for before, after in pairwise(times)]
    assert all(wait >= 0.02 * 2**retry / 2 for retry, wait in enumerate(waits))


def test_what_the_endpoint_asks_for_holds_every_request_back(tmp_path):
    times = {}

    def behaviour(prompt, seed, count):
        if prompt == "prompt 0" and count == 0:
            times["asked"] = time.monotonic()
            return UnansweredError("status 429", retry_after_seconds=0.08)
        times[prompt] = time.monotonic()
        return Reply("x", seconds=0.01)

    ask(tmp_path, FakeClient(behaviour), Limits(concurrency=2), requests=REQUESTS[:6])
    late = [prompt for prompt, when in times.items() if when >= times["asked"] + 0.08]
    assert len(late) >= 5


def test_after_the_last_retry_the_job_stops_and_what_is_under_way_is_kept(tmp_path):
    def behaviour(prompt, seed, count):
        return UnansweredError("status 503") if prompt == "prompt 1" else Reply("x", seconds=0.05)

    client = FakeClient(behaviour)
    with pytest.raises(
        EndpointError, match=r"http://fake/v1: status 503 \(tried 3 times\).*the same command resumes"
    ) as end:
        ask(tmp_path, client, Limits(concurrency=4, max_retries=2))
    assert end.value.exit_code == 74
    asked = {request.key for request in client.asked} - {REQUESTS[1].key}
    assert len(asked) == 3
    client.behaviour = lambda prompt, seed, count: Reply("x")
    client.asked.clear()
    _, journal = ask(tmp_path, client)
    assert len(journal) == 12
    assert not asked & {request.key for request in client.asked}


def test_a_job_that_stops_does_not_sit_out_the_waits_of_others(tmp_path):
    def behaviour(prompt, seed, count):
        if prompt == "prompt 0":
            return UnansweredError("status 429", retry_after_seconds=300)
        return UnansweredError("no money", is_final=True)

    start = time.monotonic()
    with pytest.raises(EndpointError, match="no money"):
        ask(tmp_path, FakeClient(behaviour), requests=REQUESTS[:2])
    assert time.monotonic() - start < 2


def test_a_refusal_is_an_answer_once_there_was_another(tmp_path):
    refusal = Reply(None, refusal="status 400: no", usage=False)
    client = FakeClient(lambda prompt, seed, count: refusal if prompt == "prompt 2" else Reply("x"))
    _, journal = ask(tmp_path, client, Limits(concurrency=1))
    assert (len(journal), journal.num_answers) == (12, 11)
    ask(tmp_path, client)
    assert len(client.asked) == 12


@pytest.mark.parametrize("concurrency", [1, 6])
def test_no_token_is_spent_beyond_the_budget_in_one_run_or_several(tmp_path, concurrency):
    # A prompt of some 8 bytes and answers of 40 tokens, which is also their limit.
    client = FakeClient(lambda prompt, seed, count: Reply("x" * 160, seconds=0.001), sampling=Sampling("m", 1.0, 40))
    each = len("prompt 0") // 4 + 40
    budget = Budget(token_budget=6 * each)
    runner, journal = ask(tmp_path, client, Limits(concurrency=concurrency), budget)
    spent = journal.prompt_tokens + journal.completion_tokens
    assert runner.exhausted
    assert 3 * each <= spent <= 6 * each
    runner, journal = ask(tmp_path, client, Limits(concurrency=concurrency), budget)
    assert runner.exhausted
    assert journal.prompt_tokens + journal.completion_tokens == spent
    runner, journal = ask(tmp_path, client, Limits(concurrency=concurrency), Budget(token_budget=12 * each + 200))
    assert not runner.exhausted
    assert len(journal) == len(client.asked) == 12


def test_an_endpoint_that_counts_no_tokens_has_neither_budget_nor_price(tmp_path):
    client = FakeClient(lambda prompt, seed, count: Reply("x", usage=False))
    with pytest.raises(InputError, match="does not say how many tokens"):
        ask(tmp_path, client, budget=Budget(token_budget=10**6))
    with pytest.raises(InputError, match="leave token_budget and the prices out"):
        ask(tmp_path, client, budget=Budget(None, 1.0, 2.0))
    _, journal = ask(tmp_path, client)
    assert len(client.asked) == len(journal) == 12


def test_a_rate_holds_over_retries(tmp_path):
    client = FakeClient(lambda prompt, seed, count: Reply("x") if count else UnansweredError("status 500"))
    start = time.monotonic()
    limits = Limits(concurrency=8, requests_per_minute=60 * 100)
    ask(tmp_path, client, limits)
    assert len(client.asked) == 24
    assert time.monotonic() - start >= 0.23


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Limits(max_retries=-1), "max_retries"),
        (lambda: Budget(None, 1.0), "price_per_million_prompt_tokens needs the other price"),
        (lambda: Budget(None, -1.0, 1.0), "price_per_million_prompt_tokens must be >= 0"),
    ],
)
def test_impossible_numbers_are_refused(make, says):
    with pytest.raises(OptionError, match=says):
        make()


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
            await pace.wait()
            found.append(round(clock.now - 100, 6))
            pace.spend(tokens)
        return found

    return asyncio.run(run())


def make(**rates):
    clock = Clock()
    return RateLimiter(Limits(**rates), clock=clock, sleep=clock.sleep), clock


@pytest.mark.parametrize(
    ("rates", "tokens", "expected"),
    [
        ({}, 10**9, [0, 0, 0]),
        ({"requests_per_minute": 30}, 0, [0, 2, 4]),
        ({"tokens_per_minute": 600}, 25, [0, 2.5, 5]),
        ({"tokens_per_minute": 600, "requests_per_minute": 10}, 25, [0, 6, 12]),
    ],
)
def test_requests_are_spaced_evenly_and_wait_until_tokens_are_worked_off(rates, tokens, expected):
    assert turns(*make(**rates), 3, tokens) == expected


def test_time_that_nobody_used_is_not_saved_up():
    pace, clock = make(requests_per_minute=60)
    clock.now += 50
    assert turns(pace, clock, 3) == [50, 51, 52]


def test_a_pause_holds_everyone_back():
    pace, clock = make()
    pace.pause(7)
    pace.pause(3)
    assert turns(pace, clock, 2) == [7, 7]


FULL = Answer('two\nlines, half a character \ud800, "quotes"', "stop", None, 11, 5)
REFUSED = Answer(None, None, "status 400: no", None, None)


def test_answers_come_back_as_they_were_in_a_later_process_too(tmp_path):
    path = tmp_path / "journal.jsonl"
    with open_journal(path) as journal:
        journal.append("a", FULL)
        journal.append("b", REFUSED)
        assert journal.get("a") == FULL
    with open_journal(path) as journal:
        assert (journal.get("a"), journal.get("b"), journal.get("c")) == (FULL, REFUSED, None)
        assert "a" in journal
        assert "c" not in journal
        assert (len(journal), journal.num_answers) == (2, 1)
        assert (journal.prompt_tokens, journal.completion_tokens) == (11, 5)
        journal.append("c", Answer("x", prompt_tokens=1))
        assert journal.prompt_tokens == 12
        assert journal.get("a") == FULL
        assert journal.get("c") == Answer("x", prompt_tokens=1)


def test_every_cut_of_the_last_line_leaves_the_lines_before(tmp_path):
    path = tmp_path / "journal.jsonl"
    with open_journal(path) as journal:
        journal.append("a", FULL)
        first = path.stat().st_size
        journal.append("b", FULL)
    whole = path.read_bytes()
    for size in range(first, len(whole)):
        path.write_bytes(whole[:size])
        with open_journal(path) as journal:
            assert ("a" in journal, "b" in journal) == (True, False)
            journal.append("b", FULL)
        assert path.read_bytes() == whole
    path.write_bytes(whole[:first] + b'{"key": \x00\x00\n')
    with open_journal(path) as journal:
        assert len(journal) == 1


def test_a_damaged_line_before_the_last_is_named_and_left_alone(tmp_path):
    path = tmp_path / "journal.jsonl"
    with open_journal(path) as journal:
        journal.append("a", FULL)
    whole = path.read_bytes()
    path.write_bytes(b"[1]\n" + whole)
    with pytest.raises(InputError, match=r"journal.jsonl:1: is no answer"), open_journal(path):
        pass
    assert path.read_bytes() == b"[1]\n" + whole


def test_a_full_disk_leaves_no_half_line(tmp_path, monkeypatch):
    path = tmp_path / "journal.jsonl"
    with open_journal(path) as journal:
        journal.append("a", FULL)
        size = path.stat().st_size

        def full(handle):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            journal.append("b", FULL)
        assert path.stat().st_size == size
        assert "b" not in journal
        monkeypatch.undo()
        with suppress(OSError):
            journal.append("b", FULL)
        assert journal.get("b") == FULL


def test_an_answer_is_on_disk_when_append_returns(tmp_path, monkeypatch):
    synced = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: (synced.append(os.fstat(handle).st_size), real(handle)))
    with open_journal(tmp_path / "journal.jsonl") as journal:
        synced.clear()
        journal.append("a", FULL)
        assert synced == [(tmp_path / "journal.jsonl").stat().st_size]
