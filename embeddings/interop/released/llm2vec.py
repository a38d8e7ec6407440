"""LLM2Vec: low-rank adapters of a decoder that is read without its causal mask."""

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
# The model cards' example; the benchmark's tasks have one each.
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query:"


class Template(NamedTuple):
    """What stands around every text of a decoder that was trained to chat."""

    before: str
    behind: str


_INST = Template("[INST] ", " [/INST]")
# By the names that the published code knows them by; other decoders have none.
TEMPLATES = {
    "mistralai/Mistral-7B-Instruct-v0.2": _INST,
    "meta-llama/Llama-2-7b-chat-hf": _INST,
    "meta-llama/Meta-Llama-3-8B-Instruct": Template("<|start_header_id|>user<|end_header_id|>\n\n", "<|eot_id|>"),
}


def load(folder: Path, base: Sequence[str] = (), assumed: Assumed | None = None) -> Imported:
    """The embedding model of an adapter, merged into what it adapts: a decoder, or one with other adapters merged.

    Vectors are the mean over the text's own tokens and what the template puts behind it, of unit length. The published
    code cuts a text longer than 400 tokens between words; here it is cut as any text, to the whole length.
    """
    *adapters, decoder = adapter_chain(folder, base)
    # The published code's own settings, where the folder has none.
    path = folder / "llm2vec_config.json"
    given = read_json(path) if path.is_file() else {}
    settings = ReleasedConfig(path, {"pooling_mode": "mean", "skip_instruction": True, **given}, assumed=assumed)
    settings.require(pooling_mode="mean")
    model, report = loaded_model(decoder, make_bidirectional=True)
    check_bidirectional(model)
    for adapter in reversed(adapters):
        report |= merge_adapter(model, adapter)
    innermost = ReleasedConfig(adapters[-1] / ADAPTER_CONFIG)
    template = TEMPLATES.get(str(innermost.fields.get("base_model_name_or_path")), Template("", ""))
    length = settings.assume("max_length", 512, least=4)
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

    The report names the weight that each tensor went into, and the adapter in front of the tensor.
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
        what = f"names no layer of {type(model).__name__} (target_modules)"
        raise InputError(str(config.path), what, "give the decoder that it was trained on, by --base")
    expected = {}
    for name, layer in layers.items():
        expected[f"{name}.lora_A"] = torch.empty(rank, layer.in_features, device="meta")
        expected[f"{name}.lora_B"] = torch.empty(layer.out_features, rank, device="meta")
    weights = ReleasedWeights(folder, "adapter_model.safetensors")
    outer = "base_model.model."
    # A decoder with its head has one name more on the way.
    outer += "model." if any(name.startswith(f"{outer}model.") for name in weights.shapes) else ""
    places = {"{layer}.lora_{side}": f"{outer}{{layer}}.lora_{{side}}.weight"}
    state, report = take_tensors(weights, expected, FAMILY, places)
    for name, layer in layers.items():
        update = state[f"{name}.lora_B"].float() @ state[f"{name}.lora_A"].float() * scale
        layer.weight.copy_((layer.weight.float() + update).to(layer.weight.dtype))
    source, used = origin_of(folder).name, report.used.items()
    into = {f"{source}/{name}": [f"{ours.rpartition('.')[0]}.weight" for ours in names] for name, names in used}
    return KeyReport(into, report.left)


def adapter_chain(folder: Path, base: Sequence[str] = ()) -> list[Path]:
    """The folders that a checkpoint is read from: adapters, the outermost first, then the decoder; else its own alone.

    `base` are directories or Hub ids of what is adapted, the outermost first; what is not named is taken from the
    adapters' own files. An adapter that was trained on a merged one names only the decoder: name both.
    """
    folders, named = [folder], list(base)
    while (folders[-1] / ADAPTER_CONFIG).is_file():
        config = ReleasedConfig(folders[-1] / ADAPTER_CONFIG)
        name = named.pop(0) if named else config.fields.get("base_model_name_or_path")
        if not isinstance(name, str):
            raise InputError(str(config.path), "does not say what it adapts", "name it by --base")
        found = resolve_model(name)
        if found in folders:
            raise InputError(str(config.path), f"adapts {name}, which is itself", "name the decoder by --base")
        folders.append(found)
    if named:
        raise OptionError("base", list(base), "names more than there are adapters", f"leave {named[0]} out")
    return folders
