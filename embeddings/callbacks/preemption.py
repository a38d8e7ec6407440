"""Stop a run early, at the end of a step, with a checkpoint from which it resumes exactly."""

import os
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher

from embeddings.callbacks.checkpoints import finish_writing
from embeddings.callbacks.run_record import model_checkpoints, write_none_on_exception
from embeddings.common import OptionError, PreemptedError
from embeddings.common.distributed import reduce_int
from embeddings.common.process import answer, stop_request
from embeddings.common.protocols import RunData


class Preemption(L.Callback):
    """Stops training at SIGUSR1, SIGTERM or Ctrl-C; after the first two, SLURM requeues the job.

    At the end of an optimiser step, after all other callbacks, the ranks agree (one all-reduce), write one checkpoint,
    the run's `last.ckpt`, and end with a `PreemptedError`. After its last step a run finishes normally. A second Ctrl-C
    ends the run at once, without a checkpoint. The command line adds this callback to every run, in place of
    Lightning's handlers, which save and communicate inside a signal handler.
    """

    def __init__(self) -> None:
        self._is_listener, self._step = False, -1

    def check_before_model(self, trainer: L.Trainer) -> None:
        """Refuse a launcher whose parent process only starts the ranks and would ignore signals."""
        launcher: Any = trainer.strategy.launcher
        if isinstance(launcher, _MultiProcessingLauncher):
            given = f"{type(trainer.strategy).__name__} with {launcher._start_method}"
            rule = "must start each rank as a separate command that handles signals"
            raise OptionError("trainer.strategy", given, rule, "use ddp")

    def check_run(self, trainer: L.Trainer, module: L.LightningModule, data: RunData | None) -> None:
        self.check_before_model(trainer)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Defer signals from now on, and move this callback behind all others."""
        if stage != "fit":
            return
        self.check_before_model(trainer)
        self._is_listener = not stop_request.listening
        if self._is_listener:
            stop_request.listen()
        stop_request.deferred = True
        # Lightning has no option for this: it would call its handler of SIGTERM before ours.
        connector: Any = trainer._signal_connector
        connector.register_signal_handlers = lambda: None
        # A new list, because Lightning is iterating over the old one.
        any_trainer: Any = trainer
        any_trainer.callbacks = [*(callback for callback in any_trainer.callbacks if callback is not self), self]

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._step = trainer.global_step
        self._stop_if_asked(trainer, f"stopped at step {self._step}, before its first update", is_in_step=False)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        if not _is_last_step(trainer):
            self._stop_if_asked(trainer, f"stopped after step {self._step}", is_in_step=True)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "fit")

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if self._is_listener:
            stop_request.leave()
        self._is_listener = False

    def _stop_if_asked(self, trainer: L.Trainer, where: str, is_in_step: bool) -> None:
        number = reduce_int(stop_request.first, "max", trainer.strategy.root_device)
        if not number:
            return
        if is_in_step:
            # Write the metrics of this step, which Lightning would write only after all callbacks.
            connector: Any = trainer._logger_connector
            connector.on_batch_end()
            connector.update_train_step_metrics()
        # One checkpoint is enough, and so is one failure to write it.
        write_none_on_exception(trainer)
        writes = is_in_step and not trainer.fast_dev_run  # type: ignore[attr-defined]
        checkpoint = _write_checkpoint(trainer) if writes else trainer.ckpt_path
        stop = answer(number, where, checkpoint, trainer.is_global_zero)
        code = trainer.strategy.broadcast(stop.exit_code)
        # Lightning would kill this process when another rank that it started ends, which all of them do now.
        getattr(trainer.strategy.launcher, "procs", []).clear()
        raise PreemptedError(stop.why, code, stop.checkpoint)


def _write_checkpoint(trainer: L.Trainer) -> str:
    """Write the checkpoint to the path of the run's last one; all ranks take part."""
    resumable = [kept for kept in model_checkpoints(trainer) if not kept.save_weights_only]
    folder = os.path.join(trainer.log_dir or trainer.default_root_dir, "checkpoints")
    kept = min(resumable, key=lambda kept: not kept.save_last, default=None) or ModelCheckpoint(folder)
    # Set before the callback's state is saved, so that the resumed run replaces this file by its next one.
    path = kept.last_model_path = _last_path(trainer, kept)
    trainer.save_checkpoint(path, weights_only=False)
    finish_writing(trainer)
    return path


def _last_path(trainer: L.Trainer, kept: ModelCheckpoint) -> str:
    """Lightning's path of the last checkpoint: it replaces this run's file, but not another run's."""
    own = os.path.abspath(kept.last_model_path or trainer.ckpt_path or "")
    path, version = kept.format_checkpoint_name({}, kept.CHECKPOINT_NAME_LAST), kept.STARTING_VERSION
    while os.path.abspath(path) != own and kept.file_exists(path, trainer):
        path = kept.format_checkpoint_name({}, kept.CHECKPOINT_NAME_LAST, version)
        version += 1
    return path


def _is_last_step(trainer: L.Trainer) -> bool:
    epochs = trainer.current_epoch + trainer.is_last_batch
    ends = trainer.is_last_batch and epochs == trainer.max_epochs
    # Lightning continues until both minimums are reached.
    may_stop = trainer.global_step >= (trainer.min_steps or 0) and epochs >= (trainer.min_epochs or 0)
    return trainer.global_step == trainer.max_steps or ends or (trainer.should_stop and may_stop)
