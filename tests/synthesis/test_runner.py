"""Many requests of a job: each sent once, within limits and a budget, and the journal of their answers."""

import os
import threading
import time
from email.utils import formatdate

import pytest

from embeddings.common import InputError
from embeddings.common.jobs import ArrayTask
from embeddings.common.progress import progress_bar
from embeddings.synthesis.client import ChatClient, EndpointError, Limits, Sampling, make_request
from embeddings.synthesis.runner import FEW_ANSWERS, Concurrency, open_journal
from embeddings.synthesis.validate import Answer, RejectedAnswer
from tests.helpers.chat_server import Reply, chat_server
from tests.helpers.refusals import refused
from tests.synthesis.models import FakeClient, make_runner


def read(value):
    """Any answer but an empty object can be used."""
    if value == {}:
        raise RejectedAnswer("missing_field", "query")


REQUESTS = [make_request(f"example/a-{number}/0", f"prompt {number}", 0, read) for number in range(12)]


def ask_all(folder, client, requests=REQUESTS):
    with make_runner(folder, client) as (runner, journal):
        runner.run(lambda: enumerate(requests), len(requests), "requests")
    return runner, journal


@pytest.mark.parametrize(("maximum", "number"), [(1, 12), (3, 60), (50, 12)])
def test_concurrent_requests_begin_with_two_and_grow_up_to_the_limit(tmp_path, maximum, number):
    client = FakeClient(lambda prompt, seed, count: Reply("[1]", seconds=0.01), limits=Limits(concurrency=maximum))
    requests = [make_request(f"a/{number}", f"prompt {number}", 0, read) for number in range(number)]
    ask_all(tmp_path, client, requests)
    assert client.max_in_flight == (maximum if number > 12 or maximum == 1 else 4)


@pytest.mark.parametrize(("capacity", "maximum", "expected"), [(1, 64, 2), (16, 64, 16), (1000, 64, 64), (7, 8, 8)])
def test_concurrency_doubles_while_the_endpoint_answers_faster(capacity, maximum, expected):
    """An endpoint that works on `capacity` requests at once; each takes a second."""
    concurrency, now = Concurrency(maximum), 0.0
    for _ in range(1000):
        now += 1 / min(concurrency.value, capacity)
        concurrency.record(Answer("x" * 400), 0, now)
        if concurrency.num_rests:
            break
    assert concurrency.value == expected


def test_retries_halve_the_concurrency_which_then_grows_again():
    concurrency, now, values = Concurrency(16), 0.0, []
    for number in range(4000):
        now += 1 / concurrency.value
        concurrency.record(Answer("x", completion_tokens=100), number // 1000, now)
        values.append(concurrency.value)
    assert values[900] == 16
    assert 4 in values[1000:1100] or 8 in values[1000:1100]
    assert values[1900] == 16


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


def test_after_the_last_retry_the_job_stops_and_answers_in_flight_are_saved(tmp_path, quick_retries, monkeypatch):
    monkeypatch.setattr("embeddings.synthesis.runner.FIRST_CONCURRENCY", 4)
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


FULL = Answer('two\nlines, half a character \ud800, "quotes"', "stop", None, 11, 5)
REFUSED = Answer(None, None, "status 400: no", None, None)


def test_answers_are_read_back_unchanged_after_reopening(tmp_path):
    path = tmp_path / "journal.jsonl"
    with open_journal(path.parent) as journal:
        journal.append("a", FULL)
        journal.append("b", REFUSED)
        assert journal.get("a") == FULL
    with open_journal(path.parent) as journal:
        assert (journal.get("a"), journal.get("b"), journal.get("c")) == (FULL, REFUSED, None)
        assert (len(journal), journal.num_answers) == (2, 1)
        assert (journal.prompt_tokens, journal.completion_tokens) == (11, 5)
        journal.append("c", Answer("x", prompt_tokens=1))
        assert journal.prompt_tokens == 12


def test_a_cut_off_answer_of_another_process_replaces_no_whole_or_longer_one(tmp_path):
    short, longer = (Answer("x", "length", None, 11, limit, limit) for limit in (5, 9))
    with open_journal(tmp_path, ArrayTask(1, 2)) as journal:
        for key, answer in {"a": short, "b": longer, "c": short}.items():
            journal.append(key, answer)
    for _ in range(2):
        with open_journal(tmp_path, ArrayTask(0, 2)) as journal:
            journal.limit = 9
            for key, answer in {"a": FULL, "c": longer}.items():
                if journal.get(key) is None:
                    journal.append(key, answer)
            assert [journal.get(key) for key in "abc"] == [FULL, longer, longer]
        assert len((tmp_path / "journal-00000.jsonl").read_bytes().splitlines()) == 2


@pytest.fixture
def path(tmp_path):
    """A journal of one answer."""
    path = tmp_path / "journal.jsonl"
    with open_journal(path.parent) as journal:
        journal.append("a", FULL)
    return path


def test_an_incomplete_last_line_is_removed_at_any_length(path):
    first = path.stat().st_size
    with open_journal(path.parent) as journal:
        journal.append("b", FULL)
    whole = path.read_bytes()
    for size in range(first, len(whole)):
        path.write_bytes(whole[:size])
        with open_journal(path.parent) as journal:
            assert (journal.get("a"), journal.get("b")) == (FULL, None)
            journal.append("b", FULL)
        assert path.read_bytes() == whole
    path.write_bytes(whole[:first] + b'{"key": \x00\x00\n')
    with open_journal(path.parent) as journal:
        assert len(journal) == 1


def test_a_damaged_line_before_the_last_is_an_error_and_not_changed(path):
    damaged = b"[1]\n" + path.read_bytes()
    path.write_bytes(damaged)
    with pytest.raises(InputError, match=r"journal.jsonl:1: is not a saved answer"), open_journal(path.parent):
        pass
    assert path.read_bytes() == damaged


def test_a_full_disk_leaves_no_half_line(path, monkeypatch):
    def full(handle):
        raise OSError(28, "No space left on device")

    size = path.stat().st_size
    with open_journal(path.parent) as journal:
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            journal.append("b", FULL)
        assert path.stat().st_size == size
        assert journal.get("b") is None
        monkeypatch.undo()
        journal.append("b", FULL)
        assert journal.get("b") == FULL


def test_an_unusable_answer_is_followed_by_the_next_attempt_at_once(tmp_path):
    def attempt(number, count=0):
        retry = None if count == 2 else lambda: attempt(number, count + 1)
        return make_request(f"example/a-{number}/{count}", f"prompt {number}", 0, read, retry=retry)

    client = FakeClient(lambda prompt, seed, count: Reply("{}" if prompt == "prompt 1" else "[1]"))
    client.limits = Limits(concurrency=1)
    _, journal = ask_all(tmp_path, client, [attempt(number) for number in range(3)])
    assert [request.key.split("/")[1:3] for request in client.asked] == [
        *(["a-0", "0"], ["a-1", "0"], ["a-1", "1"], ["a-1", "2"], ["a-2", "0"])
    ]
    ask_all(tmp_path, client, [attempt(number) for number in range(3)])
    assert len(client.asked) == len(journal) == 5


def test_more_answer_tokens_ask_again_for_cut_off_answers_only(tmp_path):
    def behaviour(prompt, seed, count):
        is_long = prompt in ("prompt 3", "prompt 5") and client.sampling.max_answer_tokens < 99
        return Reply("[1", finish_reason="length") if is_long else Reply("[1]")

    client = FakeClient(behaviour, shuffled=True, sampling=Sampling("m", max_answer_tokens=10))
    ask_all(tmp_path, client, REQUESTS[:5])
    ask_all(tmp_path, client)
    assert len(client.asked) == 12
    client.sampling = Sampling("m", max_answer_tokens=99)
    _, journal = ask_all(tmp_path, client)
    assert {request.prompt for request in client.asked[12:]} == {"prompt 3", "prompt 5"}
    assert len(journal) == 12
    ask_all(tmp_path, client)
    assert len(client.asked) == 14


def test_the_numbers_of_the_run_are_shown_before_an_answer_is_complete(tmp_path, monkeypatch, capfd):
    """A line each interval without a terminal: answers that come part by part, then their usable share."""
    monkeypatch.setattr("embeddings.synthesis.runner._POLL_SECONDS", 0.05)
    monkeypatch.setattr("embeddings.synthesis.runner.progress_bar", show_at_once)
    replies = {"prompt 0": Reply("[1]" + " " * 600, trickle_seconds=0.05), "prompt 1": Reply("{}", seconds=1)}
    with chat_server(lambda prompt, seed, count: replies[prompt]) as server:
        ask_all(tmp_path, ChatClient(server.endpoint, Sampling("m")), REQUESTS[:2])
    shown = capfd.readouterr().err
    assert "parts received, 0 tokens: " in shown
    assert "1 of 1 answers usable, " in shown
    assert "requests, " in shown


def show_at_once(total, title, unit):
    return progress_bar(total, title, unit, delay=0, every_seconds=0.05)
