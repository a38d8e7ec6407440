"""Decoders without their causal mask: NV-Embed v1 and v2 (Mistral and latent attention), and LLM2Vec's adapters."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import MistralConfig, PretrainedConfig, PreTrainedModel

from embeddings.common import InputError, OptionError, TextSettings
from embeddings.common.text import instruction_prompt
from embeddings.interop.released.checkpoint import (
    Imported,
    KeyReport,
    ReleasedConfig,
    ReleasedWeights,
    empty_model,
    filled_model,
    loaded_model,
    released_tokenizer,
    take_parts,
    take_tensors,
)
from embeddings.models.bidirectional import check_bidirectional, make_bidirectional_config
from embeddings.models.embedder import Embedder
from embeddings.models.latent_attention import LatentAttentionPooling
from embeddings.models.model_files import origin_of, read_json, resolve_model
from embeddings.models.pooling import MeanPooling

_NV_EMBED = "NV-Embed"
# The model card's example; each benchmark task has its own instruction.
_NV_EMBED_INSTRUCTION = "Given a question, retrieve passages that answer the question"
# Default maximum length of the published `encode`.
_MAX_LENGTH = 4096

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


def load_nv_embed(folder: Path) -> Imported:
    """The embedding model of a folder. Pooled tokens follow the release's rule, also for truncated texts."""
    config = ReleasedConfig(folder / "config.json")
    config.require(padding_side="right", add_eos=True, mask_type="b")
    empty = empty_model(_mistral_config(config.part("text_config")))
    with torch.device("meta"):
        pooling = _pooling(config.part("latent_attention_config"), int(empty.config.hidden_size))
    parts = {"backbone": empty, "pooling": pooling}
    states, report = take_parts(ReleasedWeights(folder), parts, _NV_EMBED, _NAMES)
    pooling.load_state_dict(states["pooling"], assign=True)
    backbone = filled_model(empty, states["backbone"])
    check_bidirectional(backbone)
    length = config.assume("max_seq_length", _MAX_LENGTH, minimum=4)
    text = TextSettings(
        query_max_length=length,
        document_max_length=length,
        prompts={"query": instruction_prompt(_NV_EMBED_INSTRUCTION)},
        append_eos=True,
        pool_prompt=not config.fields.get("is_mask_instruction", True),
        pooling_rule="instruction_count",
    )
    embedder = Embedder(backbone, released_tokenizer(folder), pooling, text=text)
    return Imported(_NV_EMBED, embedder, report, assumed=config.assumed)


def _mistral_config(config: ReleasedConfig) -> PretrainedConfig:
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


_LLM2VEC = "LLM2Vec's adapters"
ADAPTER_CONFIG = "adapter_config.json"
# The model cards' example; each benchmark task has its own instruction.
_LLM2VEC_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query:"


_INST = ("[INST] ", " [/INST]")
# The text before and after every input, by the decoder names in the published code; other decoders have none.
TEMPLATES = {
    "mistralai/Mistral-7B-Instruct-v0.2": _INST,
    "meta-llama/Llama-2-7b-chat-hf": _INST,
    "meta-llama/Meta-Llama-3-8B-Instruct": ("<|start_header_id|>user<|end_header_id|>\n\n", "<|eot_id|>"),
}


def load_llm2vec(folder: Path, base: Sequence[str] = ()) -> Imported:
    """The embedding model of an adapter, merged into its decoder together with any adapters it was trained on.

    Vectors are the mean over the tokens of the text and of the template after it. The published code truncates a text
    of more than 400 tokens between words; here the maximum length applies to the full input.
    """
    *adapters, decoder = adapter_chain(folder, base)
    # Defaults of the published code.
    path = folder / "llm2vec_config.json"
    options = read_json(path) if path.is_file() else {}
    settings = ReleasedConfig(path, {"pooling_mode": "mean", "skip_instruction": True, **options})
    settings.require(pooling_mode="mean")
    model, report = loaded_model(decoder, make_bidirectional=True)
    check_bidirectional(model)
    for adapter in reversed(adapters):
        report |= merge_adapter(model, adapter)
    innermost = ReleasedConfig(adapters[-1] / ADAPTER_CONFIG)
    before, behind = TEMPLATES.get(str(innermost.fields.get("base_model_name_or_path")), ("", ""))
    length = settings.assume("max_length", 512, minimum=4)
    text = TextSettings(
        query_max_length=length,
        document_max_length=length,
        prompts={"query": f"{before}{_LLM2VEC_INSTRUCTION} ", "document": before},
        suffix=behind,
        instruction_template=f"{before}{{instruction}} ",
        pool_prompt=not settings.fields["skip_instruction"],
        pool_start=not settings.fields["skip_instruction"],
    )
    tokenizer = released_tokenizer(decoder)
    embedder = Embedder(model, tokenizer, MeanPooling(int(model.config.hidden_size)), text=text)
    return Imported(_LLM2VEC, embedder, report, assumed=settings.assumed)


@torch.no_grad()
def merge_adapter(model: PreTrainedModel, folder: Path) -> KeyReport:
    """Add an adapter's updates to a model's weights in place: in float32, rounded once to the weight's dtype."""
    config = ReleasedConfig(folder / ADAPTER_CONFIG)
    config.require(peft_type="LORA", bias="none", fan_in_fan_out=False, use_dora=False)
    config.require(modules_to_save=None, layers_to_transform=None, rank_pattern={}, alpha_pattern={})
    rank, alpha = config.integer("r"), config.number("lora_alpha")
    scale = alpha / (rank**0.5 if config.fields.get("use_rslora") else rank)
    targets = config.fields.get("target_modules")
    names = targets if isinstance(targets, list) else []
    linear = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    layers = {name: layer for name, layer in linear.items() if name.rpartition(".")[2] in names}
    if not layers:
        problem = f"matches no layer of {type(model).__name__} (target_modules)"
        raise InputError(str(config.path), problem, "set --base to the decoder on which it was trained")
    expected = {}
    for name, layer in layers.items():
        expected[f"{name}.lora_A"] = torch.empty(rank, layer.in_features, device="meta")
        expected[f"{name}.lora_B"] = torch.empty(layer.out_features, rank, device="meta")
    weights = ReleasedWeights(folder, "adapter_model.safetensors")
    prefix = "base_model.model."
    # The tensor names of a decoder with a head contain one more "model.".
    prefix += "model." if any(name.startswith(f"{prefix}model.") for name in weights.tensors) else ""
    key_map = {"{layer}.lora_{side}": f"{prefix}{{layer}}.lora_{{side}}.weight"}
    state, report = take_tensors(weights, expected, _LLM2VEC, key_map)
    for name, layer in layers.items():
        update = state[f"{name}.lora_B"].float() @ state[f"{name}.lora_A"].float() * scale
        layer.weight.copy_((layer.weight.float() + update).to(layer.weight.dtype))
    source, used = origin_of(folder).name, report.used.items()
    merged = {f"{source}/{name}": [f"{ours.rpartition('.')[0]}.weight" for ours in names] for name, names in used}
    return KeyReport(merged, report.left)


def adapter_chain(folder: Path, base: Sequence[str] = ()) -> list[Path]:
    """The folders of a checkpoint: adapters, the last applied first, then the decoder; without adapters `folder` only.

    `base` are directories or Hub ids of the base models, in the same order; the adapters' own files supply the rest.
    """
    folders, names = [folder], list(base)
    while (folders[-1] / ADAPTER_CONFIG).is_file():
        config = ReleasedConfig(folders[-1] / ADAPTER_CONFIG)
        name = names.pop(0) if names else config.fields.get("base_model_name_or_path")
        if not isinstance(name, str):
            raise InputError(str(config.path), "does not name its base model", "set --base")
        base_folder = resolve_model(name)
        if base_folder in folders:
            raise InputError(str(config.path), f"names itself as base model: {name}", "set --base to the decoder")
        folders.append(base_folder)
    if names:
        raise OptionError("base", list(base), "has more models than there are adapters", f"remove {names[0]}")
    return folders
