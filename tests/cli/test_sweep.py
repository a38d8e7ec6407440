"""The sweep through the command line; its runs are real and tiny, in this process."""

import csv
import json
import re
import shutil
from pathlib import Path

import lightning as L
import pytest

from embeddings.cli.main import main
from embeddings.cli.sweep_runs import SignalForwarder, exclusive

TEMPERATURE = "model.init_args.loss.init_args.temperature"


class Killed(BaseException):
    """What no line and no exit code stands for."""


class CutShort(L.Callback):
    """Stops a run at an optimiser step, as a kill does."""

    step = None

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == self.step:
            raise Killed


@pytest.fixture
def ran(monkeypatch):
    """The `fit` lines that were run, in this process instead of one of their own."""
    lines = []

    def run(forwarder, words, inherited):
        lines.append(words[2:])
        try:
            return main(list(words[2:]))
        except Killed:
            return 137

    monkeypatch.setattr(SignalForwarder, "run", run)
    return lines


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_an_unfinished_point_goes_on_and_a_finished_one_is_left(sweep_file, ran, tmp_path, monkeypatch, capsys):
    file = sweep_file({TEMPERATURE: [0.1, 0.2]})
    assert main(["sweep", file, "--index", "1"]) == 0
    (whole,) = (tmp_path / "checkpoints" / "sweeps" / "tried").iterdir()
    assert whole.name.startswith("tiny-")
    assert names_in(whole) == [".lock", "checkpoints", "done.json", "model", "version_0"]
    record = json.loads((whole / "done.json").read_text())
    assert record["point"] == {TEMPERATURE: 0.2}
    assert record["metrics"]["train/loss"]["last_step"] == 3
    assert not (tmp_path / "elsewhere").exists()
    assert not (tmp_path / "run").exists()

    shutil.rmtree(whole)
    monkeypatch.setattr(CutShort, "step", 3)
    assert main(["sweep", file, "--index", "1"]) == 137
    assert "1 of 1 runs failed: point 1 with exit code 137; " in capsys.readouterr().err
    assert names_in(whole) == [".lock", "checkpoints", "version_0"]
    monkeypatch.setattr(CutShort, "step", None)
    assert main(["sweep", file, "--index", "1"]) == 0
    assert ran[2][-2:] == ["--ckpt_path", str(Path("checkpoints/sweeps/tried", whole.name, "checkpoints/last.ckpt"))]
    resumed = json.loads((whole / "done.json").read_text())
    assert resumed["resumed_from"] == ran[2][-1]
    assert resumed["metrics"]["train/loss"] == record["metrics"]["train/loss"]
    assert main(["sweep", file, "--index", "1"]) == 0
    assert len(ran) == 3
    assert "1 of 1 done already" in capsys.readouterr().out


def test_only_what_is_missing_is_run(sweep_file, faked, capsys):
    folders, _ = faked
    file = sweep_file({"a": [1, 2, 3]})
    assert main(["sweep", file, "--index", "1"]) == 0
    assert main(["sweep", file]) == 0
    assert len(folders) == len(set(folders)) == 3
    assert "1 of 3 done already\npoint 0 of 3: a=1\n" in capsys.readouterr().out
    assert main(["sweep", file]) == 0
    assert main(["sweep", sweep_file({"a": [1, 2, 3, 4]})]) == 0
    assert len(folders) == 4
    text = Path("tiny.yaml").read_text()
    for edited, number in (
        (f"{text}# a comment makes no other run\n", 4),
        (text.replace("max_steps: ", "max_steps: 1"), 5),
    ):
        Path("tiny.yaml").write_text(edited)
        assert main(["sweep", file, "--index", "0"]) == 0
        assert len(folders) == number


def test_a_run_that_another_process_has_is_left_to_it(sweep_file, faked, tmp_path, capsys):
    folders, _ = faked
    file = sweep_file({"a": [1, 2]})
    assert main(["sweep", file, "--output", "out"]) == 0
    first, second = folders
    for folder in folders:
        (folder / "done.json").unlink()
    with exclusive(first):
        assert main(["sweep", file, "--output", "out", "--index", "0"]) == 2
        assert f"error: {first}: another process trains point 0; wait for it" in capsys.readouterr().err
        assert main(["sweep", file, "--output", "out"]) == 0
    assert folders == [first, second, second]
    assert "point 0 of 2: a=1: another process is at it" in capsys.readouterr().out


@pytest.mark.parametrize("variable", ["SLURM_PROCID", "RANK", "LOCAL_RANK"])
def test_a_further_rank_neither_locks_nor_notes(variable, sweep_file, faked, monkeypatch):
    folders, endings = faked
    file = sweep_file({"a": [1]})
    endings[0] = (7,)
    assert main(["sweep", file]) == 7
    monkeypatch.setenv(variable, "1")
    with exclusive(folders[0]):
        assert main(["sweep", file, "--index", "0"]) == 7
    assert len(folders) == 2


@pytest.mark.parametrize("variable", ["SLURM_STEP_NUM_TASKS", "WORLD_SIZE"])
def test_several_processes_train_one_point_alone(variable, sweep_file, faked, monkeypatch, tmp_path, capsys):
    folders, _ = faked
    file = sweep_file({"a": [1, 2]})
    before = names_in(tmp_path)
    monkeypatch.setenv(variable, "2")
    assert main(["sweep", file]) == 2
    assert "error: index must be given where 2 processes train together, got None; " in capsys.readouterr().err
    assert names_in(tmp_path) == before
    assert main(["sweep", file, "--count"]) == 0
    assert main(["sweep", file, "--index", "1"]) == 0
    assert len(folders) == 1


@pytest.mark.parametrize(("number", "code"), [("1", 0), ("2", 2)])
def test_the_first_of_several_never_leaves_the_others_waiting(number, code, sweep_file, faked, monkeypatch, capsys):
    folders, _ = faked
    file = sweep_file({"a": [1]})
    assert main(["sweep", file]) == 0
    done = folders[0] / "done.json"
    content = done.read_text()
    done.unlink()
    # Another process is done between this one's first look and its lock.
    monkeypatch.setattr("embeddings.cli.sweep.check_runs", lambda *_: done.write_text(content))
    monkeypatch.setenv("WORLD_SIZE", number)
    assert main(["sweep", file, "--index", "0"]) == code
    assert ("another process has just done point 0; " in capsys.readouterr().err) is bool(code)
    assert len(folders) == 1


def test_a_failed_run_leaves_the_others(sweep_file, faked, capsys):
    folders, endings = faked
    file = sweep_file({"a": [1, 2, 3]})
    endings |= {0: (70,), 1: (2,)}
    assert main(["sweep", file]) == 70
    assert "2 of 3 runs failed: point 0 with exit code 70, point 1 with exit code 2; " in capsys.readouterr().err
    assert len(folders) == 3
    assert [(folder / "done.json").exists() for folder in folders] == [False, False, True]


def test_count_and_dry_run_write_nothing(sweep_file, tmp_path, capsys):
    file = sweep_file({TEMPERATURE: [0.1, 0.2], "seed_everything": [0, 1, 2]})
    before = names_in(tmp_path)
    assert main(["sweep", file, "--count"]) == 0
    assert capsys.readouterr().out == "6\n"
    assert main(["sweep", file, "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 18
    assert lines[3] == "point 1 of 6: temperature=0.1, seed_everything=1 (missing)"
    assert lines[4].startswith("  checkpoints/sweeps/tried/tiny-")
    assert lines[5].startswith(f"  python main.py fit --config {tmp_path}/tiny.yaml --{TEMPERATURE}=0.1 --seed_every")
    assert names_in(tmp_path) == before


def test_results_are_a_table_a_csv_and_a_picture(sweep_file, faked, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    file = sweep_file({"a": [1, 2], "seed_everything": [0, 1]})
    assert main(["sweep", file, "--index", "2"]) == 0
    assert main(["sweep", file, "--index", "1"]) == 0
    assert main(["sweep", file, "--results", "true"]) == 0
    out = capsys.readouterr().out
    assert "train/loss last, mean" in out
    assert "\n2 of 4 done\n" in out
    folder = tmp_path / "checkpoints" / "sweeps" / "tried"
    with open(folder / "results.csv", newline="") as rows:
        found = [(row["point"], row["last"]) for row in csv.DictReader(rows)]
    assert found[:3] == [("1", "1.1"), ("2", "2.0"), ("0", "")]
    assert (folder / "results.png").read_bytes().startswith(b"\x89PNG")
    assert main(["sweep", file, "--results", "mine/table.csv"]) == 0
    assert names_in(tmp_path / "mine") == ["table.csv", "table.png"]


@pytest.mark.parametrize(
    ("parameters", "more", "panels"),
    [
        ({"a": [1, 2], "b": ["x.Y"]}, {}, [{"a": 1, "b": "Y"}, {"a": 2, "b": "Y"}]),
        ({"seed_everything": [3]}, {}, [{"seed_everything": 3}]),
        ([{"a": 1, "b": 2}, {"b": 3}], {"method": "list"}, [{"point": "a=1, b=2"}, {"point": "b=3"}]),
    ],
)
def test_the_picture_has_what_was_varied(parameters, more, panels, sweep_file, faked, monkeypatch):
    pytest.importorskip("matplotlib")
    drawn = []
    monkeypatch.setattr("embeddings.figures.draw_sweep", lambda dots, *_: drawn.extend(values for values, _ in dots))
    file = sweep_file(parameters, **more)
    assert main(["sweep", file]) == 0
    assert main(["sweep", file, "--results", "true"]) == 0
    assert sorted(drawn, key=str) == sorted(panels, key=str)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--index", "2"], "index must lie in 0 … 1, got 2"),
        (["--count", "--dry-run"], "takes one of --count, --dry-run and --results"),
        (["--results", "true", "--index", "0"], "index has no effect on --count and --results"),
        (["--results", "scores.png"], "results must be the CSV file, got 'scores.png'; end it in .csv; the plot lies"),
        (["--results", "true"], "none of its 2 runs is done"),
    ],
)
def test_an_impossible_line_is_refused_and_nothing_written(words, says, sweep_file, tmp_path, capsys):
    file = sweep_file({"a": [1, 2]})
    before = names_in(tmp_path)
    assert main(["sweep", file, *words]) == 2
    assert says in capsys.readouterr().err.splitlines()[-1]
    assert names_in(tmp_path) == before


@pytest.mark.parametrize(
    ("parameters", "says"),
    [
        ({"model.init_args.loss.init_args.temprature": [0.1]}, "point 0: .*'temprature' is not accepted by InfoNCE"),
        ({TEMPERATURE: [0.1, "warm"]}, "point 1: .*temperature: expected float, got warm"),
        ({"trainer.max_stepz": [3]}, "point 0: unrecognized arguments: --trainer.max_stepz=3; did you mean"),
    ],
)
def test_a_key_that_no_config_has_is_refused_before_any_run(parameters, says, sweep_file, tmp_path, capsys, ran):
    file = sweep_file(parameters)
    before = names_in(tmp_path)
    for words in ([], ["--dry-run"]):
        assert main(["sweep", file, *words]) == 2
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert line.startswith("error: tried.yaml: ")
        assert re.search(says, line)
    assert names_in(tmp_path) == before
    assert ran == []


# 1 and 2 are of one type; 0.5 and each name are looked at. Each point of a list has keys of its own.
SEEN = [
    ({"a": [1, 2, 0.5], "b": ["x", "y"]}, "grid", [("1", "x"), ("1", "y"), ("0.5", "x")]),
    ([{"a": "x", "b": "y"}, {"a": "y", "b": "x"}, {"a": "x", "b": "x"}], "list", [("x", "y"), ("y", "x"), ("x", "x")]),
]


@pytest.mark.parametrize(("parameters", "method", "expected"), SEEN)
def test_a_combination_whose_values_were_seen_is_not_parsed_again(
    parameters, method, expected, sweep_file, monkeypatch
):
    parsed = []
    monkeypatch.setattr("embeddings.cli.fit.check_arguments", parsed.append)
    assert main(["sweep", sweep_file(parameters, method=method), "--dry-run"]) == 0
    found = [tuple(word[4:] for word in words if word[:4] in ("--a=", "--b=")) for words in parsed]
    assert found == expected
