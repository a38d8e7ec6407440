"""The rank, job, logger, hardware and memory of a process, and its stop signals."""

import importlib
import logging
import os
import platform
import signal
import subprocess
import sys
import warnings
from contextlib import suppress

import pytest

from embeddings.common import PreemptedError, process
from embeddings.common.process import (
    STOP_SIGNALS,
    answer,
    block_signals,
    handle_preemption,
    log_to_stderr,
    logger,
    quiet_libraries,
    stop_request,
)
from tests.callbacks.preempted_runs import fake_scontrol

NAMES = ("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_PROCID", "RANK", "LOCAL_RANK")
NAMES += ("SLURM_STEP_NUM_TASKS", "WORLD_SIZE")


@pytest.fixture(autouse=True)
def _no_job(monkeypatch):
    """Restore the handlers: a stopped run ignores signals until its process, here the tests', ends."""
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("environment", "job", "is_first", "number"),
    [
        ({}, None, True, 1),
        ({"SLURM_JOB_ID": "12", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "8"}, "12", True, 8),
        ({"SLURM_JOB_ID": "15", "SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "3"}, "12_3", True, 1),
        ({"SLURM_PROCID": "1", "WORLD_SIZE": "2"}, None, False, 2),
        # A second process that the first has started inherits the SLURM variables of the first.
        ({"SLURM_PROCID": "0", "LOCAL_RANK": "1"}, None, False, 1),
        # The first process of a second node.
        ({"RANK": "8", "LOCAL_RANK": "0"}, None, False, 1),
        # torchrun in a step of one task.
        ({"SLURM_STEP_NUM_TASKS": "1", "WORLD_SIZE": "4"}, None, True, 4),
    ],
)
def test_the_job_the_rank_and_the_number_of_processes_come_from_the_environment(
    environment, job, is_first, number, monkeypatch
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert (process.job_id(), process.is_first_process(), process.num_processes()) == (job, is_first, number)


@pytest.mark.parametrize(("code", "refusal"), [(0, ""), (1, "Invalid job id")])
def test_scontrol_runs_once_and_its_refusal_is_returned(code, refusal, tmp_path, monkeypatch):
    asked = fake_scontrol(tmp_path, code)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    assert process.requeue("12_3") == refusal
    assert asked.read_text() == "requeue 12_3\n"
    (tmp_path / "bin" / "scontrol").write_text("#!/bin/sh\nexec sleep 5\n")
    monkeypatch.setattr(process, "TIMEOUT_SECONDS", 0.1)
    assert process.requeue("12") == "no answer in 0.1 s"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert process.requeue("12") == "No such file or directory"


def test_a_command_shows_notes_and_warnings_and_restores_the_logger(capsys, monkeypatch):
    level = logger.level
    assert not logger.handlers
    with log_to_stderr():
        logger.info("a note of %d", 1)
        logger.warning("a warning")
        logger.debug("a detail")
    monkeypatch.setenv("LOCAL_RANK", "1")
    with log_to_stderr():
        logger.info("another rank's note")
        logger.warning("another rank's warning")
    assert capsys.readouterr().err.splitlines() == ["a note of 1", "a warning", "another rank's warning"]
    assert not logger.handlers
    assert (logger.level, logger.getEffectiveLevel()) == (level, logging.WARNING)


@pytest.mark.parametrize(
    "package", ["embeddings", *(f"embeddings.{name}" for name in ["common", "data", "mining", "synthesis"])]
)
def test_every_public_name_of_a_lazy_package_can_be_loaded_and_no_other(package):
    module = importlib.import_module(package)
    assert len(module.__all__) > 10
    assert all(getattr(module, name) is not None for name in module.__all__)
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        _ = module.no_such_name


def test_advice_of_libraries_is_suppressed(capsys):
    """DeepSpeed's logger writes to standard output as soon as any module loads transformers, also outside `main`."""
    deepspeed, known = logging.getLogger("DeepSpeed"), logging.StreamHandler(sys.stdout)
    deepspeed.addHandler(known)
    try:
        deepspeed.warning("Setting accelerator to CPU. If you have GPU or other accelerator, …")
        with quiet_libraries():
            deepspeed.warning("Setting accelerator to CPU. If you have GPU or other accelerator, …")
            deepspeed.warning("the optimizer overflowed")
            warnings.warn("`isinstance(treespec, LeafSpec)` is deprecated, use …", FutureWarning, stacklevel=1)
            with pytest.warns(FutureWarning, match="something else"):
                warnings.warn("something else is deprecated", FutureWarning, stacklevel=1)
        deepspeed.warning("Setting accelerator to CPU. If you have GPU or other accelerator, …")
    finally:
        deepspeed.removeHandler(known)
    assert capsys.readouterr().out == "the optimizer overflowed\n"


def send(*numbers):
    for number in numbers:
        os.kill(os.getpid(), number)


def import_that_is_interrupted():
    with suppress(SystemExit):
        send(signal.SIGTERM)
    raise ImportError("half a module")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGUSR1, 75), (signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_before_training_ends_the_run_at_once(number, code):
    with pytest.raises(PreemptedError) as stop, handle_preemption():
        send(number)
    assert (stop.value.exit_code, stop.value.line) == (code, f"{number.name}: stopped before its first step")


@pytest.mark.parametrize("name", ["WORLD_SIZE", "SLURM_STEP_NUM_TASKS"])
def test_one_of_several_ranks_only_records_a_signal_before_training(name, monkeypatch):
    monkeypatch.setenv(name, "2")
    with handle_preemption():
        send(signal.SIGUSR1)
        assert stop_request.first == signal.SIGUSR1
    # Its own error ends the run then, not the signal.
    with pytest.raises(ImportError), handle_preemption():
        import_that_is_interrupted()


def test_an_error_that_a_signal_caused_is_reported_as_the_signal():
    with pytest.raises(PreemptedError), handle_preemption():
        import_that_is_interrupted()


def test_signals_are_ignored_between_a_stop_and_the_exit():
    with pytest.raises(PreemptedError), handle_preemption():
        send(signal.SIGUSR1)
    send(signal.SIGTERM, signal.SIGUSR1)
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == [signal.SIG_IGN] * 3


def test_only_the_first_signal_during_training_is_recorded():
    with handle_preemption():
        stop_request.deferred = True
        send(signal.SIGUSR1, signal.SIGTERM)
        assert stop_request.first == signal.SIGUSR1


@pytest.mark.parametrize("error", [None, ValueError])
def test_a_run_without_a_signal_restores_the_handlers(error):
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    with suppress(ValueError), handle_preemption():
        assert [signal.getsignal(number) for number in STOP_SIGNALS] != before
        if error is not None:
            raise error
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before


def test_a_signal_ends_a_forked_child_by_the_default_action():
    with handle_preemption():
        stop_request.deferred = True
        child = os.fork()
        if child == 0:
            send(signal.SIGTERM)
            os._exit(1)
        _, status = os.waitpid(child, 0)
        assert stop_request.first == 0
    assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM


def test_a_child_that_starts_with_blocked_signals_never_receives_them():
    with handle_preemption():
        stop_request.deferred = True
        with block_signals():
            child = os.fork()
            if child == 0:
                send(*STOP_SIGNALS)
                os._exit(7)
        send(signal.SIGUSR1)
        _, status = os.waitpid(child, 0)
        assert stop_request.first == signal.SIGUSR1
    assert os.waitstatus_to_exitcode(status) == 7


def test_only_the_first_rank_requeues_and_reports(monkeypatch, tmp_path):
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("PATH", str(tmp_path))  # no scontrol here
    assert "scontrol requeue 12 failed" in answer(signal.SIGTERM, "stopped", "a.ckpt", is_first=True).line
    assert answer(signal.SIGTERM, "stopped", "a.ckpt", is_first=False).line == ""


def test_the_first_ctrl_c_is_recorded_and_the_second_ends_the_process(capfd):
    with handle_preemption():
        stop_request.deferred = True
        send(signal.SIGINT)
        assert stop_request.first == signal.SIGINT
        assert "Ctrl-C again stops at once" in capfd.readouterr().err
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)


def test_a_process_that_ignores_ctrl_c_keeps_ignoring_it():
    """As a shell's background jobs do."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with handle_preemption():
        stop_request.deferred = True
        send(signal.SIGINT, signal.SIGINT)
        assert stop_request.first == 0
    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's heap")
def test_free_memory_between_used_blocks_is_returned_to_the_system():
    code = """
from pathlib import Path
from embeddings.common.process import trim_malloc

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

blocks = [b"x" * (60_000 + row) for row in range(4000)]
used = blocks[::100]
del blocks
before = resident()
assert trim_malloc()
print(before - resident())
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert int(done.stdout) > 100 * 2**20
