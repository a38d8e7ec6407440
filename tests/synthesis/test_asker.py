"""Many requests: each is paid for once, none exceeds the budget, and what fails is tried again after a wait."""

import time
from itertools import pairwise

import pytest

from embeddings.common import InputError, OptionError
from embeddings.synthesis.client import EndpointError, Sampling, UnansweredError, make_request
from embeddings.synthesis.runner import Spending, Traffic
from tests.helpers.chat_server import Reply
from tests.synthesis.models import EAGER, FakeClient, make_asker

REQUESTS = [make_request(f"example/a-{number}/0", f"prompt {number}", 0) for number in range(12)]


def ask(folder, client, traffic=EAGER, spending=None, requests=REQUESTS):
    with make_asker(folder, client, traffic, spending) as (asker, journal):
        asker.ask_all(iter(requests), len(requests), "requests")
    return asker, journal


def test_every_request_is_answered_and_none_twice(tmp_path):
    client = FakeClient(shuffled=True)
    ask(tmp_path, client, requests=REQUESTS[:5])
    _, journal = ask(tmp_path, client)
    assert sorted(request.key for request in client.asked) == sorted(request.key for request in REQUESTS)
    assert len(journal) == 12


@pytest.mark.parametrize("concurrency", [1, 3, 50])
def test_so_many_requests_are_under_way_at_once(tmp_path, concurrency):
    client = FakeClient(lambda prompt, seed, count: Reply("x", seconds=0.005))
    ask(tmp_path, client, Traffic(concurrency))
    assert client.most_at_once == min(concurrency, 12)


def test_a_request_that_fails_is_tried_again_after_ever_longer_waits(tmp_path, caplog):
    times = []

    def behaviour(prompt, seed, count):
        times.append(time.monotonic())
        return Reply("x") if count == 3 else UnansweredError("status 500", "no")

    traffic = Traffic(concurrency=1, backoff_seconds=0.02, max_retries=3)
    asker, journal = ask(tmp_path, FakeClient(behaviour), traffic, requests=REQUESTS[:1])
    assert asker.retries == {"status 500": 3}
    assert len(journal) == 1
    # Whoever watches learns at once why nothing moves, and once.
    (message,) = caplog.messages
    assert "status 500 (no); trying again, 3 times at most" in message
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

    ask(tmp_path, FakeClient(behaviour), Traffic(concurrency=2), requests=REQUESTS[:6])
    late = [prompt for prompt, when in times.items() if when >= times["asked"] + 0.08]
    assert len(late) >= 5


def test_after_the_last_retry_the_job_stops_and_what_is_under_way_is_kept(tmp_path):
    def behaviour(prompt, seed, count):
        return UnansweredError("status 503") if prompt == "prompt 1" else Reply("x", seconds=0.05)

    client = FakeClient(behaviour)
    with pytest.raises(
        EndpointError, match=r"http://fake/v1: status 503 \(tried 3 times\).*the same line goes on"
    ) as end:
        ask(tmp_path, client, Traffic(concurrency=4, max_retries=2, backoff_seconds=0.001))
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
    def behaviour(prompt, seed, count):
        return Reply(None, refusal="status 400: no", usage=False) if prompt == "prompt 2" else Reply("x")

    client = FakeClient(behaviour)
    _, journal = ask(tmp_path, client, Traffic(concurrency=1))
    assert (len(journal), journal.num_answers) == (12, 11)
    ask(tmp_path, client)
    assert len(client.asked) == 12


def test_a_refusal_of_the_very_first_request_is_the_users_to_mend(tmp_path):
    client = FakeClient(lambda prompt, seed, count: Reply(None, refusal="status 400: unknown field", usage=False))
    with pytest.raises(InputError, match=r"refuses the request \(status 400: unknown field"):
        ask(tmp_path, client, Traffic(concurrency=1))
    assert len(client.asked) == 1


@pytest.mark.parametrize("concurrency", [1, 6])
def test_no_token_is_spent_beyond_the_budget_in_one_run_or_several(tmp_path, concurrency):
    # A prompt of some 8 bytes and answers of 40 tokens, which is also their limit.
    client = FakeClient(lambda prompt, seed, count: Reply("x" * 160, seconds=0.001), sampling=Sampling("m", 1.0, 40))
    each = len("prompt 0") // 4 + 40
    spending = Spending(token_budget=6 * each)
    asker, journal = ask(tmp_path, client, Traffic(concurrency), spending)
    spent = journal.prompt_tokens + journal.completion_tokens
    assert asker.exhausted
    assert 3 * each <= spent <= 6 * each
    asker, journal = ask(tmp_path, client, Traffic(concurrency), spending)
    assert asker.exhausted
    assert journal.prompt_tokens + journal.completion_tokens == spent
    asker, journal = ask(tmp_path, client, Traffic(concurrency), Spending(token_budget=12 * each + 200))
    assert not asker.exhausted
    assert len(journal) == len(client.asked) == 12


def test_an_endpoint_that_counts_no_tokens_has_neither_budget_nor_price(tmp_path):
    client = FakeClient(lambda prompt, seed, count: Reply("x", usage=False))
    with pytest.raises(InputError, match="does not say how many tokens"):
        ask(tmp_path, client, spending=Spending(token_budget=10**6))
    with pytest.raises(InputError, match="leave token_budget and the prices out"):
        ask(tmp_path, client, spending=Spending(None, 1.0, 2.0))
    _, journal = ask(tmp_path, client)
    assert len(client.asked) == len(journal) == 12


def test_a_rate_holds_over_retries(tmp_path):
    client = FakeClient(lambda prompt, seed, count: Reply("x") if count else UnansweredError("status 500"))
    start = time.monotonic()
    traffic = Traffic(concurrency=8, requests_per_minute=60 * 100, backoff_seconds=0.001)
    ask(tmp_path, client, traffic)
    assert len(client.asked) == 24
    assert time.monotonic() - start >= 0.23


def test_cost_is_tokens_times_price():
    assert Spending(None, 2.5, 10.0).cost(400_000, 100_000) == pytest.approx(2.0)
    assert Spending().cost(400_000, 100_000) is None


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Traffic(concurrency=0), "concurrency"),
        (lambda: Traffic(max_retries=-1), "max_retries"),
        (lambda: Traffic(requests_per_minute=0), "requests_per_minute"),
        (lambda: Spending(token_budget=0), "token_budget"),
        (lambda: Spending(None, 1.0), "price_per_million_prompt_tokens needs the other price"),
        (lambda: Spending(None, None, 1.0), "price_per_million_completion_tokens needs the other price"),
        (lambda: Spending(None, -1.0, 1.0), "price_per_million_prompt_tokens must be >= 0"),
    ],
)
def test_impossible_numbers_are_refused(make, says):
    with pytest.raises(OptionError, match=says):
        make()
