"""The sums of `anchor_weights` on a GPU, by kernels that keep every score on the chip, where these prove right.

This file travels inside model directories: it imports nothing but torch and the siblings that travel with it.
"""

import functools
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .anchor_weights import Axis, Sums, TappedAttention, tiled_sums

# Queries and keys of a tile; wide heads take less, or a tile would not fit the chip's memory.
_TILE, _TILE_OF_WIDE_HEADS = 64, 32
_WIDEST_HEAD = 256
# Relative, in the norm: both ways accumulate in float32, and gradients are rounded to the inputs' dtype at the end.
_WEIGHT_TOLERANCE = 1e-4
_GRADIENT_TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}


def fastest_sums(attention: TappedAttention, is_token_NL: Tensor, axis: Axis = "key", per_head: bool = False) -> Tensor:
    """The fused sums on a CUDA device, else the tiled ones; arguments and result of `tiled_sums`.

    The first problem of its kind in a process (device, dtype, shape of the heads, axis, mask) is preceded by a small
    random one that both ways solve, gradients included. Where they disagree or the kernels do not run, a warning says
    so once, and the kind stays with the tiled way.
    """
    if attention.query_NALE.device.type != "cuda" or not _is_supported(attention):
        return tiled_sums(attention, is_token_NL, axis, per_head)
    sums = checked_sums(fused_sums, *_kind(attention), axis)
    return sums(attention, is_token_NL, axis, per_head)


@functools.cache
def checked_sums(
    fused: Sums,
    device: torch.device,
    dtype: torch.dtype,
    width: int,
    num_shared: int,
    is_causal: bool,
    has_window: bool,
    mask_dtype: torch.dtype | None,
    axis: Axis,
) -> Sums:
    """`fused` if it solves a small random problem of this kind as the tiled way does, else the tiled way.

    Args:
        fused: What is on trial.
        device: Where.
        dtype: Of queries and keys.
        width: Of a head.
        num_shared: Heads that share a key.
        is_causal: Whether a query sees no later key.
        has_window: Whether it sees no distant key.
        mask_dtype: Of the mask, None where there is none.
        axis: The axis.
    """
    problem, is_token_NL = _trial(device, dtype, width, num_shared, is_causal, has_window, mask_dtype)
    try:
        error = _disagreement(fused, problem, is_token_NL, axis)
    except Exception as failure:
        # Compilers fail in many ways, and none of them may stop a run that has another way.
        error = f"{type(failure).__name__}: {str(failure).splitlines()[0] if str(failure) else 'no message'}"
    if error is None:
        return fused
    kind = f"{dtype}, heads of {width}, {num_shared} a key, {axis} axis"
    logging.getLogger("embeddings").warning(
        "anchor-token pooling on %s takes the slower tiled way (%s): the fused kernels failed their check: %s",
        device, kind, error,
    )  # fmt: skip
    return tiled_sums


def fused_sums(attention: TappedAttention, is_token_NL: Tensor, axis: Axis = "key", per_head: bool = False) -> Tensor:
    """The sums of logarithms by Triton kernels; arguments, result and gradients of `tiled_sums`.

    A first pass finds each query's log-sum-exp, a second sums log(K exp(score - lse) + 1); both make the scores anew.

    Memory: (N, A, L) and the inputs' own size, forward and backward; no score leaves the chip.
    Precision: products and sums in float32; those of bfloat16 or float16 inputs are exact, those of float32 never
        TF32. No atomic additions: the result is the same from run to run.
    Raises:
        ImportError: If there is no triton.
    """
    constant = replace(attention, query_NALE=attention.query_NALE.detach(), key_NGLE=attention.key_NGLE.detach())
    weight_NAL: Tensor = _FusedSums.apply(  # type: ignore[no-untyped-call]
        attention.query_NALE, attention.key_NGLE, constant, is_token_NL, axis
    )
    return weight_NAL if per_head else weight_NAL.sum(dim=1)


class _FusedSums(torch.autograd.Function):
    """The sums of each head, (N, A, L) float32; the gradient goes to queries and keys."""

    @staticmethod
    def forward(
        ctx: Any, query_NALE: Tensor, key_NGLE: Tensor, attention: TappedAttention, is_token_NL: Tensor, axis: Axis
    ) -> Tensor:
        """Log-sum-exp, then sums over queries or keys."""
        from .anchor_kernels import log_sum_exp, sums

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
        """The gradient of the queries, which finds what the softmax's rule takes off, then that of the keys."""
        from .anchor_kernels import to_keys, to_queries

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
        given = (query, key, is_token, mask, lse_NAL, count_N, gradient_NAL, delta_NAL)
        flags = {"BY_KEY": axis == "key", **_flags(attention), **sizes}
        num_tiles = -(-length // sizes["ROWS"])
        if to_query.numel():
            to_queries[num_texts * num_heads, num_tiles](*given, to_query, *rest, **flags)
            to_keys[num_texts * num_groups, num_tiles](*given, to_key, *rest, **flags)
        return to_query, to_key, None, None, None


def _sizes(width: int) -> dict[str, int]:
    """Rows and columns of a tile, and the width of a head filled up to a power of two."""
    tile = _TILE if width <= 128 else _TILE_OF_WIDE_HEADS
    return {"ROWS": tile, "COLUMNS": tile, "WIDTH": max(16, 1 << (width - 1).bit_length())}


def _flags(attention: TappedAttention) -> dict[str, Any]:
    """What the kernels are compiled for."""
    kind = 0 if attention.mask is None else 1 if attention.mask.dtype == torch.bool else 2
    return {"IS_CAUSAL": attention.is_causal, "HAS_WINDOW": attention.window is not None, "MASK": kind}


def _mask(attention: TappedAttention) -> tuple[Tensor, float, tuple[int, ...]]:
    """The mask's memory, the number above which an added one lets a key be seen, and its strides over (N, A, L, L)."""
    mask, query = attention.mask, attention.query_NALE
    if mask is None:
        return query, 0.0, (0, 0, 0, 0)
    least = 0.0 if mask.dtype == torch.bool else torch.finfo(mask.dtype).min / 2
    plain = mask.view(torch.uint8) if mask.dtype == torch.bool else mask
    return plain, least, plain.expand(*query.shape[:3], query.shape[2]).stride()


def _is_supported(attention: TappedAttention) -> bool:
    """Whether the kernels are written for such a problem."""
    query, key = attention.query_NALE, attention.key_NGLE
    return query.dtype in _GRADIENT_TOLERANCE and key.dtype == query.dtype and query.shape[-1] <= _WIDEST_HEAD


def _kind(attention: TappedAttention) -> tuple[torch.device, torch.dtype, int, int, bool, bool, torch.dtype | None]:
    """What decides how the kernels are compiled."""
    query, mask = attention.query_NALE, attention.mask
    return (
        query.device, query.dtype, query.shape[-1], query.shape[1] // attention.key_NGLE.shape[1],
        attention.is_causal, attention.window is not None, None if mask is None else mask.dtype,
    )  # fmt: skip


def _trial(
    device: torch.device,
    dtype: torch.dtype,
    width: int,
    num_shared: int,
    is_causal: bool,
    has_window: bool,
    mask_dtype: torch.dtype | None,
) -> tuple[TappedAttention, Tensor]:
    """A small random problem: two texts of unlike length, two groups of heads, more than two tiles of tokens."""
    generator, length = torch.Generator().manual_seed(0), 2 * _TILE + 11
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
    is_token_NL = torch.arange(length, device=device) < torch.tensor([[length], [_TILE + 5]], device=device)
    return TappedAttention(query, key, mask, is_causal, width**-0.5, window), is_token_NL


def _disagreement(fused: Sums, problem: TappedAttention, is_token_NL: Tensor, axis: Axis) -> str | None:
    """How two ways differ on a problem, or None where they agree."""
    with torch.inference_mode(False), torch.enable_grad():
        # Made here: a tensor of inference mode has no gradient.
        sides = [side.detach().clone().requires_grad_() for side in (problem.query_NALE, problem.key_NGLE)]
        problem = replace(problem, query_NALE=sides[0], key_NGLE=sides[1])
        found, expected = (_weight_and_gradients(way, problem, is_token_NL, axis) for way in (fused, tiled_sums))
    limits = [_WEIGHT_TOLERANCE, *[_GRADIENT_TOLERANCE[sides[0].dtype]] * 2]
    for name, limit, ours, theirs in zip(("weights", "query", "key"), limits, found, expected, strict=True):
        error = float((ours.double() - theirs.double()).norm() / theirs.double().norm())
        if not error <= limit:
            return f"{name} differ by {error:.1e}, more than {limit:.0e}"
    return None


def _weight_and_gradients(
    way: Callable[..., Tensor], problem: TappedAttention, is_token_NL: Tensor, axis: Axis
) -> tuple[Tensor, ...]:
    """The weights of each head, and the gradients of their squares' sum."""
    weight_NAL = way(problem, is_token_NL, axis, True)
    return weight_NAL.detach(), *torch.autograd.grad(weight_NAL.square().sum(), (problem.query_NALE, problem.key_NGLE))
