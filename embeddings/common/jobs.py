"""Work cut into shards: which of them a process does, and a folder that knows which are done."""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

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

_PROGRESS_DELAY_SECONDS = 2.0
_GIVE_TASK = "give --task_index and --num_tasks"

MakeShard = Callable[[int, Path], None]


@dataclass(frozen=True)
class ArrayTask:
    """One of the processes that share a job: shard `s` is the task's where `s % count == index`.

    Args:
        index: Which of them, from 0.
        count: How many there are.

    Raises:
        OptionError: If the index does not lie in 0 … count - 1.
    """

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        if self.count < 1:
            raise OptionError("num_tasks", self.count, "must be >= 1", "leave it out for one process")
        if not 0 <= self.index < self.count:
            raise OptionError("task_index", self.index, f"must lie in 0 … {self.count - 1}", "count tasks from 0")

    @classmethod
    def from_environment(cls) -> Self:
        """The task that a SLURM array started, whatever number the array counts from; outside of one, the only task.

        Raises:
            OptionError: If the array's numbers have gaps, so that they do not tell how many came before this one, or
                are no numbers.
        """
        if "SLURM_ARRAY_TASK_ID" not in os.environ:
            return cls()
        number, least, count, step = (
            _whole_number(f"SLURM_ARRAY_TASK_{name}", default, smallest)
            for name, default, smallest in (("ID", 0, 0), ("MIN", 0, 0), ("COUNT", 1, 1), ("STEP", 1, 1))
        )
        index, rest = divmod(number - least, step)
        if rest or not 0 <= index < count:
            raise OptionError("SLURM_ARRAY_TASK_ID", number, f"is not one of {count} even steps", _GIVE_TASK)
        return cls(index, count)

    @classmethod
    def resolve(cls, index: int | None, count: int | None) -> Self:
        """The task of the command line's two options, which come together; without them, the environment's.

        Raises:
            OptionError: If one of them is given without the other, or they are impossible.
        """
        if index is None and count is None:
            return cls.from_environment()
        if index is None or count is None:
            given, absent = ("num_tasks", "task_index") if index is None else ("task_index", "num_tasks")
            raise OptionError(given, count if index is None else index, f"needs {absent}", "give both or neither")
        return cls(index, count)

    def shards(self, num_shards: int) -> range:
        """The numbers of the task's shards."""
        return range(self.index, num_shards, self.count)


class ShardedJob:
    """A folder of shards, each a file that appears whole or not at all, made by any number of processes.

    `manifest.json` says what the shards are made of. A process killed at any moment costs at most the shard that it
    was making; the same call goes on at the next one. A shard is made under a lock that dies with its process, so two
    processes do not make the same one; where a file system has no such locks they do, and write the same bytes.

    Args:
        folder: The folder; it is made if there is none.
        fields: What decides the shards' bytes: kind, hashes of the inputs, arguments, seed. JSON types.
        num_shards: Number of shards.
        stem: Name of a shard's file before its number.
        suffix: Name of a shard's file after its number.
        defaults: Fields that the first process decides: the others, and later calls, take them from the manifest.

    Raises:
        InputError: If the folder holds something else, or a job with other fields; the message names the field.
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
        self.folder, self.num_shards, self.stem, self.suffix = Path(folder), num_shards, stem, suffix
        self.fields: dict[str, Any] = json.loads(json.dumps({**fields, "num_shards": num_shards}))
        self._open(defaults or {})

    def path(self, shard: int) -> Path:
        """The file of a shard."""
        return self.folder / f"{self.stem}-{shard:05d}{self.suffix}"

    @property
    def complete(self) -> bool:
        """Whether the job has been finished."""
        return bool(self._manifest().get("complete"))

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
            take_over: Whether to go on with what other tasks have left undone, and to wait for what they are at, so
                that on return no shard is missing: for work that the next step needs as a whole.
        """
        if self.complete:
            return
        own = (task or ArrayTask()).shards(self.num_shards)
        others = [shard for shard in range(self.num_shards) if shard not in own] if take_over else []
        shards = [*own, *others]
        left = [shard for shard in shards if not self.path(shard).exists()]
        with tqdm(
            total=len(shards),
            initial=len(shards) - len(left),
            desc=str(self.fields.get("kind", self.stem)),
            unit="shard",
            delay=_PROGRESS_DELAY_SECONDS,
        ) as bar:
            for wait in (False, True):
                left = [shard for shard in left if not self._make(shard, make, wait, bar)]

    def finish(self, merge: Callable[[], Mapping[str, Any]] = dict) -> bool:
        """Finish the job if no shard is missing: run `merge` once, and note in the manifest that the job is complete.

        Of several processes that come here at once, one merges and the others wait for it. A kill in `merge` lets the
        next process merge again, so `merge` must write its files whole or not at all, and the same ones each time.

        Args:
            merge: Makes what the job is for; the fields that it returns are added to the manifest.

        Returns:
            Whether the job is complete; False means that other tasks have shards to make yet.
        """
        if self.complete:
            return True
        if self.missing():
            return False
        with self.lock():
            if not self.complete:
                facts = merge()
                # What processes that were killed had begun.
                for pattern in (".*.tmp", ".*.lock"):
                    for path in self.folder.glob(pattern):
                        path.unlink(missing_ok=True)
                write_manifest(self.folder, {**self.fields, **facts, "complete": True})
        return True

    @contextmanager
    def lock(self) -> Iterator[None]:
        """The lock under which the job is finished, held by one process at a time.

        Its file goes once the job is complete, and not before: whoever comes then holds another, and must find that
        nothing is left to do.
        """
        path = self.folder / ".lock"
        with file_lock(path):
            yield
            if self.complete:
                path.unlink(missing_ok=True)

    def _open(self, defaults: Mapping[str, Any]) -> None:
        manifest = self.folder / "manifest.json"
        if not manifest.exists():
            if self.folder.exists() and (not self.folder.is_dir() or _visible(self.folder)):
                raise InputError(str(self.folder), "something else lies there already", "name a new folder")
            self.folder.mkdir(parents=True, exist_ok=True)
            with file_lock(self.folder / ".lock"):
                if not manifest.exists():
                    write_manifest(self.folder, {**self.fields, **defaults, "complete": False})
        # Whoever came first may have had other fields.
        found = check_manifest(self.folder, self.fields)
        self.fields |= {name: found.get(name, value) for name, value in defaults.items()}

    def _make(self, shard: int, make: MakeShard, wait: bool, bar: "tqdm[Any]") -> bool:
        """Make one shard unless it is there; False if another process is at it and `wait` is not set."""
        path = self.path(shard)
        lock = self.folder / f".{path.name}.lock"
        with file_lock(lock, wait) as held:
            if not held:
                return False
            if not path.exists():
                with atomic_path(path) as temporary:
                    make(shard, temporary)
            # Whoever waits for this lock looks for the shard again before making it.
            lock.unlink(missing_ok=True)
        bar.update()
        return True

    def _manifest(self) -> dict[str, Any]:
        return check_manifest(self.folder, {})


def load_shard(path: Path, mapped: bool = False) -> Any:
    """The array of a shard, or of what was made of all shards (see `load_array`).

    Raises:
        InputError: If it is missing or damaged.
    """
    return load_array(path, "delete its folder and run again", mapped)


def _whole_number(name: str, default: int, smallest: int) -> int:
    """The whole number that an environment variable holds."""
    value = os.environ.get(name, str(default))
    if not (value.isascii() and value.isdigit()) or int(value) < smallest:
        raise OptionError(name, value, f"must be a whole number >= {smallest}", _GIVE_TASK)
    return int(value)


def _visible(folder: Path) -> Sequence[str]:
    """The names in a folder, without the hidden ones that processes at work leave there."""
    return [name for name in os.listdir(folder) if not name.startswith(".")]


# A record that a rule leaves in; rules number their reasons to take one out from 1.
KEPT = 0
SHARD_ROWS = 65536


def require_shard_size(shard_size: int) -> None:
    """Check the number of records of a shard.

    Raises:
        OptionError: If it is not positive.
    """
    if shard_size < 1:
        raise OptionError("shard_size", shard_size, "must be >= 1", "leave it out for the default")


def shard_rows(shard: int, shard_size: int, num_rows: int) -> range:
    """The rows that a shard holds."""
    return range(shard * shard_size, min((shard + 1) * shard_size, num_rows))


def save_array(path: Path, array: npt.NDArray[Any]) -> None:
    """Write an array as `.npy` to exactly this path."""
    with open(path, "wb") as file:
        np.save(file, array)


def open_verdicts(path: Path) -> npt.NDArray[np.uint8]:
    """The verdicts of all rows, memory-mapped.

    Raises:
        InputError: If the file is missing or damaged.
    """
    verdict_N: npt.NDArray[np.uint8] = load_shard(path, mapped=True)
    return verdict_N


def manifest_path(output: Path) -> Path:
    """Where the manifest of `NAME.parquet` lies: `NAME.manifest.json`."""
    return output.with_suffix(".manifest.json")


def finished_manifest(output: Path, fields: Mapping[str, Any]) -> dict[str, Any] | None:
    """The manifest of a file that is there already, or None if there is none.

    Args:
        output: The file.
        fields: What decides its bytes, as JSON types. The manifest holds `output_sha256` beside them.

    Raises:
        InputError: If the file is not what these fields make.
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
def nothing_left_of(*folders: Path) -> Iterator[None]:
    """Remove the folders again, if they were not there before, where what a person gave turns out to be of no use.

    A folder that was there and empty is emptied again; of one that held something, everything stays.
    """
    made = [folder for folder in folders if not folder.exists()]
    emptied = [folder for folder in folders if folder.is_dir() and not any(folder.iterdir())]
    parents = [path for folder in folders for path in folder.parents if not path.exists()]
    try:
        yield
    except UserError:
        for path in (*made, *(path for folder in emptied for path in folder.iterdir())):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        for parent in sorted(parents, key=lambda path: -len(path.parts)):
            with suppress(OSError):
                parent.rmdir()
        raise
