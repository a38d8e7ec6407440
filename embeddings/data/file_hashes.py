"""Hashes of whole files, remembered between runs."""

import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from embeddings.common.errors import InputError
from embeddings.common.fileio import file_sha256, write_json


class FileHash(NamedTuple):
    """A file's SHA-256, and what its size, times and inode were before it was read."""

    path: Path
    stamp: list[int]
    sha256: str

    def is_current(self) -> bool:
        """Whether the file still is what was hashed, as far as size, times and inode tell."""
        return self.path.exists() and _stamp(self.path) == self.stamp


def hash_file(path: Path, memory: Path) -> FileHash:
    """The hash of a file, from `memory` where the file is unchanged: hashing a terabyte takes most of an hour.

    Raises:
        InputError: If the file cannot be read.
    """
    try:
        stamp = _stamp(path)
        note = _note(path, memory)
        known = _known(note)
        if known.get("stamp") == stamp and "sha256" in known:
            return FileHash(path, stamp, known["sha256"])
        return FileHash(path, stamp, file_sha256(path))
    except OSError as error:
        raise InputError(str(path), f"cannot be read ({error.strerror})", "check its permissions") from None


def remember_hash(known: FileHash, memory: Path) -> None:
    """Note a hash in the folder `memory`; one that cannot be written is only slower next time."""
    note = _note(known.path, memory)
    if _known(note).get("stamp") != known.stamp:
        with contextlib.suppress(OSError):
            write_json(note, {"path": str(known.path.resolve()), "stamp": known.stamp, "sha256": known.sha256})


def _known(note: Path) -> dict[str, Any]:
    """What a note says; nothing where there is none, or it is damaged."""
    try:
        known = json.loads(note.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _note(path: Path, memory: Path) -> Path:
    return memory / f"{hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:32]}.json"


def _stamp(path: Path) -> list[int]:
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]
