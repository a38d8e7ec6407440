"""Poolings: one vector from the states of a text's tokens; and what other files ask of a backbone.

This file travels inside model directories: it imports only torch and transformers.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


class TextPlaces(NamedTuple):
    """The layout of N texts whose T tokens are concatenated without padding."""

    length_N: Tensor  # number of tokens of each text, at least 1, (N,) int64
    start_N: Tensor  # index of each text's first token, (N,) int64
    text_T: Tensor  # index of each token's text, (T,) int64
    position_T: Tensor  # position of each token in its text, from 0, (T,) int64
    longest: int  # number of tokens of the longest text, L

    @classmethod
    def of(cls, length_N: Tensor, num_tokens: int, longest: int) -> Self:
        """The layout of texts with these lengths; their sum and maximum are arguments to avoid a device sync."""
        start_N = length_N.cumsum(0) - length_N
        text_T = torch.arange(len(length_N), device=length_N.device)
        text_T = text_T.repeat_interleave(length_N, output_size=num_tokens)
        position_T = torch.arange(num_tokens, device=length_N.device) - start_N[text_T]
        return cls(length_N, start_N, text_T, position_T, longest)

    def padded(self, value_T: Tensor) -> Tensor:
        """Values of the tokens, (T, …), padded with zeros to (N, L, …)."""
        zeros_NL = value_T.new_zeros(len(self.length_N), self.longest, *value_T.shape[1:])
        return zeros_NL.index_put((self.text_T, self.position_T), value_T)

    def sums(self, value_T: Tensor) -> Tensor:
        """The sum over each text's tokens, (N, …), in the input's dtype and deterministic."""
        return torch.segment_reduce(value_T, "sum", lengths=self.length_N, unsafe=True)

    def means(self, state_TH: Tensor, pooling_mask_T: Tensor) -> Tensor:
        """The mean over each text's pooled tokens, (N, H) float32 or float64; zero for a text without one."""
        state_TH = _at_least_float32(state_TH).masked_fill(~pooling_mask_T.unsqueeze(-1), 0.0)
        count_N = self.sums(pooling_mask_T.to(state_TH.dtype))
        return self.sums(state_TH) / count_N.clamp(min=1).unsqueeze(-1)


@dataclass(frozen=True, slots=True, eq=False)
class CapturedAttention:
    """The queries and keys of one attention layer, as they enter the softmax, after rotation; a head is E wide."""

    query_NALE: Tensor
    key_NGLE: Tensor  # G divides A, and A / G heads share a key (grouped-query attention)
    mask: Tensor | None  # broadcastable to (N, A, L, L): bool, True where a query sees a key, or additive
    is_causal: bool
    scaling: float  # factor of the inner products
    window: int | None = None  # hides keys at this distance or more


class Pooling(nn.Module):
    """Base class: maps the states of a text's tokens to one vector of the same width.

    A config names a class and its arguments except `hidden_size`, H, which the backbone determines. Each argument is
    stored as an attribute of the same name.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.hidden_size = hidden_size

    def forward(self, hidden_NLH: Tensor, pooling_mask_NL: Tensor) -> Tensor:
        """One vector per text.

        Args:
            hidden_NLH: States of the last layer, (N, L, H) float, padded on the right.
            pooling_mask_NL: True where a token enters the pooling, (N, L) bool.

        Returns:
            Vectors, (N, H), float32 (float64 for float64 states).
        """
        raise NotImplementedError

    def of_unpadded(self, hidden_TH: Tensor, pooling_mask_T: Tensor, places: TextPlaces, *attention: Any) -> Tensor:
        """The result of `forward` from the states of T tokens without padding; this default pads them."""
        vector_NH: Tensor = self(places.padded(hidden_TH), places.padded(pooling_mask_T), *attention)
        return vector_NH

    def token_states(self, token_TH: Tensor) -> Tensor:
        """The pooled tokens' states that the vector is the mean of, (T, H); unchanged unless overridden."""
        return token_TH

    def arguments(self) -> dict[str, Any]:
        """The constructor's arguments except the hidden size, as JSON types, for a model directory."""
        values = {name: getattr(self, name) for name in signature(type(self)).parameters if name != "hidden_size"}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    @property
    def captured_layers(self) -> tuple[int, ...]:
        """Layers of the backbone whose queries and keys `forward` also receives; none by default."""
        return ()


class MeanPooling(Pooling):
    """The mean of the pooled tokens' states, summed in float32; zero for a text without a pooled token."""

    def forward(self, hidden_NLH: Tensor, pooling_mask_NL: Tensor) -> Tensor:
        state_NLH = _at_least_float32(hidden_NLH).masked_fill(~pooling_mask_NL.unsqueeze(-1), 0.0)
        return state_NLH.sum(dim=1) / pooling_mask_NL.sum(dim=1, keepdim=True).clamp(min=1)

    def of_unpadded(self, hidden_TH: Tensor, pooling_mask_T: Tensor, places: TextPlaces, *attention: Any) -> Tensor:
        return places.means(hidden_TH, pooling_mask_T)


class ClsPooling(Pooling):
    """The state of the first token, such as [CLS], whatever the pooling mask."""

    def forward(self, hidden_NLH: Tensor, pooling_mask_NL: Tensor) -> Tensor:
        return _at_least_float32(hidden_NLH[:, 0])

    def of_unpadded(self, hidden_TH: Tensor, pooling_mask_T: Tensor, places: TextPlaces, *attention: Any) -> Tensor:
        return _at_least_float32(hidden_TH[places.start_N])


class LastTokenPooling(Pooling):
    """The state of the last pooled token; the first token's if none is pooled."""

    def forward(self, hidden_NLH: Tensor, pooling_mask_NL: Tensor) -> Tensor:
        position_L = torch.arange(hidden_NLH.shape[1], device=hidden_NLH.device)
        last_N = (position_L * pooling_mask_NL).amax(dim=1)
        row_N = torch.arange(hidden_NLH.shape[0], device=hidden_NLH.device)
        return _at_least_float32(hidden_NLH[row_N, last_N])

    def of_unpadded(self, hidden_TH: Tensor, pooling_mask_T: Tensor, places: TextPlaces, *attention: Any) -> Tensor:
        last_N = torch.zeros_like(places.start_N)
        last_N = last_N.scatter_reduce(0, places.text_T, places.position_T * pooling_mask_T, "amax")
        return _at_least_float32(hidden_TH[places.start_N + last_N])


class WeightedMeanPooling(Pooling):
    """The mean of the pooled tokens' states, weighted by position i from 1; zero if none is pooled.

    For causal decoders, whose later tokens see more of the text. Positions count from the text's first token, pooled
    or not.

    Source: Muennighoff 2022, arXiv:2202.08904, Eq. 2.
    """

    def forward(self, hidden_NLH: Tensor, pooling_mask_NL: Tensor) -> Tensor:
        state_NLH = _at_least_float32(hidden_NLH).masked_fill(~pooling_mask_NL.unsqueeze(-1), 0.0)
        position_L = torch.arange(1, state_NLH.shape[1] + 1, device=state_NLH.device, dtype=state_NLH.dtype)
        weight_NL = position_L * pooling_mask_NL
        total_N = weight_NL.sum(dim=1, keepdim=True).clamp(min=1.0)
        return (state_NLH * (weight_NL / total_N).unsqueeze(-1)).sum(dim=1)

    def of_unpadded(self, hidden_TH: Tensor, pooling_mask_T: Tensor, places: TextPlaces, *attention: Any) -> Tensor:
        state_TH = _at_least_float32(hidden_TH).masked_fill(~pooling_mask_T.unsqueeze(-1), 0.0)
        weight_T = (places.position_T + 1).to(state_TH.dtype) * pooling_mask_T
        share_T = weight_T / places.sums(weight_T).clamp(min=1.0)[places.text_T]
        return places.sums(state_TH * share_T.unsqueeze(-1))


def _at_least_float32(state: Tensor) -> Tensor:
    return state.to(torch.promote_types(state.dtype, torch.float32))


# Questions about a backbone.


def plain_backbone(backbone: nn.Module) -> PreTrainedModel:
    """The Hugging Face model that peft wraps, or the backbone itself."""
    return backbone if isinstance(backbone, PreTrainedModel) else backbone.get_base_model()  # type: ignore[operator]


def without_cache(backbone: nn.Module) -> dict[str, bool]:
    """Arguments of a forward pass that disable a decoder's key-value cache; empty for an encoder."""
    return {"use_cache": False} if getattr(plain_backbone(backbone).config, "use_cache", False) else {}


def learned_positions(model: PreTrainedModel) -> nn.Embedding | None:
    """The table of position embeddings that a model adds to its inputs, or None (rotary positions)."""
    table = getattr(getattr(model, "embeddings", None), "position_embeddings", None)
    return table if isinstance(table, nn.Embedding) else None


def first_position(table: nn.Embedding) -> int:
    """The position of a text's first token: 0 for BERT, one after the padding index for RoBERTa and XLM-R."""
    return 0 if table.padding_idx is None else table.padding_idx + 1


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode; the mode of every module is restored."""
    modes = [(module, module.training) for module in model.modules()]
    model.train(False)
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
