"""Anchor-token-aware pooling (MGH): tokens are weighted by the attention that they receive.

The full attention matrix is never stored. This file travels inside model directories: it imports only torch and its
siblings.
"""

import functools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from .pooling import CapturedAttention, Pooling, TextPlaces

Axis = Literal["key", "query"]

# Number of scores in a tile, over texts, heads, queries and keys: 8 MiB in float32, about the size of a CPU's cache.
TILE_SCORES = 1 << 21
# A float32 product overflows beyond e^88.
_MAX_LOG = 87.0
Sums = Callable[[CapturedAttention, Tensor, Axis, bool], Tensor]


class AnchorTokenPooling(Pooling):
    """The mean of the pooled tokens' states, weighted by the attention that the tokens receive in the last layer.

    w_i = sum over heads and queries of log(K a + 1), with K the text's length (see `anchor_weights`);
    v = sum over pooled tokens of w_i / (their sum) H_i. A text without a pooled token gets the zero vector.

    Args:
        hidden_size: Width of the states, H.
        axis: `key`: the attention that a token receives. `query`: Eq. 3 as printed, the uniformity of its attention.
        layers: Layers whose attention is used, from 0 or, negative, from the last; their weights are averaged.
        per_head: Whether heads count equally; otherwise, as in the paper, each by its sum.
        include_first: Whether the text's first token, often an attention sink, may be pooled.
        detach: Whether to stop the gradient at the weights; the paper does not state it.
        by_visible_queries: Whether a token's weight is divided by the number of queries that see it. The key axis needs
            this under a causal mask, where more queries see early tokens.

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
    def captured_layers(self) -> tuple[int, ...]:
        return self.layers

    @property
    def needs_both_ways(self) -> bool:
        return self.axis == "key" and not self.by_visible_queries

    def forward(
        self,
        hidden_NLH: Tensor,
        pooling_mask_NL: Tensor,
        attention_mask_NL: Tensor | None = None,
        attention: Sequence[CapturedAttention] = (),
    ) -> Tensor:
        """The weighted mean, (N, H) float32."""
        weight_NL = self.weights(pooling_mask_NL, attention_mask_NL, attention)
        state_NLH = hidden_NLH.to(weight_NL.dtype).masked_fill(~pooling_mask_NL.unsqueeze(-1), 0.0)
        with torch.autocast(state_NLH.device.type, enabled=False):
            return (weight_NL[:, None] @ state_NLH)[:, 0]

    def of_unpadded(self, hidden_TH: Tensor, pooling_mask_T: Tensor, places: TextPlaces, *attention: Any) -> Tensor:
        """Pads the states, queries and keys: the scores of each text are L x L."""
        is_token_NL = places.padded(torch.ones_like(pooling_mask_T))
        layers = [_padded_attention(layer, places) for layer in attention[0]]
        return self(places.padded(hidden_TH), places.padded(pooling_mask_T), is_token_NL, layers)  # type: ignore[no-any-return]

    def weights(
        self, pooling_mask_NL: Tensor, attention_mask_NL: Tensor | None, attention: Sequence[CapturedAttention]
    ) -> Tensor:
        """The weight of each token, (N, L) float32: 0 for tokens that are not pooled; the sum over a text is 1."""
        if len(attention) != len(self.layers):
            raise ValueError(f"needs the attention of {len(self.layers)} layers, got {len(attention)}")
        is_token_NL = pooling_mask_NL if attention_mask_NL is None else attention_mask_NL.bool()
        pooled_NL = pooling_mask_NL if self.include_first else _without_first(pooling_mask_NL)
        by_layer = []
        for layer in attention:
            weight_NL = anchor_weights(
                layer, is_token_NL, self.axis, self.per_head, self.by_visible_queries, fastest_sums
            )
            weight_NL = weight_NL.masked_fill(~pooled_NL, 0.0)
            total_N1 = weight_NL.sum(dim=1, keepdim=True)
            by_layer.append(weight_NL / total_N1.clamp(min=torch.finfo(weight_NL.dtype).tiny))
        weight_NL = by_layer[0] if len(by_layer) == 1 else torch.stack(by_layer).mean(dim=0)
        return weight_NL.detach() if self.detach else weight_NL


def _padded_attention(layer: CapturedAttention, places: TextPlaces) -> CapturedAttention:
    """The queries and keys of unpadded texts, (1, A, T, E), padded to (N, A, L, E)."""
    query, key = (places.padded(side[0].transpose(0, 1)).transpose(1, 2) for side in (layer.query_NALE, layer.key_NGLE))
    return replace(layer, query_NALE=query, key_NGLE=key)


def _without_first(pooling_mask_NL: Tensor) -> Tensor:
    """The mask without the text's first token, unless no other token is pooled."""
    rest_NL = pooling_mask_NL.clone()
    rest_NL[:, 0] = False
    return torch.where(rest_NL.any(dim=1, keepdim=True), rest_NL, pooling_mask_NL)


def tiled_sums(attention: CapturedAttention, is_token_NL: Tensor, axis: Axis = "key", per_head: bool = False) -> Tensor:
    """The sums of logarithms in `anchor_weights`, (N, L), or (N, A, L) with `per_head`, by tiles of queries.

    At most `TILE_SCORES` scores, or those of one query, are in memory; the backward pass recomputes them.
    """
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
        Weights, (N, L), >= 0, 0 at padding; in float32 whatever the input (float64 for float64 states).

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


# More than two tiles of the kernels, and not a multiple of a tile.
_TRIAL_LENGTH = 139
_MAX_HEAD_WIDTH = 256
# Relative error in the norm: both accumulate in float32, and gradients are rounded to the inputs' dtype at the end.
_WEIGHT_TOLERANCE = 1e-4
_GRADIENT_TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}


def fastest_sums(
    attention: CapturedAttention, is_token_NL: Tensor, axis: Axis = "key", per_head: bool = False
) -> Tensor:
    """The fused sums on a CUDA device, else the tiled ones; arguments and result of `tiled_sums`."""
    query, key = attention.query_NALE, attention.key_NGLE
    is_supported = query.dtype == key.dtype and query.dtype in _GRADIENT_TOLERANCE
    if query.device.type != "cuda" or not is_supported or query.shape[-1] > _MAX_HEAD_WIDTH:
        return tiled_sums(attention, is_token_NL, axis, per_head)
    return checked_sums(fused_sums, ProblemKind.of(attention), axis)(attention, is_token_NL, axis, per_head)


def fused_sums(attention: CapturedAttention, is_token_NL: Tensor, axis: Axis = "key", per_head: bool = False) -> Tensor:
    """The sums of logarithms by Triton kernels; arguments, result and gradients of `tiled_sums`."""
    from .anchor_kernels import FusedSums

    constant = replace(attention, query_NALE=attention.query_NALE.detach(), key_NGLE=attention.key_NGLE.detach())
    weight_NAL: Tensor = FusedSums.apply(  # type: ignore[no-untyped-call]
        attention.query_NALE, attention.key_NGLE, constant, is_token_NL, axis
    )
    return weight_NAL if per_head else weight_NAL.sum(dim=1)


class ProblemKind(NamedTuple):
    """The properties that the kernels are compiled for; `num_shared` heads share a key."""

    device: torch.device
    dtype: torch.dtype
    width: int
    num_shared: int
    is_causal: bool
    has_window: bool
    mask_dtype: torch.dtype | None

    @classmethod
    def of(cls, attention: CapturedAttention) -> "ProblemKind":
        query, mask = attention.query_NALE, attention.mask
        shape = (query.shape[-1], query.shape[1] // attention.key_NGLE.shape[1])
        mask_dtype = None if mask is None else mask.dtype
        return cls(query.device, query.dtype, *shape, attention.is_causal, attention.window is not None, mask_dtype)


@functools.cache
def checked_sums(fused: Sums, kind: ProblemKind, axis: Axis) -> Sums:
    """`fused` if its result on a small random problem of this kind equals that of `tiled_sums`, else `tiled_sums`."""
    problem, is_token_NL = _trial(kind)
    try:
        error = _disagreement(fused, problem, is_token_NL, axis)
    except Exception as failure:
        # Compilers raise many types of exceptions, none of which must stop the run.
        error = f"{type(failure).__name__}: {str(failure).splitlines()[0] if str(failure) else 'no message'}"
    if error is None:
        return fused
    logging.getLogger("embeddings").warning(
        "anchor-token pooling on %s uses the slower tiled sums (%s, heads of width %d, %d heads per key, %s axis): the "
        "fused kernels failed their check: %s",
        *(kind.device, kind.dtype, kind.width, kind.num_shared, axis, error),
    )
    return tiled_sums


def _trial(kind: ProblemKind) -> tuple[CapturedAttention, Tensor]:
    """A small random problem: two texts of unequal length, two groups of heads, more than two tiles of tokens."""
    device, dtype, width, num_shared, is_causal, has_window, mask_dtype = kind
    generator, length = torch.Generator().manual_seed(0), _TRIAL_LENGTH
    query, key = (
        torch.randn(2, length, heads, width, generator=generator).transpose(1, 2) for heads in (2 * num_shared, 2)
    )
    mask = None
    if mask_dtype is not None:
        seen = (torch.rand(2, 1, length, length, generator=generator) > 0.3) | torch.eye(length).bool()
        added = torch.randn(seen.shape, generator=generator)
        is_bool = mask_dtype == torch.bool
        mask = seen if is_bool else added.to(mask_dtype).masked_fill(~seen, torch.finfo(mask_dtype).min)
        mask = mask.to(device)
    query, key = (side.to(device, dtype).requires_grad_() for side in (query, key))
    window = length // 2 if has_window else None
    is_token_NL = torch.arange(length, device=device) < torch.tensor([[length], [length // 2]], device=device)
    return CapturedAttention(query, key, mask, is_causal, width**-0.5, window), is_token_NL


def _disagreement(fused: Sums, problem: CapturedAttention, is_token_NL: Tensor, axis: Axis) -> str | None:
    """The difference between the fused and the tiled sums on a problem, or None if they agree."""
    with torch.inference_mode(False), torch.enable_grad():
        # Copied, because tensors created in inference mode have no gradient.
        sides = [side.detach().clone().requires_grad_() for side in (problem.query_NALE, problem.key_NGLE)]
        problem = replace(problem, query_NALE=sides[0], key_NGLE=sides[1])
        results, references = (_weight_and_gradients(sums, problem, is_token_NL, axis) for sums in (fused, tiled_sums))
    limits = [_WEIGHT_TOLERANCE, *[_GRADIENT_TOLERANCE[sides[0].dtype]] * 2]
    for name, limit, result, reference in zip(("weights", "query", "key"), limits, results, references, strict=True):
        error = float((result.double() - reference.double()).norm() / reference.double().norm())
        if not error <= limit:
            return f"{name} differ by {error:.1e}, more than {limit:.0e}"
    return None


def _weight_and_gradients(
    sums: Callable[..., Tensor], problem: CapturedAttention, is_token_NL: Tensor, axis: Axis
) -> tuple[Tensor, ...]:
    """The weights of each head, and the gradients of the sum of their squares."""
    weight_NAL = sums(problem, is_token_NL, axis, True)
    return weight_NAL.detach(), *torch.autograd.grad(weight_NAL.square().sum(), (problem.query_NALE, problem.key_NGLE))
