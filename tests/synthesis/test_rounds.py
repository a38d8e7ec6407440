"""What is accepted follows from the answers alone: not from their order, nor from how often the job was ended."""

import json
from functools import partial

import pytest

from embeddings.synthesis.client import EndpointError, UnansweredError
from embeddings.synthesis.job import Item, run_rounds
from embeddings.synthesis.runner import Traffic
from embeddings.synthesis.validate import Draft, RejectedAnswer
from tests.helpers.chat_server import Reply
from tests.synthesis.models import EAGER, FakeClient, make_asker


def read(parsed):
    if parsed.value.get("bad"):
        raise RejectedAnswer("wrong_type", "bad")
    return Draft({"query": parsed.value["query"]}, parsed.repairs)


def items(count, is_unique=True, file="a.jsonl"):
    return [Item(f"a-{number}", file, f"prompt {number}", read, is_unique) for number in range(count)]


def run(folder, client, found, max_attempts=3, traffic=EAGER):
    with make_asker(folder, client, traffic) as (asker, journal):
        return run_rounds(lambda: iter(found), len(found), asker, journal, seed=1, max_attempts=max_attempts)


def says(**value):
    return Reply(json.dumps(value))


def test_a_good_answer_is_asked_for_once(tmp_path):
    client = FakeClient(lambda prompt, seed, count: says(query=prompt))
    outcome = run(tmp_path, client, items(6))
    assert outcome.attempts == dict.fromkeys(range(6), 0)
    assert (outcome.rejections, outcome.repairs, len(client.asked)) == ([], {}, 6)


def test_what_is_rejected_is_asked_again_with_another_seed_up_to_the_limit(tmp_path):
    seeds = {}

    def behaviour(prompt, seed, count):
        seeds.setdefault(prompt, []).append(seed)
        number = int(prompt.split()[1])
        return says(query=prompt, bad=len(seeds[prompt]) <= number)

    outcome = run(tmp_path, FakeClient(behaviour), items(5), max_attempts=3)
    assert outcome.attempts == {0: 0, 1: 1, 2: 2}
    assert [len(seeds[f"prompt {number}"]) for number in range(5)] == [1, 2, 3, 3, 3]
    assert all(len(set(found)) == len(found) for found in seeds.values())
    assert outcome.reasons == {"wrong_type": 1 + 2 + 3 + 3}
    assert outcome.rejections[0] == ("a-1", 0, "wrong_type", "bad")


def test_of_two_items_with_one_query_the_earlier_one_is_kept_whatever_comes_first(tmp_path):
    def behaviour(prompt, seed, count):
        number = int(prompt.split()[1])
        return Reply(json.dumps({"query": f"The QUERY {number // 2}!"}), seconds=0.02 if number % 2 == 0 else 0)

    outcome = run(tmp_path, FakeClient(behaviour), items(6), max_attempts=1)
    assert sorted(outcome.attempts) == [0, 2, 4]
    assert outcome.reasons == {"duplicate_query": 3}


def test_copies_are_looked_for_within_a_file_and_only_where_asked(tmp_path):
    client = FakeClient(lambda prompt, seed, count: says(query="the same"))
    places = [("a.jsonl", 0), ("a.jsonl", 1), ("b.jsonl", 2), ("b.jsonl", 3)]
    both = [Item(f"x-{place}", file, f"prompt {place}", read) for file, place in places]
    assert sorted(run(tmp_path, client, both, max_attempts=1).attempts) == [0, 2]
    (tmp_path / "other").mkdir()
    assert len(run(tmp_path / "other", client, items(4, is_unique=False)).attempts) == 4


def test_repairs_are_counted_for_accepted_answers_alone(tmp_path):
    def behaviour(prompt, seed, count):
        bad = prompt == "prompt 0"
        return Reply(f"```\n{json.dumps({'query': prompt, 'bad': bad})}\n```")

    outcome = run(tmp_path, FakeClient(behaviour), items(3), max_attempts=1)
    assert outcome.repairs == {"code_fence": 2}


def hard_to_please(prompt, seed, count):
    """An answer by prompt and seed: good, a copy, or spoilt."""
    value = {"query": f"query {seed % 9}", "bad": seed % 4 == 0}
    return Reply(json.dumps(value) if seed % 5 else "no JSON")


@pytest.mark.parametrize("concurrency", [1, 3, 16])
def test_order_and_interruptions_change_nothing(tmp_path, concurrency):
    whole = run(tmp_path, FakeClient(hard_to_please), items(30))
    assert 3 < len(whole.attempts) < 30
    assert {"duplicate_query", "not_json", "wrong_type"} == set(whole.reasons)
    folder = tmp_path / "ended"
    folder.mkdir()

    def ending(ends_after, prompt, seed, count):
        if len(client.asked) > ends_after:
            return UnansweredError("gone", is_final=True)
        return hard_to_please(prompt, seed, count)

    for ends_after in (0, 3, 10, 2, 20, 7, 1000):
        client = FakeClient(partial(ending, ends_after), shuffled=True)
        traffic = Traffic(concurrency)
        try:
            outcome = run(folder, client, items(30), traffic=traffic)
        except EndpointError:
            assert ends_after < 1000
    assert outcome == whole
