"""How long a run is, in batches and in optimiser steps, as its trainer counts them."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any


@dataclass(frozen=True)
class RunLength:
    """What turns a batch of the plan into an optimiser step of the run.

    Attributes:
        batches_per_epoch: Batches of one rank that the trainer takes of an epoch.
        accumulate_grad_batches: Batches of one optimiser step; an epoch's last step may have fewer. None where the
            number changes on the way.
        total_steps: Optimiser steps of the whole run, None where the trainer sets no end.
        is_trial: Whether the run is a few batches to see that it runs at all (`fast_dev_run`).
    """

    batches_per_epoch: int
    accumulate_grad_batches: int | None = 1
    total_steps: int | None = None
    is_trial: bool = False

    @classmethod
    def of(cls, trainer: Any, batches_per_epoch: int) -> "RunLength":
        """The length of a Lightning trainer's run over a plan with so many batches of one rank in an epoch."""
        taken = batches_taken(trainer, batches_per_epoch)
        total_steps = run_steps(trainer, batches_per_epoch)
        accumulated = trainer.accumulate_grad_batches if _accumulation_scheduler(trainer) is None else None
        return cls(taken, accumulated, total_steps, bool(trainer.fast_dev_run))

    def step_of(self, epoch: int, batch: int) -> int:
        """The optimiser step, from 0, that a batch of an epoch is part of: `global_step` while the batch is trained on.

        An epoch's last step may have fewer batches than the others: no step has batches of two epochs.
        """
        assert self.accumulate_grad_batches is not None
        steps_per_epoch = -(-self.batches_per_epoch // self.accumulate_grad_batches)
        return epoch * steps_per_epoch + batch // self.accumulate_grad_batches


def batches_taken(trainer: Any, batches_per_epoch: int) -> int:
    """The batches of an epoch that the trainer's `limit_train_batches` leaves."""
    limit = trainer.limit_train_batches
    return min(batches_per_epoch, limit) if isinstance(limit, int) else int(batches_per_epoch * limit)


def run_steps(trainer: Any, batches_per_epoch: int | None) -> int | None:
    """Optimiser steps of a run, whichever of `max_steps` and `max_epochs` ends it first; None where neither does.

    Lightning's own estimate would build the loader and drop a restored position.
    """
    ends = [int(trainer.max_steps)] if trainer.max_steps > 0 else []
    if trainer.max_epochs is not None and trainer.max_epochs > 0 and batches_per_epoch is not None:
        taken, scheduler = batches_taken(trainer, batches_per_epoch), _accumulation_scheduler(trainer)
        changes = [0] if scheduler is None else [epoch for epoch in scheduler.epochs if epoch < trainer.max_epochs]
        # From one change of the accumulation to the next all epochs have equally many steps.
        ends.append(
            sum(
                (end - start) * -(-taken // accumulated_batches(trainer, start))
                for start, end in pairwise([*changes, trainer.max_epochs])
            )
        )
    return min(ends, default=None)


def accumulated_batches(trainer: Any, epoch: int) -> int:
    """The batches of one optimiser step in an epoch, which a `GradientAccumulationScheduler` may change."""
    scheduler = _accumulation_scheduler(trainer)
    return int(trainer.accumulate_grad_batches if scheduler is None else scheduler.get_accumulate_grad_batches(epoch))


def batches_since_step(trainer: Any) -> int:
    """The batches whose gradients are accumulated and wait for the optimiser step."""
    epoch_loop: Any = trainer.fit_loop.epoch_loop
    progress = epoch_loop.batch_progress.current
    # An epoch's last batch ends a step, whatever the number of its batches.
    ends_epoch = progress.processed == progress.ready and epoch_loop._num_ready_batches_reached()
    return 0 if ends_epoch else int(progress.processed % trainer.accumulate_grad_batches)


def _accumulation_scheduler(trainer: Any) -> Any:
    """Lightning's `GradientAccumulationScheduler` among the trainer's callbacks, by its method."""
    callbacks = getattr(trainer, "callbacks", [])
    return next((one for one in callbacks if hasattr(one, "get_accumulate_grad_batches")), None)
