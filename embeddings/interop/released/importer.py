"""From a published checkpoint to a model directory of this library."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError

from embeddings.common import InputError, OptionError, UserError
from embeddings.common.process import logger
from embeddings.common.text import one_line
from embeddings.interop.released.checkpoint import Assumed
from embeddings.interop.released.detect import folders_of, loader_of
from embeddings.interop.released.fill import Imported
from embeddings.interop.released.licence import stated_licence
from embeddings.interop.released.usage import USAGES, as_used, check_name, may_want_norm, usage_name
from embeddings.models.directory import replaced_folder, require_folder_or_nothing
from embeddings.models.embedder import Embedder
from embeddings.models.hub import origin_of, resolve_model
from embeddings.models.model_card import ImportFacts, keeps_card, write_model_card
from embeddings.models.model_files import IMPORT_FILE, write_json


def import_released(
    source: str,
    output: str | os.PathLike[str],
    revision: str | None = None,
    base: Sequence[str] = (),
    known_as: str | None = None,
    assume: Mapping[str, float] | None = None,
) -> Imported:
    """Write a published checkpoint as a model directory, whole or not at all; no code of it runs.

    Beside the model lies a record of which published tensor each of its tensors came from, and what was left, and an
    embedding model's card; both are in the directory before it is put in its place. The record's `revision` is the
    commit that was read, wherever the Hub named one. Where a published card uses the vectors in a way that the files do
    not state (see `USAGES`), the model does so by itself. Numbers that no file states are in the record too.

    Args:
        source: A directory or Hub id.
        output: The directory to write; one that is there is replaced once the new one is whole.
        revision: Commit, tag or branch of a Hub id.
        base: What an adapter adapts, where its own files do not say it; see `llm2vec.load`.
        known_as: The published name of a model whose directory has another; see `usage_name`.
        assume: Numbers that no file states, by name, in place of those of the published models; see `Assumed`.

    Raises:
        InputError: If the checkpoint cannot be had, is of no known family, or is not whole.
        OptionError: If the output is a file, the source itself or what it adapts, `known_as` is another model, or a
            number is given that the checkpoint does not leave open.
    """
    require_folder_or_nothing(output)
    check_name(known_as)
    folder = resolve_model(source, revision)
    target = Path(output).expanduser()
    folders = folders_of(folder, base)
    if target.resolve() in [read.resolve() for read in folders]:
        rule = "must not be the source or its base, which it would replace"
        raise OptionError("output", str(output), rule, "name a new folder")
    imported = _used(_load(folder, base, Assumed(assume)), source, known_as)
    revision = origin_of(folder).commit or revision
    bases = [origin_of(read)._asdict() for read in folders[1:]]
    record: dict[str, Any] = {"source": source, "revision": revision, "base": bases, "family": imported.family}
    record |= {"used_as": imported.used_as, "assumed": dict(imported.assumed)}
    # The model's write is whole by itself; in a folder around it, record and card come into place with the model.
    with replaced_folder(target) as new:
        imported.model.save_pretrained(new)
        write_json(new / IMPORT_FILE, {**record, "used": imported.report.used, "left": imported.report.left})
        if isinstance(imported.model, Embedder) and not keeps_card(target):
            counts = (len(imported.report.used), len(imported.report.left))
            origin = ImportFacts(source, revision, tuple(base), imported.family, imported.used_as, *counts)
            licence = stated_licence(folder)
            write_model_card(new, imported.model, origin, licence=licence, name=target.resolve().name)
    return imported


def _used(imported: Imported, source: str, known_as: str | None) -> Imported:
    """A checkpoint whose model gives the vectors of its published card, where one is known to say more than files."""
    name = usage_name(imported.model, source, known_as)
    if name is not None and isinstance(imported.model, Embedder):
        return imported._replace(model=as_used(imported.model, USAGES[name]), used_as=name)
    if may_want_norm(imported.model):
        warning = "%s has the files of nomic-embed-text-v1.5, whose card norms vectors before it cuts them: if it is a "
        logger.warning(warning + "copy, add --known-as nomic-embed-text-v1.5", source)
    return imported


def _load(folder: Path, base: Sequence[str], assumed: Assumed) -> Imported:
    """The model of a folder; each architecture checks the fields of a config in its own way."""
    try:
        imported = loader_of(folder, base)(folder, assumed=assumed)
        assumed.check_all_taken()
        return imported._replace(assumed=assumed.values)
    except UserError:
        raise
    except (ValueError, TypeError, RuntimeError, LookupError, AttributeError, StrictDataclassError) as error:
        what = f"makes no model: {one_line(str(error), 200)}"
        raise InputError(str(folder / "config.json"), what, "take a whole copy of the checkpoint") from error
