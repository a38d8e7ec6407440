"""What ends a sweep before its time: its runs, a signal, the end of its job."""

import os
import signal
import subprocess
import threading
import time

import pytest

from embeddings.cli import sweep_runs
from embeddings.cli.main import main
from embeddings.cli.sweep_runs import FORWARDED, SignalForwarder
from embeddings.common import PreemptedError
from tests.callbacks.preempted_runs import fake_scontrol

INT, HUP, USR1, TERM = signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGTERM


@pytest.fixture(autouse=True)
def _own_signals(monkeypatch):
    """What a stopped sweep leaves ignored until its process ends, which is the tests' here; no job."""
    for name in ("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_STEP_NUM_TASKS", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    handlers = {number: signal.getsignal(number) for number in FORWARDED}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("ending", "code", "says"),
    [
        ((75, USR1), 75, "preempted: point 0 was stopped; the same line resumes\n"),
        # Only the run was told, or it was told twice.
        ((75,), 75, "preempted: point 0 was stopped; the same line resumes\n"),
        ((75, TERM, USR1), 75, "preempted: point 0 was stopped; the same line resumes\n"),
        # The run did not hear it.
        ((138, USR1), 75, "preempted: SIGUSR1: stopped at point 0; the same line resumes\n"),
        ((143, TERM), 143, "preempted: SIGTERM: stopped at point 0; the same line resumes\n"),
        ((2, USR1), 2, "error: point 0 ended with exit code 2 after SIGUSR1; the same line resumes\n"),
        ((1, TERM), 1, "error: point 0 ended with exit code 1 after SIGTERM; the same line resumes\n"),
        ((130, INT), 130, "interrupted: SIGINT: stopped at point 0; the same line resumes\n"),
        ((129, HUP), 129, "error: point 0 was stopped by SIGHUP; the same line resumes\n"),
    ],
)
def test_a_stopped_run_ends_the_sweep(ending, code, says, sweep_file, faked, capsys):
    folders, endings = faked
    endings[0] = ending
    assert main(["sweep", sweep_file({"a": [1, 2]})]) == code
    assert capsys.readouterr().err == says
    assert len(folders) == 1


@pytest.mark.parametrize(("ending", "num_asked"), [((75, USR1), 0), ((138, USR1), 1), ((143, TERM), 1)])
def test_a_job_is_queued_again_once(ending, num_asked, sweep_file, faked, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    asked = fake_scontrol(tmp_path)
    _, endings = faked
    endings[0] = ending
    assert main(["sweep", sweep_file({"a": [1, 2]})]) == 75
    # A run that ends with 75 has asked itself.
    assert asked.read_text() == "requeue 12\n" * num_asked


# A run that tells the sweep's process, and does not mind itself.
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
    assert capsys.readouterr().err == "preempted: SIGUSR1: stopped at point 1; the same line resumes\n"
    folders = [*(tmp_path / "checkpoints" / "sweeps" / "tried").iterdir()]
    assert sorted(len([*folder.iterdir()]) for folder in folders) == [1, 2]  # .lock, and done.json in one
    # Where nothing is left to do, there is nothing to be queued for.
    assert main(["sweep", file, "--index", "1"]) == 0


@pytest.mark.parametrize(("number", "code"), [(USR1, 75), (TERM, 143)])
def test_a_signal_before_the_first_run_ends_the_sweep(number, code, sweep_file, faked, monkeypatch, capsys):
    monkeypatch.setattr("embeddings.cli.sweep.check_runs", lambda *_: os.kill(os.getpid(), number))
    folders, _ = faked
    assert main(["sweep", sweep_file({"a": [1, 2]})]) == code
    assert capsys.readouterr().err == f"preempted: {number.name}: stopped before its first step\n"
    assert folders == []


# A few seconds that a signal ends with code 7.
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
def test_what_this_process_is_sent_is_passed_on(number, tmp_path):
    ready = tmp_path / "ready"
    with SignalForwarder() as forwarder:
        sender = send_once_there(ready, number)
        assert forwarder.run(["sh", "-c", CHILD.format(number=number, ready=ready)], []) == 7
        sender.join()
    assert forwarder.received == [getattr(signal, f"SIG{number}")]


def test_a_signal_that_comes_while_a_process_begins_is_passed_on(tmp_path, monkeypatch):
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
def test_nothing_comes_between_a_stop_and_the_exit(error, number):
    before = handlers()
    with pytest.raises(type(error)):
        left_by(error, number)
    is_stop = number is not None or isinstance(error, PreemptedError)
    assert handlers() == ([signal.SIG_IGN] * len(FORWARDED) if is_stop else before)
