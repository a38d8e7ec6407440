"""Converts XLM-R, RoBERTa and BERT from learned to rotary positions, with the same weights."""

import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModel, AutoModelForMaskedLM, PretrainedConfig, PreTrainedModel
from transformers.models.jina_embeddings_v3.configuration_jina_embeddings_v3 import JinaEmbeddingsV3Config

from embeddings.common import InputError, OptionError
from embeddings.common.own_folder import replaced_folder, require_replaceable
from embeddings.models.backbone import (
    BackboneConfig,
    MissingWeightsError,
    load_backbone,
    quiet_transformers,
    read_config,
)
from embeddings.models.language_model import VOCABULARY_STEP, load_language_model
from embeddings.models.model_files import resolve_model

KINDS = ("xlm-roberta", "roberta", "bert")
# Rows that pad the vocabulary are never predicted: their logit is far below any other.
_UNUSED_BIAS = -100.0
_COPIED = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_act"),
    *("hidden_dropout_prob", "attention_probs_dropout_prob", "type_vocab_size", "initializer_range"),
    *("layer_norm_eps", "pad_token_id", "bos_token_id", "eos_token_id"),
)
_IN_LAYER = {
    "attention.self.query": "self_attn.q_proj",
    "attention.self.key": "self_attn.k_proj",
    "attention.self.value": "self_attn.v_proj",
    "attention.output.dense": "self_attn.o_proj",
    "attention.output.LayerNorm": "post_attention_layernorm",
    "intermediate.dense": "mlp.fc1",
    "output.dense": "mlp.fc2",
    "output.LayerNorm": "post_mlp_layernorm",
}
_IN_HEAD = {
    "cls.predictions.transform.dense": "lm_head.dense",
    "cls.predictions.transform.LayerNorm": "lm_head.layer_norm",
    "cls.predictions.decoder": "lm_head.decoder",
    "cls.predictions": "lm_head",
}
_LAYER = re.compile(r"encoder\.layer\.(\d+)\.(.+)\.(weight|bias)")


def to_rotary(model: PreTrainedModel, num_positions: int = 2048, rope_theta: float = 10_000.0) -> PreTrainedModel:
    """Replace an encoder's position embeddings by rotations of queries and keys.

    All other weights stay, including the language-model head; the states differ until the model has been adapted by
    training. The vocabulary is padded with rows of zeros to a multiple of 64. The result is transformers'
    `JinaEmbeddingsV3Model` or its masked language model, in evaluation mode, with the same dtype and attention.

    Args:
        model: XLM-R, RoBERTa or BERT, with or without its masked-language-model head.
        num_positions: Intended maximum length in tokens, stored in the config only. The paper trains on 2,048.
        rope_theta: Base of the rotation's angles. The paper: 10,000; larger values scored lower.

    Raises:
        OptionError: If the architecture is not supported, or a number is out of range.
    Source: Nussbaum and Duderstadt 2025, arXiv:2502.07972, §4.1. Differs: none known; the paper does not state the
        values of its vocabulary padding.
    """
    _check_conversion(model.config, num_positions, rope_theta)
    num_rows = -(-int(model.config.vocab_size) // VOCABULARY_STEP) * VOCABULARY_STEP
    config = JinaEmbeddingsV3Config(
        **{name: getattr(model.config, name) for name in _COPIED},
        vocab_size=num_rows,
        max_position_embeddings=num_positions,
        rope_parameters={"rope_type": "default", "rope_theta": rope_theta},
    )
    state, prefix = _renamed(model)
    if prefix and model.config.hidden_act != "gelu":
        rule = "must be gelu, the activation of the rotary model's head"
        raise OptionError("hidden_act", model.config.hidden_act, rule, "convert the encoder without its head")
    options: dict[str, Any] = {"attn_implementation": model.config._attn_implementation, "dtype": model.dtype}
    options |= {} if prefix else {"add_pooling_layer": False}
    auto_class: Any = AutoModelForMaskedLM if prefix else AutoModel
    rotary = auto_class.from_config(config, **options)
    assert isinstance(rotary, PreTrainedModel)
    rotary.load_state_dict({name: _padded(name, value, num_rows) for name, value in state.items()})
    rotary.tie_weights()
    rotary.train(False)
    return rotary


class Conversion(NamedTuple):
    """A written rotary model's number of parameters (shared ones once), and its vocabulary size before and after."""

    num_parameters: int
    vocabulary_before: int
    vocabulary_after: int


def write_rotary_model(
    source: str,
    output: str | os.PathLike[str],
    num_positions: int = 2048,
    rope_theta: float = 10_000.0,
    keep_head: bool = True,
) -> Conversion:
    """Write a checkpoint's rotary model as a Hugging Face directory, atomically; an existing model is replaced.

    Args:
        source: A directory or Hub id of XLM-R, RoBERTa or BERT.
        output: The directory; `MaskedLMModule` adapts the model by training, `BackboneConfig` loads only the encoder.
        num_positions: As in `to_rotary`; also the tokenizer's maximum length.
        rope_theta: As in `to_rotary`.
        keep_head: Whether to keep the language-model head, which the adaptation needs.

    Raises:
        OptionError: As `to_rotary`, before any weight is read, or if the output is a file or the source itself.
        InputError: If the model is not available, or has no head to keep.
    """
    folder = resolve_model(source)
    if folder.resolve() == Path(output).expanduser().resolve():
        raise OptionError("output", str(output), "must not be the source, which it would replace", "name a new folder")
    require_replaceable(output)
    _check_conversion(read_config(folder), num_positions, rope_theta)
    config = BackboneConfig(source, dtype="auto")
    try:
        model, tokenizer = load_language_model(config, "masked") if keep_head else load_backbone(config)
    except MissingWeightsError as error:
        if not keep_head:
            raise
        what = "lacks weights of its language-model head or of its encoder"
        raise InputError(str(folder), what, "set keep_head to false to convert only the encoder") from error
    rotary = to_rotary(model, num_positions, rope_theta)
    tokenizer.model_max_length = num_positions
    with replaced_folder(Path(output)) as new, quiet_transformers():
        rotary.save_pretrained(new)
        tokenizer.save_pretrained(new)
    return Conversion(rotary.num_parameters(), int(model.config.vocab_size), int(rotary.config.vocab_size))


def _check_conversion(config: PretrainedConfig, num_positions: int, rope_theta: float) -> None:
    if config.model_type not in KINDS or getattr(config, "is_decoder", False):
        raise OptionError("model", config.model_type, "cannot be converted", f"convert one of {', '.join(KINDS)}")
    if num_positions < 1:
        raise OptionError("num_positions", num_positions, "must be >= 1", "the paper trains on 2,048")
    if not rope_theta > 1:
        raise OptionError("rope_theta", rope_theta, "must be > 1", "the paper uses 10,000")
    if (width := config.hidden_size // config.num_attention_heads) % 2:
        raise OptionError("model", f"heads of width {width}", "must have heads of even width", "convert another")


def _renamed(model: PreTrainedModel) -> tuple[dict[str, Tensor], str]:
    """The weights under the rotary model's names, and the prefix of its encoder: empty without a head."""
    old = f"{model.base_model_prefix}."
    state = model.state_dict()
    prefix = "roberta." if any(name.startswith(old) for name in state) else ""
    renamed: dict[str, Tensor] = {}
    for name, value in state.items():
        inner = name.removeprefix(old)
        if prefix and inner == name:
            stem, _, kind = name.rpartition(".")
            renamed[f"{_IN_HEAD.get(stem, stem)}.{kind}"] = value
        elif match := _LAYER.fullmatch(inner):
            renamed[f"{prefix}layers.{match[1]}.{_IN_LAYER[match[2]]}.{match[3]}"] = value
        elif not inner.startswith(("embeddings.position", "embeddings.token_type_ids", "pooler.")):
            renamed[f"{prefix}{inner}"] = value
    return renamed, prefix


def _padded(name: str, value: Tensor, num_rows: int) -> Tensor:
    """A weight, padded to the rows of the padded vocabulary if it has one row per token."""
    if name.rpartition(".")[0].endswith("word_embeddings") or name == "lm_head.decoder.weight":
        padding = value.new_zeros(num_rows - len(value), value.shape[1])
    elif name in ("lm_head.decoder.bias", "lm_head.bias"):
        padding = torch.full((num_rows - len(value),), _UNUSED_BIAS, dtype=value.dtype, device=value.device)
    else:
        return value
    return torch.cat([value, padding])
