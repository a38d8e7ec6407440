"""Single requests through the real client, and many requests within limits and a budget, each sent once."""

import asyncio
import os
import threading
import time
from email.utils import formatdate

import pytest

from embeddings.common import InputError, OptionError
from embeddings.synthesis.client import (
    FEW_ANSWERS,
    ChatClient,
    EndpointError,
    Limits,
    Sampling,
    make_request,
    open_journal,
)
from embeddings.synthesis.validate import Answer, RejectedAnswer
from tests.helpers.chat_server import Reply, chat_server
from tests.helpers.refusals import refused
from tests.synthesis.models import FakeClient, make_runner


def read(value):
    """Any answer but an empty object can be used."""
    if value == {}:
        raise RejectedAnswer("missing_field", "query")


REQUEST = make_request("example/short_long-0/0", "Write something.", 7, read)
LIST_REQUEST = make_request("tasks/short_long/0", "Write a list.", 7, read, wants_object=False)


def ask(reply, sampling=None, request=REQUEST, **limits):
    """The client's answer for a server's reply, and the server."""
    with chat_server(lambda prompt, seed, count: reply) as server:
        return ask_at(server.endpoint, sampling, request, **limits), server


def ask_at(endpoint, sampling=None, request=REQUEST, max_retries=0, **limits):
    client = ChatClient(endpoint, sampling or Sampling("some-model"), Limits(max_retries=max_retries, **limits))

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
    _, server = ask(Reply("[1]"), sampling)
    (body,) = server.requests
    assert body["max_completion_tokens"] == 99
    assert body["response_format"] == {"type": "json_object"}
    assert body["reasoning_effort"] == "low"
    assert not {"temperature", "max_tokens"} & set(body)
    _, server = ask(Reply("[1]"), sampling, LIST_REQUEST)
    assert "response_format" not in server.requests[0]


def test_the_key_comes_from_the_environment(monkeypatch):
    assert ask(Reply("[1]"))[1].headers[0]["authorization"] == "Bearer none"
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    assert ask(Reply("[1]"))[1].headers[0]["authorization"] == "Bearer sk-secret"


OTHER = Answer(None, refused="the response is not a chat completion")


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (Reply(None), Answer(None, "stop", None, 4, 0)),
        (Reply("", refusal="I will not"), Answer("", "stop", "I will not", 4, 0)),
        (Reply("x", finish_reason="length", usage=False), Answer("x", "length")),
        (Reply(status=400, error="too long"), Answer(None, refused="status 400: too long")),
        (Reply(status=422, body=b'{"detail": "no seed"}'), Answer(None, refused="status 422: no seed")),
        (Reply(body=b'{"choices": [{"message": {"content": ["a"]}}]}'), Answer(None)),
        (Reply(body=b'{"choices": []}'), OTHER),
        (Reply(body=b'{"choices": [{"message": "x"}]}'), OTHER),
        (Reply(body=b'{"choices": [{"message": {"content": "x"}}], "usage": [1]}'), OTHER),
    ],
)
def test_refusals_and_responses_without_content_are_answers(reply, expected):
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
    ("reply", "says"),
    [
        (Reply(status=500), "status 500: no"),
        (Reply(status=429, code="insufficient_quota", error="pay"), "status 429: pay"),
        (Reply(status=402), "status 402: no"),
        (Reply(status=503, body=b"<title>Down</title>"), "status 503: <title>Down"),
        (Reply(status=429, headers={"Retry-After": "3600"}), "status 429: no"),
        (Reply(hangs_up=True), "no connection"),
        (Reply(body=b"<html>"), "status 200 without an answer: <html>"),
        (Reply(body=b"[1]"), "status 200 without an answer: [1]"),
        (Reply(body=b'{"error": "overloaded"}'), "status 200 without an answer: overloaded"),
        (Reply("[1]", seconds=0.6), "no answer in 0.3 s"),
    ],
)
def test_an_endpoint_that_does_not_answer_ends_the_job_with_code_74(reply, says):
    with pytest.raises(EndpointError) as failure:
        ask(reply, timeout_seconds=0.3)
    assert says in str(failure.value)
    assert "the same command resumes" in str(failure.value)
    assert failure.value.exit_code == 74


@pytest.mark.parametrize("endpoint", ["localhost:8000", "ftp://x/v1", ""])
def test_an_endpoint_that_is_not_an_http_url_is_refused(endpoint):
    refused(OptionError, "endpoint must be an HTTP URL", ChatClient, endpoint, Sampling("m"))


REQUESTS = [make_request(f"example/a-{number}/0", f"prompt {number}", 0, read) for number in range(12)]


def ask_all(folder, client, requests=REQUESTS):
    with make_runner(folder, client) as (runner, journal):
        runner.run(iter(requests), len(requests), "requests")
    return runner, journal


def test_every_request_is_answered_and_none_twice(tmp_path):
    client = FakeClient(shuffled=True)
    ask_all(tmp_path, client, REQUESTS[:5])
    _, journal = ask_all(tmp_path, client)
    assert sorted(request.key for request in client.asked) == sorted(request.key for request in REQUESTS)
    assert len(journal) == 12


@pytest.mark.parametrize("concurrency", [1, 3, 50])
def test_the_number_of_concurrent_requests_is_the_limit(tmp_path, concurrency):
    client = FakeClient(lambda prompt, seed, count: Reply("[1]", seconds=0.005), limits=Limits(concurrency=concurrency))
    ask_all(tmp_path, client)
    assert client.max_in_flight == min(concurrency, 12)


def test_a_failed_request_is_retried(tmp_path, caplog, quick_retries):
    def behaviour(prompt, seed, count):
        if prompt == "prompt 0" and count < 2:
            return Reply(status=500) if count else Reply(body=b"<html>", headers={"Content-Type": "text/html"})
        return Reply("[1]")

    with chat_server(behaviour) as server:
        client = ChatClient(server.endpoint, Sampling("m"), Limits(max_retries=2))
        _, journal = ask_all(tmp_path, client, REQUESTS[:3])
    assert (len(journal), client.retries) == (3, 2)
    assert sum("; retrying at most 2 times" in message for message in caplog.messages) == 1


@pytest.mark.parametrize("as_date", [False, True])
def test_an_obeyed_rate_limit_is_no_failure_and_spreads_the_requests(as_date, tmp_path):
    """One request in a window is answered; all workers are refused in the first one."""
    window, answered, lock = (1.0 if as_date else 0.2), [], threading.Lock()

    def behaviour(prompt, seed, count):
        with lock:
            if answered and time.monotonic() - answered[-1] < window:
                date = formatdate(time.time() + 2, usegmt=True)
                return Reply(status=429, headers={"Retry-After": date if as_date else str(window)})
            answered.append(time.monotonic())
        return Reply("[1]")

    requests = REQUESTS[: 3 if as_date else 8]
    with chat_server(behaviour) as server:
        client = ChatClient(server.endpoint, Sampling("m"), Limits(max_retries=1))
        _, journal = ask_all(tmp_path, client, requests)
        assert len(journal) == len(requests)
        assert len(server.requests) < 4 * len(requests)


def test_an_endpoint_that_refuses_for_ever_ends_the_job(tmp_path):
    limited = Reply(status=429, error="slow down", headers={"Retry-After": "0.01"})
    with chat_server(lambda prompt, seed, count: limited) as server:
        client = ChatClient(server.endpoint, Sampling("m"), Limits(max_retries=2, concurrency=2))
        with pytest.raises(EndpointError, match="status 429: slow down"):
            ask_all(tmp_path, client)
        assert 5 <= len(server.requests) <= 6


@pytest.mark.parametrize("share", [0.95, 1.0])
def test_a_job_stops_if_most_answers_are_unusable(share, tmp_path):
    """After a first answer; the two that are shown have their causes."""
    bad = ["{}", "I'm sorry, but I cannot"]
    client = FakeClient(
        lambda prompt, seed, count: Reply("[1]" if prompt == "prompt 0" else bad[len(client.asked) % 2]),
        limits=Limits(concurrency=1, max_unusable=share),
    )
    requests = [make_request(f"a/{number}", f"prompt {number}", 0, read) for number in range(2 * FEW_ANSWERS)]
    if share == 1:
        ask_all(tmp_path, client, requests)
        return
    says = "20 of the last 21 answers are unusable, such as "
    message = refused(InputError, says, ask_all, tmp_path, client, requests)
    assert "missing field: '{}'" in message
    assert 'not json: "I\'m sorry, but I cannot"' in message
    assert len(client.asked) == FEW_ANSWERS + 1


def test_after_the_last_retry_the_job_stops_and_answers_in_flight_are_saved(tmp_path, quick_retries):
    failed = threading.Event()

    def behaviour(prompt, seed, count):
        if prompt == "prompt 1":
            if count == 2:
                failed.set()
            return Reply(status=503)
        # Answers come after the failure.
        return Reply("[1]", seconds=0.2 if failed.wait(5) else 0)

    with chat_server(behaviour) as server:
        client = ChatClient(server.endpoint, Sampling("m"), Limits(concurrency=4, max_retries=2))
        with pytest.raises(EndpointError, match=r"status 503: no.*the same command resumes"):
            ask_all(tmp_path, client)
        answered = {request["seed"] for request in server.requests} - {REQUESTS[1].seed}
        assert len(answered) == 3
        assert len(server.requests) == 3 + 3
        server.behaviour = lambda prompt, seed, count: Reply("[1]")
        server.requests.clear()
        _, journal = ask_all(tmp_path, client)
        assert len(journal) == 12
        assert not answered & {request["seed"] for request in server.requests}


def test_a_stopping_job_retries_no_other_request(tmp_path):
    def behaviour(prompt, seed, count):
        if prompt == "prompt 0":
            return Reply(status=500)
        return Reply(status=402, error="no money")

    with chat_server(behaviour) as server:
        client = ChatClient(server.endpoint, Sampling("m"))
        with pytest.raises(EndpointError, match="no money"):
            ask_all(tmp_path, client, REQUESTS[:2])
        assert len(server.requests) == 2


def test_a_refused_prompt_counts_as_answered_after_another_answer(tmp_path):
    refusal = Reply(None, refusal="status 400: no", usage=False)
    client = FakeClient(lambda prompt, seed, count: refusal if prompt == "prompt 2" else Reply("[1]"))
    client.limits = Limits(concurrency=1)
    _, journal = ask_all(tmp_path, client)
    assert (len(journal), journal.num_answers) == (12, 11)
    ask_all(tmp_path, client)
    assert len(client.asked) == 12


@pytest.mark.parametrize("concurrency", [1, 6])
def test_the_budget_is_never_exceeded_in_one_run_or_several(tmp_path, concurrency):
    # Prompts have about 8 bytes, and answers have the maximum of 40 tokens.
    client = FakeClient(lambda prompt, seed, count: Reply("x" * 160, seconds=0.001), sampling=Sampling("m", 1.0, 40))
    each = len("prompt 0") // 4 + 40
    client.limits = Limits(concurrency=concurrency, token_budget=6 * each)
    runner, journal = ask_all(tmp_path, client)
    spent = journal.prompt_tokens + journal.completion_tokens
    assert runner.exhausted
    assert 3 * each <= spent <= 6 * each
    runner, journal = ask_all(tmp_path, client)
    assert runner.exhausted
    assert journal.prompt_tokens + journal.completion_tokens == spent
    client.limits = Limits(token_budget=12 * each + 200)
    runner, journal = ask_all(tmp_path, client)
    assert not runner.exhausted
    assert len(journal) == len(client.asked) == 12


def test_a_budget_needs_an_endpoint_that_reports_tokens(tmp_path):
    client = FakeClient(lambda prompt, seed, count: Reply("x", usage=False), limits=Limits(token_budget=10**6))
    refused(InputError, "does not report the tokens .* leave token_budget out", ask_all, tmp_path, client)
    client.limits = Limits()
    _, journal = ask_all(tmp_path, client)
    assert len(client.asked) == len(journal) == 12


def test_requests_and_retries_are_spaced_evenly(tmp_path, quick_retries):
    times = []

    def behaviour(prompt, seed, count):
        times.append(time.monotonic())
        return Reply("[1]") if count else Reply(status=500)

    with chat_server(behaviour) as server:
        ask_all(tmp_path, ChatClient(server.endpoint, Sampling("m"), Limits(requests_per_minute=60 * 50)))
    assert len(times) == 24
    assert max(times) - min(times) >= 0.4


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Sampling("m", -0.1), "temperature must be >= 0"),
        (lambda: Sampling("m", float("nan")), "temperature must be >= 0"),
        (lambda: Sampling("m", max_answer_tokens=0), "max_answer_tokens must be > 0"),
        (lambda: Sampling("m", extra_body={"n": 2}), "extra_body must not contain"),
        (lambda: Limits(max_attempts=0), "max_attempts must be > 0"),
        (lambda: Limits(concurrency=0), "concurrency must be > 0"),
        (lambda: Limits(max_retries=-1), "max_retries must be >= 0"),
        (lambda: Limits(requests_per_minute=0), "requests_per_minute must be > 0"),
        (lambda: Limits(timeout_seconds=0), "timeout_seconds must be > 0"),
        (lambda: Limits(token_budget=0), "token_budget must be > 0"),
    ],
)
def test_invalid_numbers_and_fields_are_refused(make, says):
    assert Limits(max_retries=0).max_retries == Sampling("m", 0).temperature == 0
    refused(OptionError, says, make)


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
            assert (journal.get("a"), journal.get("b")) == (FULL, None)
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
        assert journal.get("b") is None
        monkeypatch.undo()
        journal.append("b", FULL)
        assert journal.get("b") == FULL
