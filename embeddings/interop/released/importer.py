"""From a published checkpoint to a model directory: family, usage, licence, and the record of its tensors."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import NomicBertConfig

from embeddings.common import InputError, OptionError, UserError
from embeddings.common.io import write_json
from embeddings.common.process import logger
from embeddings.common.text import one_line
from embeddings.interop.released import cde, llm2vec, nomic, nv_embed, sentence_transformers
from embeddings.interop.released.checkpoint import Assumed, Imported, ReleasedConfig
from embeddings.models.embedder import Embedder
from embeddings.models.language_model import LanguageModel
from embeddings.models.lora import plain_backbone
from embeddings.models.model_card import ImportFacts, keeps_card, stated_licence, write_model_card
from embeddings.models.model_files import (
    IMPORT_FILE,
    origin_of,
    replaced_folder,
    require_folder_or_nothing,
    resolve_model,
)
from embeddings.models.moe.rotary_moe import RotaryMoeConfig
from embeddings.models.pooling import MeanPooling


def import_released(
    source: str,
    output: str | os.PathLike[str],
    revision: str | None = None,
    base: Sequence[str] = (),
    known_as: str | None = None,
    assume: Mapping[str, float] | None = None,
) -> Imported:
    """Write a published checkpoint as a model directory, atomically; no code of it runs.

    Beside the model lies a record of which published tensor each of its tensors came from, and what was left, and an
    embedding model's card; both are in the directory before it is put in its place. The record's `revision` is the
    commit that was read, wherever the Hub named one. Where a published card uses the vectors in a way that the files do
    not state (see `USAGES`), the model does so too. Numbers that no file states are in the record too.

    Args:
        source: A directory or Hub id.
        output: The directory to write; one that is there is replaced once the new one is whole.
        revision: Commit, tag or branch of a Hub id.
        base: What an adapter adapts, where its own files do not say it; see `llm2vec.load`.
        known_as: The published name of a model whose directory has another; see `usage_name`.
        assume: Numbers that no file states, by name, in place of those of the published models; see `Assumed`.

    Raises:
        InputError: If the checkpoint cannot be had, is of no known family, or is incomplete.
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
        raise InputError(str(folder / "config.json"), what, "take a complete copy of the checkpoint") from error


@dataclass(frozen=True)
class Usage:
    """How a published model's vectors are used.

    Args:
        model_type: What the config of its backbone says here.
        widths: Widths that it was trained to be cut to, the full width first.
        layer_norm: Whether vectors pass a layer norm without weights before they are cut.
    """

    model_type: str
    widths: tuple[int, ...]
    layer_norm: bool = False


# The modules.json of v1.5 has only Transformer and Pooling; its card continues with layer norm, cut and unit length.
USAGES: Mapping[str, Usage] = {
    "nomic-embed-text-v1.5": Usage(NomicBertConfig.model_type, (768, 512, 256, 128, 64), layer_norm=True),
    "nomic-embed-text-v2-moe": Usage(RotaryMoeConfig.model_type, (768, 256)),
}


def check_name(known_as: str | None) -> None:
    """Refuse a name that is none of `USAGES`."""
    if known_as is not None and known_as not in USAGES:
        rule = "must be a published model that is used in a way of its own"
        raise OptionError("known_as", known_as, rule, f"give one of {', '.join(USAGES)}, or leave it out")


def usage_name(model: Embedder | LanguageModel, source: str, known_as: str | None = None) -> str | None:
    """Which one of `USAGES` an imported model is, None for none.

    No file tells v1.5 from a model trained on from it, so the name decides: `known_as`, else the last part of the Hub
    id or directory, in the Hub's cache the repository's. Backbone and width must agree, else `known_as` is refused.
    """
    name = _published_name(source) if known_as is None else known_as
    usage = USAGES.get(name)
    if usage is not None and _model_type(model) == usage.model_type:
        assert isinstance(model, Embedder)
        if model.embedding_dim == usage.widths[0]:
            return name
    if known_as is not None:
        rule = f"cannot apply to {source}, which has another backbone or width"
        raise OptionError("known_as", known_as, rule, "leave it out")
    return None


def as_used(model: Embedder, usage: Usage) -> Embedder:
    """The model with the vectors of its card: of unit length, and brought there again after a cut to any width."""
    norm = nn.LayerNorm(model.hidden_size, elementwise_affine=False) if usage.layer_norm else model.norm
    parts = (model.backbone, model.tokenizer, model.pooling)
    return Embedder(*parts, norm=norm, head=model.head, text=model.text, trained_widths=usage.widths)


def may_want_norm(model: Embedder | LanguageModel) -> bool:
    """Whether a model of no known usage has the files of nomic-embed-text-v1.5, so that it may be a copy of it."""
    if _model_type(model) != NomicBertConfig.model_type:
        return False
    assert isinstance(model, Embedder)
    return not model.normalize and model.norm is None and type(model.pooling) is MeanPooling


def _model_type(model: Embedder | LanguageModel) -> str | None:
    """What the config of a plain embedding model's backbone says; None for any other model."""
    return str(plain_backbone(model.backbone).config.model_type) if type(model) is Embedder else None


def _published_name(source: str) -> str:
    path = Path(source).expanduser().absolute()
    # The Hub's cache: models--OWNER--NAME/snapshots/COMMIT.
    return path.parents[1].name.rpartition("--")[2] if path.parent.name == "snapshots" else path.name


KNOWN = "nvembed, nomic_bert, cde-small, adapters of LLM2Vec, or a sentence-transformers directory"


def folders_of(folder: Path, base: Sequence[str] = ()) -> list[Path]:
    """The folders that a checkpoint is read from: its own, and for an adapter those of what it adapts."""
    if not (folder / llm2vec.ADAPTER_CONFIG).is_file():
        return [folder]
    adapters, decoder = llm2vec.adapter_chain(folder, base)
    return [*adapters, decoder]


def loader_of(folder: Path, base: Sequence[str] = ()) -> Callable[..., Imported]:
    """What loads the checkpoint of a folder: called with it, and with `assumed` as in `ReleasedConfig`.

    Raises:
        InputError: If it is of no family that is known here.
        OptionError: If `base` names what adapters adapt, and the folder is no adapter.
    """
    if (folder / llm2vec.ADAPTER_CONFIG).is_file():
        return partial(llm2vec.load, base=base)
    if base:
        raise OptionError("base", list(base), f"cannot apply: {folder} is no adapter", "leave it out")
    config = ReleasedConfig(folder / "config.json")
    model_type = config.fields.get("model_type")
    if model_type == "nvembed":
        return nv_embed.load
    if "transductive_corpus_size" in config.fields:
        return cde.load
    # transformers' own NomicBert has other fields: such a checkpoint needs no key map.
    if model_type == "nomic_bert" and "n_embd" in config.fields:
        return nomic.load_moe if (config.fields.get("moe_every_n_layers") or 0) > 0 else nomic.load_dense
    if (folder / "modules.json").is_file():
        return sentence_transformers.load
    what = f"model_type {model_type!r} belongs to no published family that is known here"
    raise InputError(str(config.path), what, f"import one of {KNOWN}")
