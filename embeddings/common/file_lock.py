"""Locks between processes: on a file, let go of when the process ends, however it ends."""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path

_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)


@contextmanager
def file_lock(path: Path, wait: bool = True) -> Iterator[bool]:
    """An exclusive lock on a file, which ends with the process; gives whether it is held.

    Args:
        path: The lock's file; it is made if there is none.
        wait: Whether to wait for another holder.
    """
    with _opened(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True


@contextmanager
def passing_lock(path: Path) -> Iterator[None]:
    """An exclusive lock on a file that is made for it and gone afterwards; waits for another holder.

    Where the file system has no locks there is none.

    Args:
        path: The lock's file.
    """
    while True:
        with _opened(path) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
            # Whoever held it before may have removed this file, and a third one may hold the next.
            if not _lies_at(file, path):
                continue
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return


def process_lock(path: Path) -> TextIOWrapper | None:
    """An exclusive lock that lasts until this process ends or closes the file; None where another process holds it.

    It is a record lock, which children do not inherit: a loader's worker that outlives its killed parent for some
    seconds would keep one of the other kind. Where the file system has no locks the file alone is returned.

    Args:
        path: The lock's file; it is made if there is none, and emptied once the lock is held.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    file = os.fdopen(handle, "r+")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            file.close()
            if error.errno in (errno.EACCES, errno.EAGAIN):
                return None
            raise
    file.truncate()
    return file


def _opened(path: Path) -> TextIOWrapper:
    # A link to something else is neither followed nor emptied.
    return open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o666), "w")


def _lies_at(file: TextIOWrapper, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False
