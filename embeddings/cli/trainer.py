"""A trainer for scripts: Lightning's, with what `fit` gives every run by `base.yaml` and around it."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import yaml
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, instantiate_class

from embeddings.callbacks.checkpoints import check_checkpoint_room, make_checkpoints_durable
from embeddings.callbacks.preemption import Preemption
from embeddings.callbacks.progress import replace_displays
from embeddings.callbacks.run_record import RunRecord, keep_metrics, run_logger
from embeddings.cli.configs import CONFIGS
from embeddings.cli.resume import (
    AUTO,
    check_checkpoint,
    check_plan,
    check_pooling,
    find_latest_checkpoint,
    pin_checkpoint_dir,
    resumed_run,
    say,
)
from embeddings.common import PreemptedError
from embeddings.common.arguments import as_config
from embeddings.common.process import is_first_process, logger, quiet_libraries
from embeddings.common.protocols import ChecksRun, RunData
from embeddings.modules.base import BaseModule
from embeddings.strategies.ranks import set_up_ranks


class Trainer(L.Trainer):
    """Lightning's trainer with what a run of `fit` has: record, checkpoints, metrics, health checks and resuming.

    Its options and callbacks begin as those of `base.yaml`. An option given here replaces that of the file. A callback
    is added to those of the file, or replaces the one of its class there; a `ModelCheckpoint` with a `monitor` is added
    to the one that keeps `last.ckpt`. A signal stops the run after a step, with a checkpoint.

    The run's folder gets `config.yaml` with all arguments of module, data and trainer, `run.json` and `metrics.csv`, so
    `show curves`, `report`, `export` and a model's card know the run as they know one of `fit`. A function in place of
    a class with arguments (`lambda`, `def`) is named, but neither its arguments nor its code are in the record.

    Args:
        callbacks: The run's own callbacks.
        **options: As in Lightning's `Trainer`.

    Raises:
        OptionError: If the ranks could not meet, or another `CheckpointIO` than `DurableCheckpointIO` is given.
    """

    def __init__(self, callbacks: Sequence[L.Callback] | L.Callback | None = None, **options: Any) -> None:
        own = [callbacks] if isinstance(callbacks, L.Callback) else list(callbacks or ())
        base = yaml.safe_load((CONFIGS / "base.yaml").read_text(encoding="utf-8"))["trainer"]
        kinds = {_kind(callback) for callback in own}
        made: list[L.Callback] = [instantiate_class((), entry) for entry in base.pop("callbacks")]
        standard = [callback for callback in made if _kind(callback) not in kinds]
        if options.get("enable_checkpointing") is False:
            standard = [callback for callback in standard if not isinstance(callback, ModelCheckpoint)]
        self.given_options: dict[str, Any] = {**base, **options}
        # Every run but a trial of a few batches leaves a record.
        record = [] if options.get("fast_dev_run") else [ScriptRecord()]
        chosen = [*standard, *own]
        with quiet_libraries():
            super().__init__(callbacks=[*chosen, Preemption(), *record], **self.given_options)
        self.given_options["callbacks"] = chosen
        replace_displays(self, chosen)
        make_checkpoints_durable(self)
        set_up_ranks(self)

    def fit(
        self,
        model: L.LightningModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: L.LightningDataModule | None = None,
        ckpt_path: str | os.PathLike[str] | None = None,
        weights_only: bool | None = None,
    ) -> None:
        """Train.

        Args:
            model: A module of this library, or any other.
            train_dataloaders: The data module, or what else Lightning takes.
            val_dataloaders: As in Lightning's `Trainer`.
            datamodule: The data module, by its name.
            ckpt_path: The checkpoint to resume from; `auto` for the newest one of this run below `default_root_dir`.
            weights_only: As in Lightning's `Trainer`; reading a checkpoint runs no code either way.

        Raises:
            UserError: If a part refuses the run, or the checkpoint is damaged or another run's.
            PreemptedError: If a signal stopped the run; it ends the process unless it is caught.
        """
        data = train_dataloaders if datamodule is None else datamodule
        path = None if ckpt_path is None else str(ckpt_path)
        check_checkpoint(path)
        run = self._run_config(model, data, path)
        if run_logger(self) is None:
            path = choose_folder(self, run, path, getattr(data, "batch_size", None))
        record = RunRecord.of(self)
        if record is not None:
            record.plain_config = {**run, "ckpt_path": path}
        check_start(self, model, data, path)
        try:
            with quiet_libraries():
                super().fit(model, train_dataloaders, val_dataloaders, datamodule, path, weights_only)
        except PreemptedError as stop:
            if stop.line:
                logger.warning(stop.line)
            raise

    def _run_config(self, model: L.LightningModule, data: Any, path: str | None) -> dict[str, Any]:
        """The config that would make this run, as far as its parts are classes with arguments."""
        seed = os.environ.get("PL_GLOBAL_SEED")
        config: dict[str, Any] = {"seed_everything": None if seed is None else int(seed)}
        config |= {"trainer": as_config(self.given_options), "model": as_config(model), "data": as_config(data)}
        if isinstance(model, BaseModule):
            # A function that makes the optimiser says nothing; what it makes does.
            config["model"]["init_args"]["optimizer"] = model.optimizer_config()
        return {**config, "ckpt_path": path}


class ScriptRecord(RunRecord):
    """The record of a run that a script makes; `plain_config` is set to what its parts were made with."""

    def __init__(self) -> None:
        super().__init__(LightningArgumentParser(), {}, ["python", *sys.argv])


def choose_folder(trainer: L.Trainer, run: dict[str, Any], found: str | None, batch_size: int | None) -> str | None:
    """Give the trainer its run's folder, and return the checkpoint to resume from: `auto` finds the newest one."""
    resumed, is_auto = None, found == AUTO
    if is_auto:
        ranks = trainer.num_devices * trainer.num_nodes
        found = find_latest_checkpoint(trainer.default_root_dir, run, batch_size and batch_size * ranks)
        if found is None:
            root = Path(trainer.default_root_dir or ".").resolve()
            say(f"nothing to resume below {root}: the run begins anew")
    if found:
        check_pooling(found, run)
        resumed = resumed_run(found, run, is_auto)
        if resumed or is_auto:
            pin_checkpoint_dir(trainer, found)
    keep_metrics(trainer, resumed)
    return found


def start_checks(
    trainer: L.Trainer, module: L.LightningModule, data: Any, checkpoint: str | None
) -> Iterator[Callable[[], None]]:
    """What checks a run before data is read, part by part."""
    known = data if isinstance(data, RunData) else None
    for part in (data, module, *trainer.callbacks):  # type: ignore[attr-defined]
        if isinstance(part, ChecksRun):
            yield partial(part.check_run, trainer, module, known)
    yield partial(check_checkpoint_room, trainer, module, checkpoint)
    yield partial(check_plan, data, checkpoint)


def check_start(trainer: L.Trainer, module: L.LightningModule, data: Any, checkpoint: str | None) -> None:
    """Have each part check the run before data is read, ranks are started or files are written."""
    for check in start_checks(trainer, module, data, checkpoint):
        check()
    own = run_logger(trainer)
    if own is not None and own.resumed is not None and is_first_process():
        own.hold()


def _kind(callback: L.Callback) -> tuple[type, object]:
    """What a callback is one of, for a run that wants one of each."""
    return type(callback), getattr(callback, "monitor", None)
