"""What every trained module has, whatever it learns: optimiser, schedule, and random choices that a step decides."""

from collections.abc import Callable, Iterable
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch.optim import Optimizer

from embeddings.common import InputError
from embeddings.common.randomness import derive_seed
from embeddings.training.optim import parameter_groups
from embeddings.training.schedule import Schedule

OptimizerFactory = Callable[[Iterable[Any]], Optimizer]


class OptimizedModule(L.LightningModule):
    """A module with Lightning's automatic optimisation over its trainable parameters.

    Determinism: every random choice of a step (dropout) follows from (seed, epoch, batch, rank), so a resumed run
    draws what the uninterrupted run would have drawn.

    Args:
        optimizer: Makes the optimiser from parameter groups.
        schedule: Learning-rate schedule in optimiser steps.
        seed: Seed of the step's random choices.
    """

    def __init__(self, optimizer: OptimizerFactory, schedule: Schedule, seed: int) -> None:
        super().__init__()
        self._optimizer = optimizer
        self._schedule = schedule
        self._seed = seed

    def prepare_data(self) -> None:
        """Check schedule and optimiser against the run, before anything is written."""
        self._make_optimizer()
        total_steps = self._trainer_steps()
        if total_steps is not None and not self.trainer.fast_dev_run:  # type: ignore[attr-defined]
            self._schedule.check(self._schedule.total_steps or total_steps)

    def on_fit_start(self) -> None:
        """Switch dropout on: Lightning leaves modes as they are, and a model that was loaded is in evaluation mode."""
        self.train()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Seed the step's random choices from what the step is, not from what ran before."""
        progress: Any = self.trainer.fit_loop.epoch_progress
        if progress.current.ready == progress.current.processed:
            # Lightning 2.6 does not count an epoch that begins after a resume from the end of another, and would then
            # drop the loader's place from the next checkpoint.
            progress.increment_ready()
            progress.increment_started()
        torch.manual_seed(derive_seed(self._seed, "step", self.current_epoch, batch_idx, self.global_rank))

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """The optimiser over trainable parameters and its schedule, stepped once an optimiser step."""
        optimizer = self._make_optimizer()
        scheduler = self._schedule.scheduler(optimizer, self._trainer_steps())
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _make_optimizer(self) -> Optimizer:
        groups = parameter_groups(self)
        try:
            return self._optimizer(groups)
        except ValueError as error:
            raise InputError("model.optimizer", str(error), "the method configs hold usual values") from error

    def _trainer_steps(self) -> int | None:
        """Optimiser steps of the run. Lightning's own estimate would build the loader and drop a restored position."""
        trainer = self.trainer
        if trainer.max_steps > 0:
            return int(trainer.max_steps)
        batches = getattr(getattr(trainer, "datamodule", None), "batches_per_epoch", None)
        if trainer.max_epochs is None or trainer.max_epochs < 1 or batches is None:
            return None
        if isinstance(trainer.limit_train_batches, int):
            batches = min(batches, trainer.limit_train_batches)
        else:
            batches = int(batches * trainer.limit_train_batches)
        return trainer.max_epochs * -(-batches // trainer.accumulate_grad_batches)
