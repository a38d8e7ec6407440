"""nomic-embed-text-v1, v1.5 and nomic-bert-2048: transformers' own NomicBert under other names."""

from pathlib import Path

import torch
from transformers import AutoModelForMaskedLM, NomicBertConfig, PreTrainedTokenizerBase

from embeddings.common import InputError
from embeddings.common.errors import shown
from embeddings.common.process import logger
from embeddings.interop.released.checkpoint import Assumed, ReleasedConfig, ReleasedWeights, released_tokenizer
from embeddings.interop.released.fill import Imported, empty_model, filled_model
from embeddings.interop.released.key_map import KeyMap, KeyReport, Published
from embeddings.interop.released.nomic_bert import (
    LANGUAGE_MODEL,
    LEFT,
    PROMPTS,
    encoder_fields,
    encoder_names,
    longest_text,
)
from embeddings.interop.released.sentence_transformers import described_embedder
from embeddings.models.language_model import LanguageModel

FAMILY = "Nomic's dense encoder"
_WIDTH_STEP = 256
_GATES = {"swiglu": "silu", "geglu": "gelu", "glu": "sigmoid"}
_HEAD = "cls.predictions."


def load(folder: Path, assumed: Assumed | None = None) -> Imported:
    """The embedding model of a folder, or the masked language model where it holds one.

    The layer norm of v1.5's vectors is stated by no file, and so no part of the model yet: see `usage`.

    Raises:
        InputError: If the folder does not hold a whole checkpoint of this family.
    """
    config = ReleasedConfig(folder / "config.json", assumed=assumed)
    tokenizer = released_tokenizer(folder)
    ours, weights = dense_config(config, tokenizer), ReleasedWeights(folder)
    prefix = LANGUAGE_MODEL if any(name.startswith(LANGUAGE_MODEL) for name in weights.shapes) else ""
    if any("ForPreTraining" in str(name) for name in config.fields.get("architectures") or ()):
        return Imported(FAMILY, *_language_model(ours, weights, tokenizer, prefix))
    empty = empty_model(ours)
    state, report = KeyMap(FAMILY, dense_names(prefix), (*LEFT, f"{_HEAD}{{rest}}")).take(weights, empty.state_dict())
    model, longest = filled_model(empty, state), longest_text(config)
    if longest is not None:
        logger.warning("%s: rotary_scaling_factor is left out, so texts are cut at %d tokens", folder, longest)
    return Imported(FAMILY, described_embedder(folder, model, tokenizer, PROMPTS, longest), report)


def dense_config(config: ReleasedConfig, tokenizer: PreTrainedTokenizerBase) -> NomicBertConfig:
    """Our config of a published one.

    Raises:
        InputError: If a field is none, or asks for arithmetic that is not known here.
    """
    config.require(qkv_proj_bias=False, mlp_fc1_bias=False, mlp_fc2_bias=False, norm_mlp=False)
    function = config.fields.get("activation_function")
    if not isinstance(function, str) or function not in _GATES:
        # The published code takes an MLP without a gate where nothing is said.
        what = f"has activation_function {shown(function)}, known here are {', '.join(_GATES)}"
        raise InputError(str(config.path), what, "import another checkpoint")
    width = -(-config.integer("n_inner") // _WIDTH_STEP) * _WIDTH_STEP
    fields = encoder_fields(config, tokenizer)
    return NomicBertConfig(**fields, intermediate_size=width, hidden_act=_GATES[function])


def dense_names(prefix: str = "") -> dict[str, str | Published]:
    """Our names, and where each lies."""
    mlp = f"{prefix}encoder.layers.{{n}}.mlp."
    gated = {"up": "fc11", "gate": "fc12", "down": "fc2"}
    places = {f"layers.{{n}}.mlp.{ours}_proj.weight": f"{mlp}{theirs}.weight" for ours, theirs in gated.items()}
    return {**encoder_names(prefix), **places}


def _language_model(
    config: NomicBertConfig, weights: ReleasedWeights, tokenizer: PreTrainedTokenizerBase, prefix: str
) -> tuple[LanguageModel, KeyReport]:
    """The model with its head, whose layers have no biases there and zeros for them here."""
    empty = empty_model(config, AutoModelForMaskedLM)
    inner = f"{empty.base_model_prefix}."
    words = f"{prefix}embeddings.word_embeddings.weight"
    places = {
        **{f"{inner}{ours}": place for ours, place in dense_names(prefix).items()},
        f"{_HEAD}decoder.weight": words,
        f"{_HEAD}transform.{{rest}}": f"{_HEAD}transform.{{rest}}",
    }
    expected = empty.state_dict()
    zeros = [name for name in expected if name in _HEAD_BIASES]
    left = (*(f"{prefix}{name}" for name in LEFT), f"{_HEAD}decoder.weight")
    state, report = KeyMap(FAMILY, places, left).take(
        weights, {name: tensor for name, tensor in expected.items() if name not in zeros}
    )
    for name in zeros:
        state[name] = torch.zeros(expected[name].shape, dtype=state[f"{_HEAD}decoder.weight"].dtype)
    return LanguageModel(filled_model(empty, state), tokenizer, causal=False), report


_HEAD_BIASES = (f"{_HEAD}bias", f"{_HEAD}decoder.bias", f"{_HEAD}transform.dense.bias")
