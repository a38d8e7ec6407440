"""Triton kernels of `anchor_token`: scores are computed and summed in tiles on the chip, and never stored.

Each program has R rows of one side ("own": queries or keys) and loops over tiles of the other side. No two programs add
to the same value, so results are deterministic. A query without attention, such as padding, has a log-sum-exp of plus
infinity, which makes its attention 0.

This file travels inside model directories: it imports only torch, its triton and a sibling.
"""

from typing import Any

import torch
from torch import Tensor

from .pooling import CapturedAttention

try:
    import triton
    import triton.language as tl
except ImportError:
    # transformers allows a missing package in remote code only if its import is inside `try`.
    raise

# Queries and keys per tile; tiles of wide heads are smaller to fit the chip's memory.
TILE, _TILE_OF_WIDE_HEADS = 64, 32
# Types of masks; the third, 2, is additive.
NO_MASK: tl.constexpr = tl.constexpr(0)
BOOL_MASK: tl.constexpr = tl.constexpr(1)


@triton.jit
def _rows(base, first, stride_l, stride_e, length, width, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """A tile of a head's queries or keys, (ROWS, WIDTH), zero outside the text."""
    row = first + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    inside = (row[:, None] < length) & (column[None, :] < width)
    return tl.load(base + row[:, None] * stride_l + column[None, :] * stride_e, mask=inside, other=0.0)


@triton.jit
def _scores(
    own, other, own_first, other_first, is_token, mask, mask_query, mask_key, least, scaling, length, window,
    OWN_IS_KEY: tl.constexpr, IS_CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, MASK: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Scores of own rows with other rows, (ROWS, COLUMNS) float32, minus infinity where a query does not see a key."""
    own_R1 = (own_first + tl.arange(0, ROWS))[:, None]
    other_1C = (other_first + tl.arange(0, COLUMNS))[None, :]
    if OWN_IS_KEY:
        query, key = other_1C, own_R1
    else:
        query, key = own_R1, other_1C
    score = tl.dot(own, tl.trans(other), input_precision="ieee") * scaling
    inside = (query < length) & (key < length)
    seen = inside & (tl.load(is_token + key, mask=key < length, other=0) != 0)
    if IS_CAUSAL:
        seen = seen & (key <= query)
    if HAS_WINDOW:
        seen = seen & (query - key < window) & (key - query < window)
    if MASK != NO_MASK:
        part = tl.load(mask + query * mask_query + key * mask_key, mask=inside, other=0)
        if MASK == BOOL_MASK:
            seen = seen & (part != 0)
        else:
            seen = seen & (part.to(tl.float32) > least)
            score += part.to(tl.float32)
    return tl.where(seen, score, float("-inf"))


@triton.jit
def _range(tile, length, OWN_IS_KEY: tl.constexpr, IS_CAUSAL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The range of positions of the other side that own rows may attend to; it starts at a multiple of COLUMNS."""
    low, high = 0, length
    if IS_CAUSAL:
        if OWN_IS_KEY:
            low = (tile * ROWS // COLUMNS) * COLUMNS
        else:
            high = tl.minimum(length, (tile + 1) * ROWS)
    return low, high


@triton.jit
def log_sum_exp(
    query, key, is_token, mask, lse, least, scaling, length, width, num_heads, num_shared, window,
    query_n, query_a, query_l, query_e, key_n, key_g, key_l, key_e, mask_n, mask_a, mask_query, mask_key,
    IS_CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, MASK: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The logarithm of each query's softmax denominator, (N, A, L) float32; plus infinity for no attention."""
    place, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    text, head = place // num_heads, place % num_heads
    is_token += text * length
    mask += text * mask_n + head * mask_a
    key += text * key_n + (head // num_shared) * key_g
    own = _rows(query + text * query_n + head * query_a, tile * ROWS, query_l, query_e, length, width, ROWS, WIDTH)
    most = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    low, high = _range(tile, length, False, IS_CAUSAL, ROWS, COLUMNS)
    for first in range(low, high, COLUMNS):
        other = _rows(key, first, key_l, key_e, length, width, COLUMNS, WIDTH)
        score = _scores(
            own, other, tile * ROWS, first, is_token, mask, mask_query, mask_key, least, scaling, length, window,
            False, IS_CAUSAL, HAS_WINDOW, MASK, ROWS, COLUMNS,
        )  # fmt: skip
        larger = tl.maximum(most, tl.max(score, axis=1))
        origin = tl.where(larger == float("-inf"), 0.0, larger)
        total = total * tl.exp(most - origin) + tl.sum(tl.exp(score - origin[:, None]), axis=1)
        most = larger
    row = tile * ROWS + tl.arange(0, ROWS)
    pays = (tl.load(is_token + row, mask=row < length, other=0) != 0) & (total > 0.0)
    result = tl.where(pays, most + tl.log(tl.where(pays, total, 1.0)), float("inf"))
    tl.store(lse + place * length + row, result, mask=row < length)


@triton.jit
def sums(
    own_side, other_side, is_token, mask, lse, count, weight, least, scaling, length, width,
    num_heads, own_shared, other_shared, window,
    own_n, own_a, own_l, own_e, other_n, other_a, other_l, other_e, mask_n, mask_a, mask_query, mask_key,
    OWN_IS_KEY: tl.constexpr, IS_CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, MASK: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The sum of log(K a + 1) over the other side, (N, A, L) float32; a is computed from scores and log-sum-exp."""
    place, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    text, head = place // num_heads, place % num_heads
    is_token += text * length
    mask += text * mask_n + head * mask_a
    lse += place * length
    own_side += text * own_n + (head // own_shared) * own_a
    other_side += text * other_n + (head // other_shared) * other_a
    own = _rows(own_side, tile * ROWS, own_l, own_e, length, width, ROWS, WIDTH)
    row = tile * ROWS + tl.arange(0, ROWS)
    num_tokens = tl.load(count + text)
    result = tl.zeros((ROWS,), tl.float32)
    low, high = _range(tile, length, OWN_IS_KEY, IS_CAUSAL, ROWS, COLUMNS)
    for first in range(low, high, COLUMNS):
        other = _rows(other_side, first, other_l, other_e, length, width, COLUMNS, WIDTH)
        score = _scores(
            own, other, tile * ROWS, first, is_token, mask, mask_query, mask_key, least, scaling, length, window,
            OWN_IS_KEY, IS_CAUSAL, HAS_WINDOW, MASK, ROWS, COLUMNS,
        )  # fmt: skip
        if OWN_IS_KEY:
            column = first + tl.arange(0, COLUMNS)
            total = tl.load(lse + column, mask=column < length, other=float("inf"))[None, :]
        else:
            total = tl.load(lse + row, mask=row < length, other=float("inf"))[:, None]
        result += tl.sum(tl.log(num_tokens * tl.exp(score - total) + 1.0), axis=1)
    tl.store(weight + place * length + row, result, mask=row < length)


@triton.jit
def to_queries(
    query, key, is_token, mask, lse, count, gradient, delta, result, least, scaling, length, width,
    num_heads, num_shared, window,
    query_n, query_a, query_l, query_e, key_n, key_g, key_l, key_e, mask_n, mask_a, mask_query, mask_key,
    BY_KEY: tl.constexpr, IS_CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, MASK: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The gradient of the queries, (N, A, L, E), and delta = sum over keys of a da, for the softmax's gradient.

    With da = g K / (K a + 1), where g is the gradient of the key's weight or, on the query axis, of the query's:
    ds = a (da - delta), and the gradient is the sum of ds times the keys.
    """
    place, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    text, head = place // num_heads, place % num_heads
    is_token += text * length
    mask += text * mask_n + head * mask_a
    gradient += place * length
    key += text * key_n + (head // num_shared) * key_g
    own = _rows(query + text * query_n + head * query_a, tile * ROWS, query_l, query_e, length, width, ROWS, WIDTH)
    row = tile * ROWS + tl.arange(0, ROWS)
    num_tokens = tl.load(count + text)
    total = tl.load(lse + place * length + row, mask=row < length, other=float("inf"))[:, None]
    taken = tl.zeros((ROWS,), tl.float32)
    sum_RE = tl.zeros((ROWS, WIDTH), tl.float32)
    low, high = _range(tile, length, False, IS_CAUSAL, ROWS, COLUMNS)
    for turn in tl.static_range(2):
        for first in range(low, high, COLUMNS):
            other = _rows(key, first, key_l, key_e, length, width, COLUMNS, WIDTH)
            score = _scores(
                own, other, tile * ROWS, first, is_token, mask, mask_query, mask_key, least, scaling, length, window,
                False, IS_CAUSAL, HAS_WINDOW, MASK, ROWS, COLUMNS,
            )  # fmt: skip
            share = tl.exp(score - total)
            if BY_KEY:
                column = first + tl.arange(0, COLUMNS)
                outer = tl.load(gradient + column, mask=column < length, other=0.0)[None, :]
            else:
                outer = tl.load(gradient + row, mask=row < length, other=0.0)[:, None]
            slope = outer * num_tokens / (share * num_tokens + 1.0)
            if turn == 0:
                taken += tl.sum(share * slope, axis=1)
            else:
                slope = share * (slope - taken[:, None]) * scaling
                sum_RE += tl.dot(slope, other.to(tl.float32), input_precision="ieee")
    tl.store(delta + place * length + row, taken, mask=row < length)
    column_E = tl.arange(0, WIDTH)
    inside = (row[:, None] < length) & (column_E[None, :] < width)
    where = result + (place * length + row[:, None]) * width + column_E[None, :]
    tl.store(where, sum_RE.to(result.dtype.element_ty), mask=inside)


@triton.jit
def to_keys(
    query, key, is_token, mask, lse, count, gradient, delta, result, least, scaling, length, width,
    num_heads, num_shared, window,
    query_n, query_a, query_l, query_e, key_n, key_g, key_l, key_e, mask_n, mask_a, mask_query, mask_key,
    BY_KEY: tl.constexpr, IS_CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, MASK: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The gradient of the keys, (N, G, L, E), summed over the heads that share a key; ds as in `to_queries`."""
    place, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_groups = num_heads // num_shared
    text, group = place // num_groups, place % num_groups
    is_token += text * length
    own = _rows(key + text * key_n + group * key_g, tile * ROWS, key_l, key_e, length, width, ROWS, WIDTH)
    row = tile * ROWS + tl.arange(0, ROWS)
    num_tokens = tl.load(count + text)
    sum_RE = tl.zeros((ROWS, WIDTH), tl.float32)
    low, high = _range(tile, length, True, IS_CAUSAL, ROWS, COLUMNS)
    for member in range(num_shared):
        head = group * num_shared + member
        start = (text * num_heads + head) * length
        for first in range(low, high, COLUMNS):
            base = query + text * query_n + head * query_a
            other = _rows(base, first, query_l, query_e, length, width, COLUMNS, WIDTH)
            score = _scores(
                own, other, tile * ROWS, first, is_token, mask + text * mask_n + head * mask_a, mask_query, mask_key,
                least, scaling, length, window, True, IS_CAUSAL, HAS_WINDOW, MASK, ROWS, COLUMNS,
            )  # fmt: skip
            column = first + tl.arange(0, COLUMNS)
            total = tl.load(lse + start + column, mask=column < length, other=float("inf"))
            taken = tl.load(delta + start + column, mask=column < length, other=0.0)
            share = tl.exp(score - total[None, :])
            if BY_KEY:
                outer = tl.load(gradient + start + row, mask=row < length, other=0.0)[:, None]
            else:
                outer = tl.load(gradient + start + column, mask=column < length, other=0.0)[None, :]
            slope = outer * num_tokens / (share * num_tokens + 1.0)
            slope = share * (slope - taken[None, :]) * scaling
            sum_RE += tl.dot(slope, other.to(tl.float32), input_precision="ieee")
    column_E = tl.arange(0, WIDTH)
    inside = (row[:, None] < length) & (column_E[None, :] < width)
    where = result + (place * length + row[:, None]) * width + column_E[None, :]
    tl.store(where, sum_RE.to(result.dtype.element_ty), mask=inside)


class FusedSums(torch.autograd.Function):
    """The sums of each head, (N, A, L) float32, differentiable in queries and keys."""

    @staticmethod
    def forward(
        ctx: Any, query_NALE: Tensor, key_NGLE: Tensor, attention: CapturedAttention, is_token_NL: Tensor, axis: str
    ) -> Tensor:
        query, key = attention.query_NALE, attention.key_NGLE
        num_texts, num_heads, length, width = query.shape
        num_shared = num_heads // key.shape[1]
        is_token, count_N = is_token_NL.to(torch.uint8).contiguous(), is_token_NL.sum(dim=1).float()
        mask, least, mask_strides = _mask(attention)
        sizes, flags = _sizes(width), _flags(attention)
        window = attention.window or 0
        lse_NAL = torch.empty((num_texts, num_heads, length), dtype=torch.float32, device=query.device)
        weight_NAL = torch.empty_like(lse_NAL)
        grid = (num_texts * num_heads, -(-length // sizes["ROWS"]))
        if lse_NAL.numel():
            log_sum_exp[grid](
                query, key, is_token, mask, lse_NAL, least, attention.scaling, length, width, num_heads, num_shared,
                window, *query.stride(), *key.stride(), *mask_strides, **flags, **sizes,
            )  # fmt: skip
            by_key = axis == "key"
            own, other = (key, query) if by_key else (query, key)
            shared = (num_shared, 1) if by_key else (1, num_shared)
            sums[grid](
                own, other, is_token, mask, lse_NAL, count_N, weight_NAL, least, attention.scaling, length, width,
                num_heads, *shared, window, *own.stride(), *other.stride(), *mask_strides,
                OWN_IS_KEY=by_key, **flags, **sizes,
            )  # fmt: skip
        ctx.save_for_backward(query_NALE, key_NGLE, lse_NAL, is_token, count_N)
        ctx.facts = attention, axis
        return weight_NAL

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of the queries, which also computes delta, then that of the keys."""
        query, key, lse_NAL, is_token, count_N = ctx.saved_tensors
        attention, axis = ctx.facts
        num_texts, num_heads, length, width = query.shape
        num_groups = key.shape[1]
        mask, least, mask_strides = _mask(attention)
        gradient_NAL, delta_NAL = gradients[0].float().contiguous(), torch.empty_like(lse_NAL)
        to_query = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        to_key = torch.empty(key.shape, dtype=key.dtype, device=key.device)
        sizes = _sizes(width)
        rest = (
            least, attention.scaling, length, width, num_heads, num_heads // num_groups, attention.window or 0,
            *query.stride(), *key.stride(), *mask_strides,
        )  # fmt: skip
        tensors = (query, key, is_token, mask, lse_NAL, count_N, gradient_NAL, delta_NAL)
        flags = {"BY_KEY": axis == "key", **_flags(attention), **sizes}
        num_tiles = -(-length // sizes["ROWS"])
        if to_query.numel():
            to_queries[num_texts * num_heads, num_tiles](*tensors, to_query, *rest, **flags)
            to_keys[num_texts * num_groups, num_tiles](*tensors, to_key, *rest, **flags)
        return to_query, to_key, None, None, None


def _sizes(width: int) -> dict[str, int]:
    """Rows and columns of a tile, and the width of a head rounded up to a power of two."""
    tile = TILE if width <= 128 else _TILE_OF_WIDE_HEADS
    return {"ROWS": tile, "COLUMNS": tile, "WIDTH": max(16, 1 << (width - 1).bit_length())}


def _flags(attention: CapturedAttention) -> dict[str, Any]:
    kind = 0 if attention.mask is None else 1 if attention.mask.dtype == torch.bool else 2
    return {"IS_CAUSAL": attention.is_causal, "HAS_WINDOW": attention.window is not None, "MASK": kind}


def _mask(attention: CapturedAttention) -> tuple[Tensor, float, tuple[int, ...]]:
    """The mask's data, the value above which an additive mask shows a key, and the strides over (N, A, L, L)."""
    mask, query = attention.mask, attention.query_NALE
    if mask is None:
        return query, 0.0, (0, 0, 0, 0)
    least = 0.0 if mask.dtype == torch.bool else torch.finfo(mask.dtype).min / 2
    plain = mask.view(torch.uint8) if mask.dtype == torch.bool else mask
    return plain, least, plain.expand(*query.shape[:3], query.shape[2]).stride()
