"""From a published checkpoint to a model directory of this library."""

import os
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub.errors import StrictDataclassError

from embeddings.common import InputError, OptionError, UserError
from embeddings.common.fileio import write_json
from embeddings.interop.released.detect import loader_of
from embeddings.interop.released.fill import Imported
from embeddings.models.directory import require_folder_or_nothing
from embeddings.models.hub import resolve_model
from embeddings.models.model_files import IMPORT_FILE


def import_released(
    source: str, output: str | os.PathLike[str], revision: str | None = None, base: Sequence[str] = ()
) -> Imported:
    """Write a published checkpoint as a model directory, whole or not at all; no code of it runs.

    Beside the model lies a record of which published tensor each of its tensors came from, and what was left.

    Args:
        source: A directory or Hub id.
        output: The directory to write; one that is there is replaced once the new one is whole.
        revision: Commit, tag or branch of a Hub id.
        base: What an adapter adapts, where its own files do not say it; see `llm2vec.load`.

    Raises:
        InputError: If the checkpoint cannot be had, is of no known family, or is not whole.
        OptionError: If the output is a file or the source itself.
    """
    require_folder_or_nothing(output)
    folder = resolve_model(source, revision)
    target = Path(output).expanduser()
    if folder.resolve() == target.resolve():
        raise OptionError("output", str(output), "must not be the source, which it would replace", "name a new folder")
    imported = _load(folder, base)
    imported.model.save_pretrained(target)
    record = {"source": source, "revision": revision, "base": list(base), "family": imported.family}
    write_json(target / IMPORT_FILE, {**record, "used": imported.report.used, "left": imported.report.left})
    return imported


def _load(folder: Path, base: Sequence[str]) -> Imported:
    """The model of a folder; each architecture checks the fields of a config in its own way."""
    try:
        return loader_of(folder, base)(folder)
    except UserError:
        raise
    except (ValueError, TypeError, RuntimeError, StrictDataclassError) as error:
        what = f"makes no model: {' '.join(str(error).split())[:100]}"
        raise InputError(str(folder / "config.json"), what, "take a whole copy of the checkpoint") from error
