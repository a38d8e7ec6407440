"""A trainer for scripts with the features of `fit`, and the choice of the checkpoint and folder to resume in."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
import yaml
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, instantiate_class

from embeddings.callbacks.checkpoints import check_checkpoint_room, make_checkpoints_durable
from embeddings.callbacks.gpu import GPUTraining
from embeddings.callbacks.loops import resume_exactly
from embeddings.callbacks.preemption import Preemption
from embeddings.callbacks.progress import replace_displays
from embeddings.callbacks.run_record import ResumedRun, RunRecord, keep_metrics, model_checkpoints, run_logger
from embeddings.cli.errors import ConfigError
from embeddings.cli.parser import CONFIGS, read_yaml
from embeddings.common import InputError, OptionError, PreemptedError
from embeddings.common.checkpoint_file import inspect_checkpoint, peek_checkpoint
from embeddings.common.errors import shown
from embeddings.common.io import read_json_or_empty
from embeddings.common.process import is_first_process, logger, quiet_libraries
from embeddings.common.protocols import ChecksBeforeModel, ChecksRun, RunData, as_config
from embeddings.figures.run_facts import is_finished
from embeddings.inference.encoder import has_native_bfloat16
from embeddings.modules.base import BaseModule
from embeddings.strategies.ranks import set_up_ranks

AUTO = "auto"

# The keys of a checkpoint that Lightning needs to resume; one with weights only lacks some.
_RESUMED = {"pytorch-lightning_version", "state_dict", "loops", "optimizer_states", "lr_schedulers"}
# The parts of a config that must be equal in the same run.
_PARTS = ("seed_everything", "model", "data")
# Last parts of settings that may change in the same run: they affect only how, where or how long it computes.
_FREE = (
    ".attn_implementation",
    ".batch_size",
    ".cache_dir",
    ".compile",
    ".expert_backend",
    ".fused",
    ".gradient_checkpointing",
    ".licence",
    ".num_workers",
    ".schedule.total_steps",
    ".tile_logits",
    ".tile_size",
)
# Mappings that may have only the keys that the user wrote, so that a key which the checkpoint lacks is a change.
_AS_WRITTEN = (".columns", ".label_texts", ".prompts", ".text")


class Trainer(L.Trainer):
    """Lightning's trainer with the features of `fit`: run record, checkpoints, metrics, health checks and resuming.

    Default options and callbacks are those of `base.yaml`. An option here replaces that of the file. A callback
    replaces the file's callback of the same class, or else is added; a `ModelCheckpoint` with a `monitor` is added to
    the one that writes `last.ckpt`. A signal stops the run after a step, with a checkpoint.

    The run's folder gets `config.yaml` with all arguments of module, data and trainer, `run.json` and `metrics.csv`, so
    `show curves`, `report`, `export` and model cards work as for a run of `fit`.

    Args:
        callbacks: The run's callbacks besides those of `base.yaml`.
        **options: As in Lightning's `Trainer`.
    """

    def __init__(self, callbacks: Sequence[L.Callback] | L.Callback | None = None, **options: Any) -> None:
        added = [callbacks] if isinstance(callbacks, L.Callback) else list(callbacks or ())
        base = yaml.safe_load((CONFIGS / "base.yaml").read_text(encoding="utf-8"))["trainer"]
        kinds = {_kind(callback) for callback in added}
        defaults: list[L.Callback] = [instantiate_class((), entry) for entry in base.pop("callbacks")]
        standard = [callback for callback in defaults if _kind(callback) not in kinds]
        if options.get("enable_checkpointing") is False:
            standard = [callback for callback in standard if not isinstance(callback, ModelCheckpoint)]
        self.given_options: dict[str, Any] = {**base, **options}
        used = {**self.given_options, "accelerator": known_accelerator(options.get("accelerator", AUTO))}
        # Each run leaves a record, except a trial of a few batches; `choose_folder` sets its config.
        record = RunRecord(LightningArgumentParser(), {}, ["python", *sys.argv])
        records = [] if options.get("fast_dev_run") else [record]
        chosen = [*standard, *added]
        with quiet_libraries():
            super().__init__(callbacks=[*chosen, Preemption(), GPUTraining(), *records], **used)
        self.given_options["callbacks"] = chosen
        set_up_trainer(self, chosen)
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
            train_dataloaders: A data module, or data loaders as in Lightning's `Trainer`.
            val_dataloaders: As in Lightning's `Trainer`.
            datamodule: A data module.
            ckpt_path: The checkpoint to resume from; `auto` for the newest one of this run below `default_root_dir`.
            weights_only: As in Lightning's `Trainer`; reading a checkpoint never runs code.

        Raises:
            UserError: If a check of the run fails, or the checkpoint is damaged or belongs to another run.
            PreemptedError: If a signal stopped the run; it ends the process unless it is caught.
        """
        data = train_dataloaders if datamodule is None else datamodule
        path = None if ckpt_path is None else str(ckpt_path)
        check_checkpoint(path)
        path = choose_folder(self, self._run_config(model, data), path, data)
        check_start(self, model, data, path)
        try:
            with quiet_libraries():
                super().fit(model, train_dataloaders, val_dataloaders, datamodule, path, weights_only)
        except PreemptedError as stop:
            if stop.line:
                logger.warning(stop.line)
            raise

    def _run_config(self, model: L.LightningModule, data: Any) -> dict[str, Any]:
        """The config of this run, as far as its parts are classes with arguments."""
        seed = os.environ.get("PL_GLOBAL_SEED")
        config: dict[str, Any] = {"seed_everything": None if seed is None else int(seed)}
        config |= {"trainer": as_config(self.given_options), "model": as_config(model), "data": as_config(data)}
        if isinstance(model, BaseModule):
            # The optimiser may be made by a function, which has no config; the optimiser has one.
            config["model"]["init_args"]["optimizer"] = model.optimizer_config()
        return config


def known_accelerator(accelerator: Any) -> Any:
    """The accelerator; for `auto` the CPU if there is no CUDA GPU, since nothing here has run on other devices."""
    return "cpu" if accelerator == AUTO and not torch.cuda.is_available() else accelerator


def mixed_precision(accelerator: Any = AUTO) -> Literal["bf16-mixed", "32-true"]:
    """A trainer's precision for products in bfloat16: `bf16-mixed`, but `32-true` on a device that would emulate them.

    On such a CPU a product in bfloat16 takes some 45 times as long as in float32 (an AMD EPYC with AVX2, torch 2.13).
    GPUs before compute capability 8.0 emulate them too (V100, T4).
    """
    kind = known_accelerator(accelerator)
    if kind != "cpu" and not torch.cuda.is_available():
        return "bf16-mixed"
    device = torch.device("cpu" if kind == "cpu" else "cuda")
    return "bf16-mixed" if has_native_bfloat16(device) else "32-true"


def set_up_trainer(trainer: L.Trainer, callbacks: Sequence[L.Callback]) -> None:
    """Give a trainer our displays, durable checkpoints and loops that resume exactly."""
    replace_displays(trainer, list(callbacks))
    make_checkpoints_durable(trainer)
    resume_exactly(trainer)


def choose_folder(trainer: L.Trainer, run: dict[str, Any], path: str | None, data: Any) -> str | None:
    """Set the run's folder and config; returns the checkpoint to resume from, for `auto` the newest one."""
    if run_logger(trainer) is None:
        resumed, is_auto = None, path == AUTO
        if is_auto:
            ranks = trainer.num_devices * trainer.num_nodes
            global_batch_size = data.batch_size * ranks if isinstance(data, RunData) else None
            path = find_latest_checkpoint(trainer.default_root_dir, run, global_batch_size)
            if path is None:
                root = Path(trainer.default_root_dir or ".").resolve()
                print_to_stderr(f"nothing to resume below {root}: the run starts from the beginning")
        if path:
            resumed = resumed_run(path, run, is_auto)
            if resumed or is_auto:
                pin_checkpoint_dir(trainer, path)
        keep_metrics(trainer, resumed)
        if resumed is None:
            check_new_folder(trainer, run, is_auto)
    record = RunRecord.of(trainer)
    if record is not None:
        record.plain_config = {**run, "ckpt_path": path}
    return path


def check_new_folder(trainer: L.Trainer, run: Mapping[str, Any], is_auto: bool) -> None:
    """Refuse a folder of another run, and with `auto` checkpoints where `auto` would not find them.

    With `auto` a run that ended before its first checkpoint starts again in its folder.
    """
    metrics_logger = run_logger(trainer)
    if metrics_logger is None:
        return
    if is_auto:
        logs, root = metrics_logger.root_dir, Path(trainer.default_root_dir).resolve()
        folders = [kept.dirpath or logs for kept in model_checkpoints(trainer)] or [logs]
        if not any(Path(folder).resolve().is_relative_to(root) for folder in folders):
            rule = f"must contain the run's checkpoints for --ckpt_path auto, but they are in {folders[0]}"
            hint = "give --run-dir FOLDER, which holds all that the run writes"
            raise OptionError("trainer.default_root_dir", trainer.default_root_dir, rule, hint)
    # Without a version the folder is new, and reading `log_dir` would choose it too early.
    if metrics_logger._version is None or not is_first_process():
        return
    folder = Path(metrics_logger.log_dir)
    if (folder / "run.json").is_file() and not (is_auto and _is_unfinished(folder, run)):
        hint = "leave out the version of trainer.logger, or resume by --ckpt_path"
        raise InputError(str(folder), "is the folder of another run", hint)


def _is_unfinished(folder: Path, run: Mapping[str, Any]) -> bool:
    config = read_yaml(folder / "config.yaml", f"{folder}/config.yaml")
    return first_difference(config, run) is None and not is_finished(read_json_or_empty(folder / "run.json"))


def checks_before_model(trainer: L.Trainer, data: Any, checkpoint: str | None) -> Iterator[Callable[[], None]]:
    for part in (data, *trainer.callbacks):  # type: ignore[attr-defined]
        if isinstance(part, ChecksBeforeModel):
            yield partial(part.check_before_model, trainer)
    yield partial(check_plan, data, checkpoint)


def start_checks(
    trainer: L.Trainer, module: L.LightningModule, data: Any, checkpoint: str | None
) -> Iterator[Callable[[], None]]:
    """The checks of a run before data is read, ranks are started or files are written."""
    run_data = data if isinstance(data, RunData) else None
    for part in (data, module, *trainer.callbacks):  # type: ignore[attr-defined]
        if isinstance(part, ChecksRun):
            yield partial(part.check_run, trainer, module, run_data)
    yield partial(check_checkpoint_room, trainer, module, checkpoint)
    yield partial(check_plan, data, checkpoint)


def check_start(trainer: L.Trainer, module: L.LightningModule, data: Any, checkpoint: str | None) -> None:
    for check in start_checks(trainer, module, data, checkpoint):
        check()
    metrics_logger = run_logger(trainer)
    if metrics_logger is not None and metrics_logger.resumed is not None and is_first_process():
        metrics_logger.hold()


def _kind(callback: L.Callback) -> tuple[type, object]:
    # A run has one callback for each pair.
    return type(callback), getattr(callback, "monitor", None)


def check_checkpoint(path: str | None) -> None:
    """Check the value of `--ckpt_path` before anything is built; a `ConfigError` if it cannot be resumed from."""
    if path is None or path == AUTO or "://" in path:
        return
    if path in ("best", "last", "hpc"):
        raise ConfigError(
            f"--ckpt_path {path}: is not a file; use auto for the newest checkpoint, or give a file's path"
        )
    if not Path(path).exists():
        raise ConfigError(
            f"--ckpt_path {path}: no such file; give a run's last.ckpt, or leave it out to start from the beginning"
        )
    try:
        check_resumable(Path(path))
    except InputError as error:
        raise ConfigError(f"--ckpt_path {error}") from error


def check_resumable(
    path: Path, run: Mapping[str, Any] | None = None, global_batch_size: int | None = None
) -> str | None:
    """Check that training can be resumed from a checkpoint: first its header, then all of its bytes.

    With a run's config, returns how the checkpoint's run differs, if it does; its bytes are then not read.
    """
    content = peek_checkpoint(path)
    missing = ", ".join(sorted(_RESUMED - content.keys()))
    if missing:
        what = f"cannot be resumed from, because it has no {missing}"
        raise InputError(str(path), what, "give a run's last.ckpt, or leave it out to start from the beginning")
    difference = None if run is None else _difference(content, run, global_batch_size)
    if difference is None:
        inspect_checkpoint(path)
    return difference


def find_latest_checkpoint(
    folder: str | Path | None, run: Mapping[str, Any] | None = None, global_batch_size: int | None = None
) -> str | None:
    """The newest `*.ckpt` at any depth of a folder (default the working folder) that the run can resume from, or None.

    Damaged checkpoints and the newest one of another run (see `first_difference`) are reported on standard error. A
    checkpoint without a record of its run is accepted.
    """
    # The same normalisation as Lightning's, which compares the folder as text.
    root = os.path.normpath(os.path.expanduser(folder or "."))
    others, chosen, modified = list[str](), None, dict[Path, int]()
    for path in Path(root).rglob("*.ckpt"):
        with suppress(FileNotFoundError):
            modified[path] = path.stat().st_mtime_ns
    for path in sorted(modified, key=lambda path: modified[path], reverse=True):
        try:
            difference = check_resumable(path, run, global_batch_size)
        except FileNotFoundError:
            # Another run has removed it meanwhile.
            continue
        except InputError as error:
            print_to_stderr(f"left out: {error}")
            continue
        if difference is None:
            chosen = str(path)
            break
        others.append(f"{path}: belongs to another run: {difference}; restore it, or give the file by --ckpt_path")
    if others:
        more = f" (and {len(others) - 1} more of other runs)" if len(others) > 1 else ""
        print_to_stderr(f"left out: {others[0]}{more}")
    return chosen


def resumed_run(checkpoint: str, run: Mapping[str, Any], is_auto: bool) -> ResumedRun | None:
    """The run of a checkpoint if training resumes in its folder; None if it gets a new folder.

    `auto` always resumes in the run's folder, a named file if that run is unfinished and has the same config as `run`.
    """
    path = Path(checkpoint)
    if not path.exists():
        return None
    content = peek_checkpoint(path)
    # A pooling without weights would be exchanged for another without an error.
    before, now = (_pooling(config) for config in (content.get("run_config"), run))
    if before and now and before != now:
        what = f"the checkpoint has {before}, this config {now}"
        raise InputError(f"--ckpt_path {checkpoint}", what, "resume with the configs that wrote it")
    saved = content.get("run") or {}
    # The recorded folder, or a parent folder of the checkpoint if the run was moved.
    for folder in (Path(str(saved.get("folder"))), *list(path.parents)[:2]):
        record = read_json_or_empty(folder / "run.json")
        if saved.get("id") and record.get("id") == saved["id"]:
            if is_auto or not (is_finished(record) or _difference(content, run, None)):
                return ResumedRun(folder, int(content.get("global_step", 0)))
            return None
    return None


def _pooling(config: Any) -> str | None:
    try:
        return str(config["model"]["init_args"]["pooling"]["class_path"]).rpartition(".")[2]
    except (KeyError, TypeError):
        return None


def check_plan(data: Any, checkpoint: str | None) -> None:
    """Refuse a checkpoint file whose data plan differs from the data module's, before any file is written."""
    if isinstance(data, RunData) and checkpoint is not None and Path(checkpoint).exists():
        # The key of the data module's state in Lightning's checkpoints.
        data.expect_state(peek_checkpoint(checkpoint).get(type(data).__qualname__, {}))


def pin_checkpoint_dir(trainer: L.Trainer, checkpoint: str) -> None:
    """Write checkpoints beside the resumed one; in another folder Lightning would forget the best ones."""
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.dirpath is None:
            callback.dirpath = str(Path(checkpoint).parent)


def first_difference(saved: Mapping[str, Any], current: Mapping[str, Any]) -> str | None:
    """The first setting that shows that a checkpoint belongs to another run, as text, or None; configs are plain types.

    Model, data and seed must be equal, except `_FREE` settings and options that the checkpoint does not have.
    """
    draws_seed = current.get("seed_everything") is True
    parts = [name for name in _PARTS if name in saved and not (draws_seed and name == "seed_everything")]
    return next(_differences("", {name: saved[name] for name in parts}, current), None)


def _differences(path: str, saved: Any, current: Any) -> Iterator[str]:
    if path.endswith(_FREE):
        return
    if isinstance(saved, Mapping) and isinstance(current, Mapping):
        for name in {**saved, **current} if path.endswith(_AS_WRITTEN) else saved:
            yield from _differences(f"{path}.{name}", saved.get(name), current.get(name))
    elif isinstance(saved, list) and isinstance(current, list) and len(saved) == len(current):
        for index, (before, now) in enumerate(zip(saved, current, strict=True)):
            yield from _differences(f"{path}[{index}]", before, now)
    elif saved != current:
        yield f"{path.lstrip('.')} is {shown(saved)} in the checkpoint and {shown(current)} here"


def _difference(content: Mapping[str, Any], run: Mapping[str, Any], global_batch_size: int | None) -> str | None:
    saved = content.get("run_config")
    difference = first_difference(saved, run) if isinstance(saved, dict) else None
    # The batch size of a rank may change; the global batch size is in the plan of the data module's state.
    name = str((run.get("data") or {}).get("class_path")).rpartition(".")[2]
    plan = (content.get(name) or {}).get("loader", {}).get("plan", {})
    size = plan.get("global_batch_size")
    if difference is None and None not in (size, global_batch_size) and size != global_batch_size:
        difference = f"its global batch size is {size}, this run's is {global_batch_size}"
    return difference


def print_to_stderr(line: str) -> None:
    """Print a line to standard error, on the first process only."""
    if is_first_process():
        print(line, file=sys.stderr)
