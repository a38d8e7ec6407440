"""Folders of one process beside a place: some that take it, whole or not at all, and some that are gone afterwards."""

import fcntl
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from embeddings.common.fileio import fsync_path

_LOCK = ".lock"


@contextmanager
def staged_folder(target: Path) -> Iterator[Path]:
    """A temporary folder beside `target`; on leaving without an error it is flushed to disk and becomes `target`.

    Several processes may stage one target at once: the first to finish wins and the others' work is dropped.
    """
    made = [path for path in (target.parent, *target.parent.parents) if not path.exists()]
    try:
        with scratch_folder(target) as folder:
            yield folder
            (folder / _LOCK).unlink()
            for path in (*folder.iterdir(), folder):
                fsync_path(path)
            try:
                os.rename(folder, target)
            except OSError:
                if not target.is_dir():
                    raise
            fsync_path(target.parent)
    finally:
        # What failed leaves nothing behind, empty folders included.
        for parent in made:
            with suppress(OSError):
                parent.rmdir()


@contextmanager
def scratch_folder(target: Path) -> Iterator[Path]:
    """A temporary folder beside `target`, of this process alone, which is gone on leaving.

    What a killed process left behind is removed by the next one; its lock, which dies with it, tells the living apart.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(target)
    folder = target.parent / f".{target.name}.{uuid.uuid4().hex}.tmp"
    folder.mkdir()
    try:
        # The lock is held before it gets its name: a folder without a named lock is left alone by others.
        with open(folder / f"{_LOCK}.new", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            os.rename(folder / f"{_LOCK}.new", folder / _LOCK)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove_abandoned(target: Path) -> None:
    """Remove the temporary folders beside `target` whose processes were killed."""
    for lock_path in target.parent.glob(f".{target.name}.*.tmp/{_LOCK}"):
        try:
            with open(lock_path) as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock_path.parent, ignore_errors=True)
        except OSError:
            continue
