"""Signals to processes: at random times, to their group, and to one rank of two; and kills during checkpoints.

`PREEMPTIONS=200 python -m pytest tests/callbacks/test_killed_processes.py` sends 200 signals.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel

from embeddings.callbacks import DurableCheckpointIO, checkpoints
from embeddings.cli.trainer import find_latest_checkpoint
from embeddings.common import checkpoint_file
from embeddings.common.checkpoint_file import read_checkpoint
from tests.callbacks.preempted_runs import STEPS, fake_scontrol, fit_words, preempted_config, signalled
from tests.helpers.processes import run_command
from tests.helpers.runs import quiet_trainer

ROOT = Path(__file__).parents[2]
PREEMPTIONS = int(os.environ.get("PREEMPTIONS", "4"))

pytestmark = pytest.mark.filterwarnings(
    "ignore:Checkpoint directory",
    "ignore:This process .* is multi-threaded",
    "ignore:You're resuming from a checkpoint",
)
LONG = pytest.mark.timeout(1200 + 600 * PREEMPTIONS)


def start(folder: Path, config: dict[str, Any]) -> subprocess.Popen[str]:
    """Start a run in a new process group, like a task of a SLURM job."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "PYTEST_"))}
    clean |= {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "SLURM_JOB_ID": "77"}
    words = [sys.executable, str(ROOT / "main.py"), *fit_words(folder, config)]
    return subprocess.Popen(words, env=clean, stderr=subprocess.PIPE, text=True, start_new_session=True)


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def assert_no_process_is_left(process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    pytest.fail("the run left processes behind")


@pytest.mark.slow
@LONG
def test_signals_at_random_times() -> None:
    """To a process or its group, once or twice, with a worker: one checkpoint, one requeue, code 75, same weights."""
    run_command(
        ["-m", "tests.reliability.signals", "--count", str(PREEMPTIONS)], timeout=1200 + 600 * PREEMPTIONS, check=True
    )


@pytest.mark.slow
@LONG
@pytest.mark.parametrize("is_early", [False, True])
def test_a_signal_to_one_rank_of_two_stops_both_at_one_step(is_early: bool, tmp_path: Path) -> None:
    """In the third step, or before the first one, while that rank starts."""
    config = preempted_config(tmp_path, batch_size=4)
    config["trainer"] |= {"devices": 2, "strategy": "ddp"}
    asked = fake_scontrol(tmp_path)
    signals: dict[str, Any] = {"step": 1, "at": "setup"} if is_early else {"step": 3}
    process = start(tmp_path, signalled(config, numbers=[10], rank=1, **signals))
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 75, errors
    assert_no_process_is_left(process)
    says = "stopped at step 0, before its first update" if is_early else "stopped after step 3"
    assert errors.count(f"preempted: SIGUSR1: {says}") == 1
    assert lines_of(asked) == ["requeue 77"]
    assert [lines_of(tmp_path / f"steps{rank}.txt") for rank in range(2)] == [[] if is_early else ["1", "2", "3"]] * 2
    assert [path.name for path in (tmp_path / "run").rglob("*.ckpt*")] == ([] if is_early else ["last.ckpt"])
    process = start(tmp_path, config)
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    assert lines_of(tmp_path / "steps1.txt") == [str(step) for step in range(1, STEPS + 1)]


# Functions that a checkpoint calls in this order, and the number of calls before the one of the first checkpoint.
STAGES: dict[str, tuple[Any, str, int]] = {
    "write": (torch, "save", 0),
    "checksum": (checkpoint_file, "_checksum", 0),
    "sync": (os, "fsync", -1),
    "rename": (os, "replace", 0),
    "sync folder": (os, "fsync", 0),
    "prune": (checkpoints, "_remove", 0),
}


def kill_at(stage: str, time: int) -> None:
    """Kill this process in a stage of the n-th checkpoint."""
    place, name, offset = STAGES[stage]
    left, real = [time * 2 + offset if name == "fsync" else time - (stage == "prune")], getattr(place, name)

    def counted(*arguments: Any, **options: Any) -> Any:
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **options)

    setattr(place, name, counted)


def train(folder: Path, writer: DurableCheckpointIO, checkpoint: str | None = None) -> Trainer:
    """Four steps, each with two checkpoints: one named for the step, which replaces the previous one, and the last."""
    keep = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_last=True)
    options = {"enable_checkpointing": True, "limit_val_batches": 0, "max_steps": 4}
    run = quiet_trainer(callbacks=[keep], plugins=[writer], **options)
    run.fit(BoringModel(), ckpt_path=checkpoint)
    return run


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("time", [pytest.param(3, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("stage", STAGES)
def test_a_kill_at_any_stage_loses_at_most_one_interval(
    stage: str, time: int, asynchronous: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    child = os.fork()
    if not child:
        try:
            kill_at(stage, time)
            train(tmp_path, DurableCheckpointIO(asynchronous))
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), capfd.readouterr().err
    # Two writes per step, and a removal from the second step on.
    step = time if stage.startswith("prune") else (time + 1) // 2
    found = find_latest_checkpoint(tmp_path)
    assert found is not None
    assert "left out" not in capfd.readouterr().err
    assert step - 1 <= read_checkpoint(found)["global_step"] <= step
    assert train(tmp_path, DurableCheckpointIO(asynchronous), found).global_step == 4
    assert read_checkpoint(find_latest_checkpoint(tmp_path) or "")["global_step"] == 4
