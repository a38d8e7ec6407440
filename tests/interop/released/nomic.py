"""Nomic's checkpoints in their published format, and their forward pass for one text."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedTokenizerFast

from tests.helpers.tiny import wordpiece_tokenizer
from tests.interop.released.published import State, random_state, write_checkpoint

HIDDEN, HEADS, LAYERS, EXPERTS, INNER = 32, 4, 4, 4, 24
OFF = ("rotary_emb_interleaved", "prenorm", "parallel_block", "causal")
COMMON = {
    "model_type": "nomic_bert",
    "architectures": ["NomicBertModel"],
    "n_embd": HIDDEN,
    "n_head": HEADS,
    "n_layer": LAYERS,
    "n_inner": INNER,
    "n_positions": 2048,
    "max_trained_positions": 2048,
    "vocab_size": 380,
    "pad_vocab_size_multiple": 64,
    "rotary_emb_fraction": 1.0,
    **dict.fromkeys(OFF, False),
    **dict.fromkeys(("rotary_emb_scale_base", "rotary_scaling_factor", "use_rms_norm")),
}
BIASES = ("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias")
DENSE = COMMON | {
    "rotary_emb_base": 1000,
    "layer_norm_epsilon": 1e-12,
    "activation_function": "swiglu",
    "type_vocab_size": 2,
    **dict.fromkeys(BIASES, False),
}
MOE = COMMON | {
    "rotary_emb_base": 10000,
    "layer_norm_epsilon": 1e-5,
    "activation_function": "gelu",
    "type_vocab_size": 1,
    **dict.fromkeys(BIASES, True),
    "moe_every_n_layers": 2,
    "num_experts": EXPERTS,
    "moe_top_k": 2,
    "moe_normalize_expert_weights": False,
    "num_shared_experts": 0,
    "expert_choice_router": False,
    "ffn_div": 1,
}


def nomic_state(config: dict[str, Any], prefix: str = "", layers: int = LAYERS) -> State:
    """Random tensors with the published names and shapes."""
    is_moe = "num_experts" in config
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (384, HIDDEN),
        "embeddings.token_type_embeddings.weight": (config["type_vocab_size"], HIDDEN),
        "emb_ln.weight": (HIDDEN,),
        "emb_ln.bias": (HIDDEN,),
    }
    for layer in range(layers):
        names = {"attn.Wqkv.weight": (3 * HIDDEN, HIDDEN), "attn.out_proj.weight": (HIDDEN, HIDDEN)}
        for norm in ("norm1", "norm2"):
            names |= {f"{norm}.weight": (HIDDEN,), f"{norm}.bias": (HIDDEN,)}
        if config["qkv_proj_bias"]:
            names |= {"attn.Wqkv.bias": (3 * HIDDEN,), "attn.out_proj.bias": (HIDDEN,)}
        if not is_moe:
            names |= {f"mlp.{gate}.weight": (256, HIDDEN) for gate in ("fc11", "fc12")}
            names |= {"mlp.fc2.weight": (HIDDEN, 256)}
        elif layer % 2 == 1:
            names |= {f"mlp.experts.mlp.{w}": (EXPERTS * INNER, HIDDEN) for w in ("w1", "w2")}
            names |= {"mlp.router.layer.weight": (EXPERTS, HIDDEN), "mlp.experts.bias": (HIDDEN,)}
        else:
            names |= {"mlp.fc1.weight": (INNER, HIDDEN), "mlp.fc1.bias": (INNER,)}
            names |= {"mlp.fc2.weight": (HIDDEN, INNER), "mlp.fc2.bias": (HIDDEN,)}
        shapes |= {f"encoder.layers.{layer}.{name}": shape for name, shape in names.items()}
    return random_state({f"{prefix}{name}": shape for name, shape in shapes.items()})


def nomic_folder(folder: Path, config: dict[str, Any], **state: Any) -> tuple[Path, State, PreTrainedTokenizerFast]:
    """A published folder with its tensors and tokenizer."""
    tensors, tokenizer = nomic_state(config, **state), wordpiece_tokenizer()
    return write_checkpoint(folder, config, tensors, tokenizer), tensors, tokenizer


def nomic_states(state: State, config: dict[str, Any], ids_L: Tensor) -> Tensor:
    """The last layer's states of one text, (L, H)."""
    words = state["embeddings.word_embeddings.weight"][ids_L]
    return encoder_states(state, config, words + state["embeddings.token_type_embeddings.weight"][0])


def encoder_states(
    state: State, config: dict[str, Any], inputs_LH: Tensor, position_L: Tensor | None = None, layers: int = LAYERS
) -> Tensor:
    """The last layer's states for the sums of word and type embeddings; positions are 0, 1, … by default."""
    eps, width = config["layer_norm_epsilon"], HIDDEN // HEADS

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, (HIDDEN,), state[f"{name}.weight"], state[f"{name}.bias"], eps)

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, state[f"{name}.weight"], state.get(f"{name}.bias"))

    position_L = torch.arange(len(inputs_LH)) if position_L is None else position_L
    x = norm(inputs_LH, "emb_ln")
    for layer in range(layers):
        name = f"encoder.layers.{layer}"
        query, key, value = linear(x, f"{name}.attn.Wqkv").view(len(x), 3, HEADS, width).unbind(1)
        query, key = (rotated(part, position_L, config) for part in (query, key))
        score_ALL = torch.einsum("iae,jae->aij", query, key) / width**0.5
        read = torch.einsum("aij,jae->iae", score_ALL.softmax(-1), value).reshape(len(x), HIDDEN)
        x = norm(x + linear(read, f"{name}.attn.out_proj"), f"{name}.norm1")
        x = norm(x + mlp(state, config, x, f"{name}.mlp"), f"{name}.norm2")
    return x


def rotated(x_LAE: Tensor, position_L: Tensor, config: dict[str, Any]) -> Tensor:
    """Rotary embedding of queries or keys: rotates the first half of each head against the second."""
    width, base = x_LAE.shape[-1], float(config["rotary_emb_base"])
    angle = position_L[:, None] / base ** (torch.arange(0, width, 2) / width)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    first, second = x_LAE.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def mlp(state: State, config: dict[str, Any], x: Tensor, name: str) -> Tensor:
    """The gated MLP, the plain one, or the experts, token by token."""
    if f"{name}.fc11.weight" in state:
        inner = F.linear(x, state[f"{name}.fc11.weight"]) * F.silu(F.linear(x, state[f"{name}.fc12.weight"]))
        return F.linear(inner, state[f"{name}.fc2.weight"])
    if f"{name}.fc1.weight" in state:
        inner = F.gelu(F.linear(x, state[f"{name}.fc1.weight"], state[f"{name}.fc1.bias"]))
        return F.linear(inner, state[f"{name}.fc2.weight"], state[f"{name}.fc2.bias"])
    w1, w2 = (state[f"{name}.experts.mlp.{w}"] for w in ("w1", "w2"))
    rows = []
    for token in x:
        share = (state[f"{name}.router.layer.weight"] @ token).softmax(0)
        row = state[f"{name}.experts.bias"].clone()
        for expert in share.argsort(descending=True)[: config["moe_top_k"]].tolist():
            own = slice(expert * INNER, (expert + 1) * INNER)
            row += share[expert] * (F.gelu(w1[own] @ token) @ w2[own])
        rows.append(row)
    return torch.stack(rows)
