"""Which family a published checkpoint is of, by its config.json alone."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from embeddings.common import InputError, OptionError
from embeddings.interop.released import cde, llm2vec, nomic_dense, nomic_moe, nv_embed, sentence_transformers
from embeddings.interop.released.checkpoint import ReleasedConfig
from embeddings.interop.released.fill import Imported

KNOWN = "nvembed, nomic_bert, cde-small, adapters of LLM2Vec, or a sentence-transformers directory"


def folders_of(folder: Path, base: Sequence[str] = ()) -> list[Path]:
    """The folders that a checkpoint is read from: its own, and of an adapter those of what it adapts.

    Raises:
        InputError: If what an adapter adapts cannot be had.
        OptionError: If more is named than there are adapters.
    """
    if not (folder / llm2vec.ADAPTER_CONFIG).is_file():
        return [folder]
    adapters, decoder = llm2vec.adapter_chain(folder, base)
    return [*adapters, decoder]


def loader_of(folder: Path, base: Sequence[str] = ()) -> Callable[..., Imported]:
    """What loads the checkpoint of a folder: called with it, and with `assumed` as in `ReleasedConfig`.

    Args:
        folder: Where its files lie.
        base: What adapters adapt; see `llm2vec.load`.

    Raises:
        InputError: If it is of no family that is known here.
        OptionError: If a base is named for what is no adapter.
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
        return nomic_moe.load if (config.fields.get("moe_every_n_layers") or 0) > 0 else nomic_dense.load
    if (folder / "modules.json").is_file():
        return sentence_transformers.load
    what = f"model_type {model_type!r} is of no published family that is known here"
    raise InputError(str(config.path), what, f"import one of {KNOWN}")
