"""MGH's token weights from the attention that tokens receive, without storing the full attention matrix.

This file travels inside model directories: it imports only torch.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

Axis = Literal["key", "query"]

# Number of scores in a tile, over texts, heads, queries and keys: 8 MiB in float32, about the size of a CPU's cache.
TILE_SCORES = 1 << 21
# A float32 product overflows beyond e^88.
_MAX_LOG = 87.0


@dataclass(frozen=True, slots=True, eq=False)
class CapturedAttention:
    """The queries and keys of one attention layer, as they enter the softmax, after rotation; a head is E wide.

    `mask` is the layer's mask in addition to padding, broadcastable to (N, A, L, L): bool, True where a query sees a
    key, or additive. `is_causal` additionally hides later keys, and `window` keys at this distance or more.
    """

    query_NALE: Tensor
    key_NGLE: Tensor  # G divides A, and A / G heads share a key (grouped-query attention)
    mask: Tensor | None
    is_causal: bool
    scaling: float  # factor of the inner products
    window: int | None = None


Sums = Callable[[CapturedAttention, Tensor, Axis, bool], Tensor]


def tiled_sums(attention: CapturedAttention, is_token_NL: Tensor, axis: Axis = "key", per_head: bool = False) -> Tensor:
    """The sums of logarithms in `anchor_weights`, (N, L), or (N, A, L) with `per_head`, by tiles of queries."""
    query_NALE, key_NGLE = attention.query_NALE, attention.key_NGLE
    constant = replace(attention, query_NALE=query_NALE.detach(), key_NGLE=key_NGLE.detach())
    weight: Tensor = _AnchorWeights.apply(  # type: ignore[no-untyped-call]
        query_NALE, key_NGLE, constant, is_token_NL, axis, per_head
    )
    return weight


def anchor_weights(
    attention: CapturedAttention,
    is_token_NL: Tensor,
    axis: Axis = "key",
    per_head: bool = False,
    by_visible_queries: bool = False,
    sums: Sums = tiled_sums,
) -> Tensor:
    """The weight of each token before normalisation over the text.

    With a_jk the attention of query j to key k in a head, and K the number of the text's tokens without padding:

        key axis:    w_i = sum over heads and queries j of log(K a_ji + 1)    attention that token i receives
        query axis:  w_i = sum over heads and keys j of log(K a_ij + 1)       uniformity of token i's attention

    Args:
        is_token_NL: False at padding, (N, L) bool. Padding neither receives nor adds weight.
        per_head: Whether each head's weights are first divided by their sum, so that heads count equally. Otherwise a
            head with uniform attention counts several times as much as one with an attention sink.
        by_visible_queries: Whether a token's weight is divided by the number of queries that see it.

    Returns:
        weight_NL: (N, L) float32 (float64 for float64 states), >= 0, 0 at padding.

    Memory: the scores of a tile of queries, at most `TILE_SCORES` or those of one query, forward and backward; the
        backward pass recomputes them.
    Precision: scores, softmax and sums in float32 whatever the input, under autocast too; the logarithm is taken of
        the product of several heads.
    Source: MGH, §2.2, Eq. 3. Differs: the key axis, because the paper's text, Fig. 5 and App. D.2 describe the
        attention that a token receives, while Eq. 3 as printed sums over a row of the softmax.
    """
    weight = sums(attention, is_token_NL, axis, per_head)
    if per_head:
        weight = (weight / weight.sum(dim=2, keepdim=True).clamp(min=torch.finfo(weight.dtype).tiny)).sum(dim=1)
    if by_visible_queries:
        weight = weight / visible_queries(attention, is_token_NL).clamp(min=1)
    return weight


@torch.no_grad()
def visible_queries(attention: CapturedAttention, is_token_NL: Tensor) -> Tensor:
    """The number of queries that see each token, averaged over heads, (N, L) float32."""
    count_NL = torch.zeros(is_token_NL.shape, device=is_token_NL.device)
    for rows in _tiles(attention):
        seen = _visible(attention, is_token_NL, rows) & is_token_NL[:, None, rows, None]
        count_NL += seen.float().mean(dim=1).sum(dim=1)
    return count_NL


class _AnchorWeights(torch.autograd.Function):
    """The sums of logarithms, (N, L), or (N, A, L) per head, differentiable in queries and keys."""

    @staticmethod
    def forward(
        ctx: Any,
        query_NALE: Tensor,
        key_NGLE: Tensor,
        attention: CapturedAttention,
        is_token_NL: Tensor,
        axis: Axis,
        per_head: bool,
    ) -> Tensor:
        num_texts, num_heads, length, _ = query_NALE.shape
        dtype = torch.promote_types(query_NALE.dtype, torch.float32)
        shape = (num_texts, num_heads, length) if per_head else (num_texts, length)
        weight = query_NALE.new_zeros(shape, dtype=dtype)
        count_N = is_token_NL.sum(dim=1)
        max_tokens = int(count_N.amax()) if len(count_N) else 0
        # Number of heads whose factors, each at most K + 1, multiply without overflow.
        groups = 1 if per_head or not max_tokens else max(1, int(_MAX_LOG / math.log(max_tokens + 1.0)))
        for rows in _tiles(attention):
            gain = _attention(attention, is_token_NL, rows).mul_(count_N.to(dtype)[:, None, None, None]).add_(1.0)
            if per_head:
                log = gain.log_()
            else:
                products = [part.prod(dim=1) for part in torch.split(gain, groups, dim=1)]
                log = torch.stack(products, dim=1).log_().sum(dim=1)
            if axis == "key":
                weight += log.sum(dim=-2)
            else:
                weight[..., rows] = log.sum(dim=-1)
        ctx.save_for_backward(query_NALE, key_NGLE)
        ctx.facts = attention, is_token_NL, axis, per_head
        return weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """d log(K a + 1) = K / (K a + 1) da, then the softmax's gradient; each tile's attention is recomputed."""
        query_NALE, key_NGLE = ctx.saved_tensors
        attention, is_token_NL, axis, per_head = ctx.facts
        gradient = gradients[0] if per_head else gradients[0][:, None]
        num_shared = query_NALE.shape[1] // key_NGLE.shape[1]
        to_query, to_key = torch.zeros_like(query_NALE), torch.zeros_like(key_NGLE, dtype=gradient.dtype)
        key_NALE = key_NGLE.repeat_interleave(num_shared, dim=1).to(gradient.dtype)
        count_N111 = is_token_NL.sum(dim=1).to(gradient.dtype)[:, None, None, None]
        for rows in _tiles(attention):
            attention_NArL = _attention(attention, is_token_NL, rows)
            outer = gradient[..., None, :] if axis == "key" else gradient[..., rows, None]
            slope = outer * count_N111 / (attention_NArL * count_N111 + 1.0)
            slope = attention_NArL * (slope - (attention_NArL * slope).sum(dim=-1, keepdim=True)) * attention.scaling
            with torch.autocast(slope.device.type, enabled=False):
                to_query[:, :, rows] = (slope @ key_NALE).to(to_query.dtype)
                to_keys_NALE = slope.transpose(-1, -2) @ query_NALE[:, :, rows].to(gradient.dtype)
            to_key += torch.unflatten(to_keys_NALE, 1, (-1, num_shared)).sum(dim=2)
        return to_query, to_key.to(key_NGLE.dtype), None, None, None, None


def _tiles(attention: CapturedAttention) -> list[slice]:
    """Slices of queries with at most `TILE_SCORES` scores each, or one query."""
    num_texts, num_heads, length, _ = attention.query_NALE.shape
    rows = max(1, TILE_SCORES // max(1, num_texts * num_heads * length))
    return [slice(start, min(start + rows, length)) for start in range(0, length, rows)]


def _attention(attention: CapturedAttention, is_token_NL: Tensor, rows: slice) -> Tensor:
    """The softmax of some queries over all keys, (N, A, r, L), zero in rows and columns of padding."""
    query_NArE, key_NGLE = attention.query_NALE[:, :, rows], attention.key_NGLE
    dtype = torch.promote_types(query_NArE.dtype, torch.float32)
    num_shared = query_NArE.shape[1] // key_NGLE.shape[1]
    # One product for all heads that share a key.
    grouped = torch.unflatten(query_NArE.to(dtype) * attention.scaling, 1, (-1, num_shared)).flatten(2, 3)
    # Autocast would round the scores.
    with torch.autocast(query_NArE.device.type, enabled=False):
        score = torch.unflatten(grouped @ key_NGLE.to(dtype).transpose(-1, -2), 2, (num_shared, -1)).flatten(1, 2)
    if attention.mask is not None and attention.mask.dtype != torch.bool:
        score += _rows_of(attention.mask, rows)
    seen = _visible(attention, is_token_NL, rows)
    # On a CPU, masking costs half as much as a softmax.
    if bool(seen.all()):
        return score.softmax(dim=-1)
    score = score.masked_fill_(~seen, -torch.inf).softmax(dim=-1)
    # A query that sees no key has NaN in its row, and rows of padding must not add weight.
    pays = is_token_NL[:, None, rows, None] & seen.any(dim=-1, keepdim=True)
    return score.masked_fill_(~pays, 0.0)


def _visible(attention: CapturedAttention, is_token_NL: Tensor, rows: slice) -> Tensor:
    """The keys that some queries see, broadcastable to (N, A, r, L) bool."""
    seen = is_token_NL[:, None, None, :]
    if attention.mask is not None:
        part = _rows_of(attention.mask, rows)
        # An additive mask hides a key by the dtype's minimum, or less.
        seen = seen & (part if part.dtype == torch.bool else part > torch.finfo(part.dtype).min / 2)
    if attention.is_causal or attention.window is not None:
        position_L = torch.arange(is_token_NL.shape[1], device=is_token_NL.device)
        distance_rL = position_L[rows, None] - position_L[None, :]
        if attention.is_causal:
            seen = seen & (distance_rL >= 0)
        if attention.window is not None:
            seen = seen & (distance_rL.abs() < attention.window)
    return seen


def _rows_of(mask: Tensor, rows: slice) -> Tensor:
    return mask if mask.shape[-2] == 1 else mask[..., rows, :]
