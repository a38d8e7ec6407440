"""A run that is killed at each point of writing a checkpoint goes on from a whole one, an interval back at most."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel

from embeddings.callbacks import DurableCheckpointIO
from embeddings.cli.resume import newest_checkpoint
from embeddings.common.checkpoint_file import read_checkpoint

STAGES = ["write", "header", "sync", "verify", "rename", "sync folder", "done", "prune", "pruned"]

pytestmark = pytest.mark.filterwarnings(
    "ignore:Checkpoint directory",
    "ignore:This process .* is multi-threaded",
    "ignore:You're resuming from a checkpoint",
)


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
@pytest.mark.parametrize("time", [3, 4])
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
    found = newest_checkpoint(tmp_path)
    assert found is not None
    assert "left out" not in capfd.readouterr().err
    assert step - 1 <= read_checkpoint(found)["global_step"] <= step
    assert train(tmp_path, DurableCheckpointIO(asynchronous), found).global_step == 4
    assert read_checkpoint(newest_checkpoint(tmp_path) or "")["global_step"] == 4
