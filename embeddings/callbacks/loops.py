"""Training loops that resume from every point at which a checkpoint is written.

A checkpoint is written inside a hook. Lightning skips whatever would have followed that hook, and forgets that
training was asked to stop. These loops run it.
"""

import os
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Checkpoint, Timer, WeightAveraging
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.loops.progress import _ProcessedTracker
from lightning.pytorch.loops.training_epoch_loop import RestartStage, _TrainingEpochLoop

from embeddings.callbacks.checkpoints import DurableCheckpointIO, remove_superseded
from embeddings.callbacks.run_record import callbacks_of, run_logger
from embeddings.common.process import logger


class EpochLoop(_TrainingEpochLoop):
    """Lightning's loop over batches; resumed within a step, it first runs the validation loop that is due after it."""

    # Whether a checkpoint was loaded that was written between a step and the end of its validation loop.
    is_step_open = False

    def update_restart_stage(self) -> None:
        """Count the step of the checkpoint as complete, so that Lightning does not skip what follows it."""
        super().update_restart_stage()
        self._skip_next_val = False
        if self.is_step_open and self.restarted_on_train_batch_end:
            self.batch_progress.increment_completed()
            self._restart_stage = RestartStage.RESTARTED_ON_LAST
        elif self.is_step_open:
            # Written after the validation loop, or within it: then it runs again, since its sums are not saved.
            self._skip_next_val = self.val_loop.batch_progress.is_last_batch

    def reset(self) -> None:
        """Do not count a step that an exception ended: Lightning would log all later steps under the next number."""
        num_steps, batches = self._batches_that_stepped, self.batch_progress.current
        assert isinstance(batches, _ProcessedTracker)
        is_unfinished = batches.ready > batches.processed
        super().reset()
        if is_unfinished:
            self._batches_that_stepped = num_steps

    def on_run_start(self, data_fetcher: Any) -> None:
        super().on_run_start(data_fetcher)
        if self.restarted_on_last:
            if self.is_step_open:
                self.val_loop.restarting = False
                self.on_advance_end(data_fetcher)
            self.is_step_open = False
            self.on_iteration_done()


class FitLoop(_FitLoop):
    """Lightning's loop over epochs, whose state also contains the latest metrics and whether training was to stop."""

    epoch_loop: EpochLoop
    # Whether a checkpoint of a run was loaded that is resumed in its own folder.
    _continues_run = False

    @_Loop.restarting.setter  # type: ignore[attr-defined, untyped-decorator]
    def restarting(self, restarting: bool) -> None:
        """Whether the loop resumes within an epoch; Lightning says so at an epoch's end too if `max_steps` is set."""
        counts: Any = self.epoch_progress.current
        is_within = not counts.ready == counts.started == counts.processed
        _Loop.restarting.fset(self, restarting and is_within)  # type: ignore[attr-defined]

    @property
    def done(self) -> bool:
        return not self.epoch_loop.is_step_open and super().done

    @property
    def skip(self) -> bool:
        has_batches = self.max_batches != 0 and self.trainer.limit_train_batches != 0
        return super().skip and not (has_batches and self._loaded_from_state_dict)

    def on_save_checkpoint(self) -> dict[str, Any]:
        state = super().on_save_checkpoint()
        batches: Any = self.epoch_loop.batch_progress.current
        is_after_step = batches.ready == batches.processed == batches.completed + 1
        metrics = {name: value.item() for name, value in self.trainer.callback_metrics.items() if value.numel() == 1}
        return {
            **state,
            "is_step_open": is_after_step or self.trainer.validating,
            "should_stop": self.trainer.should_stop and not _time_is_over(self.trainer),
            "metrics": metrics,
            "written_checkpoints": sorted(self._written()),
        }

    def on_load_checkpoint(self, state_dict: dict[str, Any]) -> None:
        super().on_load_checkpoint(state_dict)
        self.epoch_loop.is_step_open = state_dict.get("is_step_open", False)
        if state_dict.get("should_stop", False):
            self.trainer.should_stop = True
            logger.info("the run of this checkpoint was asked to stop, for example by EarlyStopping: no step follows")
        for name, value in state_dict.get("metrics", {}).items():
            self.trainer.callback_metrics[name] = torch.tensor(value)

        own = run_logger(self.trainer)
        self._continues_run = own is not None and own.resumed is not None
        if self._continues_run:
            written = set(state_dict.get("written_checkpoints", ()))
            # The run may have been moved. A copy under another name is the user's.
            if os.path.basename(self._resumed) in map(os.path.basename, written):
                written.add(os.path.abspath(self._resumed))
            self._written().update(written)

    def on_run_start(self) -> None:
        if self._continues_run:
            remove_superseded(self.trainer, self._resumed)
        super().on_run_start()

    def on_run_end(self) -> None:
        super().on_run_end()
        step, num_steps = self.trainer.global_step, self.trainer.estimated_stepping_batches
        if step < num_steps < float("inf") and _time_is_over(self.trainer):
            rates = [each.scheduler.get_last_lr()[0] for each in self.trainer.lr_scheduler_configs]
            where = f"at step {step:,} of {num_steps:,}" + "".join(
                f", at a learning rate of {rate:.2g}" for rate in rates
            )
            logger.warning("the time limit (max_time) ended training %s: allow more time, or fewer steps", where)
        if self._continues_run:
            remove_superseded(self.trainer)

    def load_state_dict(self, state_dict: dict[str, Any], prefix: str = "") -> None:
        super().load_state_dict(state_dict, prefix)
        if self.max_epochs is not None and self.max_epochs >= 0:
            # Lightning raises an error at a lower maximum. The run is at its end, as with a lower `max_steps`.
            self.max_epochs = max(self.max_epochs, self.epoch_progress.current.completed)

    @property
    def _resumed(self) -> str:
        return str(self.trainer.ckpt_path)

    def _written(self) -> set[str]:
        writer = self.trainer.strategy.checkpoint_io
        return writer.written if isinstance(writer, DurableCheckpointIO) else set()


def resume_exactly(trainer: L.Trainer) -> None:
    """Replace a new trainer's loops by those of this file."""
    epochs = trainer.fit_loop
    loop = FitLoop(trainer, epochs.min_epochs, epochs.max_epochs)
    loop.epoch_loop = EpochLoop(trainer, epochs.min_steps, epochs.max_steps)
    trainer.fit_loop = loop
    # Averages are updated before they are scored. The checkpoint that is written last contains what the others have
    # kept. Sorting is stable.
    any_trainer: Any = trainer
    any_trainer.callbacks.sort(key=_order)


def _order(callback: L.Callback) -> int:
    if isinstance(callback, WeightAveraging):
        return -1
    if not isinstance(callback, Checkpoint):
        return 0
    return 1 if getattr(callback, "monitor", None) is not None else 2


def _time_is_over(trainer: L.Trainer) -> bool:
    """Whether a `Timer` has stopped training. It decides again from its own state, so a longer time may be given."""
    left = [timer.time_remaining() for timer in callbacks_of(trainer, Timer)]
    return any(seconds is not None and seconds <= 0 for seconds in left)
