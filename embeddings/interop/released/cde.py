"""cde-small v1 and v2: two encoders; the second embeds a text with context vectors of the first in front."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import ModernBertConfig, NomicBertConfig, PretrainedConfig, PreTrainedTokenizerBase

from embeddings.common import InputError, TextSettings
from embeddings.interop.released.checkpoint import (
    Imported,
    Published,
    ReleasedConfig,
    ReleasedWeights,
    empty_model,
    filled_model,
    released_tokenizer,
    take_parts,
)
from embeddings.interop.released.nomic import IGNORED, PROMPTS, dense_names
from embeddings.models.context_layers import ContextSlots, FirstStage, ResidualProjection, SoftPrompt
from embeddings.models.contextual import ContextualEmbedder
from embeddings.models.directory import ContextForm

FAMILY = "cde-small"
_FIRST, _SECOND = "first_stage_model.embedder.", "second_stage_model.backbone."
_NULL = "second_stage_model.sequence_dropout_null_embedding"
# Width of an attention head in both published backbones.
_HEAD_WIDTH = 64
_FORMS = {"nomic": ContextForm(adds_pooled=False), "modernbert": ContextForm(has_positions=True, pools_prompt=True)}


def load(folder: Path) -> Imported:
    """The contextual model of a folder, whose files contain the backbones' tensors but not their configs.

    cde-small-v1 is loaded as it was trained: words have positions, context vectors have none. Both versions change the
    second stage's word embeddings before the encoder, but not context vectors or soft prompts: v1 adds the token type,
    v2 applies the encoder's layer norm once more. Here this is done once, in the word-embedding table.
    """
    config = ReleasedConfig(folder / "config.json")
    config.require(transductive_tokens_per_document=1, transductive_tie_token_embeddings=False)
    config.require(embedding_output_dim=None, autoregressive_backbone=False, pooling_strategy="mean")
    kind, tokenizer, weights = _kind(config), released_tokenizer(folder), ReleasedWeights(folder)
    if kind == "nomic":
        config.require(disable_transductive_rotary_embedding=True)
    num_context, form = config.integer("transductive_corpus_size"), _FORMS[kind]
    length = config.assume("max_seq_length", 512, minimum=4)
    # Version 2 pools the tokens after the first colon.
    rule: dict[str, Any] = {"pooling_rule": "after_colon"} if form.pools_prompt else {"pool_prompt": True}
    # Trained without context dropout, a model has no null vector.
    has_null = _NULL in weights.tensors
    parts = _empty_parts(kind, config, weights, tokenizer, num_context)
    ignored = tuple(f"{stage}{name}" for stage in (_FIRST, _SECOND) for name in IGNORED)
    states, report = take_parts(weights, parts, FAMILY, _names(kind), ignored)
    states["second"] = _with_prepared_words(parts["second"].config, states["second"])
    embedder = ContextualEmbedder(
        filled_model(parts["first"], states["first"]),
        filled_model(parts["second"], states["second"]),
        tokenizer,
        num_context=num_context,
        num_soft_prompts=parts["soft_prompt"].num_soft_prompts,
        context_dropout=config.number("transductive_sequence_dropout_prob", 0.0) if has_null else 0.0,
        text=TextSettings(length, length, dict(PROMPTS), **rule),
        form=replace(form, has_null=has_null),
    )
    for part, layer in embedder.context_parts().layers().items():
        if part in states:
            layer.load_state_dict(states[part], assign=True)
    assert embedder.residual is not None
    embedder.residual.load_state_dict(states["residual"], assign=True)
    return Imported(FAMILY, embedder, report, assumed=config.assumed)


def _empty_parts(
    kind: str, config: ReleasedConfig, weights: ReleasedWeights, tokenizer: PreTrainedTokenizerBase, num_context: int
) -> dict[str, Any]:
    """All modules of the model on the meta device, by their names in the key map."""
    pad = tokenizer.pad_token_id
    first, second = (empty_model(_backbone_config(kind, config, weights, at, pad)) for at in (_FIRST, _SECOND))
    size = int(second.config.hidden_size)
    num_soft_prompts = _shape(weights, "second_stage_model.prompt_projection.2.weight")[0] // size
    with torch.device("meta"):
        layers: dict[str, nn.Module] = {
            "projection": FirstStage(nn.Identity(), int(first.config.hidden_size), size).projection,
            "soft_prompt": SoftPrompt(num_soft_prompts, size),
            "residual": ResidualProjection(size),
        }
        if _NULL in weights.tensors:
            layers["slots"] = ContextSlots(num_context, size)
    return {"first": first, "second": second, **layers}


def _kind(config: ReleasedConfig) -> str:
    """The encoder of both stages, `nomic` or `modernbert`, by its published name."""
    first = config.fields.get("embedder")
    names = [str(first), str(config.fields.get("dataset_backbone") or first)]
    for kind, mark in (("nomic", "nomic-bert"), ("modernbert", "modernbert")):
        if all(mark in name.lower() for name in names):
            return kind
    problem = f"names the backbones {' and '.join(names)}; supported are nomic-bert-2048 and ModernBERT-base"
    raise InputError(str(config.path), problem, "import another checkpoint")


def _shape(weights: ReleasedWeights, name: str) -> tuple[int, ...]:
    if name not in weights.tensors:
        problem = f"lacks the tensor {name} of {FAMILY}"
        raise InputError(str(weights.folder), problem, "use a complete copy of the checkpoint")
    return tuple(weights.tensors[name].shape)


def _backbone_config(
    kind: str, config: ReleasedConfig, weights: ReleasedWeights, prefix: str, pad_token_id: Any
) -> PretrainedConfig:
    """The config of one stage's encoder: sizes from its tensors, everything else as published for that encoder."""
    is_nomic = kind == "nomic"
    words = "embeddings.word_embeddings.weight" if is_nomic else "embeddings.tok_embeddings.weight"
    layers, inner = ("encoder.layers", "mlp.fc11") if is_nomic else ("layers", "mlp.Wi")
    rows, width = _shape(weights, f"{prefix}{words}")
    names = [name for name in weights.tensors if name.startswith(f"{prefix}{layers}.")]
    num_layers = len({name.removeprefix(f"{prefix}{layers}.").partition(".")[0] for name in names})
    common = {
        "vocab_size": rows,
        "hidden_size": width,
        "num_attention_heads": _num_heads(config, width),
        "num_hidden_layers": num_layers,
        "pad_token_id": pad_token_id,
    }
    inner_width = _shape(weights, f"{prefix}{layers}.0.{inner}.weight")[0]
    if not is_nomic:
        every = config.assume("global_attn_every_n_layers", 3)
        thetas: dict[Any, float] = {
            "full_attention": config.assume("global_rope_theta", 160000.0),
            "sliding_attention": config.assume("local_rope_theta", 10000.0),
        }
        return ModernBertConfig(
            **common,
            intermediate_size=inner_width // 2,
            max_position_embeddings=config.assume("max_position_embeddings", 8192),
            norm_eps=config.assume("norm_eps", 1e-5),
            local_attention=config.assume("local_attention", 128),
            layer_types=["sliding_attention" if n % every else "full_attention" for n in range(num_layers)],
            rope_parameters={kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in thetas.items()},
        )
    return NomicBertConfig(
        **common,
        intermediate_size=inner_width,
        type_vocab_size=_shape(weights, f"{prefix}embeddings.token_type_embeddings.weight")[0],
        max_position_embeddings=config.assume("max_position_embeddings", 2048),
        layer_norm_eps=config.assume("layer_norm_eps", 1e-12),
        rope_parameters={"rope_type": "default", "rope_theta": config.assume("rope_theta", 1000.0)},
    )


def _num_heads(config: ReleasedConfig, width: int) -> int:
    if width % _HEAD_WIDTH:
        problem = f"has no num_attention_heads, and heads of width {_HEAD_WIDTH} cannot divide a hidden size of {width}"
        raise InputError(str(config.path), problem, "import another checkpoint")
    return config.assume("num_attention_heads", width // _HEAD_WIDTH)


def _names(kind: str) -> dict[str, str | Published]:
    """The key map (see `take_tensors`)."""
    backbones: dict[str, str | Published] = {"first.{rest}": f"{_FIRST}{{rest}}", "second.{rest}": f"{_SECOND}{{rest}}"}
    if kind == "nomic":
        stages = (("first", _FIRST), ("second", _SECOND))
        backbones = {f"{part}.{ours}": place for part, at in stages for ours, place in dense_names(at).items()}
    return {
        **backbones,
        "projection.{n}.{kind}": "first_stage_model.mlp.{n}.{kind}",
        "soft_prompt.layers.{n}.{kind}": "second_stage_model.prompt_projection.{n}.{kind}",
        "residual.layers.{n}.{kind}": "second_stage_model.output_projection.{n}.{kind}",
        "slots.null_H": _NULL,
    }


def _with_prepared_words(config: PretrainedConfig, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The second stage's weights with the changes to word embeddings (see `load`) applied to their table.

    transformers adds the token type to context vectors too, unlike v1's encoder, so that table is set to zero.
    """
    if not isinstance(config, ModernBertConfig):
        words, types = "embeddings.word_embeddings.weight", "embeddings.token_type_embeddings.weight"
        return {**state, words: state[words] + state[types][0], types: torch.zeros_like(state[types])}
    words, norm = "embeddings.tok_embeddings.weight", state["embeddings.norm.weight"]
    table = state[words].float()
    normed = F.layer_norm(table, table.shape[1:], norm.float(), eps=config.norm_eps)
    return {**state, words: normed.to(state[words].dtype)}
