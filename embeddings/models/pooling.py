"""Poolings without weights: one vector from the states of a text's tokens.

This file travels inside model directories: it imports nothing but torch.
"""

from typing import Any

import torch
from torch import Tensor, nn


class Pooling(nn.Module):
    """What turns the states of a text's tokens into one vector; the base of every pooling.

    A config names a class and the arguments past the first (`Callable[[int], Pooling]`), since the hidden size is
    known only when the backbone is there. A pooling that travels in a model directory imports nothing but torch and
    its siblings here.

    Args:
        hidden_size: Width of the states, H. The vectors are as wide.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.hidden_size = hidden_size

    def forward(self, hidden_NLH: Tensor, pooling_mask_NL: Tensor) -> Tensor:
        """One vector a text.

        Args:
            hidden_NLH: States of the last layer, (N, L, H) float, padded on the right.
            pooling_mask_NL: True where a token enters the pooling, (N, L) bool.

        Returns:
            Vectors, (N, H), float32 (float64 where the states are).
        """
        raise NotImplementedError

    def arguments(self) -> dict[str, Any]:
        """The constructor's arguments past the hidden size, as plain types: what a model directory keeps."""
        return {}

    @property
    def tapped_layers(self) -> tuple[int, ...]:
        """Layers of the backbone whose queries and keys `forward` is given beside the states; none by default."""
        return ()


class MeanPooling(Pooling):
    """The mean of the pooled tokens' states.

    A text without a pooled token gets the zero vector.

    Precision: sums in float32 whatever the input dtype, under autocast too.
    """

    def forward(self, hidden_NLH: Tensor, pooling_mask_NL: Tensor) -> Tensor:
        """The mean over the pooled tokens, (N, H) float32."""
        state_NLH = _at_least_float32(hidden_NLH).masked_fill(~pooling_mask_NL.unsqueeze(-1), 0.0)
        return mean_of_sum(state_NLH.sum(dim=1), pooling_mask_NL)


class ClsPooling(Pooling):
    """The state of the first token, be it pooled or not.

    An encoder trained this way gathers the text in its [CLS] token, so a prompt left out of the pooling changes
    nothing here.
    """

    def forward(self, hidden_NLH: Tensor, pooling_mask_NL: Tensor) -> Tensor:
        """The first token's state, (N, H) float32."""
        return _at_least_float32(hidden_NLH[:, 0])


class LastTokenPooling(Pooling):
    """The state of the last pooled token: the end-of-sequence token where one is appended.

    A text without a pooled token gets its first token's state.
    """

    def forward(self, hidden_NLH: Tensor, pooling_mask_NL: Tensor) -> Tensor:
        """The last pooled token's state, (N, H) float32."""
        position_L = torch.arange(hidden_NLH.shape[1], device=hidden_NLH.device)
        last_N = (position_L * pooling_mask_NL).amax(dim=1)
        row_N = torch.arange(hidden_NLH.shape[0], device=hidden_NLH.device)
        return _at_least_float32(hidden_NLH[row_N, last_N])


class WeightedMeanPooling(Pooling):
    """The mean of the pooled tokens' states, weighted by position: token i (from 1) weighs i.

    Made for causal decoders, whose later tokens have seen more. Positions count from the text's first token, so
    leaving a prompt out of the pooling keeps the weights of the tokens after it. A text without a pooled token gets
    the zero vector.

    Precision: sums in float32 whatever the input dtype, under autocast too.
    Source: Muennighoff 2022, arXiv:2202.08904, Eq. 2.
    """

    def forward(self, hidden_NLH: Tensor, pooling_mask_NL: Tensor) -> Tensor:
        """The position-weighted mean over the pooled tokens, (N, H) float32."""
        state_NLH = _at_least_float32(hidden_NLH).masked_fill(~pooling_mask_NL.unsqueeze(-1), 0.0)
        position_L = torch.arange(1, state_NLH.shape[1] + 1, device=state_NLH.device, dtype=state_NLH.dtype)
        weight_NL = position_L * pooling_mask_NL
        total_N = weight_NL.sum(dim=1, keepdim=True).clamp(min=1.0)
        return (state_NLH * (weight_NL / total_N).unsqueeze(-1)).sum(dim=1)


def mean_of_sum(sum_NH: Tensor, pooling_mask_NL: Tensor) -> Tensor:
    """Sums over the pooled tokens divided by their number; zero where there is none."""
    return sum_NH / pooling_mask_NL.sum(dim=1, keepdim=True).clamp(min=1)


def _at_least_float32(state: Tensor) -> Tensor:
    return state.to(torch.promote_types(state.dtype, torch.float32))
