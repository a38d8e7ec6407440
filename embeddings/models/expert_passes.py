"""The experts' MLPs over sorted rows, one expert after another in both passes, with one inner state kept of each.

This file travels inside model directories: it imports nothing but torch.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def pass_experts(
    row_PH: Tensor,
    size_X: Sequence[int],
    w1_XFH: Tensor,
    w2_XFH: Tensor,
    bias_XF: Tensor | None,
    activation: Callable[[Tensor], Tensor],
) -> Tensor:
    """Each expert's MLP over its own rows:  o = act(x W1_e^T + b1_e) W2_e.

    The values of two grouped products, in half the memory for the backward pass and, on a processor from some hundred
    rows an expert on, in no more time. Of an expert's inner states, what the activation is given is kept, and the
    backward pass computes the activation again; the experts' gradients are written where they lie in the gradient of
    the whole. Autograd over grouped products keeps both sides of the activation, and makes each for all experts at
    once, in memory that the process has just been handed.

    Args:
        row_PH: Rows sorted by expert, (P, H).
        size_X: How many of them each expert has.
        w1_XFH: Each expert's first matrix, (X, F, H).
        w2_XFH: Each expert's second matrix, (X, F, H).
        bias_XF: Each expert's bias after the first matrix, (X, F), or None.
        activation: What follows it, without parameters of its own: they would get no gradient.

    Returns:
        The outputs, (P, H), in the rows' dtype.

    Memory for the backward pass: P (F + H) numbers, beside the matrices.
    """
    output_PH: Tensor = _ExpertPasses.apply(row_PH, w1_XFH, w2_XFH, bias_XF, size_X, activation)  # type: ignore[no-untyped-call]
    return output_PH


class _ExpertPasses(torch.autograd.Function):
    """The passes of `pass_experts`; a gradient of the gradient is refused."""

    @staticmethod
    def forward(
        ctx: Any,
        row_PH: Tensor,
        w1_XFH: Tensor,
        w2_XFH: Tensor,
        bias_XF: Tensor | None,
        size_X: Sequence[int],
        activation: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """The outputs, (P, H); keeps the rows and what each expert's activation is given."""
        output_PH = torch.empty_like(row_PH)
        inner_X = []
        for expert, rows in enumerate(_slices(size_X)):
            inner_tF = row_PH[rows] @ w1_XFH[expert].T
            if bias_XF is not None:
                inner_tF += bias_XF[expert]
            torch.mm(activation(inner_tF), w2_XFH[expert], out=output_PH[rows])
            inner_X.append(inner_tF if any(ctx.needs_input_grad) else None)
        ctx.save_for_backward(row_PH, w1_XFH, w2_XFH, *inner_X)
        ctx.size_X, ctx.activation = size_X, activation
        return output_PH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_PH: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of what needs one, from that of the outputs, (P, H)."""
        row_PH, w1_XFH, w2_XFH, *inner_X = ctx.saved_tensors
        shapes = row_PH.shape, w1_XFH.shape, w2_XFH.shape, w1_XFH.shape[:2]
        of_row_PH, of_w1_XFH, of_w2_XFH, of_bias_XF = (
            row_PH.new_empty(shape) if needed else None
            for shape, needed in zip(shapes, ctx.needs_input_grad[:4], strict=True)
        )
        for expert, rows in enumerate(_slices(ctx.size_X)):
            row_tH, grad_tH = row_PH[rows], grad_PH[rows]
            with torch.enable_grad():
                inner_tF = inner_X[expert].detach().requires_grad_()
                active_tF = ctx.activation(inner_tF)
            if of_w2_XFH is not None:
                torch.mm(active_tF.detach().T, grad_tH, out=of_w2_XFH[expert])
            (of_inner_tF,) = torch.autograd.grad(active_tF, inner_tF, grad_tH @ w2_XFH[expert].T)
            if of_w1_XFH is not None:
                torch.mm(of_inner_tF.T, row_tH, out=of_w1_XFH[expert])
            if of_bias_XF is not None:
                torch.sum(of_inner_tF, 0, out=of_bias_XF[expert])
            if of_row_PH is not None:
                torch.mm(of_inner_tF, w1_XFH[expert], out=of_row_PH[rows])
        return of_row_PH, of_w1_XFH, of_w2_XFH, of_bias_XF, None, None


def _slices(size_X: Sequence[int]) -> list[slice]:
    """Where each expert's rows lie."""
    ends = torch.tensor(size_X).cumsum(0).tolist()
    return [slice(end - size, end) for size, end in zip(size_X, ends, strict=True)]
