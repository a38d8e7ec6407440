"""A trainer for scripts, with what `fit` gives every run by `base.yaml` and around it, and where a run is resumed."""

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from embeddings.callbacks.run_record import ResumedRun, RunRecord, keep_metrics, run_logger
from embeddings.cli.configs import CONFIGS
from embeddings.cli.errors import ConfigError
from embeddings.common import InputError, PreemptedError
from embeddings.common.checkpoint_file import inspect_checkpoint, peek_checkpoint
from embeddings.common.errors import shown
from embeddings.common.io import read_json_or_empty
from embeddings.common.process import is_first_process, logger, quiet_libraries
from embeddings.common.protocols import ChecksRun, RunData, as_config
from embeddings.modules.base import BaseModule
from embeddings.strategies.ranks import set_up_ranks

AUTO = "auto"

# What Lightning needs of a checkpoint to resume; one of the weights alone lacks some.
_RESUMED = {"pytorch-lightning_version", "state_dict", "loops", "optimizer_states", "lr_schedulers"}
# The parts of a config that decide whether it is the same run.
_PARTS = ("seed_everything", "model", "data")
# Ends of paths to settings of how, where or for how long something is computed: another value is still the same run.
_FREE = frozenset(
    {
        "attn_implementation",
        "batch_size",
        "cache_dir",
        "compile",
        "expert_backend",
        "fused",
        "gradient_checkpointing",
        "licence",
        "num_workers",
        "schedule.total_steps",
        "tile_logits",
        "tile_size",
    }
)


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


def check_checkpoint(path: str | None) -> None:
    """Check the value of `--ckpt_path`, before anything is built; a `ConfigError` where it cannot be resumed from."""
    if path is None or path == AUTO or ":" in path:
        return
    if path in ("best", "last", "hpc"):
        raise ConfigError(f"--ckpt_path {path}: names no file here; auto takes the newest one, or give a file's path")
    if not Path(path).exists():
        raise ConfigError(f"--ckpt_path {path}: no such file; give a run's last.ckpt, or leave it out to start anew")
    try:
        check_resumable(Path(path))
    except InputError as error:
        raise ConfigError(f"--ckpt_path {error}") from error


def check_resumable(
    path: Path, run: Mapping[str, Any] | None = None, global_batch_size: int | None = None
) -> str | None:
    """Check that training can be resumed from a checkpoint: first by its header, then all of its bytes.

    Returns by what it belongs to another run, in words, if a run's config or the queries of its batch over all ranks
    are given; its bytes are then not read. DeepSpeed's checkpoints are folders, and are not checked.
    """
    if path.is_dir():
        return None
    content = peek_checkpoint(path)
    missing = ", ".join(sorted(_RESUMED - content.keys()))
    if missing:
        what = f"cannot be resumed from, it holds no {missing}"
        raise InputError(str(path), what, "give a run's last.ckpt, or leave it out to start anew")
    difference = None if run is None else _difference(content, run, global_batch_size)
    if difference is None:
        inspect_checkpoint(path)
    return difference


def find_latest_checkpoint(
    folder: str | Path | None, run: Mapping[str, Any] | None = None, global_batch_size: int | None = None
) -> str | None:
    """The newest `*.ckpt` at any depth of a folder (None: the working one) from which the run can be resumed, or None.

    Standard error names each damaged one, and the newest one of another run (see `first_difference`) with the number of
    such. A checkpoint that does not say to which run it belongs is taken.
    """
    # Lightning's own spelling of the folder, by which it recognises a run's folder.
    root = os.path.normpath(os.path.expanduser(folder or "."))
    found = [path for path in Path(root).rglob("*.ckpt") if path.exists()]
    others, chosen = list[str](), None
    for path in sorted(found, key=lambda path: path.stat().st_mtime_ns, reverse=True):
        try:
            difference = check_resumable(path, run, global_batch_size)
        except InputError as error:
            say(f"left out: {error}")
            continue
        if difference is None:
            chosen = str(path)
            break
        others.append(f"{path}: is of another run: {difference}; restore it, or name the file by --ckpt_path")
    if others:
        more = f" (and {len(others) - 1} more of other runs)" if len(others) > 1 else ""
        say(f"left out: {others[0]}{more}")
    return chosen


def resumed_run(checkpoint: str, run: Mapping[str, Any], is_auto: bool) -> ResumedRun | None:
    """The run of a checkpoint, where it is resumed in its own folder; None where a new folder is made.

    `auto` always resumes in the run's folder. So does a named file, if it is the last one of a run that did not finish
    and is the same as `run`; any other may start a variant.
    """
    path = Path(checkpoint)
    if not path.is_file():
        return None
    content = peek_checkpoint(path)
    folder, step = _run_folder(path, content.get("run")), int(content.get("global_step", 0))
    if folder is None:
        return None
    if not is_auto:
        end = (read_json_or_empty(folder / "run.json").get("end") or {}).get("how")
        steps = [_step_of(other, content["run"]["id"]) for other in path.parent.glob("*.ckpt")]
        if end == "finished" or step < max(steps) or _difference(content, run, None) is not None:
            return None
    return ResumedRun(folder, step)


def check_plan(data: Any, checkpoint: str | None) -> None:
    """Have a data module refuse a checkpoint file's plan that differs from its own, before any file is written."""
    expect = getattr(data, "expect_state", None)
    if expect is not None and checkpoint is not None and Path(checkpoint).is_file():
        # The name under which the trainer keeps a data module's state.
        expect(peek_checkpoint(checkpoint).get(type(data).__qualname__, {}))


def check_pooling(checkpoint: str, run: Mapping[str, Any]) -> None:
    """Refuse a checkpoint whose model pools otherwise, before the trainer finds weights without a place."""
    if not Path(checkpoint).is_file():
        return
    saved = peek_checkpoint(checkpoint).get("run_config")
    there, here = (_pooling(config) for config in (saved, run))
    if None not in (there, here) and there != here:
        what = f"the checkpoint has {there}, this config {here}"
        raise ConfigError(f"--ckpt_path {checkpoint}: {what}; resume with the configs that wrote it")


def _pooling(config: Any) -> str | None:
    try:
        path = config["model"]["init_args"]["pooling"]["class_path"]
    except (KeyError, TypeError):
        return None
    return re.sub("(?<=[a-z])(?=[A-Z])", " ", str(path).rpartition(".")[2]).lower()


def pin_checkpoint_dir(trainer: L.Trainer, checkpoint: str) -> None:
    """Have the run write beside the checkpoint it resumes from; elsewhere Lightning would forget the best ones."""
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.dirpath is None:
            callback.dirpath = str(Path(checkpoint).parent)


def first_difference(saved: Mapping[str, Any], given: Mapping[str, Any]) -> str | None:
    """The first setting by which a checkpoint belongs to another run, in words, or None; both configs are plain types.

    Model, data and seed must be the same, but for `_FREE` settings and those that the checkpoint does not have. A
    rank's batch size is free: that of all ranks together, which the checkpoint's plan holds, must be the same.
    """
    draws_seed = given.get("seed_everything") is True
    parts = [name for name in _PARTS if name in saved and not (draws_seed and name == "seed_everything")]
    return _first("", {name: saved[name] for name in parts}, given)


def _first(path: str, saved: Any, given: Any) -> str | None:
    if isinstance(saved, Mapping) and isinstance(given, Mapping):
        named = [(f"{path}.{name}", saved[name], given.get(name)) for name in saved]
        pairs = [
            (name.lstrip("."), *both) for name, *both in named if not any(name.endswith(f".{end}") for end in _FREE)
        ]
    elif isinstance(saved, list) and isinstance(given, list) and len(saved) == len(given):
        pairs = [(f"{path}[{place}]", *both) for place, both in enumerate(zip(saved, given, strict=True))]
    else:
        return None if saved == given else f"{path} is {shown(saved)} there and {shown(given)} here"
    found = (_first(name, before, now) for name, before, now in pairs)
    return next((difference for difference in found if difference is not None), None)


def _difference(content: Mapping[str, Any], run: Mapping[str, Any], global_batch_size: int | None) -> str | None:
    saved = content.get("run_config")
    difference = first_difference(saved, run) if isinstance(saved, dict) else None
    # The name under which the trainer keeps a data module's state.
    name = str((run.get("data") or {}).get("class_path")).rpartition(".")[2]
    plan = (content.get(name) or {}).get("loader", {}).get("plan", {})
    size = plan.get("global_batch_size")
    if difference is None and None not in (size, global_batch_size) and size != global_batch_size:
        difference = f"its global batch size is {size}, here it is {global_batch_size}"
    return difference


def _step_of(checkpoint: Path, run: str) -> int:
    """The optimiser steps of a run's checkpoint; -1 where the file is damaged or another run's."""
    try:
        content = peek_checkpoint(checkpoint)
    except (InputError, OSError):
        return -1
    return int(content.get("global_step", 0)) if (content.get("run") or {}).get("id") == run else -1


def _run_folder(checkpoint: Path, run: Any) -> Path | None:
    """The folder of a checkpoint's run: the one it names, or one around the checkpoint if the run was moved."""
    if not isinstance(run, Mapping) or not run.get("id"):
        return None
    for folder in (Path(str(run.get("folder"))), *list(checkpoint.parents)[:2]):
        if read_json_or_empty(folder / "run.json").get("id") == run["id"]:
            return folder
    return None


def say(line: str) -> None:
    if is_first_process():
        print(line, file=sys.stderr)
