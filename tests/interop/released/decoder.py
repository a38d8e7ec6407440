"""A tiny Mistral's tensors under their published names, and its forward pass for one text without the causal mask."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.interop.released.nomic import rotated
from tests.interop.released.published import State

HIDDEN, HEADS, GROUPS, LAYERS, INNER, ROWS = 32, 4, 2, 2, 48, 512
FIELDS: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "num_hidden_layers": LAYERS,
    "intermediate_size": INNER,
    "vocab_size": ROWS,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 32768,
    "sliding_window": 4,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def decoder_shapes(prefix: str = "") -> dict[str, tuple[int, ...]]:
    """The published names and shapes."""
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (ROWS, HIDDEN), "norm.weight": (HIDDEN,)}
    narrow = HIDDEN // HEADS * GROUPS
    for layer in range(LAYERS):
        for name, rows in (("q", HIDDEN), ("k", narrow), ("v", narrow), ("o", HIDDEN)):
            shapes[f"layers.{layer}.self_attn.{name}_proj.weight"] = (rows, HIDDEN)
        for name, shape in (("gate", (INNER, HIDDEN)), ("up", (INNER, HIDDEN)), ("down", (HIDDEN, INNER))):
            shapes[f"layers.{layer}.mlp.{name}_proj.weight"] = shape
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"layers.{layer}.{name}.weight"] = (HIDDEN,)
    return {f"{prefix}{name}": shape for name, shape in shapes.items()}


def decoder_states(state: State, ids: list[int]) -> Tensor:
    """The states after the last norm with bidirectional attention, (L, H)."""
    width, length = HIDDEN // HEADS, len(ids)

    def turned(x: Tensor) -> Tensor:
        return rotated(x, torch.arange(length), {"rotary_emb_base": FIELDS["rope_theta"]})

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * state[f"{name}.weight"]

    x = state["embed_tokens.weight"][ids]
    for layer in range(LAYERS):
        name = f"layers.{layer}"
        inputs = norm(x, f"{name}.input_layernorm")
        query, key, value = (
            (inputs @ state[f"{name}.self_attn.{p}_proj.weight"].T).unflatten(1, (-1, width)) for p in "qkv"
        )
        key, value = (part.repeat_interleave(HEADS // GROUPS, 1) for part in (turned(key), value))
        score = torch.einsum("iae,jae->aij", turned(query), key) / width**0.5
        read = torch.einsum("aij,jae->iae", score.softmax(-1), value).flatten(1)
        x = x + read @ state[f"{name}.self_attn.o_proj.weight"].T
        inputs = norm(x, f"{name}.post_attention_layernorm")
        gate, up, down = (state[f"{name}.mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
        x = x + (F.silu(inputs @ gate.T) * (inputs @ up.T)) @ down.T
    return norm(x, "norm")
