import json
import subprocess
import sys
from datetime import date

import pytest

from embeddings.cli import sweep_runs
from embeddings.cli.sweep_file import Sweep
from embeddings.cli.sweep_runs import (
    SignalForwarder,
    exclusive,
    placed,
    runs_of,
    settings_hash,
    summaries,
    train,
)
from tests.helpers.checkpoints import RESUMABLE, save

PARTS = ("logger", "callbacks")
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


def test_a_run_has_a_folder_and_a_line(tmp_path):
    contents = [{"model": {"lr": 1}}]
    (run,) = runs_of(sweep(contents, {"a.b": 0.5, "c": "x y", "d": None, "e": {"f": [1]}}), tmp_path)
    assert run.folder == tmp_path / "tried" / f"method-{settings_hash(contents, run.point)}"
    assert run.words[:7] == ("fit", "--config", "a.yaml", "--a.b=0.5", "--c=x y", "--d=null", '--e={"f": [1]}')
    assert run.words[7] == f"--trainer.default_root_dir={run.folder}"
    assert run.line().startswith("python main.py fit --config a.yaml --a.b=0.5 '--c=x y' --d=null '--e={")


def test_a_folder_follows_from_the_settings_alone():
    def found(contents, point):
        return settings_hash(contents, point)

    content, point = {"model": {"lr": 1, "loss": {"t": 2}}}, {"a": 1, "b": 2}
    first = found([content], point)
    assert len(first) == 10
    assert found([{"model": {"loss": {"t": 2}, "lr": 1}}], {"b": 2, "a": 1}) == first
    others = [([{"model": {"lr": 1, "loss": {"t": 3}}}], point), ([content], {"a": 1, "b": 3}), ([content, {}], point)]
    assert len({first, *(found(*other) for other in others)}) == 4


def test_what_a_run_writes_goes_into_its_folder(tmp_path):
    checkpoint = {"class_path": "ModelCheckpoint", "init_args": {"save_last": True}}
    export = {"class_path": "ExportModel", "init_args": {"output": "checkpoints/model", "best": False}}
    kept = {"class_path": "ModelCheckpoint", "init_args": {"dirpath": "some/where"}}
    first = {"trainer": {"callbacks": ["replaced"]}}
    contents = [first, {"trainer": {"callbacks": [checkpoint]}}, {}, {"trainer": {"callbacks+": [export, kept]}}]
    found = value_of(placed(contents, tmp_path), "trainer.callbacks")
    # Where its place changed on resuming, Lightning would forget the best.
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


def test_a_date_in_a_config_is_given_as_text(tmp_path):
    parts = {name: {"class_path": "X", "init_args": {"save_dir": "x", "day": date(2024, 5, 1)}} for name in PARTS}
    words = placed([{"trainer": parts}], tmp_path)
    assert [value_of(words, f"trainer.{name}")[-1]["init_args"]["day"] for name in PARTS] == ["2024-05-01"] * 2


def test_a_point_may_give_callbacks_of_its_own(tmp_path):
    export = {"class_path": "ExportModel", "init_args": {"output": "a/b"}}
    (run,) = runs_of(sweep([{"trainer": {"callbacks": ["old"]}}], {"trainer.callbacks": [export]}), tmp_path)
    assert json.loads(run.words[-1].partition("=")[2]) == [
        export | {"init_args": {"output": str(run.folder / "b"), "replace": True}}
    ]


def test_one_process_at_a_time_has_a_folder(tmp_path):
    folder = tmp_path / "a" / "b"
    with exclusive(folder) as lock:
        assert lock is not None
        with exclusive(folder) as second:
            assert second is None
    with exclusive(folder) as lock:
        assert lock is not None


def test_the_lock_lasts_as_long_as_a_process_that_inherited_it(tmp_path):
    with exclusive(tmp_path) as lock:
        process = subprocess.Popen(["sleep", "60"], pass_fds=(lock,))
    with exclusive(tmp_path) as second:
        assert second is None
    process.kill()
    process.wait()
    with exclusive(tmp_path) as third:
        assert third is not None


def test_metrics_of_several_processes_are_one_run(tmp_path):
    write_metrics(tmp_path, 0, "epoch,step,train/loss,val/x\n0,0,3.0,\n0,1,1.0,\n0,2,,0.9\n0,2,5.0,\n")
    write_metrics(tmp_path, 10, "step,train/loss,val/x\n4,2.5,\n4,,nan\n")
    write_metrics(tmp_path, 2, "step,train/loss,val/x\n2,2.0,\n3,,0.7\n")
    found = summaries(tmp_path)
    expected = {"last": 2.5, "last_step": 4, "min": 1.0, "min_step": 1, "max": 3.0, "max_step": 0}
    assert found == {
        "train/loss": expected,
        "val/x": {"last": 0.7, "last_step": 3, "min": 0.7, "min_step": 3, "max": 0.9, "max_step": 2},
    }


@pytest.mark.parametrize(
    "row", ["1", "1,1.", ",1.0\n", "one,1.0\n", "1.5,1.0\n", "1,much\n", "\0\0\n", "2,,1.0\n", "\n"]
)
def test_a_damaged_row_costs_no_other(row, tmp_path):
    write_metrics(tmp_path, 0, "step,train/loss\n0,3.0\n" + row)
    found = summaries(tmp_path)
    assert list(found) == ["train/loss"]
    assert (found["train/loss"]["last"], found["train/loss"]["last_step"]) == (3.0, 0)


def test_a_run_is_done_once_its_process_says_so(tmp_path):
    lines = []

    class Fake(SignalForwarder):
        def run(self, words, inherited):
            lines.append((words, inherited))
            write_metrics(folder, len(lines), "step,train/loss\n0,2.0\n")
            return 137 if len(lines) == 1 else 0

    (point,) = runs_of(sweep([{}], {"a": 1}), tmp_path)
    folder = point.folder
    assert (point.status, point.record()) == ("missing", None)
    assert train(point, 3, Fake()) == 137
    assert lines[0] == ([sys.executable, str(sweep_runs.MAIN), *point.words], [3])
    assert sweep_runs.MAIN.is_file()
    assert point.status == "unfinished"
    assert train(point, None, Fake()) == 0
    assert point.status == "unfinished"
    save(RESUMABLE, folder / "last.ckpt")
    assert train(point, 4, Fake()) == 0
    assert lines[2][0][-2:] == ["--ckpt_path", str(folder / "last.ckpt")]
    assert point.status == "done"
    record = point.record()
    assert record["point"] == {"a": 1}
    assert (record["command"], record["commit"]) == (point.line(), "commit3")
    assert record["resumed_from"].endswith("last.ckpt")
    assert record["metrics"]["train/loss"]["last"] == 2.0
    (folder / "done.json").write_text("{")
    assert point.status == "unfinished"
