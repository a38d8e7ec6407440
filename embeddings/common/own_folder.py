"""Folders that a command replaces as a whole: only the files that the old folder's manifest names."""

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from glob import escape
from itertools import count
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

    Only files that the old manifest lists, with the listed content, are replaced. Other files stay; one with the name
    of a new file is renamed to `NAME.old`, except a `README.md`. At every moment the old or the new folder is
    complete on disk; after a kill the next writer of `target` restores its files.
    """
    require_replaceable(target, fields)
    target = target.expanduser().resolve()
    _restore_abandoned(target)
    with temporary_path(target) as workplace:
        new, old = workplace / "new", workplace / OLD_CONTENT
        new.mkdir(parents=True)
        exchanged = False
        try:
            yield new
            record_all(new, fields)
            share_files(new)
            _flush(new)
            # If two processes write the same folder, the second replaces the first one's.
            lock = target.with_name(f".{target.name}.lock")
            with file_lock(lock, optional=True):
                try:
                    _exchange(new, target, old)
                finally:
                    lock.unlink(missing_ok=True)
            exchanged = True
        finally:
            # If restoring failed too, the only complete copy is in this folder: keep it.
            if exchanged or not os.path.lexists(old):
                shutil.rmtree(workplace, ignore_errors=True)


def _restore_abandoned(target: Path) -> None:
    """Finish or undo the replacement of `target` in which a process was killed."""
    for workplace in abandoned(target.parent, escape(target.name)):
        old = workplace / OLD_CONTENT
        if os.path.lexists(old):
            if os.path.lexists(target):
                _keep_others(old, target, _unchanged(old), os.replace)
            else:
                os.replace(old, target)
        shutil.rmtree(workplace, ignore_errors=True)


def _exchange(new: Path, target: Path, old: Path) -> None:
    """Move `target` to `old` and `new` to `target`; undo everything after an error."""
    with ExitStack() as undo:

        def move(source: Path, destination: Path) -> None:
            os.replace(source, destination)
            undo.callback(os.replace, destination, source)

        if os.path.lexists(target):
            unchanged = _unchanged(target)
            move(target, old)
        move(new, target)
        if os.path.lexists(old):
            _keep_others(old, target, unchanged, move)
        undo.pop_all()


def _unchanged(folder: Path) -> set[str]:
    """The files of a folder that are as this library wrote them, which are replaced."""
    if not (folder / MANIFEST).is_file():
        return set()
    hashes = check_manifest(folder, {})[FILES]
    same = {name for name, digest in hashes.items() if (folder / name).is_file() and file_hash(folder / name) == digest}
    return {MANIFEST, *same}


def _keep_others(old: Path, target: Path, replaced: set[str], move: Callable[[Path, Path], None]) -> None:
    """Move all files of `old` except `replaced` to their places in `target`."""
    for entry in sorted(old.iterdir()):
        place = target / entry.name
        if entry.is_dir() and not entry.is_symlink() and (place.is_dir() or not os.path.lexists(place)):
            inner = {name.partition("/")[2] for name in replaced if name.startswith(f"{entry.name}/")}
            files = [path for path in entry.rglob("*") if path.is_symlink() or not path.is_dir()]
            if not inner.issuperset(path.relative_to(entry).as_posix() for path in files):
                place.mkdir(exist_ok=True)
                _keep_others(entry, place, inner, move)
        elif entry.name not in replaced:
            if os.path.lexists(place) and entry.name != KEPT_FILE:
                aside = next(name for name in _old_names(place) if not os.path.lexists(name))
                logger.warning("%s was not written by this library, and is now %s", place, aside.name)
                place = aside
            move(entry, place)


def _old_names(path: Path) -> Iterator[Path]:
    yield path.with_name(f"{path.name}.old")
    yield from (path.with_name(f"{path.name}.old{number}") for number in count(2))


def _flush(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        with suppress(PermissionError):
            fsync_path(path)
