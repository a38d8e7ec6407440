"""LLM2Vec: LoRA adapters of a decoder that runs without its causal mask."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from embeddings.common import InputError, OptionError, TextSettings
from embeddings.interop.released.checkpoint import (
    Assumed,
    Imported,
    KeyReport,
    ReleasedConfig,
    ReleasedWeights,
    loaded_model,
    released_tokenizer,
    take_tensors,
)
from embeddings.models.bidirectional import check_bidirectional
from embeddings.models.embedder import Embedder
from embeddings.models.model_files import origin_of, read_json, resolve_model
from embeddings.models.pooling import MeanPooling

FAMILY = "LLM2Vec's adapters"
ADAPTER_CONFIG = "adapter_config.json"
# The model cards' example; each benchmark task has its own instruction.
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query:"


class Template(NamedTuple):
    """The text before and after every input of a chat model."""

    before: str
    behind: str


_INST = Template("[INST] ", " [/INST]")
# By the decoder names in the published code; other decoders have no template.
TEMPLATES = {
    "mistralai/Mistral-7B-Instruct-v0.2": _INST,
    "meta-llama/Llama-2-7b-chat-hf": _INST,
    "meta-llama/Meta-Llama-3-8B-Instruct": Template("<|start_header_id|>user<|end_header_id|>\n\n", "<|eot_id|>"),
}


def load(folder: Path, base: Sequence[str] = (), assumed: Assumed | None = None) -> Imported:
    """The embedding model of an adapter, merged into its decoder together with any adapters it was trained on.

    Vectors are the mean over the tokens of the text and of the template after it, of unit norm. The published code
    truncates a text of more than 400 tokens between words; here the maximum length applies to the full input.
    """
    *adapters, decoder = adapter_chain(folder, base)
    # Defaults of the published code.
    path = folder / "llm2vec_config.json"
    options = read_json(path) if path.is_file() else {}
    settings = ReleasedConfig(path, {"pooling_mode": "mean", "skip_instruction": True, **options}, assumed=assumed)
    settings.require(pooling_mode="mean")
    model, report = loaded_model(decoder, make_bidirectional=True)
    check_bidirectional(model)
    for adapter in reversed(adapters):
        report |= merge_adapter(model, adapter)
    innermost = ReleasedConfig(adapters[-1] / ADAPTER_CONFIG)
    template = TEMPLATES.get(str(innermost.fields.get("base_model_name_or_path")), Template("", ""))
    length = settings.assume("max_length", 512, minimum=4)
    text = TextSettings(
        query_max_length=length,
        document_max_length=length,
        prompts={"query": f"{template.before}{INSTRUCTION} ", "document": template.before},
        suffix=template.behind,
        instruction_template=f"{template.before}{{instruction}} ",
        pool_prompt=not settings.fields["skip_instruction"],
        pool_start=not settings.fields["skip_instruction"],
    )
    tokenizer = released_tokenizer(decoder)
    return Imported(FAMILY, Embedder(model, tokenizer, MeanPooling(int(model.config.hidden_size)), text=text), report)


@torch.no_grad()
def merge_adapter(model: PreTrainedModel, folder: Path) -> KeyReport:
    """Add an adapter's updates to a model's weights in place: in float32, rounded once to the weight's dtype.

    The report maps each tensor, with the adapter's name in front, to the weight into which it was merged.
    """
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
    prefix += "model." if any(name.startswith(f"{prefix}model.") for name in weights.shapes) else ""
    key_map = {"{layer}.lora_{side}": f"{prefix}{{layer}}.lora_{{side}}.weight"}
    state, report = take_tensors(weights, expected, FAMILY, key_map)
    for name, layer in layers.items():
        update = state[f"{name}.lora_B"].float() @ state[f"{name}.lora_A"].float() * scale
        layer.weight.copy_((layer.weight.float() + update).to(layer.weight.dtype))
    source, used = origin_of(folder).name, report.used.items()
    merged = {f"{source}/{name}": [f"{ours.rpartition('.')[0]}.weight" for ours in names] for name, names in used}
    return KeyReport(merged, report.left)


def adapter_chain(folder: Path, base: Sequence[str] = ()) -> list[Path]:
    """The folders of a checkpoint: adapters, the last applied first, then the decoder; without adapters `folder` only.

    `base` are directories or Hub ids of the base models, in the same order; the adapters' own files supply the rest.
    The files of an adapter that was trained on a merged one name the decoder only: set both in `base`.
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
