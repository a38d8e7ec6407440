"""Files and folders written atomically, locks, content hashes, manifests, and the arrays and metrics of a run."""

import csv
import errno
import hashlib
import io
import json
import os
import platform
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache, lru_cache
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import xxhash
from filelock import FileLock, Timeout

from embeddings import __version__
from embeddings.common.errors import InputError, program, shown
from embeddings.common.text import canonical

_MAKE_AGAIN = "make the output again"
VERSIONED_PACKAGES = ("torch", "transformers", "tokenizers", "lightning", "datasets", "peft", "numpy")


# Manifest field: the options by which a source was read.
SETTINGS = "source_settings"
# The command that writes a folder, by the kind in its manifest.
_COMMANDS = {"vectors": "encode", "clusters": "cluster", "pair_index": "cluster --model"}
_HASH = re.compile("[0-9a-f]{32,}")
MANIFEST = "manifest.json"
# Manifest fields: the hash of each file of the folder, and that of all other fields.
FILES, CHECKSUM = "files", "xxh3_128"
CACHE_VARIABLE, DEFAULT_CACHE = "EMBED_CACHE", Path(".cache/embeddings")
Item = TypeVar("Item")


def cache_folder(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """Folder of converted sources and models: the argument, else `$EMBED_CACHE`, else `.cache/embeddings`."""
    return Path(cache_dir or os.environ.get(CACHE_VARIABLE) or DEFAULT_CACHE)


def lists_of(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """The items in lists of `size`, the last one shorter, one list in memory at a time."""
    remaining = iter(items)
    return iter(lambda: list(islice(remaining, size)), [])


@contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary path beside `path`; on leaving without an error it is flushed to disk and renamed to `path`."""
    target = Path(path)
    with temporary_path(target) as temporary:
        temporary.touch(mode=0o600, exist_ok=False)
        try:
            yield temporary
            fsync_path(temporary)
            os.chmod(temporary, 0o666 & ~_umask())
            os.replace(temporary, target)
            fsync_path(target.parent)
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """A temporary folder that becomes `target` on leaving without an error; the first of several processes wins."""
    new_parents = [parent for parent in target.parents if not parent.exists()]
    try:
        with scratch_folder(target) as folder:
            yield folder
            for path in (*folder.iterdir(), folder):
                fsync_path(path)
            try:
                os.rename(folder, target)
            except OSError:
                if not target.is_dir():
                    raise
            fsync_path(target.parent)
    finally:
        # After a failure the new parent folders are empty, and are removed too.
        for parent in new_parents:
            with suppress(OSError):
                parent.rmdir()


def link_or_copy(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    try:
        os.link(os.path.realpath(source), target)
    except OSError:
        shutil.copyfile(source, target)


@contextmanager
def scratch_folder(target: Path) -> Iterator[Path]:
    """A temporary folder beside `target` for this process, removed on leaving."""
    with temporary_path(target) as folder:
        try:
            folder.mkdir()
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


# Folders from which this process has removed the files of killed processes.
_TIDIED: set[Path] = set()
# In the temporary folder of `replaced_folder`: the folder that is being replaced, perhaps its only copy.
OLD_CONTENT = "old"


@contextmanager
def temporary_path(target: Path) -> Iterator[Path]:
    """A free path beside `target`, with a lock that shows that this process is alive."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.parent not in _TIDIED:
        _TIDIED.add(target.parent)
        remove_abandoned(target.parent)
    path = target.parent / f".{target.name}.{uuid.uuid4().hex}.tmp"
    lock_path = path.with_name(f"{path.name}.lock")
    try:
        with file_lock(lock_path, optional=True):
            yield path
    finally:
        lock_path.unlink(missing_ok=True)


def remove_abandoned(folder: Path) -> None:
    """Remove the temporary files and folders in `folder` whose processes were killed, which released their locks."""
    for path in abandoned(folder):
        if path.is_dir():
            # `replaced_folder` restores the content first.
            if not os.path.lexists(path / OLD_CONTENT):
                shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def abandoned(folder: Path, name: str = "*") -> Iterator[Path]:
    """Temporary paths of killed processes for the target `name`, each locked until the next one is asked for."""
    for lock_path in folder.glob(f".{name}.*.tmp.lock"):
        with suppress(OSError), file_lock(lock_path, wait=False) as is_abandoned:
            if is_abandoned:
                yield (path := lock_path.with_suffix(""))
                if not os.path.lexists(path):
                    lock_path.unlink(missing_ok=True)


@contextmanager
def file_lock(path: Path, wait: bool = True, optional: bool = False) -> Iterator[bool]:
    """An exclusive lock between processes, released when its process ends; yields whether it is held.

    With `optional`, work continues on a file system without locks.
    """
    lock, is_held = FileLock(path, blocking=wait), True
    try:
        lock.acquire()
    except Timeout:
        is_held = False
    except OSError as error:
        if not (optional and error.errno in (errno.ENOLCK, errno.ENOTSUP)):
            raise
    try:
        yield is_held
    finally:
        lock.release()


def require_regular(path: str | os.PathLike[str]) -> None:
    """Refuse to write a file to a path that is a folder, a link, a device or a FIFO, or that lies below a file."""
    path, hint = Path(path), "name a new file"
    if path.is_dir():
        raise InputError(f"--output {path}", "is a directory, not a file", hint)
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise InputError(f"--output {path}", "is a link or a device, not a file that this command may replace", hint)
    existing = next(parent for parent in path.absolute().parents if parent.exists())
    if not existing.is_dir():
        raise InputError(f"--output {path}", f"{existing} is not a folder", hint)


# In every file that a command writes to `--output`, so that only such a file is replaced.
GENERATOR = "written by the embeddings library"


def require_own_output(path: str | os.PathLike[str], mark: str = GENERATOR) -> None:
    """As `require_regular`; also refuse a file that does not have `mark` near its start, unless it is empty."""
    require_regular(path)
    if Path(path).exists():
        with open(path, "rb") as file:
            start = file.read(4096)
        if start and mark.encode() not in start:
            what = "already exists, and this library did not write it"
            raise InputError(f"--output {path}", what, "name a new file, or remove this one")


def check_disk_space(path: str | os.PathLike[str], num_bytes: int) -> None:
    """Check the free disk space at a path, which need not exist yet."""
    paths = (Path(path), *Path(path).absolute().parents)
    usage = shutil.disk_usage(next(path for path in paths if path.exists()))
    # Some network file systems report a total of 0.
    if usage.total and usage.free < num_bytes:
        what = f"{os.strerror(errno.ENOSPC)}: {num_bytes:,} bytes are needed and {usage.free:,} available"
        raise OSError(errno.ENOSPC, what, str(path))


def write_text(path: str | os.PathLike[str], text: str) -> None:
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def write_json_lines(path: str | os.PathLike[str], rows: Iterable[Mapping[str, Any]]) -> None:
    with atomic_path(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def read_json_or_empty(path: Path) -> dict[str, Any]:
    """The mapping of a JSON file; empty if the file is missing or damaged."""
    try:
        check_regular(path)
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def check_regular(path: str | os.PathLike[str]) -> None:
    """Refuse a pipe, socket or device before it is opened: reading one would wait without end."""
    path = Path(path)
    if path.exists() and not path.is_file() and not path.is_dir():
        raise InputError(str(path), "is not a regular file", "write its content to a file, and name that file")


def file_sha256(path: str | os.PathLike[str]) -> str:
    check_regular(path)
    return _hex_digest(path, hashlib.sha256)


def file_hash(path: str | os.PathLike[str]) -> str:
    """The xxh3-128 of a file's bytes, as 32 hex digits; read once a process while its size and times stay."""
    return _file_hash(*_identity(path))


def _identity(path: str | os.PathLike[str]) -> tuple[Any, ...]:
    status = os.stat(path)
    return os.path.abspath(path), status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


@lru_cache(maxsize=1 << 16)
def _file_hash(path: str, *_identity: int) -> str:
    return _hex_digest(path, xxhash.xxh3_128)


def _hex_digest(path: str | os.PathLike[str], algorithm: Callable[[], Any]) -> str:
    with open(path, "rb", buffering=0) as file:
        return hashlib.file_digest(file, algorithm).hexdigest()


def folder_hashes(folder: str | os.PathLike[str], pattern: str = "*") -> dict[str, str]:
    """The hash of each file in a folder, by its path in it; `**/*` includes subfolders, and hidden files are not."""
    hashes = {}
    for path in sorted(Path(folder).glob(pattern)):
        name = path.relative_to(folder)
        if path.is_file() and name != Path(MANIFEST) and not any(part.startswith(".") for part in name.parts):
            hashes[name.as_posix()] = file_hash(path)
    return hashes


def check_file(path: str | os.PathLike[str], hint: str = _MAKE_AGAIN) -> None:
    """Refuse a file whose bytes differ from those that the manifest of its folder, or of the one above, lists."""
    path = Path(path)
    for folder in (path.parent, path.parent.parent):
        expected = listed_files(folder).get(path.relative_to(folder).as_posix())
        if expected is not None and path.is_file() and file_hash(path) != expected:
            raise InputError(str(path), "is damaged: its bytes are not those that were written", hint)


def listed_files(folder: Path) -> Mapping[str, str]:
    """The hashes of files that the manifest of a folder lists, by name; empty without a manifest."""
    try:
        return _listed_files(*_identity(folder / MANIFEST))
    except OSError:
        return {}


@lru_cache(maxsize=256)
def _listed_files(path: str, *_identity: int) -> Mapping[str, str]:
    files = read_json_or_empty(Path(path)).get(FILES)
    return files if isinstance(files, dict) else {}


def text_hash(text: str) -> int:
    """A signed 64-bit hash of a text in its canonical form, equal on every machine."""
    digest = hashlib.blake2b(canonical(text).encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


@cache
def package_versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "embeddings": __version__}
    for name in VERSIONED_PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def write_manifest(folder: str | os.PathLike[str], fields: Mapping[str, Any]) -> None:
    """Write `folder/manifest.json`: `fields`, the versions, and once complete the hashes of the files."""
    files = {} if fields.get("complete") is False else {FILES: folder_hashes(folder)}
    write_file_manifest(Path(folder) / MANIFEST, {**files, **fields})


def write_file_manifest(path: str | os.PathLike[str], fields: Mapping[str, Any]) -> None:
    """Write a manifest to `path`, for an output that is one file."""
    fields = {**fields, "versions": package_versions()}
    write_json(path, {**fields, CHECKSUM: _checksum(fields)})


def _checksum(fields: Mapping[str, Any]) -> str:
    others = {name: value for name, value in fields.items() if name != CHECKSUM}
    return xxhash.xxh3_128_hexdigest(json.dumps(json.loads(json.dumps(others)), sort_keys=True).encode())


class Manifest(dict[str, Any]):
    """The fields of a manifest; a missing field raises an `InputError` with the hint."""

    def __init__(self, path: Path, fields: Mapping[str, Any], hint: str = _MAKE_AGAIN) -> None:
        super().__init__(fields)
        self.path, self.hint = path, hint

    def __missing__(self, field: str) -> Any:
        raise InputError(str(self.path), f"has no field {field!r}", self.hint)

    def integer(self, field: str, minimum: int = 0) -> int:
        value = self[field]
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            what = f"field {field!r} is {shown(value)}, expected an integer >= {minimum}"
            raise InputError(str(self.path), what, self.hint)
        return value


def check_manifest(folder: str | os.PathLike[str], expected: Mapping[str, Any]) -> Manifest:
    """The manifest of a folder; an `InputError` if it is missing or damaged, or an expected field differs."""
    return check_file_manifest(Path(folder) / MANIFEST, expected)


def check_file_manifest(path: str | os.PathLike[str], expected: Mapping[str, Any], hint: str = _MAKE_AGAIN) -> Manifest:
    """As `check_manifest`, for the manifest at `path`."""
    path = Path(path)
    check_regular(path)
    if not path.is_file():
        command = _COMMANDS.get(expected.get("kind", ""))
        if command:
            hint = f"make it with {program()} {command}"
        raise InputError(str(path), "this output has no manifest", hint)
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        manifest = None
    if not isinstance(manifest, dict):
        raise InputError(str(path), "is empty or damaged", hint)
    for field, value in expected.items():
        if manifest.get(field) != value:
            raise InputError(str(path), _difference(field, manifest.get(field), value), hint)
    if not manifest.keys().isdisjoint((FILES, CHECKSUM)) and manifest.get(CHECKSUM) != _checksum(manifest):
        raise InputError(str(path), "is damaged: its fields are not those that were written", hint)
    return Manifest(path, manifest, hint)


def _difference(field: str, found: Any, expected: Any) -> str:
    """How a field differs: a mapping by its first different entry, two hashes by what was hashed."""
    if isinstance(found, dict) and isinstance(expected, dict):
        name = next(name for name in [*expected, *found] if found.get(name) != expected.get(name))
        return _difference(f"{field}.{name}", found.get(name), expected.get(name))
    if all(isinstance(value, str) and _HASH.fullmatch(value) for value in (found, expected)):
        name = re.sub("_(sha256|key|hash)$", "", field.rpartition(".")[2]).replace("_", " ")
        return f"field {field!r} differs: the output was made with another {name}"
    return f"field {field!r} is {shown(found, 48)}, expected {shown(expected, 48)}"


def fsync_path(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def share_files(folder: Path) -> None:
    """Set the default mode for all files of a folder: safetensors writes files that only their owner can read."""
    mode = 0o666 & ~_umask()
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.chmod(mode)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def load_array(path: Path, hint: str, mapped: bool = False, is_checked: bool = False) -> Any:
    """The array of a `.npy` file, or the archive of a `.npz` file; an `InputError` with `hint` if it cannot be used."""
    damaged = InputError(str(path), "is missing, empty or damaged", hint)
    check_regular(path)
    if not is_checked:
        check_file(path, hint)
    try:
        loaded = np.load(path, mmap_mode="r" if mapped else None, allow_pickle=False)
    except (PermissionError, MemoryError):
        raise
    # numpy evaluates the header as a Python literal, which may raise many kinds of errors.
    except Exception as error:
        raise damaged from error
    is_archive = not isinstance(loaded, np.ndarray)
    if is_archive != (path.suffix == ".npz"):
        if is_archive:
            loaded.close()
        raise damaged
    return loaded


# Tolerance of a vector's squared length, after rounding to float32.
UNIT_TOLERANCE = 1e-3


def check_vectors(
    vector_ND: npt.NDArray[np.float32],
    where: str,
    first_row: int = 0,
    unit: bool = False,
    row_N: npt.NDArray[np.int64] | None = None,
) -> None:
    """Check that the length of every vector, (N, D), is finite and not zero, or is 1 if `unit` is set.

    The error names the first invalid row: from `row_N`, or counted from `first_row`.
    """
    square_N = np.einsum("nd,nd->n", vector_ND, vector_ND)
    usable_N = np.isfinite(square_N) & (square_N > 0)
    if unit:
        usable_N &= np.abs(square_N - 1) < UNIT_TOLERANCE
    bad_n = np.flatnonzero(~usable_N)
    if bad_n.size:
        row = first_row + int(bad_n[0]) if row_N is None else int(row_N[bad_n[0]])
        square = float(square_N[bad_n[0]])
        kind = "zero" if square == 0 else f"of length {square**0.5:.4g}" if np.isfinite(square) else "not finite"
        raise InputError(f"{where}:{row}", f"the vector is {kind}", "check its text and the model")


METRICS_FILE = "metrics.csv"
# Logged under the current step, from 0; all other metrics under the number of completed steps.
_CURRENT_STEP_PREFIXES = ("train/", "lr-")


def read_metrics(path: Path) -> "csv.DictReader[str]":
    """A reader of the complete rows; values that were not logged are empty or None."""
    # A kill may truncate the last line, even within a number.
    text = path.read_bytes().decode("utf-8", "replace")
    return csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1], newline=""))


def steps_made(column: str, step: int) -> int:
    return step + column.startswith(_CURRENT_STEP_PREFIXES)


def row_steps_made(row: Mapping[str, str | None]) -> int:
    """The number of completed optimiser steps when a row was measured; 0 for a row without a step."""
    step = row.get("step") or ""
    if not step.isdecimal():
        return 0
    return max(steps_made(column, int(step)) for column, value in row.items() if value and column is not None)
