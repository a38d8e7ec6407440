"""A run's folder: one for each run, with one process that writes to it, and always with a `metrics.csv`."""

import csv
import io
import os
import socket
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
from filelock import FileLock, Timeout
from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.utilities import rank_zero_only

from embeddings.common import UserError
from embeddings.common.io import METRICS_FILE, read_metrics, row_steps_made, write_text

LOCK_FILE = ".lock"


class ResumedRun(NamedTuple):
    """A run that a new process resumes in its own folder.

    Attributes:
        folder: The run's folder.
        step: Optimiser steps that its checkpoint has made.
    """

    folder: Path
    step: int


class RunLogger(CSVLogger):
    """Writes `metrics.csv` into the run's folder, and decides which folder that is.

    A new run makes the next `version_N`, so two runs that start at once get two folders. A resumed run appends to its
    own `metrics.csv`, without the rows of steps that its checkpoint has not made. A lock marks the folder as long as
    the process lives; a killed process leaves none. Rows are on disk whenever a `ModelCheckpoint` has saved.

    Args:
        resumed: The run that is resumed, or None for a new one.
        **options: As in Lightning's `CSVLogger`.
    """

    def __init__(self, resumed: ResumedRun | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.resumed = resumed
        # Loggers that write into the same folder, and wait for its number.
        self.followers: list[TensorBoardLogger] = []
        self._lock: FileLock | None = None
        if resumed is not None:
            parent = resumed.folder.parent
            if not (os.path.isdir(self.root_dir) and os.path.samefile(self.root_dir, parent)):
                self._save_dir = self._root_dir = str(parent)
                self._name = ""
            self._version = resumed.folder.name

    def hold(self) -> None:
        """Take the lock on the folder, on the first process.

        Raises:
            UserError: If another process writes to the folder.
        """
        if self._lock is not None or "://" in self.log_dir:
            return
        path = Path(self.log_dir) / LOCK_FILE
        lock = FileLock(path, blocking=False)
        try:
            lock.acquire()
        except Timeout:
            holder = path.read_text(encoding="utf-8", errors="replace").strip() or "another process"
            raise UserError(f"{self.log_dir}: {holder} is at work on this run; wait until it ends, or end it") from None
        path.write_text(f"process {os.getpid()} on {socket.gethostname()}", encoding="utf-8")
        self._lock = lock

    @property
    @rank_zero_experiment
    def experiment(self) -> ExperimentWriter:
        """The writer of `metrics.csv`; the first call makes the folder, or cuts the resumed run's file."""
        if self._experiment is None:
            self._make_folder()
            self.hold()
            self._experiment = _Appender(self.log_dir, self._names_kept())
        assert isinstance(self._experiment, ExperimentWriter)
        return self._experiment

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        """Write the rows so far: what a resumed run does not log again is then on disk."""
        self.save()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Write the last rows, and let go of the folder."""
        super().finalize(status)
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _make_folder(self) -> None:
        if self._version is None and "://" not in self.root_dir:
            number = self._get_next_version()
            while not _made(os.path.join(self.root_dir, f"version_{number}")):
                number += 1
            self._version = number
        self._fs.makedirs(self.log_dir, exist_ok=True)
        for follower in self.followers:
            follower._version = self.version

    def _names_kept(self) -> list[str]:
        """The columns of the rows that stay in `metrics.csv`."""
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
    """Appends to a file that has columns already."""

    def __init__(self, log_dir: str, names: list[str]) -> None:
        super().__init__(log_dir)
        self.metrics_keys = names

    def _check_log_dir_exists(self) -> None:
        """Leave what is there."""

    def _rewrite_with_new_header(self, fieldnames: list[str]) -> None:
        if "://" in self.metrics_file_path:
            super()._rewrite_with_new_header(fieldnames)
        else:  # whole or not at all
            path = Path(self.metrics_file_path)
            _write_rows(path, fieldnames, list(read_metrics(path)))


def keep_metrics(trainer: L.Trainer, resumed: ResumedRun | None = None) -> None:
    """Put a `RunLogger` first among the trainer's loggers, so that `trainer.log_dir` is the run's folder.

    It takes the place of the first `CSVLogger`, or shares the folder of the first `TensorBoardLogger`. Beside loggers
    that write elsewhere, and without any, the folder is `lightning_logs/version_N` below `default_root_dir`.

    Args:
        trainer: The trainer, before its run; `fast_dev_run` logs nothing.
        resumed: The run that is resumed, or None.
    """
    if trainer.fast_dev_run:  # type: ignore[attr-defined]
        return
    loggers: list[Any] = list(trainer.loggers)
    own = next((each for each in loggers if type(each) is CSVLogger), None)
    board = next((each for each in loggers if isinstance(each, TensorBoardLogger)), None)
    options: dict[str, Any] = {"save_dir": trainer.default_root_dir}
    if own is not None:
        options = {"save_dir": own.save_dir, "name": own.name, "version": own._version, "prefix": own._prefix}
        options["flush_logs_every_n_steps"] = own._flush_logs_every_n_steps
        loggers.remove(own)
    elif board is not None:
        options = {"save_dir": board.save_dir, "name": board.name, "version": board._version}
    logger = RunLogger(resumed, **options)
    logger.followers = [
        each
        for each in loggers
        if isinstance(each, TensorBoardLogger) and each._version is None and each.root_dir == logger.root_dir
    ]
    trainer.loggers = [logger, *loggers]


def run_logger(trainer: L.Trainer) -> RunLogger | None:
    """The trainer's `RunLogger`; None where it has none."""
    return next((logger for logger in trainer.loggers if isinstance(logger, RunLogger)), None)


def _made(folder: str) -> bool:
    """Make a folder; False where something of this name is there."""
    try:
        os.makedirs(folder)
    except FileExistsError:
        if not os.path.lexists(folder):
            raise
        return False
    return True


def _write_rows(path: Path, names: list[str], rows: list[dict[str, Any]]) -> None:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, fieldnames=names, extrasaction="ignore")
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, text.getvalue())
