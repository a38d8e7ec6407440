"""Both stages against a server: records that training reads, the same after every kill, and nothing paid twice."""

import json
import os
import random
import signal
import time
import warnings
from collections import Counter

import pytest

from embeddings.common import InputError, OptionError
from embeddings.common.random import derive_seed
from embeddings.data import SourceConfig
from embeddings.data.store import open_cached, read_records
from embeddings.synthesis.client import ChatClient, Sampling
from embeddings.synthesis.generate import Plan, dry_run, plan_items, synthesize
from embeddings.synthesis.prompts import METHODS, MGH, NV_EMBED, Templates
from embeddings.synthesis.runner import Spending, Traffic
from embeddings.synthesis.validate import Parsed, RejectedAnswer, read_example
from tests.helpers.chat_server import Reply, answers_badly, chat_server
from tests.synthesis.models import EAGER, FakeClient, contents

PLAN = Plan(MGH, 24, num_tasks=10, seed=5)


def run(folder, client, plan=PLAN, **options):
    return synthesize(folder, plan, Templates(plan.method), client, traffic=EAGER, **options)


def records(path):
    """What training reads of a file."""
    config = SourceConfig("synthetic", str(path))
    return list(read_records(config, open_cached(config)))


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_every_category_becomes_a_source_that_training_reads(tmp_path, method):
    plan = Plan(method, 24, num_tasks=10)
    report = run(tmp_path / "job", FakeClient(shuffled=True), plan)
    assert sum(report.num_records.values()) == 24
    assert set(report.num_records) == {f"{category.name}.jsonl" for category in method.categories}
    for category in method.categories:
        found = records(tmp_path / "job" / f"{category.name}.jsonl")
        assert [record.id for record in found] == [f"{category.name}-{number}" for number in range(len(found))]
        for record in found:
            levels = [negative.level for negative in record.negatives]
            assert levels == ([1, 2, 3, 4] if category.graded else [0] * len(category.negative_fields))
            assert record.suspicion is None
            assert (record.instruction or "").startswith(category.instruction or "Find texts number ")


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_a_second_models_prompts_begin_with_the_first_ones_records(tmp_path, method):
    plan = Plan(method, 48, num_tasks=10)
    run(tmp_path / "first", FakeClient(), plan)
    seeded = Templates(method, seeds=tmp_path / "first", num_seeds=2)
    for category in method.categories:
        alone = Templates(method).example(category, "A task.", 0, 0)
        block = seeded.example(category, "A task.", 0, 0).removesuffix(alone)
        # The same records for every example of the category, as answers that read back as those records.
        assert seeded.example(category, "Another.", 3, 9).startswith(block)
        lines = (tmp_path / "first" / f"{category.name}.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        shown = [part.partition("\n") for part in block.split("Task: ")[1:]]
        assert len(shown) == 2
        for task, _, answer in shown:
            read = read_example(Parsed(json.loads(answer), ()), category, task, "", "x")
            assert {**read.fields, "id": "x"} in [{**record, "id": "x"} for record in records]
    tasks = tmp_path / "first" / "tasks.jsonl"
    second = FakeClient(sampling=Sampling("another"))
    report = synthesize(tmp_path / "second", Plan(method, 48), seeded, second, task_file=tasks, traffic=EAGER)
    assert sum(report.num_records.values()) == 48
    assert all(request.prompt.startswith("These examples") for request in second.asked)
    assert seeded.sha256 != Templates(method).sha256


def test_a_seed_that_comes_back_is_no_record(tmp_path):
    run(tmp_path / "first", FakeClient(), Plan(MGH, 24, num_tasks=10))
    seeded = Templates(MGH, seeds=tmp_path / "first", num_seeds=1)
    category = MGH.category("sts")
    prompt = seeded.example(category, "A task.", 0, 0)
    answer = json.loads(prompt.split("Task: ")[1].partition("\n")[2].partition("\n\n")[0])
    with pytest.raises(RejectedAnswer, match="copied_seed"):
        read_example(Parsed(answer, ()), category, "A task.", prompt, "sts-0")
    assert read_example(Parsed(answer, ()), category, "A task.", "another prompt", "sts-0").fields["query"]


def test_seeds_must_be_a_jobs_folder_with_enough_records(tmp_path):
    run(tmp_path / "first", FakeClient(), Plan(MGH, 24, num_tasks=10))
    with pytest.raises(InputError, match=r"short_long\.jsonl: holds \d records of the 9 asked for; lower num_seeds"):
        Templates(MGH, seeds=tmp_path / "first", num_seeds=9)
    with pytest.raises(InputError, match="holds no records of mgh; name the folder of a finished job"):
        Templates(MGH, seeds=tmp_path)
    with pytest.raises(OptionError, match="num_seeds must be >= 1"):
        Templates(MGH, seeds=tmp_path / "first", num_seeds=0)


def test_the_seed_decides_prompts_and_the_index_the_task(tmp_path):
    tasks = {category.name: ["one", "two", "three"] for category in MGH.categories}
    prompts = [item.prompt for item in plan_items(PLAN, Templates(MGH), tasks)]
    assert prompts == [item.prompt for item in plan_items(PLAN, Templates(MGH), tasks)]
    assert prompts != [item.prompt for item in plan_items(Plan(MGH, 24, 10, seed=6), Templates(MGH), tasks)]
    found = [item for item in plan_items(PLAN, Templates(MGH), tasks) if item.id.startswith("sts-")]
    assert [item.prompt.splitlines()[0].rpartition(" ")[2] for item in found][:4] == ["one", "two", "three", "one"]


@pytest.mark.parametrize("shares", [None, {"sts": 2, "short_long": 1}, {"sts": 0.3, "long_long": 0, "short_short": 7}])
def test_every_stretch_of_the_plan_has_the_shares(shares):
    plan = Plan(MGH, 400, shares=shares)
    total = sum(plan.weights.values())
    counts = Counter()
    for number, (category, index) in enumerate(plan.order(), start=1):
        assert index == counts[category.name]
        counts[category.name] += 1
        for name, weight in plan.weights.items():
            assert abs(counts[name] - number * weight / total) < 2
    assert sum(counts.values()) == 400
    assert sum(plan.tasks_wanted().values()) == 200


def test_a_larger_plan_begins_with_the_smaller_one():
    tasks = {category.name: ["one", "two"] for category in NV_EMBED.categories}
    small, large = (list(plan_items(Plan(NV_EMBED, n, 6), Templates(NV_EMBED), tasks)) for n in (20, 50))
    assert [(item.id, item.prompt) for item in large[:20]] == [(item.id, item.prompt) for item in small]


def test_no_malformed_answer_reaches_the_data(tmp_path):
    client = FakeClient(answers_badly, shuffled=True)
    report = run(tmp_path / "job", client, Plan(MGH, 60, num_tasks=5), max_attempts=4)
    assert sum(report.num_records.values()) + report.num_given_up == 60
    assert sum(report.num_records.values()) > 30
    for reason in ("not_json", "cut_off", "refused", "empty_answer", "unusable_text", "empty_text", "wrong_type"):
        assert report.rejected[reason] > 0, reason
    assert {"code_fence", "trailing_comma"} <= set(report.repaired)
    found = [record for name in report.num_records for record in records(tmp_path / "job" / name)]
    assert len(found) == sum(report.num_records.values())
    for record in found:
        assert "of number" in record.query
        assert "of number" in record.positives[0]
        assert [negative.level for negative in record.negatives] == [1, 2, 3, 4]
        assert all(negative.text.startswith("negative ") for negative in record.negatives)


def test_a_finished_job_and_another_order_of_answers_change_nothing(tmp_path):
    report = run(tmp_path / "one", FakeClient(answers_badly))
    client = FakeClient(answers_badly)
    assert run(tmp_path / "one", client) == report
    assert client.asked == []
    run(tmp_path / "two", FakeClient(answers_badly, shuffled=True))
    assert contents(tmp_path / "two") == contents(tmp_path / "one")


def test_more_examples_cost_only_what_is_new(tmp_path):
    run(tmp_path / "job", FakeClient(), Plan(MGH, 10, num_tasks=10))
    client = FakeClient()
    assert run(tmp_path / "job", client, Plan(MGH, 24, num_tasks=10)).num_wanted == 24
    assert len(client.asked) == 14
    run(tmp_path / "whole", FakeClient(), Plan(MGH, 24, num_tasks=10))
    assert contents(tmp_path / "job") == contents(tmp_path / "whole")
    with pytest.raises(InputError, match="was begun with seed 0, this line has 1"):
        run(tmp_path / "job", client, Plan(MGH, 24, num_tasks=10, seed=1))
    with pytest.raises(InputError, match="was begun with model 'model'"):
        run(tmp_path / "job", FakeClient(sampling=Sampling("other")), Plan(MGH, 24, num_tasks=10))


def test_tasks_of_another_job_take_the_place_of_stage_one(tmp_path):
    run(tmp_path / "first", FakeClient())
    client = FakeClient(sampling=Sampling("another"))
    plan = Plan(MGH, 24, seed=5)
    run(tmp_path / "second", client, plan, task_file=tmp_path / "first" / "tasks.jsonl")
    assert len(client.asked) == 24
    assert contents(tmp_path / "second") == contents(tmp_path / "first")
    with pytest.raises(OptionError, match="num_tasks has no effect beside tasks"):
        run(tmp_path / "third", client, task_file=tmp_path / "first" / "tasks.jsonl")


@pytest.mark.parametrize("budget", [3000, 6000, 12000])
def test_a_budget_ends_the_job_with_the_records_that_are_there(tmp_path, budget):
    sampling = Sampling("m", max_answer_tokens=400)
    report = run(tmp_path / "job", FakeClient(sampling=sampling), spending=Spending(budget))
    assert not report.complete
    assert report.prompt_tokens + report.completion_tokens <= budget
    assert report.num_unasked == 24 - sum(report.num_records.values()) > 0
    report = run(tmp_path / "job", FakeClient(sampling=sampling), spending=Spending(10**7))
    assert report.complete
    run(tmp_path / "whole", FakeClient(sampling=sampling))
    assert contents(tmp_path / "job") == contents(tmp_path / "whole")


def test_a_dry_run_shows_a_prompt_of_each_kind():
    text = dry_run(PLAN, Templates(MGH))
    for category in MGH.categories:
        assert f"=== {category.name}, stage one: 1 lists of tasks ===\nThink up " in text
        assert f"=== {category.name}, stage two: " in text
    assert '"similarity_level": "high"' in text
    assert "$" not in text
    counts = [int(line.split()[-3]) for line in text.splitlines() if "stage two" in line]
    assert sum(counts) == 24


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Plan(MGH, 0), "num_examples must be >= 1"),
        (lambda: Plan(MGH, 5, 0), "num_tasks must be >= 1"),
        (lambda: Plan(NV_EMBED, 5, shares={"sts": 1}), "shares must name categories of nv_embed, got 'sts'"),
        (lambda: Plan(MGH, 5, shares={"sts": -1}), "shares.sts must be >= 0"),
        (lambda: Plan(MGH, 5, shares={"sts": float("nan")}), "shares.sts must be >= 0"),
        (lambda: Plan(MGH, 5, shares={"sts": 0}), "shares must leave a category"),
        (lambda: Plan(MGH, 5, shares={}), "shares must leave a category"),
    ],
)
def test_impossible_plans_are_refused(make, says):
    with pytest.raises(OptionError, match=says):
        make()


def test_no_attempts_are_refused(tmp_path):
    with pytest.raises(OptionError, match="max_attempts"):
        run(tmp_path / "job", FakeClient(), max_attempts=0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("num_kills", "num_examples"), [(3, 12), pytest.param(20, 60, marks=pytest.mark.slow)], ids=["3", "20"]
)
def test_a_job_killed_at_random_ends_with_the_files_of_an_uninterrupted_one(
    num_kills, num_examples, tmp_path, monkeypatch
):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    plan, draw = Plan(MGH, num_examples, num_tasks=5, seed=3), random.Random(0)

    def behaviour(prompt, seed, count):
        reply = answers_badly(prompt, seed, count)
        reply.seconds = seed % 5 / 100
        # Trouble by the way: what is asked for the first time may get no answer at all.
        return Reply(status=503) if count == 0 and seed % 11 == 0 else reply

    with chat_server(behaviour) as server:
        # Made before any fork, so that the children need not load the library.
        client = ChatClient(server.endpoint, Sampling("m"))
        synthesize(tmp_path / "whole", plan, Templates(MGH), client, traffic=Traffic(8, backoff_seconds=0.01))
        server.requests.clear()
        kills, sizes, folder, status = 0, [], tmp_path / "killed", -signal.SIGKILL
        while status != 0:
            known, first = answered_seeds(folder), len(server.requests)
            sizes.append(len(known))
            process = forked(lambda: killable(folder, plan, client))
            if kills < num_kills:
                wait_for_answers(folder, len(known) + draw.randint(0, 6), process)
                time.sleep(draw.uniform(0, 0.03))
                os.kill(process, signal.SIGKILL)
            status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
            assert status in (0, -signal.SIGKILL)
            kills += status != 0
            again = {request["seed"] for request in server.requests[first:]} & known
            assert not again, "an answer was paid for twice"
    assert kills == num_kills
    assert len(set(sizes)) > num_kills // 2, "the kills did not fall into the work"
    assert contents(folder) == contents(tmp_path / "whole")
    assert len(contents(folder)) >= 5


def killable(folder, plan, client):
    synthesize(folder, plan, Templates(MGH), client, traffic=Traffic(2, backoff_seconds=0.01))


def answered_seeds(folder):
    """The endpoint seeds of the requests whose answers are in a job's journal."""
    path = folder / "journal.jsonl"
    if not path.exists():
        return set()
    lines = [line for line in path.read_bytes().split(b"\n")[:-1] if line]
    names = [json.loads(line)["key"].rpartition("/")[0] for line in lines]
    return {derive_seed(3, "request", name) % 2**31 for name in names}


def wait_for_answers(folder, count, process):
    """Wait until a job's journal has so many lines, or its process has ended."""
    path = folder / "journal.jsonl"
    while not path.exists() or path.read_bytes().count(b"\n") < count:
        if os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return
        time.sleep(0.002)


def forked(action):
    """The id of a forked process that does something and ends with 0."""
    with warnings.catch_warnings():
        # Later Pythons warn of the server's threads; they hold no lock that the child takes.
        warnings.simplefilter("ignore", DeprecationWarning)
        process = os.fork()
    if process == 0:
        status = 1
        try:
            action()
            status = 0
        finally:
            os._exit(status)
    return process
