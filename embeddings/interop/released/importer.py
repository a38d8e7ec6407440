"""Import of published checkpoints as model directories: family, usage, licence, and the record of their tensors."""

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
from embeddings.common.own_folder import replaced_folder, require_replaceable
from embeddings.common.process import logger
from embeddings.common.text import one_line
from embeddings.interop.golden import add_golden
from embeddings.interop.released import cde, decoders, nomic
from embeddings.interop.released.checkpoint import Imported, ReleasedConfig, described_embedder, loaded_model
from embeddings.models.backbone import load_tokenizer
from embeddings.models.directory import is_contextual
from embeddings.models.embedder import Embedder
from embeddings.models.language_model import LanguageModel
from embeddings.models.model_card import ImportFacts, stated_licence, write_model_card
from embeddings.models.model_files import IMPORT_FILE, origin_of, resolve_model
from embeddings.models.moe.rotary_moe import RotaryMoeConfig
from embeddings.models.pooling import MeanPooling, plain_backbone


def import_released(
    source: str,
    output: str | os.PathLike[str],
    revision: str | None = None,
    base: Sequence[str] = (),
    known_as: str | None = None,
) -> Imported:
    """Write a published checkpoint as a model directory, atomically, without executing its code.

    The directory also gets a model card, and a record of used and unused tensors, the commit, and the numbers that no
    file contains. If a published card processes the vectors further (see `USAGES`), the model does so too.

    Args:
        source: A directory or Hub id.
        output: The directory to write; an existing one is replaced when the new one is complete.
        revision: Commit, tag or branch of a Hub id.
        base: Base models of an adapter whose files do not name them; see `decoders.adapter_chain`.
        known_as: The published name of a model whose directory has another name; see `usage_name`.
    """
    if known_as is not None and known_as not in USAGES:
        raise OptionError("known_as", known_as, f"must be one of {', '.join(USAGES)}", "leave it out for other models")
    folder = resolve_model(source, revision)
    target = Path(output).expanduser()
    folders = decoders.adapter_chain(folder, base)
    if target.resolve() in [folder.resolve() for folder in folders]:
        rule = "must not be the source or its base, which it would replace"
        raise OptionError("output", str(output), rule, "name a new folder")
    require_replaceable(output)
    imported = _with_usage(_load(folder, base), source, known_as)
    revision = origin_of(folder).commit or revision
    bases = [origin_of(base_folder)._asdict() for base_folder in folders[1:]]
    record: dict[str, Any] = {"source": source, "revision": revision, "base": bases, "family": imported.family}
    record |= {"used_as": imported.used_as, "assumed": dict(imported.assumed)}
    # `save_pretrained` is atomic only for the model; this writes model, record and card together.
    with replaced_folder(target) as new:
        if isinstance(imported.model, Embedder):
            imported.model.save_pretrained(new, card=False)
            add_golden(new)
            counts = (len(imported.report.used), len(imported.report.left))
            origin = ImportFacts(source, revision, tuple(base), imported.family, imported.used_as, *counts)
            write_model_card(new, imported.model, origin, licence=stated_licence(folder), location=target)
        else:
            imported.model.save_pretrained(new)
        write_json(new / IMPORT_FILE, {**record, "used": imported.report.used, "left": imported.report.left})
    return imported


def _with_usage(imported: Imported, source: str, known_as: str | None) -> Imported:
    name, model = usage_name(imported.model, source, known_as), imported.model
    if not isinstance(model, Embedder):
        return imported
    if name is not None:
        usage, parts = USAGES[name], (model.backbone, model.tokenizer, model.pooling)
        norm = nn.LayerNorm(model.hidden_size, elementwise_affine=False) if usage.layer_norm else model.norm
        common: Any = {name: getattr(model, name) for name in ("head", "text", "similarity")}
        used = Embedder(*parts, norm=norm, trained_widths=usage.widths, **common)
        return imported._replace(model=used, used_as=name)
    is_dense = _model_type(model) == NomicBertConfig.model_type and type(model.pooling) is MeanPooling
    if is_dense and not model.normalize and model.norm is None:
        warning = "%s has the architecture of nomic-embed-text-v1.5, whose card applies a layer norm to vectors before "
        logger.warning(warning + "truncation: if it is a copy, add --known-as nomic-embed-text-v1.5", source)
    return imported


def _load(folder: Path, base: Sequence[str]) -> Imported:
    """The model of a folder; any error of transformers about the config becomes an `InputError`."""
    try:
        if (folder / decoders.ADAPTER_CONFIG).is_file():
            return decoders.load_llm2vec(folder, base)
        return loader_of(folder)(folder)
    except UserError:
        raise
    except (ValueError, TypeError, RuntimeError, LookupError, AttributeError, StrictDataclassError) as error:
        problem = f"does not describe a valid model: {one_line(str(error), 200)}"
        raise InputError(str(folder / "config.json"), problem, "use a complete copy of the checkpoint") from error


@dataclass(frozen=True)
class Usage:
    """The processing of a published model's vectors: truncation widths, full width first, and a layer norm."""

    model_type: str
    widths: tuple[int, ...]
    layer_norm: bool = False


# The modules.json of v1.5 has only Transformer and Pooling; its card adds layer norm, truncation and normalisation.
USAGES: Mapping[str, Usage] = {
    "nomic-embed-text-v1.5": Usage(NomicBertConfig.model_type, (768, 512, 256, 128, 64), layer_norm=True),
    "nomic-embed-text-v2-moe": Usage(RotaryMoeConfig.model_type, (768, 256)),
}


def usage_name(model: Embedder | LanguageModel, source: str, known_as: str | None = None) -> str | None:
    """The name in `USAGES` of an imported model, or None; backbone and width must match.

    The files do not distinguish v1.5 from a model fine-tuned from it, so the name decides.
    """
    # In the Hub's cache a folder is named for its commit.
    name = Path(origin_of(Path(source).expanduser().absolute()).name).name if known_as is None else known_as
    usage = USAGES.get(name)
    if usage is not None and _model_type(model) == usage.model_type and model.embedding_dim == usage.widths[0]:
        return name
    if known_as is not None:
        rule = f"cannot apply to {source}, which has another backbone or width"
        raise OptionError("known_as", known_as, rule, "leave it out")
    return None


def _model_type(model: Embedder | LanguageModel) -> str | None:
    """The `model_type` of a plain embedding model's backbone; None for any other model."""
    return str(plain_backbone(model.backbone).config.model_type) if type(model) is Embedder else None


def load_directory(folder: Path) -> Imported:
    """The model of a sentence-transformers directory whose architecture transformers can load."""
    if is_contextual(folder):
        raise InputError(str(folder), "is already a model directory of this library", "use it without import")
    backbone, report = loaded_model(folder)
    embedder = described_embedder(folder, backbone, load_tokenizer(folder, backbone), {})
    return Imported("a sentence-transformers directory", embedder, report)


def loader_of(folder: Path) -> Callable[[Path], Imported]:
    """The function that loads the checkpoint of a folder."""
    config = ReleasedConfig(folder / "config.json")
    model_type = config.fields.get("model_type")
    if model_type == "nvembed":
        return decoders.load_nv_embed
    if "transductive_corpus_size" in config.fields:
        return cde.load
    # A NomicBert checkpoint in transformers' own format has other fields and needs no key map.
    if model_type == "nomic_bert" and "n_embd" in config.fields:
        return nomic.load_moe if (config.fields.get("moe_every_n_layers") or 0) > 0 else nomic.load_dense
    if (folder / "modules.json").is_file():
        return load_directory
    problem = f"model_type {model_type!r} is not supported"
    supported = "nvembed, nomic_bert, cde-small, adapters of LLM2Vec, or a sentence-transformers directory"
    raise InputError(str(config.path), problem, f"import one of {supported}")
