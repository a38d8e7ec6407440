"""Folders that a command replaces as a whole: only the files that the old folder's manifest names."""

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path
from typing import Any

from embeddings.common.errors import InputError, OptionError
from embeddings.common.io import (
    FILES,
    MANIFEST,
    OLD_CONTENT,
    abandoned,
    check_manifest,
    file_hash,
    file_lock,
    folder_hashes,
    fsync_path,
    share_files,
    temporary_path,
    write_manifest,
)
from embeddings.common.process import logger

MODEL = {"kind": "model"}
# A user's file of this name stays in place of a new one.
KEPT_FILE = "README.md"


def require_replaceable(target: str | os.PathLike[str], fields: Mapping[str, Any] = MODEL) -> None:
    """Refuse to write a folder to or below a file, and over content that this library did not write."""
    path = Path(target).expanduser()
    parent = next(parent for parent in (path, *path.parents) if os.path.lexists(parent))
    if not parent.is_dir():
        raise OptionError("output", str(path), f"leads to {parent}, which is not a folder", "name a new folder")
    # Hidden files are locks and temporary files.
    if parent == path and any(not entry.name.startswith(".") for entry in path.iterdir()):
        try:
            own_hashes(path, fields)
        except InputError as error:
            rule = f"must be new, empty or written by this library, as its {MANIFEST} shows"
            raise OptionError("output", str(path), rule, "name a new folder") from error


def own_hashes(folder: Path, fields: Mapping[str, Any] = MODEL) -> dict[str, str]:
    """The hashes of the files that this library wrote into a folder, by path; an `InputError` if it wrote none."""
    return dict(check_manifest(folder, {"kind": fields["kind"]})[FILES])


def record_files(folder: Path, *names: str) -> None:
    """Add the present content of files to the manifest of a model directory, if it has one."""
    with suppress(InputError):
        hashes = own_hashes(folder) | {name: file_hash(folder / name) for name in names}
        write_manifest(folder, {**MODEL, FILES: hashes})


def record_all(folder: Path, fields: Mapping[str, Any] = MODEL) -> None:
    write_manifest(folder, {**fields, FILES: folder_hashes(folder, "**/*")})


@contextmanager
def replaced_folder(target: Path, fields: Mapping[str, Any] = MODEL) -> Iterator[Path]:
    """Yield a new folder that replaces `target` on exit without an error; the user's files are kept.

    Only files that the old manifest lists, with the listed content, are replaced. A file with the name of a new one is
    renamed to `NAME.old`, except a `README.md`. After a kill the next writer of `target` restores it.
    """
    require_replaceable(target, fields)
    target = target.expanduser().resolve()
    _restore_abandoned(target)
    with temporary_path(target) as workplace:
        new, old = workplace / "new", workplace / OLD_CONTENT
        new.mkdir(parents=True)
        try:
            yield new
            record_all(new, fields)
            share_files(new)
            lock = target.with_name(f".{target.name}.lock")
            with file_lock(lock, optional=True):
                try:
                    _exchange(new, target, old)
                finally:
                    lock.unlink(missing_ok=True)
        finally:
            # If moving it back failed too, the only complete copy is in this folder.
            if os.path.lexists(target) or not os.path.lexists(old):
                shutil.rmtree(workplace, ignore_errors=True)


def _restore_abandoned(target: Path) -> None:
    """Undo the replacement of `target` in which a process was killed."""
    for workplace in abandoned(target.parent, escape(target.name)):
        if os.path.lexists(workplace / OLD_CONTENT) and not os.path.lexists(target):
            os.replace(workplace / OLD_CONTENT, target)
        shutil.rmtree(workplace, ignore_errors=True)


def _exchange(new: Path, target: Path, old: Path) -> None:
    """Move `target` to `old` and `new`, with the user's files of `target`, to `target`."""
    is_replaced = os.path.lexists(target)
    if is_replaced:
        _keep_others(target, new)
    for path in [*new.rglob("*"), new]:
        if not path.is_symlink():
            with suppress(PermissionError):
                fsync_path(path)
    if is_replaced:
        os.replace(target, old)
    try:
        os.replace(new, target)
    except OSError:
        if is_replaced:
            os.replace(old, target)
        raise


def _keep_others(target: Path, new: Path) -> None:
    """Link all files of `target` into `new`, except those that are as this library wrote them."""
    replaced = {MANIFEST}
    if (target / MANIFEST).is_file():
        hashes = check_manifest(target, {})[FILES]
        paths = ((name, target / name, digest) for name, digest in hashes.items())
        replaced |= {name for name, path, digest in paths if path.is_file() and file_hash(path) == digest}
    for path in sorted(target.rglob("*")):
        name = path.relative_to(target).as_posix()
        if name in replaced or (path.is_dir() and not path.is_symlink()):
            continue
        place = new / name
        if os.path.lexists(place) and path.name == KEPT_FILE:
            place.unlink()
        elif os.path.lexists(place):
            names = (place.with_name(f"{path.name}.old{number or ''}") for number in range(1000))
            place = next(each for each in names if not os.path.lexists(each))
            logger.warning("%s was not written by this library, and is now %s", path, place.name)
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(path, place, follow_symlinks=False)
        except OSError:  # of another user, or on a file system without links
            shutil.copy2(path, place, follow_symlinks=False)
