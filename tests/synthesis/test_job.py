"""A job's folder: of one job, held by one process, and left as it was where nothing came of it."""

import json
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest

from embeddings.common import InputError
from embeddings.synthesis.client import EndpointError, UnansweredError
from embeddings.synthesis.job import Item, finished_report, open_job, run_rounds
from embeddings.synthesis.runner import Budget, Limits
from embeddings.synthesis.validate import Draft, RejectedAnswer
from tests.helpers.chat_server import Reply
from tests.synthesis.models import EAGER, FakeClient, contents, make_runner

IDENTITY, SIZE = {"kind": "test", "seed": 1}, {"count": 4}


def read(parsed):
    if parsed.value.get("bad"):
        raise RejectedAnswer("wrong_type", "bad")
    return Draft({"query": parsed.value["query"]}, parsed.repairs)


def says(**value):
    return Reply(json.dumps(value))


def items(count):
    return [Item(f"a-{number}", f"{'ab'[number % 2]}.jsonl", f"prompt {number}", read) for number in range(count)]


def run(folder, client=None, identity=IDENTITY, size=SIZE, budget=None, count=4):
    client = client or FakeClient(lambda prompt, seed, _: says(query=prompt))
    with open_job(folder, identity, size, client, replace(EAGER, max_attempts=2), budget) as job:
        return job.run(lambda: items(count), count, 0, {"extra.txt": ["one\n"]})


def test_each_file_has_its_records_in_the_order_of_the_items(tmp_path):
    report = run(tmp_path / "job", FakeClient(lambda prompt, seed, _: says(query=prompt), shuffled=True))
    assert (tmp_path / "job" / "a.jsonl").read_text() == '{"query": "prompt 0"}\n{"query": "prompt 2"}\n'
    assert (tmp_path / "job" / "b.jsonl").read_text() == '{"query": "prompt 1"}\n{"query": "prompt 3"}\n'
    assert (tmp_path / "job" / "extra.txt").read_text() == "one\n"
    assert report.num_records == {"a.jsonl": 2, "b.jsonl": 2}
    assert (report.num_answers, report.prompt_tokens, report.complete) == (4, 8, True)
    assert finished_report(tmp_path / "job", {**IDENTITY, **SIZE}) == report
    assert finished_report(tmp_path / "job", {**IDENTITY, "count": 5}) is None


def test_rejected_answers_are_listed_and_counted_and_repairs_of_accepted_ones(tmp_path):
    def behaviour(prompt, seed, count):
        answer = f"```\n{json.dumps({'query': prompt, 'bad': prompt == 'prompt 3'})}\n```"
        return Reply("no JSON \ud800" if prompt == "prompt 1" else answer)

    report = run(tmp_path / "job", FakeClient(behaviour), budget=Budget(None, 1e6, 2e6))
    lines = [json.loads(line) for line in (tmp_path / "job" / "rejected.jsonl").read_text().splitlines()]
    assert [(line["id"], line["attempt"], line["reason"]) for line in lines] == [
        ("a-1", 0, "not_json"),
        ("a-3", 0, "wrong_type"),
        ("a-1", 1, "not_json"),
        ("a-3", 1, "wrong_type"),
    ]
    assert report.rejected == {"not_json": 2, "wrong_type": 2}
    assert (report.repaired, report.num_given_up) == ({"code_fence": 2}, 2)
    assert report.cost == report.prompt_tokens + 2 * report.completion_tokens


def test_a_changed_file_of_a_finished_job_is_refused_and_a_missing_one_is_not_finished(tmp_path):
    run(tmp_path)
    fields = {**IDENTITY, **SIZE}
    whole = contents(tmp_path)
    (tmp_path / "a.jsonl").unlink()
    assert finished_report(tmp_path, fields) is None
    client = FakeClient()
    run(tmp_path, client)
    assert (contents(tmp_path), client.asked) == (whole, [])
    (tmp_path / "a.jsonl").write_text("changed\n")
    with pytest.raises(InputError, match=r"a\.jsonl: is not the file that the job wrote; delete it"):
        finished_report(tmp_path, fields)


def test_a_smaller_job_leaves_no_old_file(tmp_path):
    run(tmp_path)
    assert run(tmp_path, count=1, size={"count": 1}).num_records == {"a.jsonl": 1}
    assert not (tmp_path / "b.jsonl").exists()


def test_two_processes_do_not_work_in_one_folder(tmp_path):
    with open_job(tmp_path / "job", IDENTITY, SIZE, FakeClient(), EAGER, Budget()) as job:
        with pytest.raises(InputError, match="another process is at work"):
            run(tmp_path / "job")
        assert job.folder.is_dir()
    assert run(tmp_path / "job").num_answers == 4


def items_of_one_file(count, is_unique=True):
    return [Item(f"a-{number}", "a.jsonl", f"prompt {number}", read, is_unique) for number in range(count)]


def reasons(outcome):
    return Counter(rejection.reason for rejection in outcome.rejections)


def rounds(folder, client, found, max_attempts=3, limits=EAGER):
    with make_runner(folder, client, replace(limits, max_attempts=max_attempts)) as (runner, _):
        return run_rounds(lambda: iter(found), len(found), runner, seed=1)


def test_what_is_rejected_is_asked_again_with_another_seed_up_to_the_limit(tmp_path):
    seeds = {}

    def behaviour(prompt, seed, count):
        seeds.setdefault(prompt, []).append(seed)
        number = int(prompt.split()[1])
        return says(query=prompt, bad=len(seeds[prompt]) <= number)

    outcome = rounds(tmp_path, FakeClient(behaviour), items_of_one_file(5), max_attempts=3)
    assert sorted(outcome.records) == [0, 1, 2]
    assert [len(seeds[f"prompt {number}"]) for number in range(5)] == [1, 2, 3, 3, 3]
    assert all(len(set(found)) == len(found) for found in seeds.values())
    assert reasons(outcome) == {"wrong_type": 1 + 2 + 3 + 3}
    assert outcome.rejections[0] == ("a-1", 0, "wrong_type", "bad")


def test_of_two_items_with_one_query_the_earlier_one_is_kept_whatever_comes_first(tmp_path):
    def behaviour(prompt, seed, count):
        number = int(prompt.split()[1])
        return Reply(json.dumps({"query": f"The QUERY {number // 2}!"}), seconds=0.02 if number % 2 == 0 else 0)

    outcome = rounds(tmp_path, FakeClient(behaviour), items_of_one_file(6), max_attempts=1)
    assert sorted(outcome.records) == [0, 2, 4]
    assert reasons(outcome) == {"duplicate_query": 3}


def test_copies_are_looked_for_within_a_file_and_only_where_asked(tmp_path):
    client = FakeClient(lambda prompt, seed, count: says(query="the same"))
    places = [("a.jsonl", 0), ("a.jsonl", 1), ("b.jsonl", 2), ("b.jsonl", 3)]
    both = [Item(f"x-{place}", file, f"prompt {place}", read) for file, place in places]
    assert sorted(rounds(tmp_path, client, both, max_attempts=1).records) == [0, 2]
    (tmp_path / "other").mkdir()
    assert len(rounds(tmp_path / "other", client, items_of_one_file(4, is_unique=False)).records) == 4


def hard_to_please(prompt, seed, count):
    """An answer by prompt and seed: good, a copy, or spoilt."""
    value = {"query": f"query {seed % 9}", "bad": seed % 4 == 0}
    return Reply(json.dumps(value) if seed % 5 else "no JSON")


@pytest.mark.parametrize("concurrency", [1, 3, 16])
def test_order_and_interruptions_change_nothing(tmp_path, concurrency):
    whole = rounds(tmp_path, FakeClient(hard_to_please), items_of_one_file(30))
    assert 3 < len(whole.records) < 30
    assert {"duplicate_query", "not_json", "wrong_type"} == set(reasons(whole))
    folder = tmp_path / "ended"
    folder.mkdir()

    def ending(ends_after, prompt, seed, count):
        if len(client.asked) > ends_after:
            return UnansweredError("gone", is_final=True)
        return hard_to_please(prompt, seed, count)

    for ends_after in (0, 3, 10, 2, 20, 7, 1000):
        client = FakeClient(partial(ending, ends_after), shuffled=True)
        limits = Limits(concurrency=concurrency)
        try:
            outcome = rounds(folder, client, items_of_one_file(30), limits=limits)
        except EndpointError:
            assert ends_after < 1000
    assert outcome == whole
