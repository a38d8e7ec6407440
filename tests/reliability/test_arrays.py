"""Jobs over shards as the tasks of an array: no coordinator, any order, and a killed task that is started again."""

import json
import signal
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest

from embeddings.cli.main import main
from tests.helpers.chat_server import Reply, answers_badly, chat_server
from tests.helpers.processes import Command, run_command
from tests.helpers.runs import write_pairs
from tests.reliability.world import Place

NUM_TASKS = 4
JOBS = {
    "encode": ("encode --model MODEL --input texts.jsonl --precision float32 --shard-size 4", ""),
    "mine": ("mine --model MODEL --input pairs.jsonl --margin null --num-negatives 2 --shard-size 4", "/mined.parquet"),
    "filter": ("filter --model MODEL --input pairs.jsonl --near-duplicates 0.8 --shard-size 4", "/kept.parquet"),
    "cluster": ("cluster --model MODEL --input pairs.jsonl --cluster-size 4 --num-iterations 3 --shard-size 8", ""),
}


def contents(output: Path) -> dict[str, bytes]:
    """The files of a finished output, without the working folders beside it."""
    files = [path for path in output.rglob("*") if path.is_file() and ".work" not in str(path.relative_to(output))]
    return {str(path.relative_to(output)): path.read_bytes() for path in files}


@pytest.mark.parametrize("name", JOBS)
def test_four_tasks_of_which_one_is_killed_write_what_one_process_writes(name: str, place: Place) -> None:
    line, file = JOBS[name]
    write_pairs(place.folder / "pairs.jsonl")
    rows = (place.folder / "pairs.jsonl").read_text().replace('"positive"', '"text"')
    (place.folder / "texts.jsonl").write_text(rows)
    words = [str(Path(__file__).parents[2] / "main.py"), *place.world.words(line)]
    run_command([*words, "--output", f"alone{file}"], cwd=place.folder, check=True)
    shared = [*words, "--output", f"shared{file}", "--num-tasks", str(NUM_TASKS), "--task-index"]
    with ExitStack() as stack:
        logs = [stack.enter_context(open(place.folder / f"log-{task}.txt", "w+")) for task in range(NUM_TASKS)]
        tasks = [
            stack.enter_context(Command([*shared, str(task)], cwd=place.folder, stderr=log))
            for task, log in enumerate(logs)
        ]
        while not list(place.folder.glob("shared*/*")) and tasks[1].poll() is None:
            time.sleep(0.01)
        tasks[1].send_signal(signal.SIGKILL)
        for task in (0, 2, 3):
            assert tasks[task].wait() == 0, (place.folder / f"log-{task}.txt").read_text()
    run_command([*shared, "1"], cwd=place.folder, check=True)
    assert contents(place.folder / "shared") == contents(place.folder / "alone")


def test_a_task_of_encode_makes_its_own_shards_only(place: Place, capfd: pytest.CaptureFixture[str]) -> None:
    (place.folder / "texts.jsonl").write_text("".join(f'{{"text": "fox {row}"}}\n' for row in range(20)))
    words = [*place.world.words(JOBS["encode"][0]), "--output", "out", "--num-tasks", "2", "--task-index"]
    assert main([*words, "1"]) == 0
    assert sorted(path.name for path in Path("out").glob("vectors-*")) == ["vectors-00001.npy", "vectors-00003.npy"]
    assert "shards of other tasks are missing in out" in capfd.readouterr().out
    assert main([*words, "0"]) == 0
    assert "wrote 20 vectors" in capfd.readouterr().out


SYNTHESIZE = ["synthesize", "--model", "m", "--num-examples", "60", "--num-brainstormed", "20", "--seed", "3"]


def records(output: Path) -> dict[str, bytes]:
    """The files of a finished job without its journals; its manifest has the report and the hashes of the others."""
    return {name: content for name, content in contents(output).items() if not name.startswith("journal")}


def seeds(requests: list[dict[str, int]]) -> Counter[int]:
    return Counter(request["seed"] for request in requests)


def first_with_answers(output: Path, least: int) -> int | None:
    """The first task whose journal has so many lines."""
    paths = {task: output / f"journal-{task:05d}.jsonl" for task in range(NUM_TASKS)}
    return next(
        (task for task, path in paths.items() if path.exists() and path.read_bytes().count(b"\n") >= least), None
    )


@pytest.mark.slow
def test_four_tasks_of_synthesize_of_which_one_is_killed_write_what_one_process_writes(place: Place) -> None:
    """Among the answers are damaged ones and repeated queries; no request that is answered is sent again."""

    def behaviour(prompt: str, seed: int, count: int) -> Reply:
        reply = answers_badly(prompt, seed, count)
        if prompt.startswith("Think up") or seed % 12 != 0:
            reply.seconds = seed % 5 / 50
            return reply
        # Valid answers of one category have the same query, so all but the first are asked for again.
        return Reply((reply.content or "").replace(str(seed), "1", 1), seconds=0.05)

    with chat_server(behaviour) as server:
        words = [str(Path(__file__).parents[2] / "main.py"), *SYNTHESIZE, "--endpoint", server.endpoint]
        run_command([*words, "--output", "alone"], cwd=place.folder, check=True)
        alone = seeds(server.requests)
        server.requests.clear()
        shared = [*words, "--output", "shared", "--num-tasks", str(NUM_TASKS), "--task-index"]
        with ExitStack() as stack:
            logs = [stack.enter_context(open(place.folder / f"log-{task}.txt", "w+")) for task in range(NUM_TASKS)]
            tasks = [
                stack.enter_context(Command([*shared, str(task)], cwd=place.folder, stderr=log))
                for task, log in enumerate(logs)
            ]
            # The first with some answers: a task that starts late may find its share taken over, and end.
            while (killed := first_with_answers(place.folder / "shared", 4)) is None:
                assert any(task.poll() is None for task in tasks)
                time.sleep(0.01)
            tasks[killed].send_signal(signal.SIGKILL)
            assert tasks[killed].wait() == -signal.SIGKILL
            for task in set(range(NUM_TASKS)) - {killed}:
                assert tasks[task].wait() == 0, (place.folder / f"log-{task}.txt").read_text()
        again = run_command([*shared, str(killed)], cwd=place.folder, check=True)
    report = json.loads((place.folder / "shared" / "manifest.json").read_text())["report"]
    assert report["complete"]
    assert report["rejected"]["duplicate_query"] > 0
    assert f"{report['num_answers']} answers, " in again.stdout
    assert records(place.folder / "shared") == records(place.folder / "alone")
    journals = sorted((place.folder / "shared").glob("journal-*.jsonl"))
    assert [path.name for path in journals] == [f"journal-{task:05d}.jsonl" for task in range(NUM_TASKS)]
    assert sum(path.stat().st_size > 0 for path in journals) >= 2
    found = seeds(server.requests)
    assert set(found) == set(alone)
    # Only requests that were in flight at the kill are sent again.
    assert sum(found.values()) - len(found) <= 2


def test_one_task_of_synthesize_does_the_work_of_those_that_do_not_run(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    with chat_server() as server:
        words = [*SYNTHESIZE, "--endpoint", server.endpoint, "--output"]
        assert main([*words, "alone"]) == 0
        assert main([*words, "shared", "--num-tasks", "3", "--task-index", "2"]) == 0
        number = len(server.requests)
        # Another number of tasks, and a process alone, find the finished job.
        assert main([*words, "shared", "--num-tasks", "2", "--task-index", "0"]) == 0
        assert main([*words, "shared"]) == 0
        assert len(server.requests) == number
    assert records(Path("shared")) == records(Path("alone"))
    assert capsys.readouterr().out.count("60 records of 60") == 4


def test_tasks_of_synthesize_share_a_token_budget(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    """Each of two spends at most its half; a process alone may then spend what is left of the whole."""
    budget = 16_000
    with chat_server() as server:
        words = [*SYNTHESIZE, "--endpoint", server.endpoint, "--max-answer-tokens", "200", "--output"]
        limited = [*words, "shared", "--token-budget", str(budget)]
        spent = []
        for options in (["--num-tasks", "2", "--task-index", "0"], ["--num-tasks", "2", "--task-index", "1"], []):
            assert main([*limited, *options]) == 0
            report = json.loads(Path("shared/manifest.json").read_text())["report"]
            spent.append(report["prompt_tokens"] + report["completion_tokens"])
            assert not report["complete"]
            assert report["num_unasked"] == 60 - sum(report["num_records"].values()) > 0
        assert budget / 4 < spent[0] <= budget / 2
        assert spent[0] + budget / 4 < spent[1] <= budget
        assert spent[1] <= spent[2] <= budget
        printed = capsys.readouterr().out
        assert printed.count(" tokens, more than this task's share of the token budget leaves;") == 2
        assert printed.count(" tokens, more than the token budget leaves;") == 1
        assert main([*words, "shared"]) == 0
        assert main([*words, "alone"]) == 0
    assert records(Path("shared")).keys() == records(Path("alone")).keys()
    assert {**records(Path("shared")), "manifest.json": b""} == {**records(Path("alone")), "manifest.json": b""}


def test_a_process_alone_waits_for_no_array_that_runs(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    """It is refused, as is a second process of one task: both would send the same requests."""
    with chat_server(lambda prompt, seed, count: Reply("[]", seconds=60)) as server:
        words = [*SYNTHESIZE, "--endpoint", server.endpoint, "--output", "shared"]
        task = ["--num-tasks", "2", "--task-index", "1"]
        program = str(Path(__file__).parents[2] / "main.py")
        with Command([program, *words, *task], cwd=place.folder) as running:
            while not server.requests and running.poll() is None:
                time.sleep(0.01)
            for options in ([], task):
                assert main([*words, *options]) == 2
                assert "journal-00001.jsonl: is in use by another process" in capsys.readouterr().err
            running.kill()
