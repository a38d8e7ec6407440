"""Nomic's encoders: nomic-embed-text-v1, v1.5 and nomic-bert-2048 (dense), nomic-embed-text-v2-moe (experts)."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForMaskedLM, NomicBertConfig, PreTrainedTokenizerBase

from embeddings.common import InputError
from embeddings.common.errors import shown
from embeddings.common.process import logger
from embeddings.interop.released.checkpoint import (
    Imported,
    KeyReport,
    Published,
    ReleasedConfig,
    ReleasedWeights,
    described_embedder,
    empty_model,
    filled_model,
    released_tokenizer,
    take_tensors,
)
from embeddings.models.language_model import LanguageModel
from embeddings.models.moe.rotary_moe import RotaryMoeConfig

# Training put one of these task prefixes before every text and pooled its tokens too. The prompts of mteb's task types
# are those of mteb's entry for these models, with which the published scores were measured.
_CLASSIFICATION, _CLUSTERING = "classification: ", "clustering: "
_CLASSIFIED = ("Classification", "MultilabelClassification", "PairClassification", "Reranking", "STS", "Summarization")
PROMPTS = {
    "query": "search_query: ",
    "document": "search_document: ",
    "classification": _CLASSIFICATION,
    "clustering": _CLUSTERING,
    **dict.fromkeys(_CLASSIFIED, _CLASSIFICATION),
    "Clustering": _CLUSTERING,
}

# Prefix of all tensor names in a checkpoint of a language model.
LANGUAGE_MODEL = "bert."
# A pooler that embeddings do not use, and rotary tables that are computed from the config.
IGNORED = ("pooler.dense.{kind}", "encoder.layers.{n}.attn.rotary_emb.inv_freq")


def encoder_names(prefix: str = "") -> dict[str, str | Published]:
    """The key map of all tensors outside the MLPs; `prefix` precedes the published names."""
    attention = f"{prefix}encoder.layers.{{n}}.attn."
    fused = {
        f"layers.{{n}}.self_attn.{ours}_proj.{{kind}}": Published(f"{attention}Wqkv.{{kind}}", part, 3)
        for part, ours in enumerate("qkv")
    }
    return {
        **fused,
        "layers.{n}.self_attn.o_proj.{kind}": f"{attention}out_proj.{{kind}}",
        "layers.{n}.post_attention_layernorm.{kind}": f"{prefix}encoder.layers.{{n}}.norm1.{{kind}}",
        "layers.{n}.post_mlp_layernorm.{kind}": f"{prefix}encoder.layers.{{n}}.norm2.{{kind}}",
        "embeddings.LayerNorm.{kind}": f"{prefix}emb_ln.{{kind}}",
        "embeddings.{table}_embeddings.weight": f"{prefix}embeddings.{{table}}_embeddings.weight",
    }


def encoder_fields(config: ReleasedConfig, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """The arguments of our config that do not depend on the MLPs."""
    off = ("prenorm", "parallel_block", "causal", "use_rms_norm", "rotary_emb_interleaved")
    config.require(**dict.fromkeys(off, False), rotary_emb_fraction=1.0, rotary_emb_scale_base=None)
    step, rows = config.integer("pad_vocab_size_multiple", default=1), config.integer("vocab_size")
    trained = config.assume("max_trained_positions", 2048)
    positions = longest_text(config) or max(trained, config.integer("n_positions", default=trained))
    width, num_heads = config.integer("n_embd"), config.integer("n_head")
    if width % (2 * num_heads):
        problem = f"has n_embd {width} and n_head {num_heads}, but n_embd must be a multiple of 2 * n_head"
        raise InputError(str(config.path), problem, "use config.json and weights of one checkpoint")
    return {
        "vocab_size": -(-rows // step) * step,
        "hidden_size": width,
        "num_hidden_layers": config.integer("n_layer"),
        "num_attention_heads": num_heads,
        "type_vocab_size": config.integer("type_vocab_size"),
        "layer_norm_eps": config.number("layer_norm_epsilon"),
        "hidden_dropout_prob": config.number("resid_pdrop", 0.0),
        "attention_probs_dropout_prob": config.number("attn_pdrop", 0.0),
        "initializer_range": config.number("initializer_range", 0.02),
        "max_position_embeddings": positions,
        "rope_parameters": {"rope_type": "default", "rope_theta": float(config.number("rotary_emb_base"))},
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }


def longest_text(config: ReleasedConfig) -> int | None:
    """The maximum tokens of a text if the config has `rotary_scaling_factor`, else None.

    With this factor the published code computes the rotary base from the longest text of the process so far, so a
    vector depends on other texts. Here every text uses the base of training, and longer texts are truncated.
    """
    if config.fields.get("rotary_scaling_factor") is None:
        return None
    config.number("rotary_scaling_factor")
    return config.assume("max_trained_positions", 2048)


_DENSE_FAMILY = "Nomic's dense encoder"
_WIDTH_STEP = 256
_GATES = {"swiglu": "silu", "geglu": "gelu", "glu": "sigmoid"}
_HEAD = "cls.predictions."
_HEAD_BIASES = (f"{_HEAD}bias", f"{_HEAD}decoder.bias", f"{_HEAD}transform.dense.bias")


def load_dense(folder: Path) -> Imported:
    """The embedding model of a folder, or its masked language model if the checkpoint contains one."""
    config = ReleasedConfig(folder / "config.json")
    tokenizer = released_tokenizer(folder)
    ours, weights = dense_config(config, tokenizer), ReleasedWeights(folder)
    prefix = LANGUAGE_MODEL if any(name.startswith(LANGUAGE_MODEL) for name in weights.tensors) else ""
    if any("ForPreTraining" in str(name) for name in config.fields.get("architectures") or ()):
        return Imported(_DENSE_FAMILY, *_language_model(ours, weights, tokenizer, prefix), assumed=config.assumed)
    empty = empty_model(ours)
    ignored = (*IGNORED, f"{_HEAD}{{rest}}")
    state, report = take_tensors(weights, empty.state_dict(), _DENSE_FAMILY, dense_names(prefix), ignored)
    model, longest = filled_model(empty, state), longest_text(config)
    if longest is not None:
        logger.warning("%s: rotary_scaling_factor is ignored, so texts are truncated to %d tokens", folder, longest)
    embedder = described_embedder(folder, model, tokenizer, PROMPTS, longest)
    return Imported(_DENSE_FAMILY, embedder, report, assumed=config.assumed)


def dense_config(config: ReleasedConfig, tokenizer: PreTrainedTokenizerBase) -> NomicBertConfig:
    config.require(qkv_proj_bias=False, mlp_fc1_bias=False, mlp_fc2_bias=False, norm_mlp=False)
    function = config.fields.get("activation_function")
    if not isinstance(function, str) or function not in _GATES:
        # Not optional: the published code's default is an MLP without a gate.
        problem = f"has activation_function {shown(function)}, supported are {', '.join(_GATES)}"
        raise InputError(str(config.path), problem, "import another checkpoint")
    width = -(-config.integer("n_inner") // _WIDTH_STEP) * _WIDTH_STEP
    fields = encoder_fields(config, tokenizer)
    return NomicBertConfig(**fields, intermediate_size=width, hidden_act=_GATES[function])


def dense_names(prefix: str = "") -> dict[str, str | Published]:
    mlp = f"{prefix}encoder.layers.{{n}}.mlp."
    gated = {"up": "fc11", "gate": "fc12", "down": "fc2"}
    names = {f"layers.{{n}}.mlp.{own}_proj.weight": f"{mlp}{name}.weight" for own, name in gated.items()}
    return {**encoder_names(prefix), **names}


def _language_model(
    config: NomicBertConfig, weights: ReleasedWeights, tokenizer: PreTrainedTokenizerBase, prefix: str
) -> tuple[LanguageModel, KeyReport]:
    """The model with its head; the head's biases, which the published model lacks, are zero."""
    empty = empty_model(config, AutoModelForMaskedLM)
    inner = f"{empty.base_model_prefix}."
    words = f"{prefix}embeddings.word_embeddings.weight"
    key_map = {
        **{f"{inner}{ours}": source for ours, source in dense_names(prefix).items()},
        f"{_HEAD}decoder.weight": words,
        f"{_HEAD}transform.{{rest}}": f"{_HEAD}transform.{{rest}}",
    }
    expected = empty.state_dict()
    biases = {name: expected.pop(name) for name in _HEAD_BIASES if name in expected}
    ignored = (*(f"{prefix}{name}" for name in IGNORED), f"{_HEAD}decoder.weight")
    state, report = take_tensors(weights, expected, _DENSE_FAMILY, key_map, ignored)
    for name, bias in biases.items():
        state[name] = torch.zeros(bias.shape, dtype=state[f"{_HEAD}decoder.weight"].dtype)
    return LanguageModel(filled_model(empty, state), tokenizer, causal=False), report


_MOE_FAMILY = "Nomic's encoder with experts"


def load_moe(folder: Path) -> Imported:
    config = ReleasedConfig(folder / "config.json")
    tokenizer = released_tokenizer(folder)
    empty = empty_model(moe_config(config, tokenizer))
    state, report = take_tensors(ReleasedWeights(folder), empty.state_dict(), _MOE_FAMILY, _moe_names(), IGNORED)
    embedder = described_embedder(folder, filled_model(empty, state), tokenizer, PROMPTS)
    return Imported(_MOE_FAMILY, embedder, report, assumed=config.assumed)


def moe_config(config: ReleasedConfig, tokenizer: PreTrainedTokenizerBase) -> RotaryMoeConfig:
    """Our config of a published one: every `moe_every_n_layers`-th layer has experts, from the second on."""
    config.require(qkv_proj_bias=True, mlp_fc1_bias=True, mlp_fc2_bias=True, activation_function="gelu", ffn_div=1)
    config.require(num_shared_experts=0, expert_choice_router=False, moe_normalize_expert_weights=False)
    config.require(rotary_scaling_factor=None)
    every, num_layers = config.integer("moe_every_n_layers", 2), config.integer("n_layer")
    return RotaryMoeConfig(
        **encoder_fields(config, tokenizer),
        intermediate_size=config.integer("n_inner"),
        hidden_act="gelu",
        moe_layers=list(range(1, num_layers, every)),
        num_experts=config.integer("num_experts"),
        experts_per_token=config.integer("moe_top_k"),
    )


def _moe_names() -> dict[str, str | Published]:
    mlp = "encoder.layers.{n}.mlp."
    return {
        **encoder_names(),
        "layers.{n}.mlp.router.weight": f"{mlp}router.layer.weight",
        "layers.{n}.mlp.experts.bias2": f"{mlp}experts.bias",
        "layers.{n}.mlp.experts.{matrix}": Published(f"{mlp}experts.mlp.{{matrix}}", stacked=True),
        "layers.{n}.mlp.{layer}": f"{mlp}{{layer}}",
    }
