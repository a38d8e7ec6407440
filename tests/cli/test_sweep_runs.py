"""The runs of a sweep: folders, commands, locks and the table of results."""

import csv
import json
import subprocess
import sys
from datetime import date
from pathlib import Path

import pytest

from embeddings.cli import sweep_runs
from embeddings.cli.sweep import collect, logged_metric, result_table, results_of, seed_table, write_results
from embeddings.cli.sweep_file import Metric, Sweep, short_names
from embeddings.cli.sweep_runs import SignalForwarder, exclusive, placed, runs_of, settings_hash, summaries, train
from embeddings.common import InputError
from tests.helpers.checkpoints import RESUMABLE, save

CSV = {"class_path": "lightning.pytorch.loggers.CSVLogger"}


def sweep(contents, *points):
    return Sweep("tried", "method", ("a.yaml",), tuple(contents), "grid", tuple(points))


def value_of(words, option):
    found = [word.partition("=")[2] for word in words if word.startswith(f"--{option}=")]
    assert len(found) <= 1
    return json.loads(found[0]) if found else None


def write_metrics(folder, version, text):
    run = folder / f"version_{version}"
    run.mkdir(parents=True)
    (run / "metrics.csv").write_text(text)
    (run / "run.json").write_text(json.dumps({"commit": f"commit{version}"}))


def test_a_run_has_a_folder_and_a_command(tmp_path):
    contents = [{"model": {"lr": 1}}]
    export = {"class_path": "ExportModel", "init_args": {"output": "a/b", "day": date(2024, 5, 1)}}
    point = {"a.b": 0.5, "c": "x y", "d": None, "e": {"f": [1]}}
    (run,) = runs_of(sweep(contents, point), tmp_path)
    assert run.folder == tmp_path / "tried" / f"method-{settings_hash(contents, run.point)}"
    assert run.words[:7] == ("fit", "--config", "a.yaml", "--a.b=0.5", "--c=x y", "--d=null", '--e={"f": [1]}')
    assert run.words[7] == f"--trainer.default_root_dir={run.folder}"
    assert run.line().startswith("python main.py fit --config a.yaml --a.b=0.5 '--c=x y' --d=null '--e={")
    # A point may have its own callbacks, and a date in a config is passed as text.
    words = placed([{"trainer": {"callbacks": ["old"]}}, {"trainer": {"callbacks": [export]}}], tmp_path)
    moved = {"output": str(tmp_path / "b"), "replace": True, "day": "2024-05-01"}
    assert value_of(words, "trainer.callbacks") == [export | {"init_args": moved}]


def test_the_hash_depends_only_on_the_settings():
    content, point = {"model": {"lr": 1, "loss": {"t": 2}}}, {"a": 1, "b": 2}
    first = settings_hash([content], point)
    assert len(first) == 10
    assert settings_hash([{"model": {"loss": {"t": 2}, "lr": 1}}], {"b": 2, "a": 1}) == first
    others = [([{"model": {"lr": 1, "loss": {"t": 3}}}], point), ([content], {"a": 1, "b": 3}), ([content, {}], point)]
    assert len({first, *(settings_hash(*other) for other in others)}) == 4


def test_the_output_of_a_run_goes_into_its_folder(tmp_path):
    checkpoint = {"class_path": "ModelCheckpoint", "init_args": {"save_last": True}}
    export = {"class_path": "ExportModel", "init_args": {"output": "checkpoints/model", "best": False}}
    kept = {"class_path": "ModelCheckpoint", "init_args": {"dirpath": "some/where"}}
    first = {"trainer": {"callbacks": ["replaced"]}}
    contents = [first, {"trainer": {"callbacks": [checkpoint]}}, {}, {"trainer": {"callbacks+": [export, kept]}}]
    found = value_of(placed(contents, tmp_path), "trainer.callbacks")
    # If the folder changed on resuming, Lightning would forget the best checkpoint.
    assert found[0]["init_args"] == {"save_last": True, "dirpath": str(tmp_path / "checkpoints")}
    assert found[1]["init_args"] == {"output": str(tmp_path / "model"), "best": False, "replace": True}
    assert found[2]["init_args"] == {"dirpath": str(tmp_path / "where")}
    monitor = {"trainer": {"callbacks": [{"class_path": "LearningRateMonitor", "init_args": {"prefix": "x"}}]}}
    assert value_of(placed([*contents, monitor], tmp_path), "trainer.callbacks") is None
    bare = {"trainer": {"callbacks": {"class_path": "a.ModelCheckpoint"}}}
    assert value_of(placed([bare], tmp_path), "trainer.callbacks") == [
        {"class_path": "a.ModelCheckpoint", "init_args": {"dirpath": str(tmp_path / "checkpoints")}}
    ]


def test_the_first_logger_is_a_csv_logger_and_others_stay(tmp_path):
    own = {"save_dir": str(tmp_path), "name": ""}
    for logger in (None, True, False):
        found = value_of(placed([{"trainer": {"logger": logger}}], tmp_path), "trainer.logger")
        assert found == [CSV | {"init_args": own}]
    other = {"class_path": "x.Other", "init_args": {"project": "p", "save_dir": "logs/tries"}}
    given = {"class_path": "CSVLogger", "init_args": {"save_dir": "x", "version": 3, "flush_logs_every_n_steps": 7}}
    found = value_of(placed([{"trainer": {"logger": [other, given]}}], tmp_path), "trainer.logger")
    assert found[0] == CSV | {"init_args": {**own, "flush_logs_every_n_steps": 7}}
    assert found[1]["init_args"] == {"project": "p", "save_dir": str(tmp_path / "tries")}
    assert len(found) == 2


def test_the_lock_lasts_as_long_as_a_process_that_inherited_it(tmp_path):
    with exclusive(tmp_path) as lock:
        process = subprocess.Popen(["sleep", "60"], pass_fds=(lock,))
    with exclusive(tmp_path) as second:
        assert second is None
    process.kill()
    process.wait()
    with exclusive(tmp_path) as third:
        assert third is not None


def test_a_column_is_summarised_by_last_minimum_and_maximum(tmp_path):
    write_metrics(tmp_path, 0, "epoch,step,train/loss,val/x\n0,0,3.0,\n0,1,1.0,\n0,2,,0.9\n,3,,0.7\n,4,2.5,nan\n")
    assert summaries(tmp_path / "version_0") == {
        "train/loss": {"last": 2.5, "last_step": 4, "min": 1.0, "min_step": 1, "max": 3.0, "max_step": 0},
        "val/x": {"last": 0.7, "last_step": 3, "min": 0.7, "min_step": 3, "max": 0.9, "max_step": 2},
    }
    assert summaries(tmp_path) == {}


def test_a_run_is_done_after_its_process_ends_with_code_0(tmp_path):
    lines = []

    class Fake(SignalForwarder):
        def run(self, words, inherited):
            lines.append((words, inherited))
            write_metrics(folder, 7 + len(lines), f"step,train/loss\n0,{len(lines)}.0\n")
            return 137 if len(lines) == 1 else 0

    (point,) = runs_of(sweep([{}], {"a": 1}), tmp_path)
    folder = point.folder
    assert (point.status, point.record()) == ("missing", None)
    assert train(point, 3, Fake()) == 137
    assert lines[0] == ([sys.executable, *sweep_runs.COMMAND, *point.words], [3])
    assert Path(sweep_runs.COMMAND[-1]).is_file()
    assert point.status == "unfinished"
    assert train(point, None, Fake()) == 0
    assert point.status == "unfinished"
    save(RESUMABLE, folder / "last.ckpt")
    assert train(point, 4, Fake()) == 0
    assert lines[2][0][-2:] == ["--ckpt_path", str(folder / "last.ckpt")]
    assert point.status == "done"
    record = point.record()
    assert record["point"] == {"a": 1}
    assert (record["command"], record["commit"]) == (point.line(), "commit10")
    assert record["resumed_from"].endswith("last.ckpt")
    assert record["metrics"]["train/loss"]["last"] == 3.0
    (folder / "done.json").write_text("{")
    assert point.status == "unfinished"


def test_the_runs_of_an_installed_command_are_started_by_it(tmp_path, monkeypatch):
    called = tmp_path / "bin" / "embeddings"
    monkeypatch.setattr("sys.argv", [str(called), "sweep"])
    assert sweep_runs.command_words() == sweep_runs.COMMAND
    called.parent.mkdir()
    called.touch()
    assert sweep_runs.command_words() == [str(called)]


MAX, MIN = Metric("val/x"), Metric("val/x", "min", "best")


def finish(run, last, minimum, maximum, column="val/x"):
    run.folder.mkdir(parents=True)
    summary = {"last": last, "last_step": 9, "min": minimum, "min_step": 2, "max": maximum, "max_step": 5}
    (run.folder / "done.json").write_text(json.dumps({"seconds": 12.4, "metrics": {column: summary}}))


@pytest.fixture
def made(tmp_path):
    """Six runs of two poolings with three seeds: four are done, one is unfinished, one is missing."""
    points = [{"a.pooling": name, "seed_everything": seed} for name in ("x.Mean", "x.Cls") for seed in range(3)]
    runs = runs_of(Sweep("tried", "method", (), ({},), "grid", tuple(points)), tmp_path / "sweeps")
    for run, numbers in zip(runs, [(0.5, 0.3, 0.6), (0.7, 0.2, 0.9), (0.6, 0.1, 0.6), (0.8, 0.4, 0.8)], strict=False):
        finish(run, *numbers)
    (runs[5].folder / "version_0").mkdir(parents=True)
    return runs, short_names(points)


def numbers(results):
    return [result.run.index for result in results]


def test_results_are_sorted_from_best_to_worst_and_unfinished_runs_are_last(made, tmp_path):
    runs, _ = made
    found = results_of(runs, MAX, tmp_path)
    assert numbers(found) == [3, 1, 2, 0, 4, 5]
    assert [result.status for result in found] == ["done"] * 4 + ["missing", "unfinished"]
    assert (found[1].last, found[1].best, found[1].best_step, found[1].seconds) == (0.7, 0.9, 5, 12.4)
    least = results_of(runs, MIN, tmp_path)
    assert numbers(least) == [2, 1, 0, 3, 4, 5]
    assert (least[0].value(MIN), least[0].best_step) == (0.1, 2)


def test_tables_have_a_row_per_point_and_the_mean_over_seeds(made, tmp_path):
    runs, names = made
    found = results_of(runs, MAX, tmp_path)
    lines = result_table(found, names, MAX).splitlines()
    assert lines[0].split()[:4] == ["point", "pooling", "seed_everything", "val/x"]
    assert lines[1].split() == ["3", "Cls", "0", "0.8000", "0.8000", "5", "12", "done", runs[3].folder.name]
    assert lines[5].split() == ["4", "Cls", "1", "-", "-", "-", "-", "missing", "-"]
    # Mean: 0.5, 0.7 and 0.6; Cls: 0.8 alone.
    lines = [line.split() for line in seed_table(found, names, MAX).splitlines()[1:]]
    assert lines == [["Cls", "0.8000", "-", "1"], ["Mean", "0.6000", "±0.1000", "3"]]
    for one in ({"a.pooling": "pooling"}, {"seed_everything": "seed_everything"}):
        assert seed_table(found, one, MAX) is None
    write_results(found, names, tmp_path / "out" / "r.csv")
    with open(tmp_path / "out" / "r.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["point"]) for row in rows] == [3, 1, 2, 0, 4, 5]
    assert (rows[0]["a.pooling"], rows[0]["seed_everything"], rows[0]["last"]) == ("Cls", "0", "0.8")
    assert (rows[4]["last"], rows[4]["status"]) == ("", "missing")
    # A key that a point leaves out is a dash.
    points = ({"a": 1}, {"b": 2, "seed_everything": 1})
    found = results_of(runs_of(Sweep("tried", "method", (), ({},), "list", points), tmp_path), MAX, tmp_path)
    lines = result_table(found, short_names(points), MAX).splitlines()
    assert [line.split()[:4] for line in lines[1:]] == [["0", "1", "-", "-"], ["1", "-", "2", "1"]]


def test_the_error_for_an_unknown_metric_lists_the_logged_ones(made, tmp_path):
    runs, _ = made
    with pytest.raises(InputError, match=r"tried.yaml: metric: no run has logged 'val/y'; column must be one of val/x"):
        results_of(runs, Metric("val/y"), tmp_path / "tried.yaml")
    finish(runs[4], 1.0, 1.0, 1.0, column="val/y")
    assert numbers(results_of(runs, Metric("val/y"), tmp_path))[0] == 4


def test_the_training_loss_replaces_a_default_metric_that_no_run_has_logged(made, tmp_path, capsys):
    runs, _ = made
    assert logged_metric(runs, Metric()) == Metric()
    plan = Sweep("tried", "method", (), ({},), "grid", tuple(run.point for run in runs))
    with pytest.raises(InputError, match="no run has logged 'val/ndcg_at_10'"):
        collect(plan, runs, tmp_path / "r.csv", tmp_path / "tried.yaml")
    finish(runs[4], 0.2, 0.1, 0.9, column="train/loss")
    collect(plan, runs, tmp_path / "r.csv", tmp_path / "tried.yaml")
    lines = capsys.readouterr().out.splitlines()
    assert "train/loss last" in lines[0]
    assert lines[1].split()[:5] == ["4", "Cls", "1", "0.2000", "0.1000"]
