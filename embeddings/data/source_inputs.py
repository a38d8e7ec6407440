"""What a source is read from, known by its content: files by their hashes, a data set of the Hub by its commit."""

import contextlib
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from embeddings.common.errors import InputError
from embeddings.common.io import file_sha256, read_json_or_empty, write_json
from embeddings.data.readers import HubReader, Reader, open_reader, resolve_revision
from embeddings.data.sources import HUB_PREFIX, Origin, resolve_files

HASHES = "hashes"


class FileHash(NamedTuple):
    """A file's SHA-256, and what its size, times and inode were before it was read."""

    path: Path
    stamp: list[int]
    sha256: str

    def is_current(self) -> bool:
        """Whether the file still is what was hashed, as far as size, times and inode tell."""
        return self.path.exists() and _stamp(self.path) == self.stamp


def hash_file(path: Path, memory: Path) -> FileHash:
    """The hash of a file, from `memory` where the file is unchanged: hashing a terabyte takes most of an hour."""
    try:
        stamp = _stamp(path)
        known = read_json_or_empty(_note(path, memory))
        unchanged = known.get("stamp") == stamp and "sha256" in known
        return FileHash(path, stamp, known["sha256"] if unchanged else file_sha256(path))
    except OSError as error:
        raise InputError(str(path), f"cannot be read ({error.strerror})", "check its permissions") from None


def remember_hash(known: FileHash, memory: Path) -> None:
    """Note a hash in the folder `memory`; one that cannot be written is only slower next time."""
    note = _note(known.path, memory)
    if read_json_or_empty(note).get("stamp") != known.stamp:
        with contextlib.suppress(OSError):
            write_json(note, {"path": str(known.path.resolve()), "stamp": known.stamp, "sha256": known.sha256})


def _note(path: Path, memory: Path) -> Path:
    return memory / f"{hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:32]}.json"


def _stamp(path: Path) -> list[int]:
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


class SourceInputs:
    """The files or the Hub split of a source; `identity` tells their content from others by hashes or a commit.

    `root` is the folder of converted sources, where the files' hashes are remembered.
    """

    def __init__(self, source: Origin, root: Path, commit: str | None = None) -> None:
        self._is_hub, self._memory = source.is_hub, root / HASHES
        self._files: list[FileHash] = []
        self.identity: list[dict[str, Any]]
        if source.is_hub:
            name = str(source.path).removeprefix(HUB_PREFIX)
            split, commit = source.split or "train", commit or resolve_revision(name, source.revision)
            self.identity = [{"hub": name, "subset": source.subset, "split": split, "commit": commit}]
        else:
            self._files = [hash_file(path, self._memory) for path in resolve_files(source.path or [])]
            self.identity = [{"sha256": file.sha256} for file in self._files]

    @property
    def paths(self) -> list[str]:
        """The files; none of a Hub data set."""
        return [str(file.path) for file in self._files]

    def readers(self, columns: Sequence[str], required: Sequence[str]) -> list[Reader]:
        """Readers of these columns; see `open_reader`."""
        if self._is_hub:
            (hub,) = self.identity
            return [HubReader(hub["hub"], hub["subset"], hub["split"], hub["commit"])]
        return [open_reader(file.path, columns, required) for file in self._files]

    def require_unchanged(self) -> None:
        """Check that the files are what they were when they were hashed."""
        for file in self._files:
            if not file.is_current():
                raise InputError(str(file.path), "the file changed while it was read", "run again when it is at rest")

    def remember(self) -> None:
        """Note the files' hashes, so that the next run need not read them whole."""
        for file in self._files:
            remember_hash(file, self._memory)
