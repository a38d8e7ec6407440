"""NV-Embed v1 and v2: a Mistral decoder without its causal mask, and latent-attention pooling."""

from pathlib import Path
from typing import Any

import torch
from transformers import MistralConfig, PretrainedConfig

from embeddings.common import TextSettings
from embeddings.common.text import instruction_prompt
from embeddings.interop.released.checkpoint import (
    Assumed,
    Imported,
    ReleasedConfig,
    ReleasedWeights,
    empty_model,
    filled_model,
    released_tokenizer,
    take_parts,
)
from embeddings.models.bidirectional import check_bidirectional, make_bidirectional_config
from embeddings.models.embedder import Embedder
from embeddings.models.latent_attention import LatentAttentionPooling

FAMILY = "NV-Embed"
# The model card's example; each benchmark task has its own instruction.
INSTRUCTION = "Given a question, retrieve passages that answer the question"
# Default maximum length of the published `encode`.
MAX_LENGTH = 4096

_BLOCK = "latent_attention_model.cross_attend_blocks"
_NAMES = {
    "backbone.{rest}": "embedding_model.{rest}",
    "pooling.latents": "latent_attention_model.latents",
    "pooling.attention.norm.{kind}": f"{_BLOCK}.0.norm.{{kind}}",
    "pooling.attention.norm_latents.{kind}": f"{_BLOCK}.0.norm_context.{{kind}}",
    "pooling.attention.to_query.weight": f"{_BLOCK}.0.fn.to_q.weight",
    "pooling.attention.to_key_value.weight": f"{_BLOCK}.0.fn.to_kv.weight",
    "pooling.attention.to_output.weight": f"{_BLOCK}.0.fn.to_out.weight",
    "pooling.feed_forward.norm.{kind}": f"{_BLOCK}.1.norm.{{kind}}",
    "pooling.feed_forward.expand.{kind}": f"{_BLOCK}.1.fn.net.0.{{kind}}",
    "pooling.feed_forward.contract.{kind}": f"{_BLOCK}.1.fn.net.2.{{kind}}",
}
_INTEGER_FIELDS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "max_position_embeddings"),
)


def load(folder: Path, assumed: Assumed | None = None) -> Imported:
    """The embedding model of a folder.

    Vectors have unit norm, as on the model card. Pooled tokens follow the release's rule, and a truncated text loses
    its end-of-sequence token as in the release. A text without tokens to pool has a valid vector here.
    """
    config = ReleasedConfig(folder / "config.json", assumed=assumed)
    config.require(padding_side="right", add_eos=True, mask_type="b")
    empty = empty_model(_backbone_config(config.part("text_config")))
    with torch.device("meta"):
        pooling = _pooling(config.part("latent_attention_config"), int(empty.config.hidden_size))
    parts = {"backbone": empty, "pooling": pooling}
    states, report = take_parts(ReleasedWeights(folder), parts, FAMILY, _NAMES)
    pooling.load_state_dict(states["pooling"], assign=True)
    backbone = filled_model(empty, states["backbone"])
    check_bidirectional(backbone)
    length = config.assume("max_seq_length", MAX_LENGTH, minimum=4)
    text = TextSettings(
        query_max_length=length,
        document_max_length=length,
        prompts={"query": instruction_prompt(INSTRUCTION)},
        append_eos=True,
        pool_prompt=not config.fields.get("is_mask_instruction", True),
        pooling_rule="instruction_count",
    )
    return Imported(FAMILY, Embedder(backbone, released_tokenizer(folder), pooling, text=text), report)


def _backbone_config(config: ReleasedConfig) -> PretrainedConfig:
    """The transformers config of the decoder, without the sliding window, which the release never applies."""
    config.require(model_type="bidir_mistral", rope_scaling=None, hidden_act="silu")
    rope = {"rope_type": "default", "rope_theta": float(config.number("rope_theta"))}
    fields: dict[str, Any] = {name: config.integer(name) for name in _INTEGER_FIELDS}
    ours = MistralConfig(
        **fields,
        rms_norm_eps=config.number("rms_norm_eps"),
        attention_dropout=config.number("attention_dropout", 0.0),
        initializer_range=config.number("initializer_range", 0.02),
        rope_parameters=rope,
        bos_token_id=config.integer("bos_token_id", 0),
        eos_token_id=config.integer("eos_token_id", 0),
        use_cache=False,
    )
    make_bidirectional_config(ours)
    return ours


def _pooling(config: ReleasedConfig, hidden_size: int) -> LatentAttentionPooling:
    config.require(hidden_dim=hidden_size, latent_dim=hidden_size)
    latents, heads = config.integer("num_latents_value"), config.integer("num_cross_heads")
    return LatentAttentionPooling(hidden_size, latents, heads, head_dim=config.integer("cross_dim_head"))
