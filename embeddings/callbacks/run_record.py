"""A run's folder: its name, its `metrics.csv`, and the record of config, command, versions and hardware."""

import csv
import io
import json
import os
import shlex
import subprocess
import uuid
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from enum import Enum
from functools import cached_property, partial
from itertools import count
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import lightning as L
import yaml
from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.utilities import rank_zero_only

from embeddings.common import OptionError, PreemptedError, UserError
from embeddings.common.distributed import count_values
from embeddings.common.errors import CHECKOUT
from embeddings.common.io import (
    METRICS_FILE,
    file_lock,
    package_versions,
    read_json_or_empty,
    read_metrics,
    row_steps_made,
    write_json,
    write_text,
)
from embeddings.common.own_folder import require_replaceable
from embeddings.common.process import device_name
from embeddings.common.process import logger as process_logger
from embeddings.common.protocols import run_data
from embeddings.figures.run_facts import validation_scores
from embeddings.models.model_card import TrainingFacts
from embeddings.models.moe.upcycling import parameter_counts

Kind = TypeVar("Kind")

# The file in a model directory that names the run which wrote it.
MODEL_RUN_FILE = "training_run.json"


class RunRecord(SaveConfigCallback):
    """Writes `config.yaml` and `run.json` into the run's folder, and config and run into every checkpoint.

    `run.json` gets an `end` when the run ends; a run without one was killed or is still running. A process that
    resumes a run in its folder keeps the run's `id`, and moves the records of earlier processes to `earlier`. One that
    continues a run in a new folder records that run's id as `continued_id`.

    Args:
        parser: The parser that read the config.
        config: The parsed config.
        command: The arguments of the command line.
    """

    def __init__(self, parser: LightningArgumentParser, config: Any, command: list[str]) -> None:
        # Lightning would validate the full config again to save it.
        super().__init__(parser, config, save_to_log_dir=False)
        self.command = command
        self.log_dir = Path()
        self._record: dict[str, Any] = {}

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        # All ranks take part, because the trainer broadcasts its folder.
        log_dir = trainer.log_dir
        assert log_dir is not None
        self.log_dir = Path(log_dir)
        super().setup(trainer, pl_module, stage)

    def save_config(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.log_dir.mkdir(parents=True, exist_ok=True)
        text = yaml.safe_dump(self.plain_config, sort_keys=False, allow_unicode=True)
        write_text(self.log_dir / "config.yaml", text)
        logger, data, path = run_logger(trainer), run_data(trainer), self.log_dir / "run.json"
        is_resumed = logger is not None and logger.resumed is not None and path.is_file()
        previous = json.loads(path.read_bytes()) if is_resumed else {}
        earlier = [*previous.pop("earlier", []), previous] if previous else []
        self._record = {
            "id": previous.get("id") or uuid.uuid4().hex,
            "continued_id": previous.get("continued_id"),
            "resumed_from": self.plain_config.get("ckpt_path"),
            "method": getattr(pl_module, "title", "") or type(pl_module).__name__,
            "command": shlex.join(self.command),
            "commit": git_commit(),
            "world_size": trainer.world_size,
            "precision": str(trainer.precision),
            "versions": package_versions(),
            "hardware": device_name(trainer.strategy.root_device),
            "started": _now(),
            "parameters": {
                **parameter_counts(pl_module)._asdict(),
                "trained": count_values(weight for weight in pl_module.parameters() if weight.requires_grad),
            },
            "source_rows": {} if data is None else data.source_rows,
            "earlier": earlier,
        }
        write_json(path, self._record)

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        run = checkpoint.get("run") or {}
        if self._record and run.get("id") != self.id:
            self._record["continued_id"] = run.get("id")
            write_json(self.log_dir / "run.json", self._record)

    def add(self, name: str, value: dict[str, str]) -> None:
        """Add an entry to `run.json`; on rank 0."""
        if self._record:
            self._record[name] = value
            write_json(self.log_dir / "run.json", self._record)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        callbacks: list[Any] = callbacks_of(trainer, L.Callback)
        why = "; ".join(filter(None, (callback.harm() for callback in callbacks if hasattr(callback, "harm"))))
        if why and trainer.is_global_zero:
            process_logger.warning("warning: %s", why)
        self._note_end(trainer, "finished", why)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        # A second Ctrl-C ends the run at once, so no callback may write a checkpoint.
        if isinstance(exception, KeyboardInterrupt):
            write_none_on_exception(trainer)
        with suppress(OSError):  # an error of the disk does not replace the exception
            if isinstance(exception, PreemptedError | KeyboardInterrupt):
                self._note_end(trainer, "interrupted", getattr(exception, "line", ""))
            else:
                self._note_end(trainer, "failed", f"{type(exception).__name__}: {exception}")

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["run_config"] = self.plain_config
        checkpoint["run"] = {"id": self.id, "folder": str(self.log_dir)}
        # Before the checkpoint is complete: a run that resumes from it does not log these rows again.
        logger = run_logger(trainer)
        if logger is not None and trainer.is_global_zero:
            logger.save()

    @property
    def id(self) -> str:
        """The run's unique id, the same after each resume; empty on all ranks but the first."""
        return str(self._record.get("id", ""))

    @staticmethod
    def of(trainer: L.Trainer) -> "RunRecord | None":
        return next(iter(callbacks_of(trainer, RunRecord)), None)

    def facts(self, num_steps: int) -> TrainingFacts:
        """The run's facts for the card of a model after this number of optimiser steps; on rank 0."""
        return TrainingFacts(self.plain_config, num_steps, self._record, validation_scores(self.log_dir, num_steps))

    @cached_property
    def plain_config(self) -> dict[str, Any]:
        """The merged config as plain types; cached, since each checkpoint contains it."""
        return plain_types(self.parser, self.config)

    def _note_end(self, trainer: L.Trainer, how: Literal["finished", "interrupted", "failed"], why: str) -> None:
        # Only rank 0 has a record, and none has one before its folder is known.
        if self._record:
            end = {"time": _now(), "step": trainer.global_step, "how": how, "why": why}
            write_json(self.log_dir / "run.json", {**self._record, "end": end})


def check_output(trainer: L.Trainer, output: str, option: str, replace: bool) -> None:
    """Refuse a path that exists but is not a folder, or, without `replace`, contains another run's model."""
    require_replaceable(output)
    place, logger = Path(output).expanduser(), run_logger(trainer)
    if replace or logger is None or RunRecord.of(trainer) is None or not (place / "config.json").is_file():
        return
    own = None if logger.resumed is None else read_json_or_empty(logger.resumed.folder / "run.json").get("id")
    if own is None or read_json_or_empty(place / MODEL_RUN_FILE).get("id") != own:
        fix = f"choose another folder, or set replace: true in {option}"
        raise OptionError(f"{option}.output", output, "must not contain a model of another run", fix)


def mark_output(trainer: L.Trainer, folder: Path) -> None:
    record = RunRecord.of(trainer)
    if record is not None:
        write_json(folder / MODEL_RUN_FILE, {"id": record.id, "step": trainer.global_step})


def write_none_on_exception(trainer: L.Trainer) -> None:
    """Prevent every `ModelCheckpoint` from saving at the current exception; Lightning calls them last."""
    for kept in model_checkpoints(trainer):
        kept.save_on_exception = False


def callbacks_of(trainer: L.Trainer, kind: type[Kind]) -> list[Kind]:
    callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return [callback for callback in callbacks if isinstance(callback, kind)]


def model_checkpoints(trainer: L.Trainer) -> list[ModelCheckpoint]:
    return [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]


# A default may be an enum, such as the interval of Lightning's `Timer`, which YAML does not have.
yaml.SafeDumper.add_multi_representer(Enum, lambda dumper, member: dumper.represent_data(member.value))


def plain_types(parser: LightningArgumentParser, config: Any) -> dict[str, Any]:
    # Not validated again: validation takes longer than the rest of a run's start.
    text = parser.dump(config, skip_none=False, skip_validation=True, format="yaml")
    # libyaml's loader, if PyYAML has it, is ten times as fast.
    plain: dict[str, Any] = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return plain


def git_commit() -> str | None:
    """The commit of this package's clone, else of the working folder, with `+` if files have changed; or None."""
    clone = CHECKOUT if CHECKOUT is not None and (CHECKOUT / ".git").exists() else None
    run = partial(subprocess.run, cwd=clone, capture_output=True, text=True, check=True, timeout=10)
    try:
        commit, status = run(["git", "rev-parse", "HEAD"]), run(["git", "status", "--porcelain", "-uno"])
    except (OSError, subprocess.SubprocessError):
        return None
    return str(commit.stdout.strip()) + ("+" if status.stdout.strip() else "")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


LOCK_FILE = ".lock"


class ResumedRun(NamedTuple):
    """A run that is resumed in its folder, and the optimiser steps of its checkpoint."""

    folder: Path
    step: int


class RunLogger(CSVLogger):
    """Writes `metrics.csv` into the run's folder, and chooses that folder.

    A new run creates the next `version_N`, also if two runs start together. A resumed run removes the rows after its
    checkpoint's step, and appends. A lock on the folder excludes other processes.
    """

    def __init__(self, resumed: ResumedRun | None = None, **options: Any) -> None:
        if resumed is not None:
            options |= {"save_dir": str(resumed.folder.parent), "name": "", "version": resumed.folder.name}
        super().__init__(**{**options, "save_dir": os.path.expanduser(options["save_dir"])})
        self.resumed = resumed
        # Loggers that write into the same folder and get its version from this logger.
        self.followers: list[TensorBoardLogger] = []
        self._lock: ExitStack | None = None

    def hold(self) -> None:
        """Lock the folder on the first process; raises a `UserError` if another process writes to it."""
        if self._lock is not None or "://" in self.log_dir:
            return
        lock = ExitStack()
        if not lock.enter_context(file_lock(Path(self.log_dir) / LOCK_FILE, wait=False, optional=True)):
            what = "another process is already running this run; wait until it ends, or end it"
            raise UserError(f"{self.log_dir}: {what}")
        self._lock = lock

    @property
    @rank_zero_experiment
    def experiment(self) -> ExperimentWriter:
        if self._experiment is None:
            self._make_folder()
            self.hold()
            self._experiment = _Appender(self.log_dir, self._truncate())
        assert isinstance(self._experiment, ExperimentWriter)
        return self._experiment

    @rank_zero_only
    def finalize(self, status: str) -> None:
        super().finalize(status)
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _make_folder(self) -> None:
        if self._version is None and "://" not in self.root_dir:
            os.makedirs(self.root_dir, exist_ok=True)
            for number in count(self._get_next_version()):
                with suppress(FileExistsError):
                    os.mkdir(os.path.join(self.root_dir, f"version_{number}"))
                    self._version = number
                    break
        self._fs.makedirs(self.log_dir, exist_ok=True)
        for follower in self.followers:
            follower._version = self.version

    def _truncate(self) -> list[str]:
        """Remove the rows after the resumed step from `metrics.csv`; returns its columns."""
        path = Path(self.log_dir) / METRICS_FILE
        if self.resumed is None or not path.is_file():
            path.unlink(missing_ok=True)
            return []
        reader = read_metrics(path)
        rows = [row for row in reader if row_steps_made(row) <= self.resumed.step]
        names = list(reader.fieldnames or ())
        _write_rows(path, names, rows)
        return names


class _Appender(ExperimentWriter):
    """Appends to a file that already has columns."""

    def __init__(self, log_dir: str, names: list[str]) -> None:
        super().__init__(log_dir)
        self.metrics_keys = names

    def _check_log_dir_exists(self) -> None:
        """Lightning's would remove existing files."""

    def _rewrite_with_new_header(self, fieldnames: list[str]) -> None:
        if "://" in self.metrics_file_path:
            super()._rewrite_with_new_header(fieldnames)
        else:
            path = Path(self.metrics_file_path)
            _write_rows(path, fieldnames, list(read_metrics(path)))


def keep_metrics(trainer: L.Trainer, resumed: ResumedRun | None = None) -> None:
    """Put a `RunLogger` first among the trainer's loggers, so that `trainer.log_dir` is the run's folder.

    It replaces the first `CSVLogger`, or shares the folder of the first `TensorBoardLogger`; else the folder is
    `lightning_logs/version_N` below `default_root_dir`.
    """
    if trainer.fast_dev_run:  # type: ignore[attr-defined]
        return
    loggers: list[Any] = list(trainer.loggers)
    own = next((each for each in loggers if type(each) is CSVLogger), None)
    boards = [each for each in loggers if isinstance(each, TensorBoardLogger)]
    options: dict[str, Any] = {"save_dir": trainer.default_root_dir}
    if own is not None:
        options = {"save_dir": own.save_dir, "name": own.name, "version": own._version, "prefix": own._prefix}
        options["flush_logs_every_n_steps"] = own._flush_logs_every_n_steps
        loggers.remove(own)
    elif boards:
        options = {"save_dir": boards[0].save_dir, "name": boards[0].name, "version": boards[0]._version}
    logger = RunLogger(resumed, **options)
    # A resumed run's may end with a slash.
    root = os.path.abspath(logger.root_dir)
    own_boards = [each for each in boards if os.path.abspath(os.path.expanduser(each.root_dir)) == root]
    logger.followers = [each for each in own_boards if each._version is None]
    trainer.loggers = [logger, *loggers]


def run_logger(trainer: L.Trainer) -> RunLogger | None:
    return next((logger for logger in trainer.loggers if isinstance(logger, RunLogger)), None)


def _write_rows(path: Path, names: list[str], rows: list[dict[str, Any]]) -> None:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, fieldnames=names, extrasaction="ignore")
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, text.getvalue())
