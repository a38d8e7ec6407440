"""Folders that appear whole or not at all."""

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

    Several processes may stage one target at once: the first to finish wins and the others' work is dropped. What a
    killed process left behind is removed by the next one; its lock, which dies with it, tells the living apart.
    """
    made = [path for path in (target.parent, *target.parent.parents) if not path.exists()]
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(target)
    folder = target.parent / f".{target.name}.{uuid.uuid4().hex}.tmp"
    folder.mkdir()
    try:
        # The lock is held before it gets its name: a folder without a named lock is left alone by others.
        with open(folder / f"{_LOCK}.new", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            os.rename(folder / f"{_LOCK}.new", folder / _LOCK)
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
        shutil.rmtree(folder, ignore_errors=True)
        # What failed leaves nothing behind, empty folders included.
        for parent in made:
            with suppress(OSError):
                parent.rmdir()


def _remove_abandoned(target: Path) -> None:
    for lock_path in target.parent.glob(f".{target.name}.*.tmp/{_LOCK}"):
        try:
            with open(lock_path) as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock_path.parent, ignore_errors=True)
        except OSError:
            continue
