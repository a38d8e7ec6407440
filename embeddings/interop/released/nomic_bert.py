"""What all checkpoints of Nomic's encoder share: the fields of config.json and the names of tensors."""

from typing import Any

from transformers import PreTrainedTokenizerBase

from embeddings.common import InputError
from embeddings.interop.released.checkpoint import ReleasedConfig
from embeddings.interop.released.key_map import Published

# Each names what the text is for; training put one before every text, and its tokens are pooled.
# Under mteb's types of tasks they are those that the published scores are from, by mteb's own entry of these models.
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

# In front of every name where the checkpoint holds a language model.
LANGUAGE_MODEL = "bert."
# A pooler that no embedding reads, and tables that follow from the config.
LEFT = ("pooler.dense.{kind}", "encoder.layers.{n}.attn.rotary_emb.inv_freq")


def encoder_names(prefix: str = "") -> dict[str, str | Published]:
    """Our names outside the MLPs, and where each lies.

    Args:
        prefix: What stands in front of every published name.
    """
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
    """The arguments of our config that do not depend on the MLPs.

    Raises:
        InputError: If a field is none, or asks for arithmetic that is not known here.
    """
    config.require(
        prenorm=False,
        parallel_block=False,
        causal=False,
        use_rms_norm=False,
        rotary_emb_fraction=1.0,
        rotary_emb_interleaved=False,
        rotary_emb_scale_base=None,
    )
    step, rows = config.integer("pad_vocab_size_multiple", default=1), config.integer("vocab_size")
    trained = _trained_positions(config)
    positions = longest_text(config) or max(trained, config.integer("n_positions", default=trained))
    width, num_heads = config.integer("n_embd"), config.integer("n_head")
    if width % (2 * num_heads):
        what = f"has n_embd {width} and n_head {num_heads}, which make no heads that can be rotated in halves"
        raise InputError(str(config.path), what, "take config.json and weights from one checkpoint")
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
    """The most tokens of a text, where `rotary_scaling_factor` asks to turn longer ones more slowly, else None.

    The published code then takes the rotary base from the longest text that the process has met, so a vector depends on
    the texts beside it and before it. Here every text turns as in training, and a longer one is cut: all others have
    the published vectors.

    Raises:
        InputError: If a field is none.
    """
    if config.fields.get("rotary_scaling_factor") is None:
        return None
    config.number("rotary_scaling_factor")
    return _trained_positions(config)


def _trained_positions(config: ReleasedConfig) -> int:
    return config.assume("max_trained_positions", 2048)
