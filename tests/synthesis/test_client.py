"""Single requests through the real client, and many requests within limits and a budget, each sent once."""

import asyncio
import os
import time
from itertools import pairwise

import pytest

from embeddings.common import InputError, OptionError
from embeddings.synthesis import client as client_module
from embeddings.synthesis.client import (
    Budget,
    ChatClient,
    EndpointError,
    Limits,
    RateLimiter,
    Sampling,
    UnansweredError,
    make_request,
    open_journal,
)
from embeddings.synthesis.validate import Answer
from tests.helpers.chat_server import Reply, chat_server
from tests.helpers.refusals import refused
from tests.synthesis.models import EAGER, FakeClient, make_runner

REQUEST = make_request("example/short_long-0/0", "Write something.", 7)
LIST_REQUEST = make_request("tasks/short_long/0", "Write a list.", 7, wants_object=False)


def ask(reply, sampling=None, request=REQUEST, timeout_seconds=5.0):
    """The client's answer for a server's reply, and the server."""
    with chat_server(lambda prompt, seed, count: reply) as server:
        return ask_at(server.endpoint, sampling, request, timeout_seconds), server


def ask_at(endpoint, sampling=None, request=REQUEST, timeout_seconds=5.0):
    client = ChatClient(endpoint, sampling or Sampling("some-model"), timeout_seconds)

    async def run():
        async with client.connected():
            return await client.ask(request)

    return asyncio.run(run())


def test_an_answer_has_its_token_counts():
    answer, server = ask(Reply("x" * 40))
    assert answer == Answer("x" * 40, "stop", None, 4, 10)
    (body,) = server.requests
    assert body == {
        "model": "some-model",
        "messages": [{"role": "user", "content": "Write something."}],
        "seed": REQUEST.seed,
        "temperature": 1.0,
        "max_tokens": 4096,
    }


def test_the_options_of_a_request_reach_the_endpoint():
    sampling = Sampling("m", None, 99, "max_completion_tokens", True, {"reasoning_effort": "low"})
    _, server = ask(Reply("x"), sampling)
    (body,) = server.requests
    assert body["max_completion_tokens"] == 99
    assert body["response_format"] == {"type": "json_object"}
    assert body["reasoning_effort"] == "low"
    assert not {"temperature", "max_tokens"} & set(body)
    _, server = ask(Reply("x"), sampling, LIST_REQUEST)
    assert "response_format" not in server.requests[0]


def test_the_key_comes_from_the_environment(monkeypatch):
    assert ask(Reply("x"))[1].headers[0]["authorization"] == "Bearer none"
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    assert ask(Reply("x"))[1].headers[0]["authorization"] == "Bearer sk-secret"


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (Reply(None), Answer(None, "stop", None, 4, 0)),
        (Reply("", refusal="I will not"), Answer("", "stop", "I will not", 4, 0)),
        (Reply("x", finish_reason="length", usage=False), Answer("x", "length")),
        (Reply(status=400, error="too long"), Answer(None, refused="status 400: too long")),
        (Reply(body=b'{"choices": [{"message": {"content": ["a"]}}], "usage": {"prompt_tokens": -1}}'), Answer(None)),
    ],
)
def test_refusals_and_empty_contents_are_answers(reply, expected):
    assert ask(reply)[0] == expected


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        (Reply(status=401, error="bad key"), "status 401"),
        (Reply(status=404, error="no model"), "--model"),
        (Reply(status=405), "status 405"),
    ],
)
def test_a_wrong_url_key_or_model_is_an_input_error(reply, says):
    refused(InputError, says, ask, reply)


@pytest.mark.parametrize(
    ("reply", "says", "wait", "is_final"),
    [
        (Reply(status=500), "status 500", None, False),
        (Reply(status=408), "status 408", None, False),
        (Reply(status=429, headers={"Retry-After": "2.5"}), "status 429", 2.5, False),
        (Reply(status=429, headers={"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}), "status 429", None, False),
        (Reply(status=429, headers={"Retry-After": "inf"}), "status 429", None, False),
        (Reply(status=429, code="insufficient_quota"), "status 429", None, True),
        (Reply(status=402), "status 402", None, True),
        (Reply(hangs_up=True), "no connection", None, False),
        (Reply(body=b"<html>"), "not a chat", None, False),
        (Reply(body=b'{"choices": []}'), "not a chat", None, False),
        (Reply(body=b'{"choices": [{"message": "x"}]}'), "not a chat", None, False),
        (Reply(body=b'{"choices": [{"message": {"content": "x"}}], "usage": [1]}'), "not a chat", None, False),
        (Reply(body=b"x", headers={"Content-Type": "text/plain"}), "not a chat", None, False),
    ],
)
def test_temporary_failures_are_reported_as_unanswered(reply, says, wait, is_final):
    with chat_server(lambda prompt, seed, count: reply) as server:
        with pytest.raises(UnansweredError, match=says) as failure:
            ask_at(server.endpoint)
        assert len(server.requests) == 1
    assert (failure.value.retry_after_seconds, failure.value.is_final) == (wait, is_final)


@pytest.mark.parametrize("reply", [Reply("x", seconds=0.6), Reply("x", trickle_seconds=0.08)])
def test_the_timeout_applies_to_late_and_to_slow_answers(reply):
    with pytest.raises(UnansweredError, match=r"no answer in 0\.3 s"):
        ask(reply, timeout_seconds=0.3)
    assert ask(Reply("x", seconds=0.05))[0].content == "x"


@pytest.mark.parametrize("endpoint", ["localhost:8000", "ftp://x/v1", "http://", "http://x:port/v1", ""])
def test_an_endpoint_that_is_not_an_http_url_is_refused(endpoint):
    refused(OptionError, "endpoint must be an HTTP URL", ChatClient, endpoint, Sampling("m"))


def test_a_key_contains_the_prompts_hash_and_seeds_differ():
    other = make_request("example/short_long-0/0", "Write something else.", 7)
    assert other.key != REQUEST.key
    assert other.seed == REQUEST.seed
    assert make_request("example/short_long-0/1", "Write something.", 7).seed != REQUEST.seed
    assert make_request("example/short_long-0/0", "Write something.", 8).seed != REQUEST.seed


REQUESTS = [make_request(f"example/a-{number}/0", f"prompt {number}", 0) for number in range(12)]


def ask_all(folder, client, limits=EAGER, budget=None, requests=REQUESTS):
    with make_runner(folder, client, limits, budget) as (runner, journal):
        runner.run(iter(requests), len(requests), "requests")
    return runner, journal


def test_every_request_is_answered_and_none_twice(tmp_path):
    client = FakeClient(shuffled=True)
    ask_all(tmp_path, client, requests=REQUESTS[:5])
    _, journal = ask_all(tmp_path, client)
    assert sorted(request.key for request in client.asked) == sorted(request.key for request in REQUESTS)
    assert len(journal) == 12


@pytest.mark.parametrize("concurrency", [1, 3, 50])
def test_the_number_of_concurrent_requests_is_the_limit(tmp_path, concurrency):
    client = FakeClient(lambda prompt, seed, count: Reply("x", seconds=0.005))
    ask_all(tmp_path, client, Limits(concurrency=concurrency))
    assert client.max_in_flight == min(concurrency, 12)


def test_a_failed_request_is_retried_after_increasing_waits(tmp_path, caplog, monkeypatch):
    times = []
    monkeypatch.setattr(client_module, "BACKOFF_SECONDS", 0.02)

    def behaviour(prompt, seed, count):
        times.append(time.monotonic())
        return Reply("x") if count == 3 else UnansweredError("status 500", "no")

    limits = Limits(concurrency=1, max_retries=3)
    runner, journal = ask_all(tmp_path, FakeClient(behaviour), limits, requests=REQUESTS[:1])
    assert runner.retries == {"status 500": 3}
    assert len(journal) == 1
    # The reason is logged at the first failure, and only then.
    (message,) = caplog.messages
    assert "status 500 (no); retrying, at most 3 times" in message
    waits = [after - before for before, after in pairwise(times)]
    assert all(wait >= 0.02 * 2**retry / 2 for retry, wait in enumerate(waits))


def test_a_wait_that_the_endpoint_requests_delays_all_requests(tmp_path):
    times = {}

    def behaviour(prompt, seed, count):
        if prompt == "prompt 0" and count == 0:
            times["asked"] = time.monotonic()
            return UnansweredError("status 429", retry_after_seconds=0.08)
        times[prompt] = time.monotonic()
        return Reply("x", seconds=0.01)

    ask_all(tmp_path, FakeClient(behaviour), Limits(concurrency=2), requests=REQUESTS[:6])
    late = [prompt for prompt, when in times.items() if when >= times["asked"] + 0.08]
    assert len(late) >= 5


def test_after_the_last_retry_the_job_stops_and_answers_in_flight_are_saved(tmp_path):
    def behaviour(prompt, seed, count):
        return UnansweredError("status 503") if prompt == "prompt 1" else Reply("x", seconds=0.05)

    client = FakeClient(behaviour)
    with pytest.raises(EndpointError, match=r"http://fake/v1: status 503 \(tried 3 times\).*the same command") as end:
        ask_all(tmp_path, client, Limits(concurrency=4, max_retries=2))
    assert end.value.exit_code == 74
    asked = {request.key for request in client.asked} - {REQUESTS[1].key}
    assert len(asked) == 3
    client.behaviour = lambda prompt, seed, count: Reply("x")
    client.asked.clear()
    _, journal = ask_all(tmp_path, client)
    assert len(journal) == 12
    assert not asked & {request.key for request in client.asked}


def test_a_stopping_job_does_not_finish_the_waits_of_other_requests(tmp_path):
    def behaviour(prompt, seed, count):
        if prompt == "prompt 0":
            return UnansweredError("status 429", retry_after_seconds=300)
        return UnansweredError("no money", is_final=True)

    start = time.monotonic()
    with pytest.raises(EndpointError, match="no money"):
        ask_all(tmp_path, FakeClient(behaviour), requests=REQUESTS[:2])
    assert time.monotonic() - start < 2


def test_a_refused_prompt_counts_as_answered_after_another_answer(tmp_path):
    refusal = Reply(None, refusal="status 400: no", usage=False)
    client = FakeClient(lambda prompt, seed, count: refusal if prompt == "prompt 2" else Reply("x"))
    _, journal = ask_all(tmp_path, client, Limits(concurrency=1))
    assert (len(journal), journal.num_answers) == (12, 11)
    ask_all(tmp_path, client)
    assert len(client.asked) == 12


@pytest.mark.parametrize("concurrency", [1, 6])
def test_the_budget_is_never_exceeded_in_one_run_or_several(tmp_path, concurrency):
    # Prompts have about 8 bytes, and answers have the maximum of 40 tokens.
    client = FakeClient(lambda prompt, seed, count: Reply("x" * 160, seconds=0.001), sampling=Sampling("m", 1.0, 40))
    each = len("prompt 0") // 4 + 40
    budget = Budget(token_budget=6 * each)
    runner, journal = ask_all(tmp_path, client, Limits(concurrency=concurrency), budget)
    spent = journal.prompt_tokens + journal.completion_tokens
    assert runner.exhausted
    assert 3 * each <= spent <= 6 * each
    runner, journal = ask_all(tmp_path, client, Limits(concurrency=concurrency), budget)
    assert runner.exhausted
    assert journal.prompt_tokens + journal.completion_tokens == spent
    runner, journal = ask_all(tmp_path, client, Limits(concurrency=concurrency), Budget(token_budget=12 * each + 200))
    assert not runner.exhausted
    assert len(journal) == len(client.asked) == 12


def test_budget_and_prices_need_an_endpoint_that_reports_tokens(tmp_path):
    client = FakeClient(lambda prompt, seed, count: Reply("x", usage=False))
    refused(InputError, "does not report the tokens", ask_all, tmp_path, client, budget=Budget(token_budget=10**6))
    refused(InputError, "leave token_budget and the prices", ask_all, tmp_path, client, budget=Budget(None, 1.0, 2.0))
    _, journal = ask_all(tmp_path, client)
    assert len(client.asked) == len(journal) == 12


def test_the_request_rate_includes_retries(tmp_path):
    client = FakeClient(lambda prompt, seed, count: Reply("x") if count else UnansweredError("status 500"))
    start = time.monotonic()
    limits = Limits(concurrency=8, requests_per_minute=60 * 100)
    ask_all(tmp_path, client, limits)
    assert len(client.asked) == 24
    assert time.monotonic() - start >= 0.23


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Sampling("m", -0.1), "temperature must be between 0 and 2"),
        (lambda: Sampling("m", float("nan")), "temperature must be between 0 and 2"),
        (lambda: Sampling("m", max_answer_tokens=0), "max_answer_tokens must be >= 1"),
        (lambda: Sampling("m", extra_body={"n": 2}), "extra_body must not contain"),
        (lambda: Limits(concurrency=0), "concurrency must be >= 1"),
        (lambda: Limits(max_retries=-1), "max_retries must be >= 0"),
        (lambda: Limits(requests_per_minute=0), "requests_per_minute must be > 0"),
        (lambda: Budget(token_budget=0), "token_budget must be >= 1"),
        (lambda: Budget(None, 1.0), "price_per_million_prompt_tokens needs the other price"),
        (lambda: Budget(None, -1.0, 1.0), "price_per_million_prompt_tokens must be >= 0"),
    ],
)
def test_invalid_numbers_are_refused(make, says):
    refused(OptionError, says, make)


class Clock:
    """A clock that advances only during `sleep`."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now

    async def sleep(self, seconds):
        self.now += seconds


def start_times(limiter, clock, count, tokens=0):
    """The start times of successive requests that each spend `tokens`."""

    async def run():
        times = []
        for _ in range(count):
            await limiter.wait()
            times.append(round(clock.now - 100, 6))
            limiter.spend(tokens)
        return times

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
def test_requests_are_spaced_evenly_and_wait_for_the_token_rate(rates, tokens, expected):
    assert start_times(*make(**rates), 3, tokens) == expected


def test_idle_time_does_not_allow_bursts():
    limiter, clock = make(requests_per_minute=60)
    clock.now += 50
    assert start_times(limiter, clock, 3) == [50, 51, 52]


def test_a_pause_delays_all_requests():
    limiter, clock = make()
    limiter.pause(7)
    limiter.pause(3)
    assert start_times(limiter, clock, 2) == [7, 7]


FULL = Answer('two\nlines, half a character \ud800, "quotes"', "stop", None, 11, 5)
REFUSED = Answer(None, None, "status 400: no", None, None)


def test_answers_are_read_back_unchanged_after_reopening(tmp_path):
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


@pytest.fixture
def path(tmp_path):
    """A journal of one answer."""
    path = tmp_path / "journal.jsonl"
    with open_journal(path) as journal:
        journal.append("a", FULL)
    return path


def test_an_incomplete_last_line_is_removed_at_any_length(path):
    first = path.stat().st_size
    with open_journal(path) as journal:
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


def test_a_damaged_line_before_the_last_is_an_error_and_not_changed(path):
    damaged = b"[1]\n" + path.read_bytes()
    path.write_bytes(damaged)
    with pytest.raises(InputError, match=r"journal.jsonl:1: is not a saved answer"), open_journal(path):
        pass
    assert path.read_bytes() == damaged


def test_a_full_disk_leaves_no_half_line(path, monkeypatch):
    def full(handle):
        raise OSError(28, "No space left on device")

    size = path.stat().st_size
    with open_journal(path) as journal:
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            journal.append("b", FULL)
        assert path.stat().st_size == size
        assert "b" not in journal
        monkeypatch.undo()
        journal.append("b", FULL)
        assert journal.get("b") == FULL


def test_an_answer_is_on_disk_when_append_returns(path, monkeypatch):
    synced = []
    real = os.fsync
    with open_journal(path) as journal:
        monkeypatch.setattr(os, "fsync", lambda handle: (synced.append(os.fstat(handle).st_size), real(handle)))
        journal.append("b", FULL)
        assert synced == [path.stat().st_size]
