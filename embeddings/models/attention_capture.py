"""The queries and keys of chosen attention layers, read where the layer hands them to its attention function.

This file travels inside model directories: it imports nothing but torch, transformers and its siblings.
"""

import copy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .anchor_weights import CapturedAttention
from .portable import TextTransformer

NAME = "embeddings_capture"


class AttentionCapture:
    """Reads the queries and keys of some layers of a backbone, while `open`.

    Each layer gets its own copy of the backbone's config, which names a function that notes what it is given and calls
    the backbone's own. The model's config, weights and saved files stay as they are. A layer that runs again for the
    backward pass, when the capture is closed, notes nothing. `found` holds what each layer was given, by its `id`.
    Layers are counted from 0 or, negative, from the last; impossible ones are a `ValueError`.
    """

    def __init__(self, backbone: nn.Module, layers: Sequence[int]) -> None:
        found = attention_layers(backbone)
        if not layers or any(not -len(found) <= layer < len(found) for layer in layers):
            raise ValueError(f"layers {list(layers)} must be among the {len(found)} attention layers that can be read")
        if len({layer % len(found) for layer in layers}) < len(layers):
            raise ValueError(f"layers {list(layers)} must name each layer once")
        AttentionInterface.register(NAME, _captured_attention)
        self._modules = [found[layer] for layer in layers]
        self._own_configs: list[Any] = []
        self.found: dict[int, CapturedAttention] | None = None
        self.attach()

    def attach(self) -> None:
        """Reach the layers, as a new capture does, unless another capture has one of them."""
        if any(module.config._attn_implementation == NAME for module in self._modules):
            raise ValueError("another pooling reads this backbone's attention already")
        self._own_configs = [module.config for module in self._modules]
        for module, own in zip(self._modules, self._own_configs, strict=True):
            config = copy.copy(own)
            config._attn_implementation_internal = NAME
            module.config = config
            # A plain attribute: a capture is no part of the module's state.
            object.__setattr__(module, "embeddings_capture", (self, own._attn_implementation))

    def detach(self) -> None:
        """Leave the layers as they were found, until `attach`."""
        for module, own in zip(self._modules, self._own_configs, strict=True):
            module.config = own
            object.__delattr__(module, "embeddings_capture")

    @contextmanager
    def open(self) -> Iterator[Callable[[], list[CapturedAttention]]]:
        """Inside, the backbone runs once, then the function given has the layers' queries and keys in order."""
        found: dict[int, CapturedAttention] = {}
        self.found = found

        def layers() -> list[CapturedAttention]:
            if any(id(module) not in found for module in self._modules):
                raise RuntimeError("the backbone ran without calling its attention function")
            return [found[id(module)] for module in self._modules]

        try:
            yield layers
        finally:
            self.found = None


def attention_layers(backbone: nn.Module) -> list[Any]:
    """The self-attention modules that go through transformers' attention interface, in the order of the layers."""
    found = [
        module
        for module in backbone.modules()
        if isinstance(getattr(module, "layer_idx", None), int)
        and hasattr(module, "is_causal")
        and hasattr(getattr(module, "config", None), "_attn_implementation")
    ]
    return sorted(found, key=lambda module: module.layer_idx)


def _captured_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **arguments: Any
) -> Any:
    """The attention function of a tapped layer: note the queries and keys, then do what the backbone would do."""
    capture, inner = module.embeddings_capture
    for name in ("softcap", "position_bias"):
        if arguments.get(name) is not None:
            raise ValueError(f"attention with {name} cannot be read for pooling; use another backbone or pooling")
    is_causal = arguments.get("is_causal")
    is_causal = module.is_causal if is_causal is None else is_causal
    scaling = arguments.get("scaling")
    # Where there is a mask it says all; two-dimensional ones, of flash attention, are padding alone. What comes with
    # texts without padding says nothing.
    is_row = arguments.get("cu_seq_lens_q") is not None
    mask = None if attention_mask is None or attention_mask.dim() == 2 or is_row else attention_mask
    scaling = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    is_causal, window = bool(is_causal) and mask is None, arguments.get("sliding_window") if mask is None else None
    if is_row and attention_mask is not None:
        is_causal, window = visible_range(module, arguments)
    if capture.found is not None:
        capture.found[id(module)] = CapturedAttention(query, key, mask, is_causal, scaling, window)
    return own_attention(module, inner)(module, query, key, value, attention_mask, **arguments)


def own_attention(module: nn.Module, name: str) -> Callable[..., Any]:
    """The attention function that a layer has under this name."""
    if name == "eager":
        eager: Callable[..., Any] = sys.modules[type(module).__module__].eager_attention_forward
        return eager
    return ALL_ATTENTION_FUNCTIONS[name]  # type: ignore[no-any-return]


def visible_range(module: Any, arguments: Mapping[str, Any]) -> tuple[bool, int | None]:
    """Whether a layer is causal, and how many places away its queries see no key: what transformers' masks say.

    A decoder whose config turned the causal mask off sees its window's last place too.
    """
    called, window = arguments.get("is_causal"), arguments.get("sliding_window")
    is_causal = bool(module.is_causal if called is None else called)
    return is_causal, None if window is None else int(window) + (called is False)


class CapturingTransformer(TextTransformer):
    """Texts to token states and the attention of some layers: the first module of a pipeline whose pooling reads it.

    `tapped_layers` is their name in `text_settings.json`; `text` are the arguments of `TextTransformer`.
    """

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
