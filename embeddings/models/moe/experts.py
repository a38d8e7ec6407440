"""The router and the experts of a sparse layer: MLPs of which each token passes K, dropless.

This file travels inside model directories: it imports nothing but torch.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


class RoutingSums(NamedTuple):
    """What a layer's routing adds up to over its T tokens; sums of two sets of tokens are those of both together."""

    count_X: Tensor  # tokens that each expert was given, (X,) int64, T K in all
    probability_X: Tensor  # sum of the softmax over all experts, (X,) float32, with gradient
    squared_logsumexp: Tensor  # sum of logsumexp(logits)^2, () float32, with gradient


class Routing(NamedTuple):
    """Where each token goes."""

    expert_TK: Tensor  # the experts of each token, the most probable first, (T, K) int64
    weight_TK: Tensor  # the weight of each of them in the token's output, (T, K) float32
    sums: RoutingSums


class Router(nn.Module):
    """Top-k routing by a linear layer without bias:  p = softmax(W x),  the K largest of p choose and weigh experts.

    Args:
        renormalize: Whether the K weights are divided by their sum. With K = 1 the weight is then always 1, and the
            router learns from the balancing loss alone.
        noise: Half the width of the uniform factor around 1 that a state is multiplied by before it is scored, in
            training only; 0 for none. Switch Transformer uses 0.01; the released model none.

    Precision: logits, softmax and sums in float32 (float64 where the states are), under autocast too.
    Raises:
        ValueError: If a number is impossible; the message names it and shows the value.
    Source: Nussbaum and Duderstadt 2025, arXiv:2502.07972, §3.2, and the released code (no renormalisation, no noise).
        Differs: logits are in float32 too; there the softmax alone is.
    """

    def __init__(
        self, hidden_size: int, num_experts: int, top_k: int, renormalize: bool = False, noise: float = 0.0
    ) -> None:
        super().__init__()
        check_routing(num_experts, top_k, noise)
        self.top_k = top_k
        self.renormalize = renormalize
        self.noise = noise
        # A bare matrix and no linear layer: low-rank adapters and autocast stay away from it.
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))
        self.reset_parameters()

    def reset_parameters(self, std: float = 0.02) -> None:
        nn.init.normal_(self.weight, std=std)

    def forward(self, token_TH: Tensor) -> Routing:
        """The routing of T tokens without padding, (T, H) float."""
        with torch.autocast(token_TH.device.type, enabled=False):
            scored_TH = token_TH.to(torch.promote_types(token_TH.dtype, torch.float32))
            if self.training and self.noise > 0:
                scored_TH = scored_TH * torch.empty_like(scored_TH).uniform_(1 - self.noise, 1 + self.noise)
            logit_TX = F.linear(scored_TH, self.weight.to(scored_TH.dtype))
            probability_TX = logit_TX.softmax(dim=-1)
            weight_TK, expert_TK = probability_TX.topk(self.top_k, dim=-1)
            if self.renormalize:
                weight_TK = weight_TK / weight_TK.sum(dim=-1, keepdim=True)
            chosen_P = expert_TK.flatten()
            # Counting by bincount would wait for a GPU.
            count_X = torch.zeros(logit_TX.shape[1], dtype=torch.int64, device=chosen_P.device)
            count_X = count_X.scatter_add(0, chosen_P, torch.ones_like(chosen_P))
            sums = RoutingSums(count_X, probability_TX.sum(dim=0), logit_TX.logsumexp(dim=-1).square().sum())
        return Routing(expert_TK, weight_TK, sums)


def check_routing(num_experts: int, top_k: int, noise: float = 0.0) -> None:
    """Refuse impossible numbers by a `ValueError` that names the number and shows it."""
    if num_experts < 1:
        raise ValueError(f"num_experts must be >= 1, got {num_experts}")
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k must be from 1 to the {num_experts} experts there are, got {top_k}")
    if not 0 <= noise < 1:
        raise ValueError(f"noise must be >= 0 and < 1, got {noise}")


# From this many rows an expert on, on average, a CPU is no slower expert by expert than by grouped products.
ROWS_BY_EXPERT = 512

Activation = Callable[[Tensor], Tensor]
# A product of each expert's own rows with its matrix: (P, I), (X, I, O) and the (X,) int32 ends of the experts' rows.
GroupedProduct = Callable[[Tensor, Tensor, Tensor], Tensor]
# All experts' MLPs over sorted rows: (P, H), the (X,) int64 numbers of each expert's rows, and the weights.
SortedMlps = Callable[[Tensor, Tensor, "ExpertWeights"], Tensor]


class ExpertWeights(NamedTuple):
    """What a back end computes with, in the dtype it computes in."""

    w1_XFH: Tensor  # (X, F, H), or (X, 2F, H) where it is gated
    w2_XFH: Tensor  # (X, F, H)
    bias_XF: Tensor | None  # after the first matrix, as many numbers as that has rows
    activation: Activation  # the gate included


Backend = Callable[[Tensor, Routing, ExpertWeights], Tensor]


class Gate(nn.Module):
    """act(g) * u of numbers g and u that lie end to end, (…, 2F) to (…, F)."""

    def __init__(self, activation: Activation) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, both: Tensor) -> Tensor:
        gate, value = both.chunk(2, dim=-1)
        return self.activation(gate) * value


class Experts(nn.Module):
    """X MLPs of one shape; a token's output is the weighted sum of its K experts' and one bias that all share.

        y = b2 + sum over a token's experts e of  weight_e * act(x W1_e^T + b1_e) W2_e

    A gated MLP (SwiGLU, GeGLU) has its gate's matrix G and the other one U laid end to end as W1, and
    act(x G^T) * x U^T in the place of act(x W1^T).

    Dropless: however uneven the load, every token passes all of its experts.

    Args:
        intermediate_size: Inner width of each expert, F.
        inner_bias: Whether each expert has a bias b1; the released model has none.
        activation: What follows the first matrix, GELU as released.
        backend: How the sum is computed: `grouped_experts` or `loop_experts`, which give the same values.
        gated: Whether each expert is a gated MLP.

    Weight layout: `w1` and `w2` are (X, F, H), a gated `w1` (X, 2F, H), the gate first. The released checkpoint's,
        (X F, H) expert after expert, are these with the first two dimensions laid end to end; its `bias` is `bias2`.
    Precision: products in the states' dtype or autocast's, the weighted sum in float32 (float64 where the states are).
    Source: Nussbaum and Duderstadt 2025, arXiv:2502.07972, §3.2 and §4.3, and the released code. Differs: `inner_bias`.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        inner_bias: bool = False,
        activation: Activation = F.gelu,
        backend: Backend | None = None,
        gated: bool = False,
    ) -> None:
        super().__init__()
        self.activation = Gate(activation) if gated else activation
        self.backend = grouped_experts if backend is None else backend
        num_rows = intermediate_size * (2 if gated else 1)
        self.w1 = nn.Parameter(torch.empty(num_experts, num_rows, hidden_size))
        self.w2 = nn.Parameter(torch.empty(num_experts, intermediate_size, hidden_size))
        self.bias1 = nn.Parameter(torch.empty(num_experts, num_rows)) if inner_bias else None
        self.bias2 = nn.Parameter(torch.empty(hidden_size))
        self.reset_parameters()

    def reset_parameters(self, std: float = 0.02) -> None:
        for matrix in (self.w1, self.w2):
            nn.init.normal_(matrix, std=std)
        for bias in (self.bias1, self.bias2):
            if bias is not None:
                nn.init.zeros_(bias)

    def forward(self, token_TH: Tensor, routing: Routing) -> Tensor:
        """The output of T tokens without padding, (T, H), in the dtype it is computed in."""
        device = token_TH.device.type
        # No grouped product is on autocast's list, so its casts are made here, alike for every back end.
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else token_TH.dtype
        cast = _cast if _casts is None or self.w1.dtype == dtype else _uncompiled_cast
        bias_XF = None if self.bias1 is None else cast(self.bias1, dtype)
        weights = ExpertWeights(cast(self.w1, dtype), cast(self.w2, dtype), bias_XF, self.activation)
        with torch.autocast(device, enabled=False):
            sum_TH = self.backend(token_TH.to(dtype), routing, weights)
            return (sum_TH + self.bias2).to(dtype)


_casts: dict[tuple[int, torch.dtype], tuple[Tensor, int, Tensor]] | None = None


@contextmanager
def shared_casts() -> Iterator[None]:
    """Inside, experts' weights are cast to autocast's dtype once, as autocast does for the products on its list.

    For one training step, in which the weights do not change: all mini-batches and kept graphs share one copy of each
    weight, through which each graph's backward reaches the weight.
    """
    global _casts
    before, _casts = _casts, {}
    try:
        yield
    finally:
        _casts = before


def _cast(weight: Tensor, dtype: torch.dtype) -> Tensor:
    if _casts is None or weight.dtype == dtype:
        return weight.to(dtype)
    owner, version, cast = _casts.get((id(weight), dtype), (None, 0, weight))
    if owner is not weight or version != weight._version:
        # With a graph even where this pass has none: a later pass needs it.
        with torch.enable_grad():
            cast = weight.to(dtype)
        _casts[id(weight), dtype] = (weight, weight._version, cast)
    return cast


# A compiled layer would be compiled again for each step's own copies.
_uncompiled_cast: Callable[[Tensor, torch.dtype], Tensor] = torch.compiler.disable(_cast)  # type: ignore[no-untyped-call]


def loop_experts(token_TH: Tensor, routing: Routing, weights: ExpertWeights) -> Tensor:
    """The sum over each token's experts, (T, H), float32 or better, one expert after another: a reference."""
    sum_TH = token_TH.new_zeros(token_TH.shape, dtype=routing.weight_TK.dtype)
    for expert in range(len(weights.w1_XFH)):
        token_t, choice_t = (routing.expert_TK == expert).nonzero(as_tuple=True)
        inner_tF = token_TH[token_t] @ weights.w1_XFH[expert].T
        if weights.bias_XF is not None:
            inner_tF = inner_tF + weights.bias_XF[expert]
        output_tH = weights.activation(inner_tF) @ weights.w2_XFH[expert]
        sum_TH = sum_TH.index_add(0, token_t, output_tH * routing.weight_TK[token_t, choice_t, None])
    return sum_TH


def grouped_experts(token_TH: Tensor, routing: Routing, weights: ExpertWeights) -> Tensor:
    """The same sum over tokens sorted by expert, by two grouped products; neither loops nor waits in Python.

    On a CPU large loads in float32 go expert by expert, with the same values (`pass_experts`). The loop takes what
    `grouped_mm` does not: float64, and widths whose rows are no multiple of 16 bytes. Under torch.compile float32
    breaks the graph: the product is traced in bfloat16 alone.
    """
    if not _takes(weights):
        return _uncompiled_loop(token_TH, routing, weights)
    if torch.compiler.is_compiling() and token_TH.dtype != torch.bfloat16:
        return _uncompiled_sorted(token_TH, routing, weights)
    return sorted_experts(token_TH, routing, weights)


def _takes(weights: ExpertWeights) -> bool:
    """Whether torch's grouped product takes such matrices."""
    _, inner, hidden = weights.w2_XFH.shape
    size = weights.w1_XFH.element_size()
    return weights.w1_XFH.dtype != torch.float64 and inner * size % 16 == 0 and hidden * size % 16 == 0


def grouped_mm(row_PI: Tensor, matrix_XIO: Tensor, end_X: Tensor) -> Tensor:
    """The product of each expert's own rows, up to its end, with its matrix, (P, O)."""
    if len(row_PI) == 0:
        # The experts keep a gradient of zero where there is no token.
        return row_PI @ matrix_XIO.sum(0)
    return F.grouped_mm(row_PI, matrix_XIO, offs=end_X)


def grouped_mlps(
    row_PH: Tensor, count_X: Tensor, weights: ExpertWeights, product: GroupedProduct = grouped_mm
) -> Tensor:
    """Each expert's MLP over its own rows, (P, H), by two grouped products; `count_X` are the experts' rows."""
    end_X = count_X.cumsum(0).to(torch.int32)
    inner_PF = product(row_PH, weights.w1_XFH.transpose(1, 2), end_X)
    if weights.bias_XF is not None:
        # As a product its gradient is one too: a sum over rows in a fixed order, without atomic additions.
        row_P1 = torch.arange(len(row_PH), device=end_X.device)[:, None]
        is_own_PX = (row_P1 < end_X) & (row_P1 >= end_X - count_X)
        inner_PF = torch.addmm(inner_PF, is_own_PX.to(inner_PF.dtype), weights.bias_XF)
    return product(weights.activation(inner_PF), weights.w2_XFH, end_X)


def _quickest_mlps(row_PH: Tensor, count_X: Tensor, weights: ExpertWeights) -> Tensor:
    is_large, activation = len(row_PH) >= ROWS_BY_EXPERT * len(count_X), weights.activation
    learns = isinstance(activation, nn.Module) and next(activation.parameters(), None) is not None
    if row_PH.device.type == "cpu" and is_large and row_PH.dtype == torch.float32 and not learns:
        return pass_experts(row_PH, count_X.tolist(), weights)
    return grouped_mlps(row_PH, count_X, weights)


def sorted_experts(
    token_TH: Tensor, routing: Routing, weights: ExpertWeights, mlps: SortedMlps = _quickest_mlps
) -> Tensor:
    """The same sum over tokens sorted by expert, (T, H), float32 or better.

    The P = T K pairs of token and expert are sorted by expert; `mlps` runs over each expert's contiguous rows. Sums of
    a token's K rows, forward and backward, gather them: a GPU adds by index one by one and in any order.
    """
    order_P = routing.expert_TK.flatten().sort(stable=True).indices
    token_P = order_P // routing.expert_TK.shape[1]
    # Where each token's rows lie, in the order of their experts.
    place_P = torch.empty_like(order_P).scatter_(0, order_P, torch.arange(len(order_P), device=order_P.device))
    row_TK = place_P.view(routing.expert_TK.shape).sort(dim=1).values
    sorted_PH: Tensor = _RowsOfTokens.apply(token_TH, token_P, row_TK)  # type: ignore[no-untyped-call]
    output_PH = mlps(sorted_PH, routing.sums.count_X, weights)
    weight_P1 = routing.weight_TK.flatten().index_select(0, order_P)[:, None]
    sum_TH: Tensor = _SumsOfRows.apply(output_PH * weight_P1, token_P, row_TK)  # type: ignore[no-untyped-call]
    return sum_TH


class _RowsOfTokens(torch.autograd.Function):
    """Each token's state in all of its K rows, (P, H)."""

    @staticmethod
    def forward(ctx: Any, token_TH: Tensor, token_P: Tensor, row_TK: Tensor) -> Tensor:
        ctx.save_for_backward(row_TK)
        return token_TH.index_select(0, token_P)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_PH: Tensor) -> tuple[Tensor, None, None]:
        return _sum_of_rows(grad_PH, *ctx.saved_tensors), None, None


class _SumsOfRows(torch.autograd.Function):
    """The sum of each token's K rows, (T, H)."""

    @staticmethod
    def forward(ctx: Any, row_PH: Tensor, token_P: Tensor, row_TK: Tensor) -> Tensor:
        ctx.save_for_backward(token_P)
        return _sum_of_rows(row_PH, row_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TH: Tensor) -> tuple[Tensor, None, None]:
        (token_P,) = ctx.saved_tensors
        return grad_TH.index_select(0, token_P), None, None


def _sum_of_rows(row_PH: Tensor, row_TK: Tensor) -> Tensor:
    """Each token's rows one after another, (T, H), so that no copy of all is made."""
    first_T, *others = row_TK.unbind(1)
    sum_TH = row_PH.index_select(0, first_T)
    for row_T in others:
        sum_TH += row_PH.index_select(0, row_T)
    return sum_TH


_uncompiled_sorted: Backend = torch.compiler.disable(sorted_experts)  # type: ignore[no-untyped-call]
_uncompiled_loop: Backend = torch.compiler.disable(loop_experts)  # type: ignore[no-untyped-call]


def pass_experts(row_PH: Tensor, size_X: Sequence[int], weights: ExpertWeights) -> Tensor:
    """Each expert's MLP over its own rows, (P, H):  o = act(x W1_e^T + b1_e) W2_e.

    The values of two grouped products, with half the memory for the backward pass: it keeps each expert's input of the
    activation and computes the activation again, which must have no parameters: they would get no gradient.
    """
    output_PH: Tensor = _ExpertPasses.apply(row_PH, *weights, size_X)  # type: ignore[no-untyped-call]
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
        activation: Activation,
        size_X: Sequence[int],
    ) -> Tensor:
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
