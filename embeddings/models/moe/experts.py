"""The router and the experts of a sparse layer: each token passes K of X MLPs, dropless.

This file travels inside model directories: it imports only torch.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


class RoutingSums(NamedTuple):
    """Sums over the T tokens of a layer; the sums of disjoint sets of tokens can be added."""

    count_X: Tensor  # number of tokens of each expert, (X,) int64, T K in total
    probability_X: Tensor  # sum of the softmax over all experts, (X,) float32, with gradient
    squared_logsumexp: Tensor  # sum of logsumexp(logits)^2, () float32, with gradient


class Routing(NamedTuple):
    expert_TK: Tensor  # the indices of each token's experts, the most probable first, (T, K) int64
    weight_TK: Tensor  # the weights of these experts in the token's output, (T, K) float32
    sums: RoutingSums


class Router(nn.Module):
    """Top-k routing by a linear layer without bias: p = softmax(W x); the K largest p select and weight the experts.

    Args:
        renormalize: Whether the K weights are divided by their sum. With K = 1 the weight is then always 1, and the
            router learns only from the load-balancing loss.
        noise: Half the width of the uniform factor around 1 that the router's input is multiplied by in training; 0
            for none. Switch Transformer uses 0.01; the released model none.

    Source: Nussbaum and Duderstadt 2025, arXiv:2502.07972, §3.2, and the released code (no renormalisation, no noise).
        Differs: logits, softmax and sums are in float32, under autocast too; in the released code only the softmax is.
        The gradients of bfloat16 tokens and of the weight come from products in bfloat16, as in every other layer.
    """

    def __init__(
        self, hidden_size: int, num_experts: int, top_k: int, renormalize: bool = False, noise: float = 0.0
    ) -> None:
        super().__init__()
        if not 1 <= top_k <= num_experts:
            raise ValueError(f"top_k must be from 1 to the number of experts, {num_experts}, got {top_k}")
        if not 0 <= noise < 1:
            raise ValueError(f"noise must be >= 0 and < 1, got {noise}")
        self.top_k = top_k
        self.renormalize = renormalize
        self.noise = noise
        # A parameter instead of nn.Linear, so that LoRA and autocast do not apply to it.
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, token_TH: Tensor) -> Routing:
        """The routing of T tokens without padding, (T, H) float."""
        with torch.autocast(token_TH.device.type, enabled=False):
            logit_TX = self._logits(token_TH)
            probability_TX = logit_TX.softmax(dim=-1)
            weight_TK, expert_TK = probability_TX.topk(self.top_k, dim=-1)
            if self.renormalize:
                weight_TK = weight_TK / weight_TK.sum(dim=-1, keepdim=True)
            # bincount would synchronise with the GPU, and scatter_add would add one by one to a few addresses.
            expert_X = torch.arange(logit_TX.shape[1], device=expert_TK.device)
            count_X = (expert_TK.flatten()[:, None] == expert_X).sum(dim=0)
            sums = RoutingSums(count_X, probability_TX.sum(dim=0), logit_TX.logsumexp(dim=-1).square().sum())
        return Routing(expert_TK, weight_TK, sums)

    def _logits(self, token_TH: Tensor) -> Tensor:
        is_noisy = self.training and self.noise > 0
        if token_TH.dtype == torch.bfloat16 and not is_noisy:
            logit_TX: Tensor = _Logits.apply(token_TH, self.weight)  # type: ignore[no-untyped-call]
            return logit_TX
        scored_TH = token_TH.to(torch.promote_types(token_TH.dtype, torch.float32))
        if is_noisy:
            scored_TH = scored_TH * torch.empty_like(scored_TH).uniform_(1 - self.noise, 1 + self.noise)
        return F.linear(scored_TH, self.weight.to(scored_TH.dtype))


class _Logits(torch.autograd.Function):
    """The float32 logits of bfloat16 tokens, (T, X), without a float32 copy of the tokens in the graph."""

    @staticmethod
    def forward(ctx: Any, token_TH: Tensor, weight_XH: Tensor) -> Tensor:
        ctx.save_for_backward(token_TH, weight_XH)
        return F.linear(token_TH.to(torch.float32), weight_XH.to(torch.float32))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TX: Tensor) -> tuple[Tensor, Tensor]:
        token_TH, weight_XH = ctx.saved_tensors
        rounded_TX = grad_TX.to(token_TH.dtype)
        return rounded_TX @ weight_XH.to(token_TH.dtype), (rounded_TX.T @ token_TH).to(weight_XH.dtype)


Activation = Callable[[Tensor], Tensor]
# The product of each expert's rows with its matrix: (P, I), (X, I, O) and the (X,) int32 ends of the experts' rows.
GroupedProduct = Callable[[Tensor, Tensor, Tensor], Tensor]


class ExpertWeights(NamedTuple):
    """The weights of all experts in the dtype of the computation."""

    w1_XFH: Tensor  # (X, F, H), or (X, 2F, H) for gated MLPs
    w2_XFH: Tensor  # (X, F, H)
    bias_XF: Tensor | None  # bias after the first matrix, one value per row of it
    bias_H: Tensor  # bias of the weighted sum, shared by all experts, in its own dtype
    activation: Activation  # includes the gate


Backend = Callable[[Tensor, Routing, ExpertWeights], Tensor]


class Gate(nn.Module):
    """act(g) * u for concatenated g and u, (…, 2F) to (…, F)."""

    def __init__(self, activation: Activation) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, both: Tensor) -> Tensor:
        gate, value = both.chunk(2, dim=-1)
        return self.activation(gate) * value


class Experts(nn.Module):
    """X MLPs of one shape; a token's output is the weighted sum of the outputs of its K experts plus a shared bias.

        y = b2 + sum over a token's experts e of  weight_e * act(x W1_e^T + b1_e) W2_e

    For gated MLPs (SwiGLU, GeGLU), W1 is the concatenation of the gate's matrix G and the other matrix U, and
    act(x G^T) * x U^T replaces act(x W1^T). Dropless: every token passes all of its K experts.

    Args:
        intermediate_size: Inner width of each expert, F.
        inner_bias: Whether each expert has a bias b1; the released model has none.
        activation: Activation after the first matrix, GELU as released.
        backend: How the sum is computed: `grouped_experts` or `loop_experts`, with equal results.
        gated: Whether each expert is a gated MLP; its `w1` is then (X, 2F, H), the gate first.

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
        self.bias1 = nn.Parameter(torch.zeros(num_experts, num_rows)) if inner_bias else None
        self.bias2 = nn.Parameter(torch.zeros(hidden_size))
        for matrix in (self.w1, self.w2):
            nn.init.normal_(matrix, std=0.02)

    def forward(self, token_TH: Tensor, routing: Routing) -> Tensor:
        """The output of T tokens without padding, (T, H), in the tokens' dtype or autocast's; summed in float32."""
        device = token_TH.device.type
        # Autocast does not cover grouped products, so the casts are here, the same for every back end.
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else token_TH.dtype
        cast = _cast if _casts is None or self.w1.dtype == dtype else _uncompiled_cast
        bias_XF = None if self.bias1 is None else cast(self.bias1, dtype)
        weights = ExpertWeights(cast(self.w1, dtype), cast(self.w2, dtype), bias_XF, self.bias2, self.activation)
        with torch.autocast(device, enabled=False):
            return self.backend(token_TH.to(dtype), routing, weights)


_casts: dict[tuple[int, torch.dtype], tuple[Tensor, int, Tensor]] | None = None


@contextmanager
def shared_casts() -> Iterator[None]:
    """For one training step: cast experts' weights to autocast's dtype once, as autocast does for other layers."""
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
        # With a graph even under no_grad: a later pass may need it.
        with torch.enable_grad():
            cast = weight.to(dtype)
        _casts[id(weight), dtype] = (weight, weight._version, cast)
    return cast


# Otherwise a compiled layer would be recompiled for the copies of each step.
_uncompiled_cast: Callable[[Tensor, torch.dtype], Tensor] = torch.compiler.disable(_cast)  # type: ignore[no-untyped-call]


def loop_experts(token_TH: Tensor, routing: Routing, weights: ExpertWeights) -> Tensor:
    """The weighted sum over each token's experts and the shared bias, (T, H), by a loop: the reference."""
    sum_TH = token_TH.new_zeros(token_TH.shape, dtype=routing.weight_TK.dtype)
    for expert in range(len(weights.w1_XFH)):
        token_t, choice_t = (routing.expert_TK == expert).nonzero(as_tuple=True)
        inner_tF = token_TH[token_t] @ weights.w1_XFH[expert].T
        if weights.bias_XF is not None:
            inner_tF = inner_tF + weights.bias_XF[expert]
        output_tH = weights.activation(inner_tF) @ weights.w2_XFH[expert]
        sum_TH = sum_TH.index_add(0, token_t, output_tH * routing.weight_TK[token_t, choice_t, None])
    return (sum_TH + weights.bias_H).to(token_TH.dtype)


def grouped_experts(token_TH: Tensor, routing: Routing, weights: ExpertWeights) -> Tensor:
    """The sum of `loop_experts` over tokens sorted by expert, by two grouped products without a device sync.

    `loop_experts` handles what torch's grouped product does not support: float64, and rows whose size is not a multiple
    of 16 bytes. Under torch.compile float32 breaks the graph: torch traces the product only in bfloat16.
    """
    size = weights.w2_XFH.element_size()
    if weights.w2_XFH.dtype == torch.float64 or any(width * size % 16 for width in weights.w2_XFH.shape[1:]):
        return _uncompiled_loop(token_TH, routing, weights)
    if torch.compiler.is_compiling() and token_TH.dtype != torch.bfloat16:
        return _uncompiled_sorted(token_TH, routing, weights)
    return sorted_experts(token_TH, routing, weights)


def _grouped_mm(row_PI: Tensor, matrix_XIO: Tensor, end_X: Tensor) -> Tensor:
    """The product of each expert's rows with its matrix, (P, O); `end_X` are the int32 ends of the experts' rows."""
    if len(row_PI) == 0:
        # Without tokens the experts still get a gradient of zero.
        return row_PI @ matrix_XIO.sum(0)
    return F.grouped_mm(row_PI, matrix_XIO, offs=end_X)


def grouped_mlps(
    row_PH: Tensor, count_X: Tensor, weights: ExpertWeights, product: GroupedProduct = _grouped_mm
) -> Tensor:
    """Each expert's MLP over its contiguous rows, (P, H); `count_X` are the numbers of rows."""
    end_X = count_X.cumsum(0).to(torch.int32)
    inner_PF = product(row_PH, weights.w1_XFH.transpose(1, 2), end_X)
    if weights.bias_XF is not None:
        # Added by a matrix product, whose gradient is deterministic: it has no atomic additions.
        row_P1 = torch.arange(len(row_PH), device=end_X.device)[:, None]
        is_expert_PX = (row_P1 < end_X) & (row_P1 >= end_X - count_X)
        inner_PF = torch.addmm(inner_PF, is_expert_PX.to(inner_PF.dtype), weights.bias_XF)
    return product(weights.activation(inner_PF), weights.w2_XFH, end_X)


def sorted_experts(
    token_TH: Tensor,
    routing: Routing,
    weights: ExpertWeights,
    mlps: Callable[[Tensor, Tensor, ExpertWeights], Tensor] = grouped_mlps,
) -> Tensor:
    """The sum of `loop_experts`, (T, H), over tokens sorted by expert.

    The sums over a token's K rows gather the rows: index_add on a GPU is slow and not deterministic.
    """
    num_choices = routing.expert_TK.shape[1]
    # Of the P = T K pairs of token and expert, sorted by expert. On a GPU, sorting short integers takes fewer passes.
    order_P = routing.expert_TK.flatten().to(torch.int16).sort(stable=True).indices
    token_P = order_P // num_choices
    # The row of each choice of a token.
    row_P = torch.empty_like(order_P).scatter_(0, order_P, torch.arange(len(order_P), device=order_P.device))
    row_TK = row_P.view(routing.expert_TK.shape)
    sorted_PH: Tensor = _RowsOfTokens.apply(token_TH, token_P, row_TK)  # type: ignore[no-untyped-call]
    output_PH = mlps(sorted_PH, routing.sums.count_X, weights)
    return _WeightedSums.apply(output_PH, routing.weight_TK, weights.bias_H, order_P, token_P, row_TK)  # type: ignore[no-untyped-call,no-any-return]


class _RowsOfTokens(torch.autograd.Function):
    """Copies each token's state to its K rows, (P, H)."""

    @staticmethod
    def forward(ctx: Any, token_TH: Tensor, token_P: Tensor, row_TK: Tensor) -> Tensor:
        ctx.save_for_backward(row_TK)
        return token_TH.index_select(0, token_P)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_PH: Tensor) -> tuple[Tensor, None, None]:
        # Added one after another to save memory.
        first_T, *others = ctx.saved_tensors[0].unbind(1)
        sum_TH = grad_PH.index_select(0, first_T)
        for row_T in others:
            sum_TH += grad_PH.index_select(0, row_T)
        return sum_TH, None, None


class _WeightedSums(torch.autograd.Function):
    """The bias plus the weighted sum of each token's K rows, (T, H), in the rows' dtype.

    The sum is in the weights' dtype, float32, and rounded once. No tensor of P rows is in float32: a GPU's kernels
    multiply values of two dtypes without a copy in the wider one.
    """

    @staticmethod
    def forward(
        ctx: Any, row_PH: Tensor, weight_TK: Tensor, bias_H: Tensor, order_P: Tensor, token_P: Tensor, row_TK: Tensor
    ) -> Tensor:
        ctx.save_for_backward(row_PH, weight_TK, order_P, token_P, row_TK)
        ctx.bias_dtype = bias_H.dtype
        sum_TH = bias_H
        for choice, row_T in enumerate(row_TK.unbind(1), start=1):
            chosen_TH = row_PH.index_select(0, row_T)
            rounded_TH = torch.empty_like(chosen_TH) if choice == row_TK.shape[1] else None
            sum_TH = torch.addcmul(sum_TH, chosen_TH, weight_TK[:, choice - 1, None], out=rounded_TH)
        return sum_TH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TH: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        row_PH, weight_TK, order_P, token_P, row_TK = ctx.saved_tensors
        grad_PH = grad_TH.index_select(0, token_P)
        # Products may leave the range of float16.
        wide_PH = row_PH.to(weight_TK.dtype) if row_PH.dtype == torch.float16 else row_PH
        product_P = (wide_PH * grad_PH).sum(1, dtype=weight_TK.dtype)
        grad_PH.mul_(weight_TK.flatten().index_select(0, order_P)[:, None])
        grad_H = grad_TH.sum(0, dtype=weight_TK.dtype).to(ctx.bias_dtype)
        return grad_PH, product_P[row_TK], grad_H, None, None, None


_uncompiled_sorted: Backend = torch.compiler.disable(sorted_experts)  # type: ignore[no-untyped-call]
_uncompiled_loop: Backend = torch.compiler.disable(loop_experts)  # type: ignore[no-untyped-call]
