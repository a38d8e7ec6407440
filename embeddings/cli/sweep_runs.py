"""The runs of a sweep: their folders, the lines that train them, and what became of each."""

import fcntl
import hashlib
import json
import math
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from embeddings.cli.configs import class_name, unfolded
from embeddings.cli.sweep_file import Point, Sweep
from embeddings.common import PreemptedError
from embeddings.common.errors import CHECKOUT, program
from embeddings.common.io import read_json_or_empty, write_json
from embeddings.figures.run_facts import metrics_path, read_curves

# What Python runs for the command line. An installed package is not looked for in the current folder first.
COMMAND = ["-P", "-m", "embeddings"] if CHECKOUT is None else [str(CHECKOUT / "main.py")]
CSV_LOGGER = "lightning.pytorch.loggers.CSVLogger"
# The arguments by which callbacks and loggers are told where to write.
PLACES = ("output", "dirpath", "save_dir")

_HASH_DIGITS = 10


@dataclass(frozen=True)
class Run:
    """A point's run: its number from 0, the config keys that it sets, its folder, and the line that trains it."""

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
        """What `done.json` holds once the run is finished."""
        return read_json_or_empty(self.folder / "done.json") or None

    def line(self) -> str:
        return f"{program()} {shlex.join(self.words)}"


def runs_of(sweep: Sweep, output: Path) -> list[Run]:
    """The runs of a sweep's points, each in the folder `output/SWEEP/RECIPE-HASH`."""
    found = []
    configs = [word for config in sweep.configs for word in ("--config", config)]
    for index, point in enumerate(sweep.points):
        folder = output / sweep.name / f"{sweep.recipe}-{settings_hash(sweep.contents, point)}"
        words = ["fit", *configs]
        words += [f"--{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in point.items()]
        words += placed([*sweep.contents, unfolded(point)], folder)
        found.append(Run(index, point, folder, tuple(words)))
    return found


def settings_hash(contents: Sequence[Mapping[str, Any]], point: Point) -> str:
    """Some hex digits that stand for a run's settings: the configs' contents, in order, and the values of its point."""
    # Not merged first: what becomes of a class's arguments when a later config chooses another class, the parser knows.
    text = json.dumps([contents, point], sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:_HASH_DIGITS]


def placed(contents: Sequence[Mapping[str, Any]], folder: Path) -> list[str]:
    """Options that send what a run writes into its folder: logs, checkpoints, and what callbacks put elsewhere.

    The first logger is a CSV logger, whose `version_N` of a process holds its `metrics.csv`; other loggers stay.
    """
    loggers = [logger for logger in _listed(contents, "logger") if isinstance(logger, Mapping)]
    own = next((logger.get("init_args") or {} for logger in loggers if class_name(logger) == "CSVLogger"), {})
    arguments = {key: value for key, value in own.items() if key != "version"}
    first = {"class_path": CSV_LOGGER, "init_args": {**arguments, "save_dir": str(folder), "name": ""}}
    others = [_moved(logger, folder) for logger in loggers if class_name(logger) != "CSVLogger"]
    words = [f"--trainer.default_root_dir={folder}", f"--trainer.logger={json.dumps([first, *others], default=str)}"]
    callbacks = _listed(contents, "callbacks")
    moved = [_moved(callback, folder) for callback in callbacks]
    return words if moved == callbacks else [*words, f"--trainer.callbacks={json.dumps(moved, default=str)}"]


@contextmanager
def exclusive(folder: Path) -> Iterator[int | None]:
    """The lock on a run's folder, as an open file's number; None where another process holds it.

    A process that inherits the number holds the lock too. Between machines it holds as far as the file system's `flock`
    does: NFS needs a mount without `nolock` and `local_lock`, Lustre one with `flock`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
        else:
            yield file.fileno()


def train(run: Run, lock: int | None, forwarder: "SignalForwarder") -> int:
    """Train a point in a process of its own, from its newest checkpoint if it has one; returns its exit code.

    `lock` is the number of its lock's file; None on a further rank, which does not write done.json.
    """
    from embeddings.cli.trainer import find_latest_checkpoint  # loads Lightning

    start = time.monotonic()
    checkpoint = find_latest_checkpoint(run.folder)
    words = [*run.words, *(["--ckpt_path", checkpoint] if checkpoint else [])]
    if checkpoint:
        print(f"resumed from {checkpoint}", flush=True)
    code = forwarder.run([sys.executable, *command_words(), *words], [] if lock is None else [lock])
    if code == 0 and lock is not None:
        # A run that had no checkpoint yet began anew in the next folder; `version_10` comes after `version_9`.
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
    """What Python runs for a run: the installed command where that was called, whose lines then name it."""
    called = Path(sys.argv[0])
    return [str(called)] if called.name == "embeddings" and called.is_file() else COMMAND


def summaries(run: Path) -> dict[str, dict[str, float]]:
    """Of each column that a run logged its last value, its least and its largest, and their steps."""
    found = {}
    for column, curve in sorted(read_curves(run).items()) if metrics_path(run).is_file() else ():
        values = {step: value for step, value in zip(*curve, strict=True) if math.isfinite(value)}
        if values:
            at = values.__getitem__
            chosen = {"last": max(values), "min": min(values, key=at), "max": max(values, key=at)}
            found[column] = {name: values[step] for name, step in chosen.items()}
            found[column] |= {f"{name}_step": step for name, step in chosen.items()}
    return found


def _listed(contents: Sequence[Mapping[str, Any]], name: str) -> list[Any]:
    """A list of the trainer's after all configs: a later one replaces it, or appends with `name+`."""
    found: list[Any] = []
    for content in contents:
        trainer = content.get("trainer")
        for key, value in trainer.items() if isinstance(trainer, Mapping) else ():
            elements = list(value) if isinstance(value, list) else [value]
            if key == name:
                found = elements
            elif key == f"{name}+":
                found = [*found, *elements]
    return found


def _moved(part: Any, folder: Path) -> Any:
    """A logger or callback with the places that it writes to in a folder, under the last of their own names."""
    if not isinstance(part, Mapping):
        return part
    arguments = part.get("init_args") or {}
    # Where its place changes, as with each process's logs, Lightning forgets on resuming which checkpoint was the best.
    places = {"dirpath": "checkpoints"} if class_name(part) == "ModelCheckpoint" else {}
    places |= {name: arguments[name] for name in PLACES if isinstance(arguments.get(name), str)}
    moved: dict[str, Any] = {name: str(folder / Path(place).name) for name, place in places.items()}
    # A run that was cut short after its export, without a checkpoint, begins anew.
    if class_name(part) in ("ExportModel", "ExportLanguageModel"):
        moved["replace"] = True
    return {**part, "init_args": {**arguments, **moved}} if moved else part


# What a cluster or a terminal sends to end a job, or to have it save itself.
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


class SignalForwarder:
    """Passes signals on to the process that is at work, and begins no other once one has come.

    Inside this context none of the signals ends this process; nor afterwards where it was left because of one, so that
    none comes between a run's answer and the exit. `received` holds what came so far.
    """

    def __init__(self) -> None:
        self.received: list[signal.Signals] = []
        self._early: list[signal.Signals] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "SignalForwarder":
        self._previous = {number: signal.signal(number, self._pass_on) for number in FORWARDED}
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        ignored = bool(self.received) or isinstance(error, PreemptedError)
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_IGN if ignored else handler)

    def run(self, words: Sequence[str], inherited: Sequence[int]) -> int:
        """Run a line to its end; returns its exit code, 128 and the signal's number if one killed it or came before."""
        if self.received:
            return 128 + self.received[0]
        # A group of its own: a terminal's Ctrl-C comes once, from here, and does not end a run that is saving itself.
        self._process = subprocess.Popen(words, pass_fds=tuple(inherited), process_group=0)
        while self._early:
            self._process.send_signal(self._early.pop(0))
        code = self._process.wait()
        self._process = None
        return code if code >= 0 else 128 - code

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self.received.append(signal.Signals(number))
        if self._process is None:
            self._early.append(signal.Signals(number))
        else:
            self._process.send_signal(number)
