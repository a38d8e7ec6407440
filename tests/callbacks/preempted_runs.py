"""Tiny training runs through the command line that receive signals, with a `scontrol` that records its calls."""

import os
import signal
import stat
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from tests.helpers.runs import component, run_config, write_config, write_pairs

STEPS = 6


class SignalAt(Callback):
    """Sends the signals `numbers` to this process during optimiser step `step`, in hook `at`."""

    def __init__(self, step: int, numbers: list[int], at: str = "on_before_zero_grad", rank: int = 0) -> None:
        self.step, self.numbers, self.rank = step, numbers, rank
        setattr(self, at, self._send)

    def _send(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        if trainer.global_rank == self.rank and trainer.global_step == self.step - 1:
            for number in self.numbers:
                os.kill(os.getpid(), number)


class Notes(Callback):
    """Appends each optimiser step to a file, and writes the weights of a run that finishes."""

    def __init__(self, folder: str, seconds: float = 0.0) -> None:
        self.folder, self.seconds = Path(folder), seconds

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        with open(self.folder / f"steps{trainer.global_rank}.txt", "a") as file:
            file.write(f"{trainer.global_step}\n")
        signal.sigtimedwait([], self.seconds)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            torch.save(pl_module.state_dict(), self.folder / "final.pt")


class StopsEarly(Callback):
    """Sets `should_stop` from the first batch on."""

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        trainer.should_stop = True


def preempted_config(folder: Path, **data: Any) -> dict[str, Any]:
    """A run of six steps with dropout, four steps per epoch, with the checkpoints of the base config."""
    config = run_config(folder, dropout=0.1, **data)
    write_pairs(folder / "pairs.jsonl", num_pairs=32)
    config["trainer"] |= {"max_steps": STEPS, "logger": None}
    config["trainer"]["callbacks"] = [
        component("ModelCheckpoint", every_n_train_steps=500, save_last=True, save_on_exception=True),
        component("tests.callbacks.preempted_runs.Notes", folder=str(folder)),
    ]
    return config


def signalled(config: dict[str, Any], **options: Any) -> dict[str, Any]:
    """The config with a `SignalAt`."""
    at = component("tests.callbacks.preempted_runs.SignalAt", **options)
    return config | {"trainer": config["trainer"] | {"callbacks": [*config["trainer"]["callbacks"], at]}}


def fake_scontrol(folder: Path, code: int = 0) -> Path:
    """A `scontrol` in `folder/bin`; returns the file of its arguments, one line per call."""
    (folder / "bin").mkdir(exist_ok=True)
    program, asked = folder / "bin" / "scontrol", folder / "asked.txt"
    program.write_text(f'#!/bin/sh\necho "$@" >> "{asked}"\necho "Invalid job id" >&2\nexit {code}\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    asked.touch()
    return asked


def fit_words(folder: Path, config: dict[str, Any]) -> list[str]:
    """The command line of a run that resumes from its last checkpoint."""
    return ["fit", "--config", write_config(folder, config), "--ckpt_path", "auto"]
