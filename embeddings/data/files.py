"""The files that a path names."""

import glob
import os
import re
from collections.abc import Sequence
from pathlib import Path

from embeddings.common.errors import InputError

_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")


def resolve_files(path: str | Sequence[str]) -> list[Path]:
    """The files that a path, a glob or a list of these names: the list's order, a glob's matches sorted.

    Environment variables (`$DATA`, `${DATA}`) and `~` are filled in.

    Raises:
        InputError: If a variable is not set, a file is missing, or a folder or a pipe, a glob matches nothing, or a
            file comes twice.
    """
    parts = [path] if isinstance(path, str) else path
    found = [file for part in parts for file in _expand(part)]
    seen: set[Path] = set()
    for file in found:
        if file in seen:
            raise InputError(str(file), "the path names this file twice", "name it once")
        seen.add(file)
    return found


def fill_path(path: str) -> Path:
    """A path with its environment variables (`$DATA`, `${DATA}`) and `~` filled in.

    Raises:
        InputError: If a variable is not set.
    """
    return Path(_fill(path))


def _fill(part: str) -> str:
    return os.path.expanduser(_VARIABLE.sub(lambda match: _variable(part, match), part))


def _expand(part: str) -> list[Path]:
    filled = _fill(part)
    if os.path.isdir(filled):
        raise InputError(filled, "is a folder, expected a file", "name its files, such as FOLDER/*.jsonl")
    if os.path.exists(filled) or not glob.has_magic(filled):
        if not os.path.exists(filled):
            raise InputError(filled, "no such file", "check the path")
        if not os.path.isfile(filled):
            raise InputError(filled, "is no regular file", "write what it gives to a file, and name that")
        return [Path(filled)]
    matches = [Path(match) for match in sorted(glob.glob(filled, recursive=True)) if os.path.isfile(match)]
    if not matches:
        raise InputError(filled, "no file matches", "check the pattern")
    return matches


def _variable(part: str, match: re.Match[str]) -> str:
    name = match[1] or match[2]
    if name not in os.environ:
        raise InputError(part, f"the environment variable {name} is not set", f"run: export {name}=FOLDER")
    return os.environ[name]
