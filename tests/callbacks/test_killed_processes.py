"""Signals to whole processes: at random instants, to their group, and to one rank of two.

`PREEMPTIONS=200 python -m pytest tests/callbacks/test_killed_processes.py` sends two hundred.
"""

import os
import random
import re
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

from embeddings.callbacks import DurableCheckpointIO
from embeddings.cli.trainer import find_latest_checkpoint
from embeddings.common.checkpoint_file import read_checkpoint
from tests.callbacks.preempted_runs import STEPS, fake_scontrol, fit_words, preempted_config, signalled

ROOT = Path(__file__).parents[2]
PREEMPTIONS = int(os.environ.get("PREEMPTIONS", "4"))

pytestmark = pytest.mark.filterwarnings(
    "ignore:Checkpoint directory",
    "ignore:This process .* is multi-threaded",
    "ignore:You're resuming from a checkpoint",
)
LONG = pytest.mark.timeout(1200 + 600 * PREEMPTIONS)


def start(folder: Path, config: dict[str, Any], **environment: str) -> subprocess.Popen[str]:
    """A run in a process group of its own, as a job's task."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "PYTEST_"))}
    clean |= {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "SLURM_JOB_ID": "77"}
    words = [sys.executable, str(ROOT / "main.py"), *fit_words(folder, config)]
    return subprocess.Popen(words, env=clean | environment, stderr=subprocess.PIPE, text=True, start_new_session=True)


def listens(process: subprocess.Popen[str]) -> bool:
    """Whether a process has a handler for SIGTERM."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    found = re.search(r"SigCgt:\s*(\w+)", status)
    return found is not None and bool(int(found[1], 16) & 1 << (signal.SIGTERM - 1))


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def final_weights(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / "final.pt", weights_only=True)


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
def test_signals_at_random_instants(tmp_path: Path) -> None:
    """To the process or its group, once or twice, with a worker: one checkpoint, one requeue, 75, and the same bits."""
    config = preempted_config(tmp_path, num_workers=1)
    config["trainer"]["callbacks"][1]["init_args"]["seconds"] = 0.2
    asked, chance = fake_scontrol(tmp_path), random.Random(0)
    begin = time.monotonic()
    process = start(tmp_path, config)
    process.communicate()
    assert process.returncode == 0
    seconds, whole = time.monotonic() - begin, final_weights(tmp_path)
    run, places = tmp_path / "run", {"before": 0, "during": 0, "after": 0}

    def new_run() -> None:
        subprocess.run(["rm", "-rf", str(run), str(tmp_path / "final.pt"), str(tmp_path / "steps0.txt")], check=True)

    new_run()
    for _ in range(PREEMPTIONS):
        calls, steps = len(lines_of(asked)), len(lines_of(tmp_path / "steps0.txt"))
        process = start(tmp_path, config)
        while not listens(process):
            time.sleep(0.01)
        time.sleep(chance.uniform(0, seconds))
        send = chance.choice([os.kill, os.killpg])
        for number in chance.choice([[10], [15], [10, 15], [15, 15]]):
            if process.poll() is None:
                send(process.pid, number)
        _, errors = process.communicate(timeout=600)
        assert_no_process_is_left(process)
        taken = lines_of(tmp_path / "steps0.txt")
        assert taken == [str(step) for step in range(1, len(taken) + 1)], errors
        if (tmp_path / "final.pt").exists():
            # It was done; a signal may have met its process on the way out.
            assert process.returncode in (0, -10, -15), errors
            assert len(lines_of(asked)) == calls
            final = final_weights(tmp_path)
            assert [name for name in whole if not torch.equal(whole[name], final[name])] == []
            places["after"] += 1
            new_run()
            continue
        assert process.returncode == 75, errors
        assert len(lines_of(asked)) == calls + 1
        assert errors.count("preempted: ") == 1
        assert [path.name for path in run.rglob("*.ckpt*")] == ["last.ckpt"] * bool(taken)
        places["during" if len(taken) > steps else "before"] += 1
    print(f"{PREEMPTIONS} signals: {places}")


@pytest.mark.slow
@LONG
def test_a_signal_to_one_rank_of_two_stops_both_at_one_step(tmp_path: Path) -> None:
    config = preempted_config(tmp_path, batch_size=4)
    config["trainer"] |= {"devices": 2, "strategy": "ddp"}
    asked = fake_scontrol(tmp_path)
    process = start(tmp_path, signalled(config, step=3, numbers=[10], rank=1))
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 75, errors
    assert_no_process_is_left(process)
    assert [lines_of(tmp_path / f"steps{rank}.txt") for rank in range(2)] == [["1", "2", "3"]] * 2
    assert lines_of(asked) == ["requeue 77"]
    assert errors.count("preempted: SIGUSR1: stopped after step 3") == 1
    assert [path.name for path in (tmp_path / "run").rglob("*.ckpt*")] == ["last.ckpt"]
    process = start(tmp_path, config)
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    assert lines_of(tmp_path / "steps1.txt") == [str(step) for step in range(1, STEPS + 1)]


@pytest.mark.slow
@LONG
def test_a_signal_to_one_rank_that_still_starts_stops_both_before_the_first_step(tmp_path: Path) -> None:
    config = preempted_config(tmp_path, batch_size=4)
    config["trainer"] |= {"devices": 2, "strategy": "ddp"}
    asked = fake_scontrol(tmp_path)
    process = start(tmp_path, signalled(config, step=1, numbers=[10], rank=1, at="setup"))
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 75, errors
    assert_no_process_is_left(process)
    assert errors.count("preempted: SIGUSR1: stopped at step 0, where it began") == 1
    assert lines_of(asked) == ["requeue 77"]
    assert not list(tmp_path.rglob("*.ckpt")) + list(tmp_path.glob("steps*.txt"))


STAGES = ["write", "header", "sync", "verify", "rename", "sync folder", "done", "prune", "pruned"]


class KillAt:
    """Kills this process as a stage begins for the so-manieth time."""

    def __init__(self, stage: str, time: int) -> None:
        self.stage, self.left = stage, time

    def __call__(self, stage: str) -> None:
        self.left -= stage == self.stage
        if not self.left:
            os.kill(os.getpid(), signal.SIGKILL)


def train(folder: Path, writer: DurableCheckpointIO, checkpoint: str | None = None) -> Trainer:
    """Four steps, each with two checkpoints: the step's own, which takes the place of the one before, and the last."""
    keep = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_last=True)
    options: dict[str, Any] = {"accelerator": "cpu", "logger": False, "limit_val_batches": 0, "max_steps": 4}
    options |= {"enable_progress_bar": False, "enable_model_summary": False}
    run = Trainer(callbacks=[keep], plugins=[writer], **options)
    run.fit(BoringModel(), ckpt_path=checkpoint)
    return run


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("time", [pytest.param(3, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("stage", STAGES)
def test_a_kill_at_this_point_loses_an_interval_at_most(
    stage: str, time: int, asynchronous: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    child = os.fork()
    if not child:
        try:
            writer = DurableCheckpointIO(asynchronous)
            writer.on_stage = KillAt(stage, time - 1 if stage.startswith("prune") else time)
            train(tmp_path, writer)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), capfd.readouterr().err
    # Two writes a step, and a removal from the second step on.
    step = time if stage.startswith("prune") else (time + 1) // 2
    found = find_latest_checkpoint(tmp_path)
    assert found is not None
    assert "left out" not in capfd.readouterr().err
    assert step - 1 <= read_checkpoint(found)["global_step"] <= step
    assert train(tmp_path, DurableCheckpointIO(asynchronous), found).global_step == 4
    assert read_checkpoint(find_latest_checkpoint(tmp_path) or "")["global_step"] == 4
