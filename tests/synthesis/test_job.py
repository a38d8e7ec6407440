"""A job's folder: of one job, held by one process, and left as it was where nothing came of it."""

import json

import pytest

from embeddings.common import InputError
from embeddings.synthesis.job import Item, finished_report, open_job, run_rounds
from embeddings.synthesis.runner import Spending
from embeddings.synthesis.validate import Draft
from tests.helpers.chat_server import Reply
from tests.synthesis.models import EAGER, FakeClient, contents

IDENTITY, SIZE = {"kind": "test", "seed": 1}, {"count": 4}


def read(parsed):
    return Draft({"query": parsed.value["query"]}, parsed.repairs)


def items(count):
    return [Item(f"a-{number}", f"{'ab'[number % 2]}.jsonl", f"prompt {number}", read) for number in range(count)]


def run(folder, client=None, identity=IDENTITY, size=SIZE, spending=None, count=4):
    client = client or FakeClient(lambda prompt, seed, _: Reply(json.dumps({"query": prompt})))
    with open_job(folder, identity, size, client, EAGER, spending or Spending()) as job:
        found = items(count)
        outcome = run_rounds(lambda: found, count, job.asker, job.journal, seed=0, max_attempts=2)
        return job.finish(lambda: found, count, 0, outcome, {"extra.txt": ["one\n"]})


def test_each_file_has_its_records_in_the_order_of_the_items(tmp_path):
    report = run(tmp_path / "job", FakeClient(lambda p, s, _: Reply(json.dumps({"query": p})), shuffled=True))
    assert (tmp_path / "job" / "a.jsonl").read_text() == '{"query": "prompt 0"}\n{"query": "prompt 2"}\n'
    assert (tmp_path / "job" / "b.jsonl").read_text() == '{"query": "prompt 1"}\n{"query": "prompt 3"}\n'
    assert (tmp_path / "job" / "extra.txt").read_text() == "one\n"
    assert report.num_records == {"a.jsonl": 2, "b.jsonl": 2}
    assert (report.num_answers, report.prompt_tokens, report.complete) == (4, 8, True)
    assert finished_report(tmp_path / "job", {**IDENTITY, **SIZE}) == report
    assert finished_report(tmp_path / "job", {**IDENTITY, "count": 5}) is None


def test_rejected_answers_are_listed_and_counted(tmp_path):
    def behaviour(prompt, seed, count):
        return Reply("no JSON \ud800" if prompt == "prompt 1" else f"```\n{json.dumps({'query': prompt})}\n```")

    report = run(tmp_path / "job", FakeClient(behaviour), spending=Spending(None, 1e6, 2e6))
    lines = [json.loads(line) for line in (tmp_path / "job" / "rejected.jsonl").read_text().splitlines()]
    assert [(line["id"], line["attempt"], line["reason"]) for line in lines] == [
        ("a-1", 0, "not_json"),
        ("a-1", 1, "not_json"),
    ]
    assert (report.rejected, report.repaired, report.num_given_up) == ({"not_json": 2}, {"code_fence": 3}, 1)
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


def test_a_larger_job_goes_on_from_a_smaller_one_and_a_smaller_one_leaves_no_old_file(tmp_path):
    run(tmp_path, count=2, size={"count": 2})
    client = FakeClient(lambda prompt, seed, _: Reply(json.dumps({"query": prompt})))
    assert run(tmp_path, client, count=4).num_records == {"a.jsonl": 2, "b.jsonl": 2}
    assert len(client.asked) == 2
    assert run(tmp_path, client, count=1, size={"count": 1}).num_records == {"a.jsonl": 1}
    assert not (tmp_path / "b.jsonl").exists()


def test_another_jobs_folder_is_refused_with_the_field_that_differs(tmp_path):
    run(tmp_path)
    before = contents(tmp_path)
    with pytest.raises(InputError, match="was begun with seed 1, this line has 2; repeat the line"):
        run(tmp_path, identity={**IDENTITY, "seed": 2})
    assert contents(tmp_path) == before


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="something else lies there already"):
        run(tmp_path)
    with pytest.raises(InputError, match="something else lies there already"):
        run(tmp_path / "notes.txt")
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_two_processes_do_not_work_in_one_folder(tmp_path):
    with open_job(tmp_path / "job", IDENTITY, SIZE, FakeClient(), EAGER, Spending()) as job:
        with pytest.raises(InputError, match="another process is at work"):
            run(tmp_path / "job")
        assert job.folder.is_dir()
    assert run(tmp_path / "job").num_answers == 4


@pytest.mark.parametrize("is_there", [False, True])
def test_a_mistake_before_the_first_answer_leaves_nothing(tmp_path, is_there):
    refuses = FakeClient(lambda prompt, seed, _: Reply(None, refusal="status 400", usage=False))
    folder = tmp_path / "deep" / "job"
    if is_there:
        folder.mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(InputError, match="refuses the request"):
        run(folder, refuses)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_kill_before_the_first_manifest_does_not_block_the_folder(tmp_path):
    (tmp_path / "journal.jsonl").touch()
    (tmp_path / ".manifest.json.abc.tmp").touch()
    assert run(tmp_path).num_answers == 4
