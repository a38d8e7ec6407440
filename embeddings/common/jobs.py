"""Resumable jobs over shards: a folder that records which shards are complete, and worker processes."""

import json
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Sized
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, ProcessPoolExecutor, as_completed, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import get_context, parent_process, resource_tracker
from pathlib import Path
from threading import Thread
from types import FrameType
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from embeddings.common.errors import InputError, NumericError, OptionError, UserError, WorkerError, require_minimum
from embeddings.common.io import (
    CHECKSUM,
    atomic_path,
    check_file_manifest,
    check_manifest,
    file_lock,
    file_sha256,
    load_array,
    require_regular,
    write_file_manifest,
    write_manifest,
)
from embeddings.common.process import EXIT_TERMINATED, block_signals, exit_description
from embeddings.common.progress import progress_bar

MakeShard = Callable[[int, Path], None]


@dataclass(frozen=True)
class ArrayTask:
    """One of the processes that share a job: it makes the shards `s`, from 0, with `s % count == index`."""

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        require_minimum("num_tasks", self.count, 1, "leave it out for one process")
        if not 0 <= self.index < self.count:
            raise OptionError("task_index", self.index, f"must be from 0 to {self.count - 1}", "count tasks from 0")

    def shards(self, num_shards: int) -> range:
        return range(self.index, num_shards, self.count)


@dataclass(frozen=True)
class TaskOptions:
    """The share of the work of this process.

    Args:
        task_index: Index of this process among those that share the work, from 0; by default the SLURM array task's.
        num_tasks: Number of processes that share the work.
    """

    task_index: int | None = None
    num_tasks: int | None = None

    def resolve(self) -> ArrayTask:
        """The task from the options; without them from a SLURM array with a constant step, or the only task."""
        index, count = self.task_index, self.num_tasks
        if index is not None and count is not None:
            return ArrayTask(index, count)
        if index is not None or count is not None:
            raise OptionError("task_index", index, "needs num_tasks, which needs it too", "set both or neither")
        if "SLURM_ARRAY_TASK_ID" not in os.environ:
            return ArrayTask()
        number, first, count, step = (
            int(os.environ.get(f"SLURM_ARRAY_TASK_{name}", default))
            for name, default in (("ID", 0), ("MIN", 0), ("COUNT", 1), ("STEP", 1))
        )
        index, remainder = divmod(number - first, step)
        if remainder or not 0 <= index < count:
            rule = f"is not in an array of {count} tasks with a constant step"
            raise OptionError("SLURM_ARRAY_TASK_ID", number, rule, "set --task-index and --num-tasks")
        return ArrayTask(index, count)


class JobFolder:
    """A folder that one resumable job writes; `manifest.json` records its fields and whether it is complete.

    A folder with other content, or a job with other fields, is refused.

    Args:
        folder: The folder; created if it is missing.
        fields: What determines the output (JSON types): kind, hashes of the inputs, arguments, seed.
        defaults: Fields that the first process sets; the others read them from the manifest.
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
        recorded = check_manifest(self.folder, {})
        # Another process may have been first, with other fields.
        check_file_manifest(manifest, self.fields, "name a new folder, or remove this one")
        self.fields |= {name: recorded.get(name, value) for name, value in defaults.items()}

    @property
    def complete(self) -> bool:
        return bool(check_manifest(self.folder, {}).get("complete"))

    @contextmanager
    def lock(self) -> Iterator[None]:
        """The lock under which the job is finished."""
        path = self.folder / ".lock"
        with file_lock(path):
            yield
            # Not before: a later process locks a new file, and must see that the job is complete.
            if self.complete:
                path.unlink(missing_ok=True)

    def finish(self, merge: Callable[[], Mapping[str, Any]] = dict) -> bool:
        """Run `merge` in one process and mark the job complete; after a kill it runs again. Returns whether it is."""
        if self.complete:
            return True
        with self.lock():
            if not self.complete:
                facts = merge()
                # Partial files of killed processes.
                for pattern in (".*.tmp", ".*.lock"):
                    for path in self.folder.glob(pattern):
                        path.unlink(missing_ok=True)
                write_manifest(self.folder, {**self.fields, **facts, "complete": True})
        return True


class ShardedJob(JobFolder):
    """A job in shards, files `STEM-00000SUFFIX`, made by any number of processes on a shared folder.

    A killed process loses at most its current shard; the same call resumes there.
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
        return self.folder / f"{self.stem}-{shard:05d}{self.suffix}"

    def missing(self, task: ArrayTask | None = None) -> list[int]:
        """The shards of a task (None: all) that are not made yet."""
        if self.complete:
            return []
        shards = (task or ArrayTask()).shards(self.num_shards)
        return [shard for shard in shards if not self.path(shard).exists()]

    def run(
        self,
        make: MakeShard,
        task: ArrayTask | None = None,
        take_over: bool = False,
        rows: Callable[[int], Sized] | None = None,
    ) -> None:
        """Make the task's missing shards (None: all) by `make(shard, temporary path)`.

        With `take_over` the other tasks' shards are then made, or waited for, so that all exist on return. The bar
        counts the rows of each shard, if `rows` returns them.
        """
        if self.complete:
            return
        task_shards = (task or ArrayTask()).shards(self.num_shards)
        others = [shard for shard in range(self.num_shards) if shard not in task_shards] if take_over else []
        shards = [*task_shards, *others]
        missing = [shard for shard in shards if not self.path(shard).exists()]
        title, unit = str(self.fields.get("kind", self.stem)), "shard" if rows is None else "row"
        sizes = {shard: 1 if rows is None else len(rows(shard)) for shard in shards}
        total = sum(sizes.values())
        done = total - sum(sizes[shard] for shard in missing)
        with progress_bar(total, title, unit, initial=done) as bar:
            for wait in (False, True):
                busy = []
                for shard in missing:
                    with bar.item(sizes[shard]) as item:
                        if not self.make(shard, make, wait):
                            item.cancel()
                            busy.append(shard)
                missing = busy

    def make(self, shard: int, make: MakeShard, wait: bool = False) -> bool:
        """Make one shard unless it exists; False if another process is making it and `wait` is not set."""
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
        return not self.missing() and super().finish(merge)


def require_free(folder: Path) -> None:
    """Refuse a file, and a folder that has content but no manifest."""
    if (folder / "manifest.json").exists() or not folder.exists():
        return
    # Hidden files are locks and temporary files of other processes, one of which may write the manifest meanwhile.
    has_content = not folder.is_dir() or any(not path.name.startswith(".") for path in folder.iterdir())
    if has_content and not (folder / "manifest.json").exists():
        raise InputError(str(folder), "already exists and has no manifest", "name a new folder")


def shard_rows(shard: int, shard_size: int, num_rows: int) -> range:
    return range(shard * shard_size, min((shard + 1) * shard_size, num_rows))


def save_array(path: Path, array: npt.NDArray[Any]) -> None:
    """Write an array as `.npy` to exactly this path; `np.save` would add a suffix."""
    with open(path, "wb") as file:
        np.save(file, array)


def write_array(path: Path, array: npt.NDArray[Any]) -> None:
    with atomic_path(path) as temporary:
        save_array(temporary, array)


def load_shard(path: Path, mapped: bool = False) -> Any:
    return load_array(path, "delete its folder and run again", mapped)


# Jobs that write one file, such as `NAME.parquet`, with `NAME.parquet.manifest.json` beside it.


def manifest_path(output: Path) -> Path:
    # Not `NAME.manifest.json`, which `NAME.jsonl` would have too.
    return output.with_name(f"{output.name}.manifest.json")


@contextmanager
def output_file(output: Path, fields: Mapping[str, Any]) -> Iterator[Path]:
    """Write the file of a job and its manifest: `fields`, to which the caller may still add, and the bytes' hash.

    The file is renamed last: if it exists, its manifest does too.
    """
    with atomic_path(output) as temporary:
        yield temporary
        write_file_manifest(manifest_path(output), {**fields, "output_sha256": file_sha256(temporary)})


def finished_manifest(output: Path, fields: Mapping[str, Any]) -> dict[str, Any] | None:
    """The manifest of a complete file with these `fields` and the recorded bytes, None if it does not exist."""
    path = manifest_path(output)
    require_regular(output)
    require_regular(path)
    if not output.exists():
        if path.exists() and CHECKSUM not in check_file_manifest(path, {}):
            raise InputError(str(path), "this library did not write it", "name a new file")
        return None
    if not path.exists():
        raise InputError(str(output), "already exists and has no manifest", "name a new file")
    manifest = check_file_manifest(path, fields)
    if file_sha256(output) != manifest["output_sha256"]:
        raise InputError(str(output), "is not the file that its manifest describes", "delete it and run again")
    return manifest


@contextmanager
def discard_on_user_error(
    *folders: Path, unless: Callable[[], bool] = lambda: False, task: ArrayTask | None = None
) -> Iterator[None]:
    """Remove folders that were new or empty if a `UserError` ends the block, unless `unless` then returns True.

    Folders that other tasks of an array write too are left.
    """
    made = [folder for folder in folders if not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))]
    parents = [parent for folder in folders for parent in folder.parents if not parent.exists()]
    try:
        yield
    except UserError:
        is_shared = task is not None and task.count > 1
        if not is_shared and not unless():
            for folder in made:
                shutil.rmtree(folder, ignore_errors=True)
            for parent in parents:
                with suppress(OSError):
                    parent.rmdir()
        raise


Item = TypeVar("Item")
Result = TypeVar("Result")

_TERMINATION_SECONDS = 10.0


def spread(
    makers: Sequence[Callable[[], Callable[[Item], Result]]], items: Iterable[Item]
) -> Generator[Result, None, None]:
    """Process each item in one of several processes; results are yielded in the order of completion.

    At most two items a process are read ahead of the results. The processes end with this iterator, or if this process
    is killed. The death of one is a `WorkerError`.

    Args:
        makers: For each process a factory of its work function, called in the new process (`spawn`).
        items: The work items.
    """
    context = get_context("spawn")
    pool = ProcessPoolExecutor(len(makers), context, _begin, (makers, context.Value("i")))
    processes: dict[int, Any] = {}
    pending = set[Future[Result]]()
    # Ctrl-C reaches all processes of a terminal, but this process decides when the workers end. Python's resource
    # tracker, which starts with the first worker, would unblock the signal again.
    resource_tracker.ensure_running()
    try:
        for item in items:
            with block_signals((signal.SIGINT,)):
                pending.add(pool.submit(_serve, item))
            processes |= pool._processes or {}
            if len(pending) == 2 * len(makers):
                done, pending = wait(pending, return_when=FIRST_COMPLETED)
                for future in done:
                    yield future.result()
        for future in as_completed(pending):
            yield future.result()
    except BrokenExecutor:
        for process in processes.values():
            process.join(_TERMINATION_SECONDS)
        codes = [process.exitcode or 0 for process in processes.values()]
        # The executor has terminated the others.
        code = next((code for code in codes if code not in (0, -signal.SIGTERM, EXIT_TERMINATED)), max(codes))
        raise WorkerError(f"a worker process {exit_description(code)}; finished results are kept") from None
    finally:
        # Terminate all before waiting for the first.
        for process in processes.values():
            process.terminate()
        for process in processes.values():
            process.join(_TERMINATION_SECONDS)
            process.kill()
        pool.shutdown(cancel_futures=True)


# In a worker process: the factory of its work function, and that function once it is made.
_worker: list[Any] = []


def _begin(makers: Sequence[Callable[[], Callable[[Any], Any]]], num_begun: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with num_begun.get_lock():
        _worker[:] = [makers[num_begun.value]]
        num_begun.value += 1
    Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)


def _serve(item: Any) -> Any:
    try:
        if len(_worker) == 1:
            _worker.append(_worker[0]())
            # The factory writes no files, and an import may ignore the exit, so until here SIGTERM ends at once.
            signal.signal(signal.SIGTERM, _exit)
        return _worker[1](item)
    except SystemExit as error:
        os._exit(int(error.code or 0))  # the executor would go on
    except (UserError, NumericError):
        raise
    except OSError as error:
        # A library's own class may not survive pickling; these arguments also choose Python's class.
        arguments = (str(error),) if error.errno is None else (error.errno, error.strerror, error.filename)
        raise OSError(*arguments) from None
    except Exception:
        raise RuntimeError(f"a worker process failed:\n{traceback.format_exc()}") from None


def _exit(number: int, frame: FrameType | None) -> None:
    """End the process with its clean-up of partial files; a second signal must not interrupt the clean-up."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(128 + number)
