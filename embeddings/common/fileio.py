"""Files written whole or not at all, content hashes, and the manifest beside a job's output."""

import errno
import hashlib
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from embeddings.common.errors import InputError, shown

_MAKE_AGAIN = "make the output again"
VERSIONED_PACKAGES = ("embeddings", "torch", "transformers", "tokenizers", "lightning", "datasets", "peft", "numpy")


# Told what a writer does next, by a word.
Stage = Callable[[str], None]


def unnoticed(stage: str) -> None:
    """A `Stage` for which nothing is done."""


@contextmanager
def atomic_path(
    path: str | os.PathLike[str], verify: Callable[[Path], None] | None = None, on_stage: Stage = unnoticed
) -> Iterator[Path]:
    """A temporary path beside `path`; on leaving without an error it is flushed to disk and renamed to `path`.

    After a crash at any point `path` holds either its old content or the whole new one.

    Args:
        path: The place.
        verify: Called with the temporary path once it is on disk; if it raises, `path` keeps its old content.
        on_stage: Told what comes next: "sync", "verify", "rename", "sync folder" and "done".
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        on_stage("sync")
        fsync_path(temporary)
        on_stage("verify")
        if verify is not None:
            verify(temporary)
        os.chmod(temporary, 0o666 & ~_umask())
        on_stage("rename")
        os.replace(temporary, target)
        on_stage("sync folder")
        fsync_path(target.parent)
        on_stage("done")
    finally:
        temporary.unlink(missing_ok=True)


def check_room(path: str | os.PathLike[str], num_bytes: int, spare_bytes: int = 0) -> None:
    """Check that the disk has room for so many bytes at a place, which need not be there yet.

    Args:
        path: The place.
        num_bytes: What is to be written.
        spare_bytes: What it takes the place of in the end.

    Raises:
        OSError: If it has not; quotas are met only by writing.
    """
    places = (Path(path), *Path(path).absolute().parents)
    usage = shutil.disk_usage(next(place for place in places if place.exists()))
    # Some network file systems say that they have none at all.
    if usage.total and usage.free + spare_bytes < num_bytes:
        raise OSError(errno.ENOSPC, no_room(os.strerror(errno.ENOSPC), num_bytes, usage.free), str(path))


def no_room(reason: str, num_bytes: int, free_bytes: int) -> str:
    """What to say of a disk that is full."""
    return f"{reason}: {num_bytes:,} bytes are needed and {free_bytes:,} available"


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write `text` as UTF-8, whole or not at all."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Write `value` as indented JSON, whole or not at all."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def file_sha256(path: str | os.PathLike[str]) -> str:
    """The SHA-256 of a file's bytes, as 64 hex digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def text_hash(text: str) -> int:
    """A signed 64-bit hash of a text without its outer white space, equal on every machine."""
    digest = hashlib.blake2b(text.strip().encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def installed_versions() -> dict[str, str]:
    """The versions of Python and of the packages that decide a job's output."""
    found = {"python": platform.python_version()}
    for name in VERSIONED_PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def write_manifest(folder: str | os.PathLike[str], fields: Mapping[str, Any]) -> None:
    """Write `folder/manifest.json`: the given fields and the versions of what made the output."""
    write_manifest_file(Path(folder) / "manifest.json", fields)


def write_manifest_file(path: str | os.PathLike[str], fields: Mapping[str, Any]) -> None:
    """Write a manifest under a name of its own, for an output that is one file."""
    write_json(path, {**fields, "versions": installed_versions()})


class Manifest(dict[str, Any]):
    """The fields of a manifest; to ask for one that is not there raises an `InputError`.

    Args:
        path: Its file.
        fields: What it holds.
        fix: The way out where a field is missing or wrong.
    """

    def __init__(self, path: Path, fields: Mapping[str, Any], fix: str = _MAKE_AGAIN) -> None:
        super().__init__(fields)
        self.path, self.fix = path, fix

    def __missing__(self, field: str) -> Any:
        """Refuse it."""
        raise InputError(str(self.path), f"has no field {field!r}", self.fix)

    def whole(self, field: str, least: int = 0) -> int:
        """A field that is a whole number.

        Raises:
            InputError: If it is none, or below `least`.
        """
        value = self[field]
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            what = f"field {field!r} is {shown(value)}, expected a whole number >= {least}"
            raise InputError(str(self.path), what, self.fix)
        return value


def check_manifest(folder: str | os.PathLike[str], expected: Mapping[str, Any]) -> Manifest:
    """Check that every expected field of `folder/manifest.json` has the expected value; returns all its fields.

    Raises:
        InputError: If the manifest is missing or damaged, or a field differs; the message names the field and both
            values.
    """
    return check_manifest_file(Path(folder) / "manifest.json", expected)


def check_manifest_file(path: str | os.PathLike[str], expected: Mapping[str, Any], fix: str = _MAKE_AGAIN) -> Manifest:
    """The same of a manifest with a name of its own, and a way out of its own."""
    path = Path(path)
    if not path.is_file():
        raise InputError(str(path), "no manifest lies beside this output", fix)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise InputError(str(path), "is empty or damaged", fix)
    for field, value in expected.items():
        if found.get(field) != value:
            what = f"field {field!r} is {shown(found.get(field), 48)}, expected {shown(value, 48)}"
            raise InputError(str(path), what, fix)
    return Manifest(path, found, fix)


def fsync_path(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
