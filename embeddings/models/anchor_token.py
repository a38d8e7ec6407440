"""Anchor-token-aware pooling (MGH): tokens weigh as much as the attention that they receive.

This file travels inside model directories: it imports nothing but torch and the siblings that travel with it.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .anchor_fused import fastest_sums
from .anchor_weights import Axis, TappedAttention, anchor_weights
from .pooling import Pooling


class AnchorTokenPooling(Pooling):
    """The mean of the pooled tokens' states, weighted by the attention that the tokens receive in the last layer.

    w_i = sum over heads and queries of log(K a + 1), with K the text's own length (see `anchor_weights`);
    v = sum over pooled tokens of w_i / (their sum) H_i. A text without a pooled token gets the zero vector.

    Args:
        hidden_size: Width of the states, H.
        axis: `key`: what a token receives. `query`: Eq. 3 as it is printed: how evenly a token looks about.
        layers: Whose attention counts, from 0 or, negative, from the last; the weights of several are averaged.
        per_head: Whether heads count alike; else, as in the paper, each by its own sum.
        include_first: Whether the text's first token, often a sink of attention, may be pooled. Prompts are left out of
            the pooling by the text settings.
        detach: Whether the weights are constants for the gradient; the paper does not say.
        by_visible_queries: Whether a token's weight is divided by the number of queries that see it: what the key axis
            needs under a causal mask, where early tokens are seen by more.

    Precision: weights and sums in float32 whatever the input dtype, under autocast too.
    Memory: linear in the length (see `anchor_weights`); on a GPU by fused kernels where they pass a check at their
        first use (see `anchor_fused`).
    Raises:
        ValueError: If the axis is unknown or there is no layer.

    Source: MGH, §2.2, Eq. 3 to 5. Differs: the key axis by default, for which see `anchor_weights`.
    """

    def __init__(
        self,
        hidden_size: int,
        axis: Axis = "key",
        layers: Sequence[int] = (-1,),
        per_head: bool = False,
        include_first: bool = True,
        detach: bool = False,
        by_visible_queries: bool = False,
    ) -> None:
        super().__init__(hidden_size)
        if axis not in ("key", "query"):
            raise ValueError(f"pooling.axis must be key or query, got {axis!r}")
        if not layers:
            raise ValueError("pooling.layers must name a layer; -1 is the last")
        self.axis: Axis = axis
        self.layers = tuple(layers)
        self.per_head = per_head
        self.include_first = include_first
        self.detach = detach
        self.by_visible_queries = by_visible_queries

    @property
    def tapped_layers(self) -> tuple[int, ...]:
        """The layers whose queries and keys `forward` is to be given."""
        return self.layers

    @property
    def needs_both_ways(self) -> bool:
        """Whether the weights are of no use under a causal mask."""
        return self.axis == "key" and not self.by_visible_queries

    def forward(
        self,
        hidden_NLH: Tensor,
        pooling_mask_NL: Tensor,
        attention_mask_NL: Tensor | None = None,
        attention: Sequence[TappedAttention] = (),
    ) -> Tensor:
        """The weighted mean over the pooled tokens, (N, H) float32.

        Args:
            hidden_NLH: States of the last layer, (N, L, H) float, padded on the right.
            pooling_mask_NL: True where a token enters the pooling, (N, L) bool.
            attention_mask_NL: False at padding, (N, L) bool.
            attention: Queries and keys of the tapped layers.
        """
        weight_NL = self.weights(pooling_mask_NL, attention_mask_NL, attention)
        state_NLH = hidden_NLH.to(weight_NL.dtype).masked_fill(~pooling_mask_NL.unsqueeze(-1), 0.0)
        with torch.autocast(state_NLH.device.type, enabled=False):
            return (weight_NL[:, None] @ state_NLH)[:, 0]

    def weights(
        self,
        pooling_mask_NL: Tensor,
        attention_mask_NL: Tensor | None,
        attention: Sequence[TappedAttention],
    ) -> Tensor:
        """The weight of each token, (N, L) float32: 0 where it is not pooled, 1 over the text; arguments as above."""
        if len(attention) != len(self.layers):
            raise ValueError(f"needs the attention of {len(self.layers)} layers, got {len(attention)}")
        is_token_NL = pooling_mask_NL if attention_mask_NL is None else attention_mask_NL.bool()
        pooled_NL = pooling_mask_NL if self.include_first else _without_first(pooling_mask_NL)
        shares = []
        for layer in attention:
            weight_NL = anchor_weights(
                layer, is_token_NL, self.axis, self.per_head, self.by_visible_queries, fastest_sums
            )
            weight_NL = weight_NL.masked_fill(~pooled_NL, 0.0)
            total_N1 = weight_NL.sum(dim=1, keepdim=True)
            shares.append(weight_NL / total_N1.clamp(min=torch.finfo(weight_NL.dtype).tiny))
        weight_NL = shares[0] if len(shares) == 1 else torch.stack(shares).mean(dim=0)
        return weight_NL.detach() if self.detach else weight_NL

    def arguments(self) -> dict[str, Any]:
        """The constructor's arguments past the hidden size."""
        return {
            "axis": self.axis,
            "layers": list(self.layers),
            "per_head": self.per_head,
            "include_first": self.include_first,
            "detach": self.detach,
            "by_visible_queries": self.by_visible_queries,
        }


def _without_first(pooling_mask_NL: Tensor) -> Tensor:
    """The mask without the text's first token, where another one is pooled."""
    rest_NL = pooling_mask_NL.clone()
    rest_NL[:, 0] = False
    return torch.where(rest_NL.any(dim=1, keepdim=True), rest_NL, pooling_mask_NL)
