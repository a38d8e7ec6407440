"""Half precision: exact rotary frequencies, faster layer norms on a GPU, and attention's backward pass on a CPU."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward


class KeepsFrequencies(nn.Module):
    """A module whose rotary frequencies stay float32 when its weights are cast to half precision, as in a loaded model.

    Rounded ones would rotate the tokens of a long text by other angles in training with `bf16-true` than afterwards.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        found = [(part, name, value) for part in self.modules() for name, value in part.named_buffers(recurse=False)]
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for part, name, value in found:
            cast: Any = part._buffers[name]
            if name.endswith("inv_freq") and cast.dtype.itemsize < value.dtype.itemsize <= 4:
                part._buffers[name] = value.to(cast.device)
        return self


class LayerNorm(nn.LayerNorm):
    """torch's layer norm, but under autocast to bfloat16 on a GPU its input and output are bfloat16.

    The kernel computes mean, variance and result in float32, and rounds the result once. torch's autocast instead casts
    the input to float32 and returns float32: the sums of a residual layer are then float32 too, each linear layer casts
    its input, and the graph keeps twice the bytes. Elsewhere this is torch's layer norm: on a CPU, in float32, and in
    float16, whose range is too small for the states of some models.

    It has the name of torch's class, which a model's hash contains.
    """

    def forward(self, input: Tensor) -> Tensor:
        if not _rounds(input.device.type):
            return super().forward(input)
        with torch.autocast(input.device.type, enabled=False):
            weight, bias = (None if each is None else each.to(torch.bfloat16) for each in (self.weight, self.bias))
            return F.layer_norm(input.to(torch.bfloat16), self.normalized_shape, weight, bias, self.eps)


def _rounds(device_type: str) -> bool:
    is_on = device_type == "cuda" and torch.is_autocast_enabled("cuda")
    return is_on and torch.get_autocast_dtype("cuda") == torch.bfloat16


class _Attention(torch.autograd.Function):
    """torch's attention kernel for a CPU; its backward pass in half precision computes in float32.

    Queries are (N, A, L, E), keys and values (N, A, M, E), the additive mask is broadcast to (N, A, L, M).
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
    ) -> Tensor:
        ctx.options = {"dropout_p": 0.0, "is_causal": is_causal, "scale": scale}
        output, logsumexp = _FORWARD(query, key, value, attn_mask=mask, **ctx.options)
        ctx.save_for_backward(query, key, value, output, logsumexp, mask)
        return output  # type: ignore[no-any-return]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        tensors = [each if each is None else each.float() for each in (*gradients, *ctx.saved_tensors)]
        found = _BACKWARD(*tensors[:-1], attn_mask=tensors[-1], **ctx.options)
        return *(each.to(gradients[0].dtype) for each in found), None, None, None


# Length times width of the largest heads for which this is known to be faster.
MAX_SIZE = 8_192
_CHOICE, _KERNEL = torch._fused_sdp_choice, SDPBackend.FLASH_ATTENTION.value
_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class _FloatBackward(TorchFunctionMode):
    """Calls `_Attention` in place of torch's function where that would choose the same kernel in half precision."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not F.scaled_dot_product_attention:
            return function(*args, **(kwargs or {}))
        return self.attention(*args, **(kwargs or {}))

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else query.dtype
        inputs: list[Any] = [
            each.to(dtype) if each is not None and each.is_floating_point() else each
            for each in (query, key, value, attn_mask)
        ]
        query, key, value, mask = inputs
        options: Any = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
        is_quicker = dtype.itemsize == 2 and key.shape[-2:].numel() <= MAX_SIZE
        # torch's own choice: it has no such kernel for dropout, a learned mask, and some shapes and strides.
        if not is_quicker or _CHOICE(query, key, value, mask, **options) != _KERNEL:
            return F.scaled_dot_product_attention(query, key, value, mask, **options)
        if enable_gqa:
            key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, -torch.inf)
        output: Tensor = _Attention.apply(query, key, value, mask, is_causal, scale)  # type: ignore[no-untyped-call]
        return output


def _attention(module: nn.Module, query: Tensor, *arguments: Any, **options: Any) -> tuple[Tensor, None]:
    """transformers' `sdpa`; in training in half precision on a CPU its backward pass computes in float32.

    There both passes of torch's kernel take 1.3 to 3 times as long if the second is in bfloat16, up to 256 tokens with
    heads of width 32 and 128 with heads of 64 (P24). Longer texts change nothing, nor does dropout, for which torch has
    no kernel on a CPU. The output is equal to the bit.
    """
    is_chosen = query.device.type == "cpu" and module.training and getattr(module, _MARK, False)
    with _FloatBackward() if is_chosen and not torch.compiler.is_compiling() else nullcontext():
        return sdpa_attention_forward(module, query, *arguments, **options)


# An attribute of attention layers of our backbones; other models of the process keep transformers' function.
_MARK = "has_float_backward"
AttentionInterface.register("sdpa", _attention)


def use_half_precision(backbone: nn.Module) -> None:
    """Give a backbone's layers the faster forms of this file, in place."""
    for module in backbone.modules():
        if type(module) is nn.LayerNorm:
            module.__class__ = LayerNorm
        elif hasattr(module, "is_causal"):
            setattr(module, _MARK, True)
