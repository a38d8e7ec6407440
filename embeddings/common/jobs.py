"""Resumable jobs over shards: a folder that knows which shards are done, and the processes that share them."""

import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from embeddings.common.errors import InputError, OptionError, UserError
from embeddings.common.io import (
    atomic_path,
    check_file_manifest,
    check_manifest,
    file_lock,
    file_sha256,
    load_array,
    write_manifest,
)

# Work that ends within this time shows no progress bar.
PROGRESS_DELAY_SECONDS = 2.0
# Between two lines of progress where standard error is no terminal.
LINE_SECONDS = 30.0
_GIVE_TASK = "give --task_index and --num_tasks"

MakeShard = Callable[[int, Path], None]


def progress_bar(
    total: int | None,
    title: str,
    unit: str,
    *,
    delay: float | None = None,
    every_seconds: float = LINE_SECONDS,
    **options: Any,
) -> "tqdm[Any]":
    """The progress of work on standard error, with the time left: a bar in a terminal, lines in a log.

    Args:
        total: Units of all of the work; None where that is not known, or `iterable` among the options knows it.
        title: What the work is called.
        unit: What is counted.
        delay: Seconds before anything is shown; two if left out.
        every_seconds: Seconds between two lines of a log; the last line closes the work.
        options: Further options of tqdm.
    """
    options |= {"total": total, "desc": title, "unit": unit}
    options["delay"] = PROGRESS_DELAY_SECONDS if delay is None else delay
    if sys.stderr is not None and sys.stderr.isatty():
        return tqdm(**options)
    return _LineBar(**{**options, "file": _Lines(sys.stderr), "mininterval": every_seconds, "miniters": 1})


class _LineBar(tqdm):  # type: ignore[type-arg]
    """A bar that is never shown more often than its interval says, whatever changes in it."""

    def __init__(self, **options: Any) -> None:
        self._shown_at = time.time() if options["delay"] > 0 else -math.inf
        super().__init__(**options)

    def refresh(self, *arguments: Any, **options: Any) -> None:
        """Show the bar if it is time."""
        if not self.disable and (now := time.time()) - self._shown_at >= self.mininterval:
            self._shown_at = now
            super().refresh(*arguments, **options)


class _Lines:
    """A stream on which a bar is written as one line after another, each once, instead of overwriting one line."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream, self._last = stream, ""

    def write(self, text: str) -> None:
        """Write the bar's line, unless its step was written last."""
        # tqdm shows the last step twice, with other seconds.
        line = text.strip()
        if line and line.partition("[")[0] != self._last.partition("[")[0] and self._stream is not None:
            self._stream.write(line + "\n")
            self._last = line

    def flush(self) -> None:
        """Pass it on."""
        if self._stream is not None:
            self._stream.flush()


@dataclass(frozen=True)
class ArrayTask:
    """One of the processes that share a job: shard `s` is the task's where `s % count == index`, from 0."""

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        if self.count < 1:
            raise OptionError("num_tasks", self.count, "must be >= 1", "leave it out for one process")
        if not 0 <= self.index < self.count:
            raise OptionError("task_index", self.index, f"must lie in 0 … {self.count - 1}", "count tasks from 0")

    def shards(self, num_shards: int) -> range:
        """The numbers of the task's shards."""
        return range(self.index, num_shards, self.count)


@dataclass(frozen=True)
class TaskOptions:
    """Which part of the work this process does.

    Args:
        task_index: Number of this process among those that share the work, from 0; in a SLURM array that of the task.
        num_tasks: How many processes share the work.
    """

    task_index: int | None = None
    num_tasks: int | None = None

    def resolve(self) -> ArrayTask:
        """The task that the options name; without them that of a SLURM array, or the only task.

        A SLURM array may count from any number, in even steps.

        Raises:
            OptionError: If one option is given without the other, a number is impossible, or the array has gaps.
        """
        index, count = self.task_index, self.num_tasks
        if index is not None and count is not None:
            return ArrayTask(index, count)
        if index is not None or count is not None:
            given, absent = ("num_tasks", "task_index") if index is None else ("task_index", "num_tasks")
            raise OptionError(given, count if index is None else index, f"needs {absent}", "give both or neither")
        if "SLURM_ARRAY_TASK_ID" not in os.environ:
            return ArrayTask()
        number, least, count, step = (
            _whole_number(f"SLURM_ARRAY_TASK_{name}", default, smallest)
            for name, default, smallest in (("ID", 0, 0), ("MIN", 0, 0), ("COUNT", 1, 1), ("STEP", 1, 1))
        )
        index, rest = divmod(number - least, step)
        if rest or not 0 <= index < count:
            raise OptionError("SLURM_ARRAY_TASK_ID", number, f"is not one of {count} even steps", _GIVE_TASK)
        return ArrayTask(index, count)


def _whole_number(name: str, default: int, smallest: int) -> int:
    """The integer that an environment variable holds."""
    value = os.environ.get(name, str(default))
    if not (value.isascii() and value.isdigit()) or int(value) < smallest:
        raise OptionError(name, value, f"must be a whole number >= {smallest}", _GIVE_TASK)
    return int(value)


class JobFolder:
    """A folder that one resumable job writes; `manifest.json` says what decides its bytes, and whether it is complete.

    Args:
        folder: The folder; it is made if there is none.
        fields: What decides the bytes: kind, hashes of the inputs, arguments, seed. JSON types.
        defaults: Fields that the first process decides: the others, and later calls, take them from the manifest.

    Raises:
        InputError: If the folder holds something else, or a job with other fields; the message names the field.
    """

    def __init__(
        self, folder: str | os.PathLike[str], fields: Mapping[str, Any], defaults: Mapping[str, Any] | None = None
    ) -> None:
        self.folder = Path(folder)
        self.fields: dict[str, Any] = json.loads(json.dumps(fields))
        manifest, defaults = self.folder / "manifest.json", json.loads(json.dumps(defaults or {}))
        if not manifest.exists():
            require_free(self.folder)
            self.folder.mkdir(parents=True, exist_ok=True)
            with file_lock(self.folder / ".lock"):
                if not manifest.exists():
                    write_manifest(self.folder, {**self.fields, **defaults, "complete": False})
                    (self.folder / ".lock").unlink(missing_ok=True)
        found = check_manifest(self.folder, {})
        # Another process may have been first, with other fields; folders of older versions do not name all numbers.
        expected = {name: value for name, value in self.fields.items() if name != "num_shards" or name in found}
        check_manifest(self.folder, expected)
        self.fields |= {name: found.get(name, value) for name, value in defaults.items()}

    @property
    def complete(self) -> bool:
        """Whether the job has been finished."""
        return bool(check_manifest(self.folder, {}).get("complete"))

    @contextmanager
    def lock(self) -> Iterator[None]:
        """The lock under which the job is finished, held by one process at a time.

        Its file is removed once the job is complete, and not before: a process that comes later takes a new one, and
        must find that nothing is left to do.
        """
        path = self.folder / ".lock"
        with file_lock(path):
            yield
            if self.complete:
                path.unlink(missing_ok=True)

    def finish(self, merge: Callable[[], Mapping[str, Any]] = dict) -> bool:
        """Run `merge` once, and note in the manifest that the job is complete, with the fields that it returns.

        Of several processes that call this at once, one merges and the others wait for it. After a kill in `merge` the
        next process merges again, so `merge` must write its files atomically, and the same ones each time. Returns
        whether the job is complete.
        """
        if self.complete:
            return True
        with self.lock():
            if not self.complete:
                facts = merge()
                # What killed processes had begun.
                for pattern in (".*.tmp", ".*.lock"):
                    for path in self.folder.glob(pattern):
                        path.unlink(missing_ok=True)
                write_manifest(self.folder, {**self.fields, **facts, "complete": True})
        return True


class ShardedJob(JobFolder):
    """A job in shards, each a file that is written atomically, by any number of processes.

    A process killed at any moment costs at most the shard that it was making; the same call resumes at the next one. A
    shard is made under a lock that dies with its process, so two processes do not make the same one; where a file
    system has no such locks they do, and write the same bytes.

    Args:
        folder: See `JobFolder`, and so `fields`, `defaults` and errors.
        num_shards: Number of shards.
        stem: Name of a shard's file before its number.
        suffix: Name of a shard's file after its number.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        fields: Mapping[str, Any],
        num_shards: int,
        *,
        stem: str = "shard",
        suffix: str = ".npy",
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(folder, {**fields, "num_shards": num_shards}, defaults)
        self.num_shards, self.stem, self.suffix = num_shards, stem, suffix

    def path(self, shard: int) -> Path:
        """The file of a shard."""
        return self.folder / f"{self.stem}-{shard:05d}{self.suffix}"

    def missing(self) -> list[int]:
        """The shards that are not there yet; none once the job is finished."""
        if self.complete:
            return []
        return [shard for shard in range(self.num_shards) if not self.path(shard).exists()]

    def run(self, make: MakeShard, task: ArrayTask | None = None, take_over: bool = False) -> None:
        """Make the task's shards that are not there yet, with progress and the time left on standard error.

        Args:
            make: Writes shard `s` to a temporary path: `make(s, path)`. Its bytes follow from `s` and the job's fields.
            task: Which shards are this process's; None for all.
            take_over: Whether to make, or to wait for, the other tasks' shards too, so that none is missing on return.
        """
        if self.complete:
            return
        own = (task or ArrayTask()).shards(self.num_shards)
        others = [shard for shard in range(self.num_shards) if shard not in own] if take_over else []
        shards = [*own, *others]
        left = [shard for shard in shards if not self.path(shard).exists()]
        title = str(self.fields.get("kind", self.stem))
        with progress_bar(len(shards), title, "shard", initial=len(shards) - len(left)) as bar:
            for wait in (False, True):
                unmade = []
                for shard in left:
                    if self.make(shard, make, wait):
                        bar.update()
                    else:
                        unmade.append(shard)
                left = unmade

    def make(self, shard: int, make: MakeShard, wait: bool = False) -> bool:
        """Make one shard unless it is there; False if another process is making it and `wait` is not set."""
        path = self.path(shard)
        lock = self.folder / f".{path.name}.lock"
        with file_lock(lock, wait) as held:
            if not held:
                return False
            if not path.exists():
                with atomic_path(path) as temporary:
                    make(shard, temporary)
            # A process that waits for this lock looks for the shard again before making it.
            lock.unlink(missing_ok=True)
        return True

    def finish(self, merge: Callable[[], Mapping[str, Any]] = dict) -> bool:
        """Finish the job (see `JobFolder.finish`) once no shard is missing; False if other tasks have some left."""
        return not self.missing() and super().finish(merge)


def require_free(folder: Path) -> None:
    """Check that a job may begin in a folder, or has begun there; an `InputError` where something else lies there."""
    if (folder / "manifest.json").exists() or not folder.exists():
        return
    # Hidden files are what other processes leave while they work.
    if not folder.is_dir() or any(not path.name.startswith(".") for path in folder.iterdir()):
        raise InputError(str(folder), "something else lies there already", "name a new folder")


def require_shard_size(shard_size: int) -> None:
    """Check the number of records of a shard; an `OptionError` where it is not positive."""
    if shard_size < 1:
        raise OptionError("shard_size", shard_size, "must be >= 1", "leave it out for the default")


def shard_rows(shard: int, shard_size: int, num_rows: int) -> range:
    """The rows of a shard."""
    return range(shard * shard_size, min((shard + 1) * shard_size, num_rows))


def save_array(path: Path, array: npt.NDArray[Any]) -> None:
    """Write an array as `.npy` to exactly this path."""
    with open(path, "wb") as file:
        np.save(file, array)


def write_array(path: Path, array: npt.NDArray[Any]) -> None:
    """Write an array as `.npy` atomically."""
    with atomic_path(path) as temporary:
        save_array(temporary, array)


def load_shard(path: Path, mapped: bool = False) -> Any:
    """The array of a shard, or of what was made of all shards (see `load_array`)."""
    return load_array(path, "delete its folder and run again", mapped)


# The one file that a job over a source writes, such as `NAME.parquet`, with its manifest beside it.


def manifest_path(output: Path) -> Path:
    """The path of a file's manifest: `NAME.manifest.json`."""
    return output.with_suffix(".manifest.json")


def finished_manifest(output: Path, fields: Mapping[str, Any]) -> dict[str, Any] | None:
    """The manifest of a file that is there already, or None; an `InputError` where `fields` make another file.

    The manifest holds `fields`, as JSON types, and the file's `output_sha256`.
    """
    if not output.exists():
        return None
    if not manifest_path(output).is_file():
        raise InputError(str(output), "something else lies there already", "name a new file")
    found = check_file_manifest(manifest_path(output), fields)
    if file_sha256(output) != found["output_sha256"]:
        raise InputError(str(output), "is not the file that its manifest describes", "delete it and run again")
    return found


@contextmanager
def discard_on_user_error(*folders: Path, unless: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Remove folders that were not there before, or empty those that were empty, if a `UserError` ends the block.

    A folder that held something before stays as it is, and so do all where `unless` then returns True.
    """
    made = [folder for folder in folders if not folder.exists()]
    emptied = [folder for folder in folders if folder.is_dir() and not any(folder.iterdir())]
    parents = [path for folder in folders for path in folder.parents if not path.exists()]
    try:
        yield
    except UserError:
        if not unless():
            for path in (*made, *(path for folder in emptied for path in folder.iterdir())):
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)
            for parent in sorted(parents, key=lambda path: -len(path.parts)):
                with suppress(OSError):
                    parent.rmdir()
        raise
