"""Jobs over shards as the tasks of an array: no coordinator, any order, and a killed task that is started again."""

import signal
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from embeddings.cli.main import main
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
