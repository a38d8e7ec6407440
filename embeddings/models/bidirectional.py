"""Turning a decoder's causal mask off, and proving that it is off."""

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from embeddings.common import OptionError

_FIX = "use an architecture that transformers builds its masks for, or another attn_implementation"


def make_bidirectional_config(config: PretrainedConfig) -> None:
    """Switch a decoder's config to attention in both directions without a window; it stays so when saved and reloaded.

    transformers builds its mask from `config.is_causal`. The flag of a single layer is not enough: the eager path
    never reads it, and the others lose it as soon as a batch has padding.

    Where layers with and without a window differ in their rotary base (Gemma 3) the window is part of what was
    trained, so it stays, in both directions.
    """
    config.is_causal = False
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None and _rope_by_layer_type(config):
        return
    if getattr(config, "sliding_window", None) is not None:
        config.sliding_window = None
    if getattr(config, "use_sliding_window", False):
        config.use_sliding_window = False
    if layer_types is not None:
        config.layer_types = ["full_attention" if kind == "sliding_attention" else kind for kind in layer_types]


def make_bidirectional(model: PreTrainedModel) -> None:
    """Turn the causal mask and the window of a built decoder off, in place, its config included.

    Source: Lee 2024, arXiv:2405.17428, §3.1.
    """
    make_bidirectional_config(model.config)
    kinds = getattr(model.config, "layer_types", None)
    for module in model.modules():
        # Layers keep copies of what they read from the config when they were built.
        if getattr(module, "is_causal", None) is True:
            module.is_causal = False  # type: ignore[assignment]
        if kinds is None or not _rope_by_layer_type(model.config):
            if isinstance(getattr(module, "sliding_window", None), int):
                module.sliding_window = None  # type: ignore[assignment]
            if getattr(module, "layer_type", None) == "sliding_attention":
                module.layer_type = "full_attention"  # type: ignore[assignment]
            if getattr(module, "has_sliding_layers", False) is True:
                module.has_sliding_layers = False  # type: ignore[assignment]


@torch.no_grad()
def check_bidirectional(model: PreTrainedModel) -> None:
    """Check that each text's first token sees its last one, and that neither sees padding.

    Runs three tiny forward passes of two texts of unlike length, so that the path with padding is the one tested.

    Raises:
        OptionError: If attention is causal still, or padding changes a state; the message names the model and the
            attention implementation.
    """
    vocab_size = int(model.config.vocab_size)
    ids_NL = torch.arange(24).view(2, 12) % (vocab_size - 4) + 3
    attention_NL = torch.ones(2, 12, dtype=torch.int64)
    attention_NL[1, 9:] = 0
    changed_NL = ids_NL.clone()
    changed_NL[0, 11] = vocab_size - 1
    changed_NL[1, 8] = vocab_size - 1
    was_training = model.training
    model.train(False)
    try:
        first_NH = _states(model, ids_NL, attention_NL)[:, 0]
        moved_N = (_states(model, changed_NL, attention_NL)[:, 0] - first_NH).abs().amax(dim=1)
        alone_LH = _states(model, ids_NL[1:, :9], attention_NL[1:, :9])[0]
    finally:
        model.train(was_training)
    name = f"{type(model).__name__} with {model.config._attn_implementation} attention"
    if float(moved_N.min()) == 0.0:
        rule = "cannot take effect: the first token does not see the last one"
        raise OptionError("backbone.bidirectional", name, rule, _FIX)
    spread = float((alone_LH[0] - first_NH[1]).abs().max() / alone_LH[0].abs().max().clamp(min=1e-6))
    if spread > (1e-3 if model.dtype in (torch.float32, torch.float64) else 0.1):
        raise OptionError("backbone.bidirectional", name, f"lets padding change a state (by {spread:.1e})", _FIX)


@torch.no_grad()
def check_causal(model: PreTrainedModel) -> None:
    """Check that a text's first token does not see its last one: what a model is to predict would be given away.

    Raises:
        OptionError: If it does.
    """
    ids_NL = (torch.arange(12, device=model.device)[None] % (int(model.config.vocab_size) - 4)) + 3
    changed_NL = ids_NL.clone()
    changed_NL[0, -1] = int(model.config.vocab_size) - 1
    all_NL = torch.ones_like(ids_NL)
    was_training = model.training
    model.train(False)
    try:
        first_H, other_H = (_states(model, ids, all_NL)[0, 0] for ids in (ids_NL, changed_NL))
    finally:
        model.train(was_training)
    if float((first_H - other_H).abs().max()) > 1e-5 * float(first_H.abs().max()):
        rule = "needs a causal mask: here the first token sees the last one"
        raise OptionError("model.objective", "causal", rule, "take a decoder that was saved with its mask, or mntp")


def _states(model: PreTrainedModel, ids_NL: Tensor, attention_NL: Tensor) -> Tensor:
    device = model.device
    output = model(input_ids=ids_NL.to(device), attention_mask=attention_NL.to(device))
    states: Tensor = output.last_hidden_state
    return states.float()


def _rope_by_layer_type(config: PretrainedConfig) -> bool:
    parameters = getattr(config, "rope_parameters", None)
    return isinstance(parameters, dict) and "sliding_attention" in parameters
