"""From a published checkpoint to a model directory: family, usage, licence, and the record of its tensors."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import NomicBertConfig

from embeddings.common import InputError, OptionError, UserError
from embeddings.common.io import write_json
from embeddings.common.process import logger
from embeddings.common.text import one_line
from embeddings.interop.released import cde, llm2vec, nomic, nv_embed
from embeddings.interop.released.checkpoint import Assumed, Imported, ReleasedConfig, described_embedder, loaded_model
from embeddings.models.backbone import load_tokenizer
from embeddings.models.directory import is_contextual
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

    Beside the model lie an embedding model's card and a record: which published tensor each of its tensors came from,
    what was left, the commit that was read, and the numbers that no file states. Where a published card uses the
    vectors in a way that the files do not state (see `USAGES`), the model does so too.

    Args:
        source: A directory or Hub id.
        output: The directory to write; one that is there is replaced once the new one is whole.
        revision: Commit, tag or branch of a Hub id.
        base: What an adapter adapts, where its own files do not say it; see `llm2vec.adapter_chain`.
        known_as: The published name of a model whose directory has another; see `usage_name`.
        assume: Numbers that no file states, by name, in place of those of the published models.

    Raises:
        InputError: If the checkpoint cannot be had, is of no known family, or is incomplete.
        OptionError: If the output is a file or one of the folders that are read, or an option does not fit.
    """
    require_folder_or_nothing(output)
    if known_as is not None and known_as not in USAGES:
        rule = "must be a published model that is used in a way of its own"
        raise OptionError("known_as", known_as, rule, f"give one of {', '.join(USAGES)}, or leave it out")
    folder = resolve_model(source, revision)
    target = Path(output).expanduser()
    folders = llm2vec.adapter_chain(folder, base)
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
    name, model = usage_name(imported.model, source, known_as), imported.model
    if not isinstance(model, Embedder):
        return imported
    if name is not None:
        usage, parts = USAGES[name], (model.backbone, model.tokenizer, model.pooling)
        norm = nn.LayerNorm(model.hidden_size, elementwise_affine=False) if usage.layer_norm else model.norm
        used = Embedder(*parts, norm=norm, head=model.head, text=model.text, trained_widths=usage.widths)
        return imported._replace(model=used, used_as=name)
    is_dense = _model_type(model) == NomicBertConfig.model_type and type(model.pooling) is MeanPooling
    if is_dense and not model.normalize and model.norm is None:
        warning = "%s has the files of nomic-embed-text-v1.5, whose card norms vectors before it cuts them: if it is a "
        logger.warning(warning + "copy, add --known-as nomic-embed-text-v1.5", source)
    return imported


def _load(folder: Path, base: Sequence[str], assumed: Assumed) -> Imported:
    """The model of a folder; each architecture checks the fields of a config in its own way."""
    try:
        if (folder / llm2vec.ADAPTER_CONFIG).is_file():
            imported = llm2vec.load(folder, base, assumed)
        else:
            imported = loader_of(folder)(folder, assumed=assumed)
        assumed.check_all_taken()
        return imported._replace(assumed=assumed.values)
    except UserError:
        raise
    except (ValueError, TypeError, RuntimeError, LookupError, AttributeError, StrictDataclassError) as error:
        what = f"makes no model: {one_line(str(error), 200)}"
        raise InputError(str(folder / "config.json"), what, "take a complete copy of the checkpoint") from error


@dataclass(frozen=True)
class Usage:
    """How a published model's vectors are used: the widths to cut them to, the full one first, after a norm or not.

    `model_type` is what the config of its backbone says here.
    """

    model_type: str
    widths: tuple[int, ...]
    layer_norm: bool = False


# The modules.json of v1.5 has only Transformer and Pooling; its card continues with layer norm, cut and unit length.
USAGES: Mapping[str, Usage] = {
    "nomic-embed-text-v1.5": Usage(NomicBertConfig.model_type, (768, 512, 256, 128, 64), layer_norm=True),
    "nomic-embed-text-v2-moe": Usage(RotaryMoeConfig.model_type, (768, 256)),
}


def usage_name(model: Embedder | LanguageModel, source: str, known_as: str | None = None) -> str | None:
    """Which one of `USAGES` an imported model is, None for none.

    No file tells v1.5 from a model trained on from it, so the name decides: `known_as`, else the last part of the Hub
    id or directory. Backbone and width must agree, else `known_as` is refused.
    """
    # In the Hub's cache the folder's name is the commit.
    name = Path(origin_of(Path(source).expanduser().absolute()).name).name if known_as is None else known_as
    usage = USAGES.get(name)
    if usage is not None and _model_type(model) == usage.model_type:
        assert isinstance(model, Embedder)
        if model.embedding_dim == usage.widths[0]:
            return name
    if known_as is not None:
        rule = f"cannot apply to {source}, which has another backbone or width"
        raise OptionError("known_as", known_as, rule, "leave it out")
    return None


def _model_type(model: Embedder | LanguageModel) -> str | None:
    """What the config of a plain embedding model's backbone says; None for any other model."""
    return str(plain_backbone(model.backbone).config.model_type) if type(model) is Embedder else None


def load_directory(folder: Path, assumed: Assumed | None = None) -> Imported:
    """The model of a sentence-transformers directory; transformers itself renames the tensors of its architectures."""
    if is_contextual(folder):
        raise InputError(str(folder), "is a model directory of this library already", "use it as it is")
    backbone, report = loaded_model(folder)
    embedder = described_embedder(folder, backbone, load_tokenizer(folder, backbone), {})
    return Imported("a sentence-transformers directory", embedder, report)


def loader_of(folder: Path) -> Callable[..., Imported]:
    """What loads the checkpoint of a folder: called with it, and with `assumed` as in `ReleasedConfig`."""
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
        return load_directory
    what = f"model_type {model_type!r} belongs to no published family that is known here"
    known = "nvembed, nomic_bert, cde-small, adapters of LLM2Vec, or a sentence-transformers directory"
    raise InputError(str(config.path), what, f"import one of {known}")
