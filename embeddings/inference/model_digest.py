"""A hash of a model: two models of one hash give the same vectors."""

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from embeddings.inference.encoder import Encoder

# Fields of a config that no vector depends on: where it came from, and what is chosen anew in each process.
_PASSING = (
    "_name_or_path",
    "_attn_implementation",
    "_experts_implementation",
    "architectures",
    "auto_map",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "use_cache",
)
# What a tokenizer was last asked for: the encoder asks anew each time.
_ASKED = ("truncation", "padding")


def embedder_sha256(encoder: Encoder) -> str:
    """A hash of all that decides a model's vectors: structure, configs, weights, text settings and tokenizer.

    Weights alone leave much open: the mask of attention, its heads and window, rotary bases, how many experts a token
    is sent to, how a text is normalised before it is cut into words. The dtype that they are held in here is left out,
    so a checkpoint in bfloat16 has one hash wherever it is read; who keeps vectors keeps the precision beside the hash.
    """
    embedder = encoder.embedder
    settings = {
        "pooling": embedder.pooling.arguments(),
        "normalize": embedder.normalize,
        "text": embedder.text.to_dict(),
        "configs": dict(_configs(embedder)),
        "tokenizer": _tokenizer_fields(embedder.tokenizer),
    }
    digest = hashlib.sha256(repr(embedder).encode())
    digest.update(json.dumps(settings, sort_keys=True, default=str).encode())
    for name, tensor in sorted(embedder.state_dict().items()):
        numbers = tensor.detach().cpu()
        if numbers.is_floating_point():
            numbers = numbers.to(torch.promote_types(numbers.dtype, torch.float32))
        digest.update(f"{name} {numbers.dtype} {tuple(numbers.shape)}".encode())
        digest.update(numbers.contiguous().view(-1).view(dtype=torch.uint8).numpy())
    return digest.hexdigest()


def _configs(embedder: nn.Module) -> Iterator[tuple[str, Any]]:
    """The config of every transformers model inside, and of the adapters on it, by the module's name."""
    for name, module in embedder.named_modules():
        adapters = getattr(module, "peft_config", None)
        if isinstance(adapters, dict):
            yield f"{name} adapters", {key: (made.lora_alpha, made.use_rslora) for key, made in adapters.items()}
        if isinstance(module, PreTrainedModel):
            yield name, {key: value for key, value in module.config.to_dict().items() if key not in _PASSING}


def _tokenizer_fields(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """What a tokenizer does with a text: its vocabulary, and all steps around it where the library can tell them."""
    fields: dict[str, Any] = {"vocabulary": tokenizer.get_vocab(), "special": tokenizer.special_tokens_map}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        steps = json.loads(backend.to_str())
        fields["steps"] = {key: value for key, value in steps.items() if key not in _ASKED}
    return fields
