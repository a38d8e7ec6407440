"""Captures the queries and keys of chosen attention layers at the call of their attention function.

This file travels inside model directories: it imports only torch, transformers and its siblings.
"""

import copy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .pooling import CapturedAttention
from .portable import TextTransformer

NAME = "embeddings_capture"


class AttentionCapture:
    """Captures the queries and keys of some layers of a backbone while it is `open`.

    Each layer gets a copy of the backbone's config that names another attention function: it stores queries and keys
    and calls the original function. The model's config, weights and saved files do not change. A layer that is
    recomputed in the backward pass, after the capture is closed, stores nothing.
    """

    def __init__(self, backbone: nn.Module, layers: Sequence[int]) -> None:
        modules = attention_layers(backbone)
        if not layers or any(not -len(modules) <= layer < len(modules) for layer in layers):
            raise ValueError(
                f"layers {list(layers)} must be among the {len(modules)} attention layers that can be read"
            )
        if len({layer % len(modules) for layer in layers}) < len(layers):
            raise ValueError(f"layers {list(layers)} must name each layer once")
        AttentionInterface.register(NAME, _captured_attention)
        self._modules = [modules[layer] for layer in layers]
        self._original_configs: list[Any] = []
        self.captured: dict[int, CapturedAttention] | None = None  # by the `id` of the layer
        self.attach()

    def attach(self) -> None:
        """Replace the configs of the layers; a `ValueError` if another capture has replaced one of them."""
        if any(module.config._attn_implementation == NAME for module in self._modules):
            raise ValueError("another pooling reads this backbone's attention already")
        self._original_configs = [module.config for module in self._modules]
        for module, original in zip(self._modules, self._original_configs, strict=True):
            config = copy.copy(original)
            config._attn_implementation_internal = NAME
            module.config = config
            # Not registered in the module's state.
            object.__setattr__(module, "embeddings_capture", (self, original._attn_implementation))

    def detach(self) -> None:
        for module, original in zip(self._modules, self._original_configs, strict=True):
            module.config = original
            object.__delattr__(module, "embeddings_capture")

    @contextmanager
    def open(self) -> Iterator[Callable[[], list[CapturedAttention]]]:
        """Capture one run of the backbone; afterwards the yielded function returns the layers' attention in order."""
        captured: dict[int, CapturedAttention] = {}
        self.captured = captured

        def layers() -> list[CapturedAttention]:
            if any(id(module) not in captured for module in self._modules):
                raise RuntimeError("the backbone ran without calling its attention function")
            return [captured[id(module)] for module in self._modules]

        try:
            yield layers
        finally:
            self.captured = None


def attention_layers(backbone: nn.Module) -> list[Any]:
    """The self-attention modules that use transformers' attention interface, in the order of the layers."""
    modules = [
        module
        for module in backbone.modules()
        if isinstance(getattr(module, "layer_idx", None), int)
        and hasattr(module, "is_causal")
        and hasattr(getattr(module, "config", None), "_attn_implementation")
    ]
    return sorted(modules, key=lambda module: module.layer_idx)


def _captured_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **arguments: Any
) -> Any:
    """The attention function of a captured layer: stores queries and keys, then calls the original function."""
    capture, original = module.embeddings_capture
    for name in ("softcap", "position_bias"):
        if arguments.get(name) is not None:
            raise ValueError(f"attention with {name} cannot be read for pooling; use another backbone or pooling")
    is_causal = arguments.get("is_causal")
    is_causal = module.is_causal if is_causal is None else is_causal
    scaling = arguments.get("scaling")
    # A mask includes causality and window, except a two-dimensional one of flash attention, which only has padding, and
    # the placeholder that comes with unpadded texts.
    is_row = arguments.get("cu_seq_lens_q") is not None
    mask = None if attention_mask is None or attention_mask.dim() == 2 or is_row else attention_mask
    scaling = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    is_causal, window = bool(is_causal) and mask is None, arguments.get("sliding_window") if mask is None else None
    if is_row and attention_mask is not None:
        is_causal, window = visible_range(module, arguments)
    if capture.captured is not None:
        capture.captured[id(module)] = CapturedAttention(query, key, mask, is_causal, scaling, window)
    return own_attention(module, original)(module, query, key, value, attention_mask, **arguments)


def own_attention(module: nn.Module, name: str) -> Callable[..., Any]:
    if name == "eager":
        eager: Callable[..., Any] = sys.modules[type(module).__module__].eager_attention_forward
        return eager
    return ALL_ATTENTION_FUNCTIONS[name]  # type: ignore[no-any-return]


def visible_range(module: Any, arguments: Mapping[str, Any]) -> tuple[bool, int | None]:
    """Whether a layer is causal, and the distance from which its queries see no key, as in transformers' masks."""
    argument, window = arguments.get("is_causal"), arguments.get("sliding_window")
    is_causal = bool(module.is_causal if argument is None else argument)
    if window is not None and argument is False:
        window = module.config.sliding_window + 1
    return is_causal, window


class CapturingTransformer(TextTransformer):
    """Maps texts to token states and the attention of some layers, for a pooling that uses it."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tapped_layers: Sequence[int], **text: Any
    ) -> None:
        super().__init__(model, tokenizer, **text)
        self.captured_layers = list(tapped_layers)
        self.capture = AttentionCapture(model, tapped_layers)

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "tapped_layers": self.captured_layers}

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        with self.capture.open() as captured:
            return {**super().forward(features), "captured_attention": captured()}
