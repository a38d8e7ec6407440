import os

import pytest

from embeddings.cli.main import main
from embeddings.inference import Encoder
from tests.evaluation.air_bench_sets import stand_in
from tests.evaluation.task_sets import write_sets
from tests.helpers.refusals import assert_refused


@pytest.fixture(scope="module")
def world(model, tmp_path_factory):
    """A folder with a model and the sets of every kind of task."""
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "model").symlink_to(model)
    write_sets(folder / "sets")
    return folder


def line(world, output, *options):
    return ["evaluate", "--model", str(world / "model"), "--output", str(output), "--precision", "float32", *options]


def test_tasks_are_scored_shared_and_resumed(world, tmp_path, capsys, monkeypatch):
    tasks = ["--tasks", f"[{world}/sets/pairs, {world}/sets/topics]"]
    share = ["--task-index", "0", "--num-tasks", "2"]
    assert main(line(world, tmp_path / "out", *tasks, *share)) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[-1] == "this process's tasks are done, 1 others are missing"
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "1")
    monkeypatch.setenv("SLURM_ARRAY_TASK_COUNT", "2")
    assert main(line(world, tmp_path / "out", *tasks)) == 0
    table = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in table] == ["task", "pairs", "topics", "mean", "mean", "mean"]
    assert len([*(tmp_path / "out").glob("results/*/*/scores.csv")]) == 1
    monkeypatch.setattr(Encoder, "encode", lambda *_, **__: pytest.fail("encoded again"))
    assert main(line(world, tmp_path / "out", *tasks)) == 0
    assert capsys.readouterr().out.splitlines() == table


def test_widths_and_instructions_reach_the_tasks(world, tmp_path, capsys):
    options = ["--tasks", f"{world}/sets/pairs", "--dimensions", "[32, 8]", "--instructions", "mgh"]
    assert main(line(world, tmp_path / "out", *options)) == 0
    assert capsys.readouterr().out.splitlines()[0].split() == ["task", "type", "metric", "score_32", "score_8"]
    folders = sorted(path.parent.name.split("-")[0] for path in (tmp_path / "out").rglob("pairs.json"))
    assert folders == ["dimensions_8__instructions_mgh", "instructions_mgh"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([], "data or tasks must be given, got 'neither'"),
        (["--data", "sets", "--tasks", "SciFact"], "data or tasks must be given, got 'both'"),
        (["--data", "sets", "--num-tasks", "2"], "num_tasks has no effect without --tasks"),
        (["--data", "sets", "--instructions", "mgh"], "instructions has no effect without --tasks"),
        (["--tasks", "SciFact", "--output", "file"], "is a file; name a folder"),
        (["--tasks", "SciFact", "--output", "null"], "output must name the folder of the tasks' results"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(options, says, world, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.symlink(world / "sets", "sets")
    (tmp_path / "file").touch()
    assert_refused(capfd, tmp_path, says, main, line(world, "out", *options))


def test_air_bench_is_scored_by_domain_and_searched_where_its_labels_are_private(world, tmp_path, capsys, monkeypatch):
    stand_in(monkeypatch, tmp_path)
    tasks = ["--tasks", "[air-bench-qa-law-en-de, air-bench-24.04-qa-law]", "--dimensions", "[32, 8]"]
    assert main(line(world, tmp_path / "out", *tasks)) == 0
    table = [row.split() for row in capsys.readouterr().out.splitlines()]
    names = [row[0] for row in table[1:4]]
    assert names == [
        f"air-bench-{name}" for name in ("24.05-qa-law-en-dev", "24.05-qa-law-de-dev", "24.04-qa-law-en-test")
    ]
    assert table[3][3:] == ["searched", "searched"]
    (mean,) = [row[-2:] for row in table if row[:4] == ["mean", "of", "2", "all"]]
    title = next(number for number, row in enumerate(table) if row[:3] == ["AIR-Bench", "24.05", "qa"])
    assert [row[:2] for row in table[title + 1 : title + 4]] == [["en", "[32]"], ["de", "[32]"], ["all", "[32]"]]
    assert float(table[title + 3][-1]) == pytest.approx(100 * float(mean[0]), abs=0.01)
    assert [row[-1] for row in table[title + 7 :]] == ["25.10", "25.00", "20.65"]
    assert len([*(tmp_path / "out").rglob("*_NoReranker.zip")]) == 2
