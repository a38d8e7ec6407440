"""Synthesis jobs: both stages, valid records, resuming after kills without repeated requests, new negatives."""

import json
import os
import random
import re
import signal
import time
from collections import Counter
from dataclasses import replace

import pytest

from embeddings.common import InputError, OptionError, progress
from embeddings.common.io import write_json_lines
from embeddings.common.random import derive_seed
from embeddings.data import SourceConfig
from embeddings.data.store import open_cached, read_records
from embeddings.synthesis.client import ChatClient, Limits, Sampling
from embeddings.synthesis.generate import (
    MAX_ROUNDS,
    Item,
    Plan,
    ask_items,
    brainstorm,
    dry_run,
    open_job,
    plan_items,
    read_task_file,
    regenerate_negatives,
    synthesize,
)
from embeddings.synthesis.prompts import METHODS, MGH, NV_EMBED, PromptOptions, Templates
from embeddings.synthesis.validate import RejectedAnswer, read_example
from tests.data.rows import write_jsonl
from tests.helpers.chat_server import Reply, answers_badly, answers_well, chat_server
from tests.helpers.forks import fork
from tests.helpers.refusals import refused
from tests.synthesis.models import EAGER, FakeClient, contents, make_runner

PLAN = Plan("mgh", 24, num_brainstormed=10, seed=5)


def run(folder, client, plan=PLAN, **options):
    return synthesize(folder, plan, Templates(plan.recipe), client, **options)


def records(path):
    """The records of a file, as training reads them."""
    config = SourceConfig("synthetic", str(path))
    return [record for _, record in read_records(config, open_cached(config))]


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_every_category_becomes_a_valid_source(tmp_path, method):
    plan = Plan(method.name, 24, num_brainstormed=10)
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
def test_prompts_of_a_seeded_job_begin_with_the_first_jobs_records(tmp_path, method):
    plan = Plan(method.name, 48, num_brainstormed=10)
    run(tmp_path / "first", FakeClient(), plan)
    seeded = Templates(method, PromptOptions(seeds=tmp_path / "first", num_seeds=2))
    for category in method.categories:
        alone = Templates(method).example(category, "A task.", 0, 0)
        block = seeded.example(category, "A task.", 0, 0).removesuffix(alone)
        # All prompts of a category begin with the same records, in the form of answers.
        assert seeded.example(category, "Another.", 3, 9).startswith(block)
        lines = (tmp_path / "first" / f"{category.name}.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        shown = [part.partition("\n") for part in block.split("Task: ")[1:]]
        assert len(shown) == 2
        for task, _, answer in shown:
            read = read_example(json.loads(answer), category, task, "", "x")
            assert {**read, "id": "x"} in [{**record, "id": "x"} for record in records]
    tasks = tmp_path / "first" / "tasks.jsonl"
    second = FakeClient(sampling=Sampling("another"))
    report = synthesize(tmp_path / "second", Plan(method.name, 48, tasks=tasks), seeded, second)
    assert sum(report.num_records.values()) == 48
    assert all(request.prompt.startswith("These examples") for request in second.asked)
    assert seeded.sha256 != Templates(method).sha256


def test_a_seed_may_contain_the_line_separators_of_unicode(tmp_path):
    negatives = [{"text": f"negative {level}", "level": level} for level in range(1, 5)]
    record = {
        "query": "one\u2028two\x85",
        "positive": "three\u2029four",
        "negatives": negatives,
        "instruction": "Find.",
    }
    write_json_lines(tmp_path / "short_long.jsonl", [record] * 2)
    prompt = Templates(MGH, PromptOptions(seeds=tmp_path, num_seeds=2)).example(MGH.category("short_long"), "t", 0, 0)
    assert prompt.count("one\u2028two\x85") == prompt.count("three\u2029four") == 2


def test_seeds_must_be_a_jobs_folder_with_enough_records(tmp_path):
    run(tmp_path / "first", FakeClient(), Plan("mgh", 24, num_brainstormed=10))
    with pytest.raises(InputError, match=r"short_long\.jsonl: contains \d of the 9 records requested; lower num_seeds"):
        Templates(MGH, PromptOptions(seeds=tmp_path / "first", num_seeds=9))
    with pytest.raises(InputError, match="contains no records of mgh; use the folder of a finished job"):
        Templates(MGH, PromptOptions(seeds=tmp_path))


def test_prompts_depend_on_the_seed_and_tasks_on_the_index(tmp_path):
    tasks = {category.name: ["one", "two", "three"] for category in MGH.categories}
    prompts = [item.prompt for item in plan_items(PLAN, Templates(MGH), tasks)]
    assert prompts == [item.prompt for item in plan_items(PLAN, Templates(MGH), tasks)]
    assert prompts != [item.prompt for item in plan_items(Plan("mgh", 24, 10, seed=6), Templates(MGH), tasks)]
    found = [item for item in plan_items(PLAN, Templates(MGH), tasks) if item.id.startswith("sts-")]
    assert [item.prompt.splitlines()[0].rpartition(" ")[2] for item in found][:4] == ["one", "two", "three", "one"]


@pytest.mark.parametrize("shares", [None, {"sts": 2, "short_long": 1}, {"sts": 0.3, "long_long": 0, "short_short": 7}])
def test_every_section_of_the_plan_has_the_shares(shares):
    plan = Plan("mgh", 400, shares=shares)
    total = sum(plan.weights.values())
    counts = Counter()
    for number, (category, index) in enumerate(plan.order(), start=1):
        assert index == counts[category.name]
        counts[category.name] += 1
        for name, weight in plan.weights.items():
            assert abs(counts[name] - number * weight / total) < 2
    assert sum(counts.values()) == 400
    assert sum(plan.tasks_wanted().values()) == 200


def test_no_malformed_answer_reaches_the_data(tmp_path):
    client = FakeClient(answers_badly, shuffled=True, limits=replace(EAGER, max_attempts=4))
    report = run(tmp_path / "job", client, Plan("mgh", 60, num_brainstormed=5))
    assert sum(report.num_records.values()) + report.num_given_up == 60
    assert sum(report.num_records.values()) > 30
    for reason in ("not_json", "cut_off", "refused", "empty_answer", "unusable_text", "empty_text", "wrong_type"):
        assert report.rejected[reason] > 0, reason
    found = [record for name in report.num_records for record in records(tmp_path / "job" / name)]
    assert len(found) == sum(report.num_records.values())
    for record in found:
        assert "of number" in record.query
        assert "of number" in record.positives[0]
        assert [negative.level for negative in record.negatives] == [1, 2, 3, 4]
        assert all(negative.text.startswith("negative ") for negative in record.negatives)


def test_more_examples_request_only_the_new_ones(tmp_path):
    run(tmp_path / "job", FakeClient(), Plan("mgh", 10, num_brainstormed=10))
    client = FakeClient()
    assert run(tmp_path / "job", client, Plan("mgh", 24, num_brainstormed=10)).num_wanted == 24
    assert len(client.asked) == 14
    run(tmp_path / "whole", FakeClient(), Plan("mgh", 24, num_brainstormed=10))
    assert contents(tmp_path / "job") == contents(tmp_path / "whole")
    refused(
        InputError,
        r"seed. is 0, expected 1",
        run,
        tmp_path / "job",
        client,
        Plan("mgh", 24, num_brainstormed=10, seed=1),
    )
    with pytest.raises(InputError, match=r"field .model. is .model., expected .other."):
        run(tmp_path / "job", FakeClient(sampling=Sampling("other")), Plan("mgh", 24, num_brainstormed=10))


def test_tasks_of_another_job_replace_stage_one(tmp_path):
    run(tmp_path / "first", FakeClient())
    client = FakeClient(sampling=Sampling("another"))
    plan = Plan("mgh", 24, tasks=tmp_path / "first" / "tasks.jsonl", seed=5)
    run(tmp_path / "second", client, plan)
    assert len(client.asked) == 24
    assert contents(tmp_path / "second") == contents(tmp_path / "first")


@pytest.mark.parametrize("budget", [3000, 6000, 12000])
def test_a_budget_ends_the_job_with_the_records_so_far(tmp_path, budget):
    sampling = Sampling("m", max_answer_tokens=400)
    report = run(tmp_path / "job", FakeClient(sampling=sampling, limits=Limits(token_budget=budget)))
    assert not report.complete
    assert report.prompt_tokens + report.completion_tokens <= budget
    assert report.num_unasked == 24 - sum(report.num_records.values()) > 0
    report = run(tmp_path / "job", FakeClient(sampling=sampling, limits=Limits(token_budget=10**7)))
    assert report.complete
    run(tmp_path / "whole", FakeClient(sampling=sampling))
    assert contents(tmp_path / "job") == contents(tmp_path / "whole")


def test_a_budget_too_small_for_one_request_is_refused_and_nothing_is_left(tmp_path):
    client = FakeClient(sampling=Sampling("m", max_answer_tokens=400), limits=Limits(token_budget=500))
    message = refused(OptionError, "token_budget must be enough for one request", run, tmp_path / "job", client)
    needed = int(re.search(r"at least ([\d,]+)", message)[1].replace(",", ""))
    assert 500 < needed < 3000
    assert not client.asked
    assert not (tmp_path / "job").exists()


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
        (lambda: Plan("mgh", 0), "num_examples must be >= 1"),
        (lambda: Plan("mgh", 5, 0), "num_brainstormed must be >= 1"),
        (lambda: Plan("nv_embed", 5, shares={"sts": 1}), "shares must name categories of nv_embed, got 'sts'"),
        (lambda: Plan("mgh", 5, shares={"sts": -1}), "shares.sts must be >= 0"),
        (lambda: Plan("mgh", 5, shares={"sts": float("nan")}), "shares.sts must be >= 0"),
        (lambda: Plan("mgh", 5, shares={}), "shares must include a category"),
    ],
)
def test_invalid_plans_are_refused(make, says):
    refused(OptionError, says, make)


@pytest.mark.parametrize(
    ("num_kills", "num_examples"), [(3, 12), pytest.param(20, 60, marks=pytest.mark.slow)], ids=["3", "20"]
)
def test_a_job_killed_at_random_ends_with_the_files_of_an_uninterrupted_one(
    num_kills, num_examples, tmp_path, quick_retries
):
    plan, draw = Plan("mgh", num_examples, num_brainstormed=5, seed=3), random.Random(0)

    def behaviour(prompt, seed, count):
        reply = answers_badly(prompt, seed, count)
        reply.seconds = seed % 5 / 100
        # Some requests fail the first time.
        return Reply(status=503) if count == 0 and seed % 11 == 0 else reply

    with chat_server(behaviour) as server:
        # Before any fork, so that the children need not load OpenAI's client.
        client = ChatClient(server.endpoint, Sampling("m"), Limits(concurrency=3))
        synthesize(tmp_path / "whole", plan, Templates(MGH), client)
        server.requests.clear()
        kills, sizes, folder, status = 0, [], tmp_path / "killed", -signal.SIGKILL
        while status != 0:
            known, first = answered_seeds(folder), len(server.requests)
            sizes.append(len(known))
            process = fork(lambda: synthesize(folder, plan, Templates(MGH), client))
            if kills < num_kills:
                wait_for_answers(folder, len(known) + draw.randint(0, 6), process)
                time.sleep(draw.uniform(0, 0.03))
                os.kill(process, signal.SIGKILL)
            status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
            assert status in (0, -signal.SIGKILL)
            kills += status != 0
            again = {request["seed"] for request in server.requests[first:]} & known
            assert not again, "an answered request was sent again"
    assert kills == num_kills
    assert len(set(sizes)) > num_kills // 2, "most kills came before any progress"
    assert contents(folder) == contents(tmp_path / "whole")
    assert len(contents(folder)) >= 5


def answered_seeds(folder):
    """The endpoint seeds of the requests whose answers are in a job's journal."""
    path = folder / "journal.jsonl"
    if not path.exists():
        return set()
    lines = [line for line in path.read_bytes().split(b"\n")[:-1] if line]
    names = [json.loads(line)["key"].rpartition("/")[0] for line in lines]
    return {derive_seed(3, "request", name) % 2**31 for name in names}


def wait_for_answers(folder, count, process):
    """Wait until a job's journal has `count` lines, or its process has ended."""
    path = folder / "journal.jsonl"
    while not path.exists() or path.read_bytes().count(b"\n") < count:
        if os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return
        time.sleep(0.002)


def list_tasks(folder, client, num_tasks):
    with make_runner(folder, client) as (runner, _):
        rejections = []
        tasks = brainstorm({"short_long": num_tasks}, Templates(MGH), runner, 0, rejections)
        return tasks["short_long"], rejections


def lists_of(size, repeated=0):
    """A model whose lists have `size` tasks, of which `repeated` are in every list."""

    def behaviour(prompt, seed, count):
        common = [f"common task {n}" for n in range(repeated)]
        return Reply(json.dumps([*common, *(f"task {seed} {n}" for n in range(size - repeated))]))

    return FakeClient(behaviour, shuffled=True)


@pytest.mark.parametrize(
    ("size", "repeated", "num_found", "num_lists"), [(20, 0, 45, 3), (20, 15, 45, 6), (6, 6, 6, 2 * MAX_ROUNDS + 1)]
)
def test_duplicate_tasks_are_dropped_and_more_are_requested_up_to_a_limit(
    size, repeated, num_found, num_lists, tmp_path, caplog
):
    client = lists_of(size, repeated)
    tasks, _ = list_tasks(tmp_path, client, 45)
    assert len(set(tasks)) == len(tasks) == num_found
    assert len(client.asked) == num_lists
    assert ("6 different tasks, 45 were requested" in caplog.text) == (num_found == 6)


def test_a_model_that_returns_no_tasks_is_an_input_error(tmp_path):
    """The rejected lists are written; an answer that is cut off needs more tokens, which the folder accepts."""
    plan = Plan("mgh", 10, num_brainstormed=5, shares={"short_long": 1})
    says = r"model: short_long: all 8 answers are unusable, such as empty answer.* and a new folder"
    refused(InputError, says, run, tmp_path / "job", FakeClient(lambda prompt, seed, count: Reply("")), plan)
    lines = (tmp_path / "job" / "rejected.jsonl").read_text().splitlines()
    assert [json.loads(line)["id"] for line in lines] == [f"tasks-short_long-{number}" for number in range(8)]
    cut = FakeClient(
        lambda prompt, seed, count: Reply("[", finish_reason="length"), sampling=Sampling("m", max_answer_tokens=9)
    )
    says = r"such as cut off.*; raise max_answer_tokens above 9: the same folder then asks for them again"
    refused(InputError, says, run, tmp_path / "cut", cut, plan)
    client = FakeClient(sampling=Sampling("m", max_answer_tokens=99))
    assert run(tmp_path / "cut", client, plan).num_records == {"short_long.jsonl": 10}


def test_a_task_file_is_read_by_category(tmp_path):
    tasks = {category.name: [f"{category.name} {n} é" for n in range(2)] for category in MGH.categories}
    rows = [{"category": name, "task": task} for name, found in tasks.items() for task in found]
    path = write_jsonl(tmp_path / "tasks.jsonl", [*rows, {"category": "sts", "task": "STS 1 é!"}])
    assert read_task_file(path, MGH.categories) == tasks
    assert list(read_task_file(path, NV_EMBED.categories)) == ["short_long", "long_short", "short_short"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot be read"),
        ("", "is empty"),
        ('{"category": "short_long"}\n', "tasks.jsonl:1: is not a task"),
        ('{"category": "short_long", "task": "a\\u0000"}\n', "tasks.jsonl:1: is not a task"),
        ('{"category": "short_long", "task": " "}\n', "tasks.jsonl:1: is not a task"),
        ('{"category": "short_long", "task": "a"}\n', "contains no task of long_short"),
        ("[]\n", "tasks.jsonl:1"),
    ],
)
def test_an_invalid_task_file_is_refused(tmp_path, content, says):
    path = tmp_path / "tasks.jsonl"
    if content is not None:
        path.write_text(content)
    refused(InputError, says, read_task_file, path, MGH.categories)


OLD = {"negatives": ["old"], "score": 2}
ROWS = [
    {"query": f"question {n}", "positive": [f"answer {n}", f"another {n}"], "id": f"r{n}", **OLD} for n in range(5)
] + [{"query": "question 0", "positive": "other answer", "instruction": "Answer.", "label": "x", "language": "en"}]


@pytest.fixture
def source(tmp_path):
    return SourceConfig("input", str(write_jsonl(tmp_path / "pairs.jsonl", ROWS)))


def regenerate(folder, source, client, **options):
    return regenerate_negatives(source, folder, Templates(MGH), client, **options)


def test_only_the_negatives_are_replaced(tmp_path, source, caplog):
    caplog.set_level("INFO")
    client = FakeClient(shuffled=True)
    report = regenerate(tmp_path / "job", source, client)
    # The cost is said before it is spent.
    num_bytes = sum(len(request.prompt.encode()) for request in client.asked)
    assert f"6 requests, some {num_bytes // 4:,} tokens of prompts (estimated) and at most 24,576 of" in caplog.text
    assert report.num_records == {"records.jsonl": 6}
    config = SourceConfig("new", str(tmp_path / "job" / "records.jsonl"))
    new, old = ([record for _, record in read_records(one, open_cached(one))] for one in (config, source))
    assert len(new) == len(old) == 6
    for after, before in zip(new, old, strict=True):
        assert [negative.level for negative in after.negatives] == [1, 2, 3, 4]
        assert not set(after.negatives) & set(before.negatives)
        for name in ("query", "positives", "id", "score", "label", "instruction", "language"):
            assert getattr(after, name) == getattr(before, name)
    assert sum("\nanswer 3\n" in request.prompt for request in client.asked) == 1


def test_each_pass_over_the_source_has_a_bar_of_its_own(tmp_path, source, monkeypatch, capfd):
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    monkeypatch.setattr(progress, "PROGRESS_DELAY_SECONDS", 0.0)
    regenerate(tmp_path / "job", source, FakeClient())
    titles = re.findall(r"^(pass \d) over input: 100%", capfd.readouterr().err, flags=re.MULTILINE)
    assert list(dict.fromkeys(titles)) == ["pass 1", "pass 2", "pass 3", "pass 4"]


IDENTITY, SIZE = {"kind": "test", "seed": 1}, {"count": 4}


def read_query(value):
    if value.get("bad"):
        raise RejectedAnswer("wrong_type", "bad")
    return {"query": value["query"]}


def says(**value):
    return Reply(json.dumps(value))


def some_items(count):
    return [Item(f"a-{number}", f"{'ab'[number % 2]}.jsonl", f"prompt {number}", read_query) for number in range(count)]


def echo(prompt, seed, count):
    return says(query=prompt)


def run_job(folder, client=None, size=SIZE, count=4):
    client = client or FakeClient(echo)
    client.limits = replace(client.limits, max_attempts=2)
    with open_job(folder, IDENTITY, size, client) as job:
        return job.run(lambda: some_items(count), count, 0, {"extra.jsonl": [{"n": 1}]})


def test_each_file_has_its_records_in_the_order_of_the_items(tmp_path):
    report = run_job(tmp_path / "job", FakeClient(echo, shuffled=True))
    assert (tmp_path / "job" / "a.jsonl").read_text() == '{"query": "prompt 0"}\n{"query": "prompt 2"}\n'
    assert (tmp_path / "job" / "b.jsonl").read_text() == '{"query": "prompt 1"}\n{"query": "prompt 3"}\n'
    assert (tmp_path / "job" / "extra.jsonl").read_text() == '{"n": 1}\n'
    assert report.num_records == {"a.jsonl": 2, "b.jsonl": 2}
    assert (report.num_answers, report.prompt_tokens, report.complete) == (4, 8, True)
    client = FakeClient()
    assert run_job(tmp_path / "job", client) == report
    assert client.asked == []


def test_rejected_answers_are_listed_and_counted(tmp_path):
    def behaviour(prompt, seed, count):
        answer = f"```\n{json.dumps({'query': prompt, 'bad': prompt == 'prompt 3'})}\n```"
        return Reply("no JSON \ud800" if prompt == "prompt 1" else answer)

    report = run_job(tmp_path / "job", FakeClient(behaviour))
    lines = [json.loads(line) for line in (tmp_path / "job" / "rejected.jsonl").read_text().splitlines()]
    assert [(line["id"], line["attempt"], line["reason"]) for line in lines] == [
        ("a-1", 0, "not_json"),
        ("a-3", 0, "wrong_type"),
        ("a-1", 1, "not_json"),
        ("a-3", 1, "wrong_type"),
    ]
    assert report.rejected == {"not_json": 2, "wrong_type": 2}
    assert report.num_given_up == 2


def test_a_job_without_any_record_fails_and_shows_two_answers(tmp_path):
    client = FakeClient(lambda prompt, seed, count: Reply("I'm sorry, but I cannot"))
    says = 'model: all 8 answers are unusable, such as not json: "I\'m sorry, but I cannot" and not json: '
    for _ in range(2):
        refused(InputError, says, run_job, tmp_path / "job", client)
    assert len(client.asked) == 8


@pytest.mark.parametrize("is_first", [True, False])
def test_a_job_that_stops_at_unusable_answers_lists_them(tmp_path, is_first):
    """In stage one and in stage two."""

    def behaviour(prompt, seed, count):
        return Reply("no") if prompt.startswith("Think up") == is_first else answers_well(prompt, seed, count)

    refused(InputError, "answers are unusable", run, tmp_path, FakeClient(behaviour), Plan("mgh", 100))
    rows = [json.loads(line) for line in (tmp_path / "rejected.jsonl").read_text().splitlines()]
    assert len(rows) >= 19
    assert {row["id"].startswith("tasks-") for row in rows} == {is_first}


def test_a_changed_file_of_a_finished_job_is_refused_and_a_missing_one_is_written_again(tmp_path):
    run_job(tmp_path)
    whole, client = contents(tmp_path), FakeClient()
    (tmp_path / "a.jsonl").unlink()
    run_job(tmp_path, client)
    assert (contents(tmp_path), client.asked) == (whole, [])
    (tmp_path / "a.jsonl").write_text("changed\n")
    refused(InputError, r"a\.jsonl: is not the file that the job wrote; delete it", run_job, tmp_path)


def test_a_smaller_job_leaves_no_old_file(tmp_path):
    run_job(tmp_path)
    assert run_job(tmp_path, count=1, size={"count": 1}).num_records == {"a.jsonl": 1}
    assert not (tmp_path / "b.jsonl").exists()


def test_two_processes_do_not_work_in_one_folder(tmp_path):
    with open_job(tmp_path / "job", IDENTITY, SIZE, FakeClient()) as job:
        refused(InputError, "is in use by another process", run_job, tmp_path / "job")
        assert job.path.is_dir()
    assert run_job(tmp_path / "job").num_answers == 4


def items_of_one_file(count):
    return [Item(f"a-{number}", "a.jsonl", f"prompt {number}", read_query) for number in range(count)]


def reasons(outcome):
    return Counter(rejection.reason for rejection in outcome.rejections)


def rounds(folder, client, found, max_attempts):
    client.limits = replace(EAGER, max_attempts=max_attempts)
    with make_runner(folder, client) as (runner, _):
        return ask_items(lambda: iter(found), len(found), runner, seed=1)


def test_rejected_items_are_requested_again_with_another_seed_up_to_the_limit(tmp_path):
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


def test_of_two_items_with_one_query_the_first_item_is_kept(tmp_path):
    def behaviour(prompt, seed, count):
        number = int(prompt.split()[1])
        return Reply(json.dumps({"query": f"The QUERY {number // 2}!"}), seconds=0.02 if number % 2 == 0 else 0)

    outcome = rounds(tmp_path, FakeClient(behaviour), items_of_one_file(6), max_attempts=1)
    assert sorted(outcome.records) == [0, 2, 4]
    assert reasons(outcome) == {"duplicate_query": 3}
