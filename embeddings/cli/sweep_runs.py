"""The runs of a sweep: their folders, commands, training and records."""

import ctypes
import fcntl
import hashlib
import json
import math
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from embeddings.cli.configs import class_name, unfolded
from embeddings.cli.sweep_file import Point, Sweep
from embeddings.common import PreemptedError
from embeddings.common.errors import CHECKOUT, program
from embeddings.common.io import read_json_or_empty, write_json
from embeddings.figures.run_facts import metrics_path, read_curves

# Python's arguments that start the command line; -P keeps the current folder out of the import path.
COMMAND = ["-P", "-m", "embeddings"] if CHECKOUT is None else [str(CHECKOUT / "main.py")]
CSV_LOGGER = "lightning.pytorch.loggers.CSVLogger"
# Arguments of callbacks and loggers that are output paths.
PATH_ARGUMENTS = ("output", "dirpath", "save_dir")

_HASH_DIGITS = 10


@dataclass(frozen=True)
class Run:
    """The run of a point: its index from 0, the config keys that it sets, its folder, and its arguments of `fit`."""

    index: int
    point: Point
    folder: Path
    words: tuple[str, ...]

    @property
    def status(self) -> Literal["done", "unfinished", "missing"]:
        if self.record() is not None:
            return "done"
        return "unfinished" if any(self.folder.glob("version_*")) else "missing"

    def record(self) -> dict[str, Any] | None:
        """The content of `done.json`; None if the run is not finished."""
        return read_json_or_empty(self.folder / "done.json") or None

    def line(self) -> str:
        return f"{program()} {shlex.join(self.words)}"


def runs_of(sweep: Sweep, output: Path) -> list[Run]:
    """The runs of a sweep's points, each in the folder `output/SWEEP/RECIPE-HASH`."""
    runs = []
    configs = [word for config in sweep.configs for word in ("--config", config)]
    for index, point in enumerate(sweep.points):
        folder = output / sweep.name / f"{sweep.recipe}-{settings_hash(sweep.contents, point)}"
        words = ["fit", *configs]
        words += [f"--{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in point.items()]
        words += placed([*sweep.contents, unfolded(point)], folder)
        runs.append(Run(index, point, folder, tuple(words)))
    return runs


def settings_hash(contents: Sequence[Mapping[str, Any]], point: Point) -> str:
    """A short hexadecimal hash of a run's settings: the contents of the configs, in order, and the point."""
    # The configs are not merged first, because only the parser can merge the arguments of classes.
    text = json.dumps([contents, point], sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:_HASH_DIGITS]


def placed(contents: Sequence[Mapping[str, Any]], folder: Path) -> list[str]:
    """Options that redirect all output of a run to its folder: logs, checkpoints, and the output of callbacks.

    The first logger becomes a CSV logger, which writes the `metrics.csv` of each process to its `version_N`; other
    loggers follow.
    """
    loggers = [logger for logger in _listed(contents, "logger") if isinstance(logger, Mapping)]
    csv_options = next((logger.get("init_args") or {} for logger in loggers if class_name(logger) == "CSVLogger"), {})
    arguments = {key: value for key, value in csv_options.items() if key != "version"}
    first = {"class_path": CSV_LOGGER, "init_args": {**arguments, "save_dir": str(folder), "name": ""}}
    others = [_moved(logger, folder) for logger in loggers if class_name(logger) != "CSVLogger"]
    words = [f"--trainer.default_root_dir={folder}", f"--trainer.logger={json.dumps([first, *others], default=str)}"]
    callbacks = _listed(contents, "callbacks")
    moved = [_moved(callback, folder) for callback in callbacks]
    return words if moved == callbacks else [*words, f"--trainer.callbacks={json.dumps(moved, default=str)}"]


@contextmanager
def exclusive(folder: Path) -> Iterator[int | None]:
    """The file descriptor of the lock on a run's folder; None if another process has the lock.

    A process that inherits the descriptor has the lock too. The lock works between machines if the file system's
    `flock` does: NFS needs a mount without `nolock` and `local_lock`, Lustre one with `flock`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
        else:
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
            file.flush()
            yield file.fileno()


def holder(folder: Path) -> str:
    """The process that has the lock on a run's folder, in words."""
    return (folder / ".lock").read_text(encoding="utf-8", errors="replace").strip() or "another process"


def train(run: Run, lock: int | None, forwarder: "SignalForwarder") -> int:
    """Train a run in a new process, from its newest checkpoint if it has one; returns the exit code.

    `lock` is the file descriptor of its lock; None on all ranks but the first, which do not write done.json.
    """
    from embeddings.cli.trainer import find_latest_checkpoint  # loads Lightning

    start = time.monotonic()
    checkpoint = find_latest_checkpoint(run.folder)
    words = [*run.words, *(["--ckpt_path", checkpoint] if checkpoint else [])]
    if checkpoint:
        print(f"resumed from {checkpoint}", flush=True)
    code = forwarder.run([sys.executable, *command_words(), *words], [] if lock is None else [lock])
    if code == 0 and lock is not None:
        # A restarted run without a checkpoint uses the next folder; `version_10` comes after `version_9`.
        last = max(run.folder.glob("version_*"), key=lambda path: (len(path.name), path.name), default=run.folder)
        fields = {
            "point": run.point,
            "command": run.line(),
            "seconds": round(time.monotonic() - start, 1),
            "resumed_from": checkpoint,
            "commit": read_json_or_empty(last / "run.json").get("commit"),
            "metrics": summaries(last),
        }
        write_json(run.folder / "done.json", fields)
    return code


def command_words() -> list[str]:
    """Python's arguments that start the command line: the installed command if this process is one, else `COMMAND`."""
    called = Path(sys.argv[0])
    return [str(called)] if called.name == "embeddings" and called.is_file() else COMMAND


def summaries(run: Path) -> dict[str, dict[str, float]]:
    """The last, minimum and maximum value of each logged column, with their steps."""
    columns = {}
    for column, curve in sorted(read_curves(run).items()) if metrics_path(run).is_file() else ():
        values = {step: value for step, value in zip(*curve, strict=True) if math.isfinite(value)}
        if values:
            at = values.__getitem__
            chosen = {"last": max(values), "min": min(values, key=at), "max": max(values, key=at)}
            columns[column] = {name: values[step] for name, step in chosen.items()}
            columns[column] |= {f"{name}_step": step for name, step in chosen.items()}
    return columns


def _listed(contents: Sequence[Mapping[str, Any]], name: str) -> list[Any]:
    """A list option of the trainer after all configs: a later config replaces it, or appends by `name+`."""
    merged: list[Any] = []
    for content in contents:
        trainer = content.get("trainer")
        for key, value in trainer.items() if isinstance(trainer, Mapping) else ():
            elements = list(value) if isinstance(value, list) else [value]
            if key == name:
                merged = elements
            elif key == f"{name}+":
                merged = [*merged, *elements]
    return merged


def _moved(part: Any, folder: Path) -> Any:
    """A logger or callback with its output paths moved to a folder; the last part of each path stays."""
    if not isinstance(part, Mapping):
        return part
    arguments = part.get("init_args") or {}
    # A fixed checkpoint folder: if it changes when a run resumes, Lightning forgets which checkpoint was the best.
    paths = {"dirpath": "checkpoints"} if class_name(part) == "ModelCheckpoint" else {}
    paths |= {name: arguments[name] for name in PATH_ARGUMENTS if isinstance(arguments.get(name), str)}
    moved: dict[str, Any] = {name: str(folder / Path(path).name) for name, path in paths.items()}
    # A run that was interrupted after its export, without a checkpoint, starts again and replaces it.
    if class_name(part) in ("ExportModel", "ExportLanguageModel"):
        moved["replace"] = True
    return {**part, "init_args": {**arguments, **moved}} if moved else part


# Signals that a cluster or terminal sends to end a job, or to make it save a checkpoint.
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


class SignalForwarder:
    """Forwards signals to the running child process, and starts no other one after a signal.

    Inside this context the signals do not end this process. If the context ends because of one, they are ignored
    afterwards too, so that none changes the exit code. `received` contains the signals so far.
    """

    def __init__(self) -> None:
        self.received: list[signal.Signals] = []
        self._early: list[signal.Signals] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "SignalForwarder":
        self._previous = {number: signal.signal(number, self._forward) for number in FORWARDED}
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        ignored = bool(self.received) or isinstance(error, PreemptedError)
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_IGN if ignored else handler)

    def run(self, words: Sequence[str], inherited: Sequence[int]) -> int:
        """Run a command; returns its exit code, or 128 plus the signal's number if one killed it or came before."""
        if self.received:
            return 128 + self.received[0]
        # A separate process group: Ctrl-C reaches the run only once, from here, and does not kill a run that is saving.
        ends = partial(_end_with, os.getpid()) if sys.platform == "linux" else None
        self._process = subprocess.Popen(words, pass_fds=tuple(inherited), process_group=0, preexec_fn=ends)
        while self._early:
            self._process.send_signal(self._early.pop(0))
        code = self._process.wait()
        self._process = None
        return code if code >= 0 else 128 - code

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self.received.append(signal.Signals(number))
        if self._process is None:
            self._early.append(signal.Signals(number))
        else:
            self._process.send_signal(number)


_LIBC = ctypes.CDLL(None)
# The option's number in Linux's sys/prctl.h.
_PR_SET_PDEATHSIG = 1


def _end_with(parent: int) -> None:
    """Let the kernel kill this new process when its parent is killed; no other process would end it."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
