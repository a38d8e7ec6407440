"""The one file that a job over a source writes: its manifest beside it, and what becomes of work that is of no use."""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from embeddings.common.errors import InputError, UserError
from embeddings.common.fileio import check_manifest_file, file_sha256


def manifest_path(output: Path) -> Path:
    """Where the manifest of `NAME.parquet` lies: `NAME.manifest.json`."""
    return output.with_suffix(".manifest.json")


def finished_manifest(output: Path, fields: Mapping[str, Any]) -> dict[str, Any] | None:
    """The manifest of a file that is there already, or None if there is none.

    Args:
        output: The file.
        fields: What decides its bytes, as JSON types. The manifest holds `output_sha256` beside them.

    Raises:
        InputError: If the file is not what these fields make.
    """
    if not output.exists():
        return None
    if not manifest_path(output).is_file():
        raise InputError(str(output), "something else lies there already", "name a new file")
    found = check_manifest_file(manifest_path(output), fields)
    if file_sha256(output) != found["output_sha256"]:
        raise InputError(str(output), "is not the file that its manifest describes", "delete it and run again")
    return found


@contextmanager
def nothing_left_of(*folders: Path) -> Iterator[None]:
    """Remove the folders again, if they were not there before, where what a person gave turns out to be of no use.

    A folder that was there and empty is emptied again; of one that held something, everything stays.
    """
    made = [folder for folder in folders if not folder.exists()]
    emptied = [folder for folder in folders if folder.is_dir() and not any(folder.iterdir())]
    parents = [path for folder in folders for path in folder.parents if not path.exists()]
    try:
        yield
    except UserError:
        for path in (*made, *(path for folder in emptied for path in folder.iterdir())):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        for parent in sorted(parents, key=lambda path: -len(path.parts)):
            with suppress(OSError):
                parent.rmdir()
        raise
