"""Batches to optimiser steps, against Lightning's own count."""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor, nn

from embeddings.data.samplers.base import RunLength, run_steps
from tests.data.killed_runs import LIGHTNING_WARNINGS


def trainer(**changes: Any) -> Any:
    defaults = {"max_steps": -1, "max_epochs": None, "limit_train_batches": 1.0, "accumulate_grad_batches": 1}
    return SimpleNamespace(**{**defaults, "fast_dev_run": False, **changes})


@pytest.mark.parametrize(
    ("changes", "batches", "expected"),
    [
        ({"max_steps": 7}, 10, 7),
        ({"max_epochs": 3}, 10, 30),
        ({"max_epochs": 3, "accumulate_grad_batches": 4}, 10, 9),
        ({"max_epochs": 3, "limit_train_batches": 4}, 10, 12),
        ({"max_epochs": 3, "limit_train_batches": 40}, 10, 30),
        ({"max_epochs": 3, "limit_train_batches": 0.25}, 10, 6),
        ({"max_epochs": 3, "max_steps": 7}, 10, 7),
        ({"max_epochs": 3, "max_steps": 70}, 10, 30),
        ({"max_epochs": -1, "max_steps": 70}, 10, 70),
        ({"max_epochs": -1}, 10, None),
        ({"max_epochs": 3}, None, None),
        ({"max_epochs": 3, "max_steps": 70}, None, 70),
    ],
)
def test_the_steps_of_a_run_end_with_whatever_ends_first(changes: Any, batches: Any, expected: int | None) -> None:
    assert run_steps(trainer(**changes), batches) == expected


def test_the_steps_of_a_run_whose_accumulation_changes_are_counted_epoch_by_epoch() -> None:
    changing = [GradientAccumulationScheduler({1: 2, 2: 3, 7: 5})]
    assert run_steps(trainer(max_epochs=5, callbacks=changing), 10) == 10 + 5 + 3 * 4
    assert RunLength.of(trainer(max_epochs=5, callbacks=changing), 10).accumulate_grad_batches is None


def test_a_run_takes_over_what_the_trainer_says() -> None:
    found = RunLength.of(trainer(max_epochs=2, limit_train_batches=7, accumulate_grad_batches=3), 10)
    assert found == RunLength(batches_per_epoch=7, accumulate_grad_batches=3, total_steps=6, is_trial=False)
    assert RunLength.of(trainer(fast_dev_run=1), 10).is_trial


@pytest.mark.filterwarnings(*LIGHTNING_WARNINGS)
@pytest.mark.parametrize(
    "options",
    [
        {"max_epochs": 3},
        {"max_epochs": 3, "accumulate_grad_batches": 4},
        {"max_epochs": 3, "accumulate_grad_batches": 5},
        {"max_epochs": 2, "accumulate_grad_batches": 20},
        {"max_epochs": 3, "accumulate_grad_batches": 2, "limit_train_batches": 5},
        {"max_epochs": 3, "accumulate_grad_batches": 2, "limit_train_batches": 0.5},
        {"max_epochs": 5, "accumulate_grad_batches": 4, "max_steps": 7},
    ],
)
def test_every_batch_is_of_the_step_that_lightning_counts(options: dict[str, Any]) -> None:
    module = Counting()
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    fit = Trainer(accelerator="cpu", enable_checkpointing=False, **quiet, **options)
    fit.fit(module, torch.utils.data.DataLoader(torch.arange(10)))
    run = RunLength.of(fit, 10)
    assert len(module.seen) >= 9
    assert [step for _, _, step in module.seen] == [run.step_of(epoch, batch) for epoch, batch, _ in module.seen]
    assert fit.global_step == run.total_steps
    assert all(after - before in (0, 1) for (_, _, before), (_, _, after) in pairwise(module.seen))


class Counting(LightningModule):
    """Notes epoch, batch and optimiser step of each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.seen: list[tuple[int, int, int]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen.append((self.current_epoch, batch_idx, self.global_step))
        return self.layer(torch.ones(1)).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)
