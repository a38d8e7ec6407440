"""Tokens, routings and experts of small sizes, and the written-out sum over a token's experts."""

import math

import torch
from torch import Tensor

from embeddings.models.experts import Experts
from embeddings.models.moe_router import Router, Routing, RoutingSums

HIDDEN, INNER, EXPERTS = 16, 24, 8


def make_experts(inner_bias: bool = True, num_experts: int = EXPERTS, seed: int = 0) -> Experts:
    """Random experts whose biases are not zero."""
    torch.manual_seed(seed)
    experts = Experts(HIDDEN, INNER, num_experts, inner_bias)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return experts


def make_router(top_k: int = 2, num_experts: int = EXPERTS, std: float = 0.5, **options: bool | float) -> Router:
    """A random router that is sure enough of its choices for rounding not to change them."""
    torch.manual_seed(1)
    router = Router(HIDDEN, num_experts, top_k, **options)  # type: ignore[arg-type]
    torch.nn.init.normal_(router.weight, std=std)
    return router


def random_tokens(num_tokens: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(num_tokens)
    return torch.randn(num_tokens, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)


def routing_of(expert_TK: Tensor, dtype: torch.dtype = torch.float32, num_experts: int = EXPERTS) -> Routing:
    """A routing to given experts with random weights that need a gradient."""
    generator = torch.Generator().manual_seed(2)
    weight_TK = torch.rand(expert_TK.shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    count_X = torch.bincount(expert_TK.flatten(), minlength=num_experts)
    return Routing(expert_TK, weight_TK, RoutingSums(count_X, torch.zeros(num_experts), torch.zeros(())))


def gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def written_out(experts: Experts, token_TH: Tensor, routing: Routing) -> Tensor:
    """Token by token, expert by expert."""
    rows = []
    for token_H, chosen_K, weight_K in zip(token_TH, routing.expert_TK.tolist(), routing.weight_TK, strict=True):
        row_H = experts.bias2
        for expert, weight in zip(chosen_K, weight_K, strict=True):
            inner_F = experts.w1[expert] @ token_H
            if experts.bias1 is not None:
                inner_F = inner_F + experts.bias1[expert]
            row_H = row_H + weight * (gelu(inner_F) @ experts.w2[expert])
        rows.append(row_H)
    return torch.stack(rows)
