"""The sweep through the command line, with tiny runs in this process; signals, locks and failed runs."""

import csv
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import lightning as L
import pytest

from embeddings.cli import sweep_runs
from embeddings.cli.main import main
from embeddings.cli.sweep_runs import FORWARDED, SignalForwarder, exclusive
from embeddings.common import PreemptedError
from tests.callbacks.preempted_runs import fake_scontrol
from tests.helpers.forks import fork
from tests.helpers.refusals import assert_refused
from tests.helpers.waiting import wait_for

TEMPERATURE = "model.init_args.loss.init_args.temperature"


class Killed(BaseException):
    """An exception that the command line does not catch."""


class CutShort(L.Callback):
    """Stops a run at an optimiser step, as a kill does."""

    step = None

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == self.step:
            raise Killed


@pytest.fixture
def ran(monkeypatch):
    """The `fit` commands that were run, in this process instead of a new one."""
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
def test_an_unfinished_point_resumes_and_a_finished_one_is_skipped(sweep_file, ran, tmp_path, monkeypatch, capsys):
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


def test_only_unfinished_points_are_run(sweep_file, faked, capsys):
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
    for edited, number in ((f"{text}# a comment\n", 4), (text.replace("max_steps: ", "max_steps: 1"), 5)):
        Path("tiny.yaml").write_text(edited)
        assert main(["sweep", file, "--index", "0"]) == 0
        assert len(folders) == number


def test_a_run_that_another_process_trains_is_skipped_and_the_command_fails(sweep_file, faked, capsys):
    folders, _ = faked
    file = sweep_file({"a": [1, 2]})
    assert main(["sweep", file, "--output", "out"]) == 0
    first, second = folders
    for folder in folders:
        (folder / "done.json").unlink()
    with exclusive(first):
        assert main(["sweep", file, "--output", "out", "--index", "0"]) == 2
        owner = f"process {os.getpid()} on {socket.gethostname()}"
        assert f"error: {first}: {owner} trains point 0; wait for it" in capsys.readouterr().err
        assert main(["sweep", file, "--output", "out"]) == 2
    assert folders == [first, second, second]
    out, err = capsys.readouterr()
    assert f"point 0 of 2: a=1: {owner} trains it" in out
    assert f"error: {first}: {owner} trains point 0; wait for it, then run the same command again" in err


@pytest.mark.parametrize("variable", ["SLURM_PROCID", "RANK", "LOCAL_RANK"])
def test_other_ranks_than_the_first_do_not_lock_or_write_records(variable, sweep_file, faked, monkeypatch):
    folders, endings = faked
    file = sweep_file({"a": [1]})
    endings[0] = (7,)
    assert main(["sweep", file]) == 7
    monkeypatch.setenv(variable, "1")
    with exclusive(folders[0]):
        assert main(["sweep", file, "--index", "0"]) == 7
    assert len(folders) == 2


@pytest.mark.parametrize("variable", ["SLURM_STEP_NUM_TASKS", "WORLD_SIZE"])
def test_several_processes_need_an_index(variable, sweep_file, faked, monkeypatch, tmp_path, capsys):
    folders, _ = faked
    file = sweep_file({"a": [1, 2]})
    monkeypatch.setenv(variable, "2")
    says = "error: index must be given if 2 processes train together, got None; "
    assert_refused(capsys, tmp_path, says, main, ["sweep", file])
    assert main(["sweep", file, "--count"]) == 0
    assert main(["sweep", file, "--index", "1"]) == 0
    assert len(folders) == 1


@pytest.mark.parametrize(("number", "code"), [("1", 0), ("2", 2)])
def test_the_first_rank_does_not_leave_the_others_waiting(number, code, sweep_file, faked, monkeypatch, capsys):
    folders, _ = faked
    file = sweep_file({"a": [1]})
    assert main(["sweep", file]) == 0
    done = folders[0] / "done.json"
    content = done.read_text()
    done.unlink()
    # Another process finishes the point after this one's check, but before its lock.
    monkeypatch.setattr("embeddings.cli.sweep.check_runs", lambda *_: done.write_text(content))
    monkeypatch.setenv("WORLD_SIZE", number)
    assert main(["sweep", file, "--index", "0"]) == code
    assert ("another process has just finished point 0; " in capsys.readouterr().err) is bool(code)
    assert len(folders) == 1


def test_a_failed_run_does_not_stop_the_others(sweep_file, faked, capsys):
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
def test_the_plot_shows_the_varied_keys(parameters, more, panels, sweep_file, faked, monkeypatch):
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
        (["--index", "2"], "index must be from 0 to 1, got 2"),
        (["--count", "--dry-run"], "accepts one of --count, --dry-run and --results"),
        (["--results", "true", "--index", "0"], "index has no effect on --count and --results"),
        (["--results", "scores.png"], "results must be the CSV file, got 'scores.png'; end it in .csv; the plot is"),
        (["--results", "true"], "none of its 2 runs is done"),
    ],
)
def test_impossible_options_are_refused_and_nothing_is_written(words, says, sweep_file, tmp_path, capsys):
    file = sweep_file({"a": [1, 2]})
    assert_refused(capsys, tmp_path, says, main, ["sweep", file, *words])


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


# 1 and 2 have the same type; 0.5 and each name are checked. Each point of a list has its own keys.
SEEN = [
    ({"a": [1, 2, 0.5], "b": ["x", "y"]}, "grid", [("1", "x"), ("1", "y"), ("0.5", "x")]),
    ([{"a": "x", "b": "y"}, {"a": "y", "b": "x"}, {"a": "x", "b": "x"}], "list", [("x", "y"), ("y", "x"), ("x", "x")]),
]


@pytest.mark.parametrize(("parameters", "method", "expected"), SEEN)
def test_a_combination_of_values_checked_before_is_not_parsed_again(
    parameters, method, expected, sweep_file, monkeypatch
):
    parsed = []
    monkeypatch.setattr("embeddings.cli.fit.check_arguments", parsed.append)
    assert main(["sweep", sweep_file(parameters, method=method), "--dry-run"]) == 0
    found = [tuple(word[4:] for word in words if word[:4] in ("--a=", "--b=")) for words in parsed]
    assert found == expected


INT, HUP, USR1, TERM = signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGTERM


@pytest.fixture(autouse=True)
def _own_signals(monkeypatch):
    """Restores the signal handlers, which a stopped sweep leaves ignored; no SLURM job."""
    for name in ("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_STEP_NUM_TASKS", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    handlers = {number: signal.getsignal(number) for number in FORWARDED}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("ending", "code", "says"),
    [
        ((75, USR1), 75, "preempted: point 0 was stopped; run the same command again to resume\n"),
        # Only the run got the signal, or got it twice.
        ((75,), 75, "preempted: point 0 was stopped; run the same command again to resume\n"),
        ((75, TERM, USR1), 75, "preempted: point 0 was stopped; run the same command again to resume\n"),
        # The run did not handle the signal.
        ((138, USR1), 75, "preempted: SIGUSR1: stopped at point 0; run the same command again to resume\n"),
        ((143, TERM), 143, "preempted: SIGTERM: stopped at point 0; run the same command again to resume\n"),
        ((2, USR1), 2, "error: point 0 ended with exit code 2 after SIGUSR1; run the same command again to resume\n"),
        ((1, TERM), 1, "error: point 0 ended with exit code 1 after SIGTERM; run the same command again to resume\n"),
        ((130, INT), 130, "interrupted: SIGINT: stopped at point 0; run the same command again to resume\n"),
        ((129, HUP), 129, "error: point 0 was stopped by SIGHUP; run the same command again to resume\n"),
    ],
)
def test_a_stopped_run_ends_the_sweep(ending, code, says, sweep_file, faked, capsys):
    folders, endings = faked
    endings[0] = ending
    assert main(["sweep", sweep_file({"a": [1, 2]})]) == code
    assert capsys.readouterr().err == says
    assert len(folders) == 1


@pytest.mark.parametrize(("ending", "num_asked"), [((75, USR1), 0), ((138, USR1), 1), ((143, TERM), 1)])
def test_a_job_is_requeued_once(ending, num_asked, sweep_file, faked, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    asked = fake_scontrol(tmp_path)
    _, endings = faked
    endings[0] = ending
    assert main(["sweep", sweep_file({"a": [1, 2]})]) == 75
    # A run that ends with 75 has requeued the job itself.
    assert asked.read_text() == "requeue 12\n" * num_asked


# A run that signals the sweep's process and ignores the signal itself.
LAST_STEP = """
import os, signal, time
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
os.kill(os.getppid(), signal.SIGUSR1)
time.sleep(0.2)
"""


def test_a_signal_at_a_runs_last_step_ends_the_sweep_before_the_next(sweep_file, tmp_path, monkeypatch, capsys):
    (tmp_path / "main.py").write_text(LAST_STEP)
    monkeypatch.setattr(sweep_runs, "COMMAND", [str(tmp_path / "main.py")])
    monkeypatch.setattr("embeddings.cli.sweep.check_runs", lambda *_: None)
    file = sweep_file({"a": [1, 2]})
    assert main(["sweep", file]) == 75
    assert capsys.readouterr().err == "preempted: SIGUSR1: stopped at point 1; run the same command again to resume\n"
    folders = [*(tmp_path / "checkpoints" / "sweeps" / "tried").iterdir()]
    assert sorted(len([*folder.iterdir()]) for folder in folders) == [1, 2]  # .lock, and done.json in one
    # If nothing is left to do, the job is not requeued.
    assert main(["sweep", file, "--index", "1"]) == 0


@pytest.mark.parametrize(("number", "code"), [(USR1, 75), (TERM, 143)])
def test_a_signal_before_the_first_run_ends_the_sweep(number, code, sweep_file, faked, monkeypatch, capsys):
    monkeypatch.setattr("embeddings.cli.sweep.check_runs", lambda *_: os.kill(os.getpid(), number))
    folders, _ = faked
    assert main(["sweep", sweep_file({"a": [1, 2]})]) == code
    assert capsys.readouterr().err == f"preempted: {number.name}: stopped before its first step\n"
    assert folders == []


# A process of a few seconds that ends with code 7 on a signal.
CHILD = "trap 'exit 7' {number}; touch {ready}; for _ in $(seq 200); do sleep 0.02; done"


def handlers():
    return [signal.getsignal(number) for number in FORWARDED]


def send(number):
    os.kill(os.getpid(), getattr(signal, f"SIG{number}"))


def send_once_there(path, number):
    def wait():
        while not path.exists():
            time.sleep(0.01)
        send(number)

    sender = threading.Thread(target=wait)
    sender.start()
    return sender


@pytest.mark.parametrize("number", ["INT", "TERM", "HUP", "USR1"])
def test_signals_are_forwarded(number, tmp_path):
    ready = tmp_path / "ready"
    with SignalForwarder() as forwarder:
        sender = send_once_there(ready, number)
        assert forwarder.run(["sh", "-c", CHILD.format(number=number, ready=ready)], []) == 7
        sender.join()
    assert forwarder.received == [getattr(signal, f"SIG{number}")]


def test_a_signal_while_a_process_starts_is_forwarded(tmp_path, monkeypatch):
    begin = subprocess.Popen

    def begin_and_be_told(*words, **options):
        process = begin(*words, **options)
        while not (tmp_path / "ready").exists():
            time.sleep(0.01)
        send("USR1")
        return process

    monkeypatch.setattr(subprocess, "Popen", begin_and_be_told)
    with SignalForwarder() as forwarder:
        assert forwarder.run(["sh", "-c", CHILD.format(number="USR1", ready=tmp_path / "ready")], []) == 7


def left_by(error, number):
    with SignalForwarder() as forwarder:
        assert forwarder.run(["sh", "-c", "exit 3"], []) == 3
        assert forwarder.run(["sh", "-c", "kill -9 $$"], []) == 137
        if number:
            send(number)
        raise error


@pytest.mark.parametrize(
    ("error", "number"), [(PreemptedError("", 75), None), (OSError("full"), "TERM"), (OSError("full"), None)]
)
def test_signals_are_ignored_after_a_stop(error, number):
    before = handlers()
    with pytest.raises(type(error)):
        left_by(error, number)
    is_stop = number is not None or isinstance(error, PreemptedError)
    assert handlers() == ([signal.SIG_IGN] * len(FORWARDED) if is_stop else before)


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is a call of Linux")
def test_a_killed_sweep_takes_its_run_along(tmp_path):
    """The lock of the run's folder is free again, so the same command trains the run."""

    def sweep_one():
        with exclusive(tmp_path) as lock, SignalForwarder() as forwarder:
            forwarder.run(["sh", "-c", f"touch {tmp_path / 'ready'}; exec sleep 60"], [lock])

    child = fork(sweep_one)
    wait_for((tmp_path / "ready").exists, "the run")
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)

    def is_free():
        with exclusive(tmp_path) as lock:
            return lock is not None

    wait_for(is_free, "the end of the run", timeout_seconds=5)
