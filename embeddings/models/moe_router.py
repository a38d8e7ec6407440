"""The router of a sparse layer: which experts a token goes to, with what weight, and what the routing adds up to.

This file travels inside model directories: it imports nothing but torch.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class RoutingSums(NamedTuple):
    """What a layer's routing adds up to over its tokens; sums of two sets of tokens are those of both together.

    Attributes:
        count_X: How many of the T tokens each expert was given, (X,) int64; the sum over experts is T K.
        probability_X: Sum over tokens of the softmax over all experts, (X,) float32, with gradient.
        squared_logsumexp: Sum over tokens of logsumexp(logits)^2, () float32, with gradient.
    """

    count_X: Tensor
    probability_X: Tensor
    squared_logsumexp: Tensor


class Routing(NamedTuple):
    """Where each token goes.

    Attributes:
        expert_TK: The experts of each token, the most probable first, (T, K) int64.
        weight_TK: The weight of each of them in the token's output, (T, K) float32.
        sums: What the routing adds up to.
    """

    expert_TK: Tensor
    weight_TK: Tensor
    sums: RoutingSums


class Router(nn.Module):
    """Top-k routing by a linear layer without bias:  p = softmax(W x),  the K largest of p choose and weigh experts.

    Args:
        hidden_size: Width of the states, H.
        num_experts: Experts, X.
        top_k: Experts a token, K.
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
        """Draw the weights from N(0, std)."""
        nn.init.normal_(self.weight, std=std)

    def forward(self, token_TH: Tensor) -> Routing:
        """The routing of T tokens.

        Args:
            token_TH: States of tokens without padding, (T, H) float.
        """
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
    """Check that a routing can be.

    Raises:
        ValueError: If it cannot; the message names the number and shows it.
    """
    if num_experts < 1:
        raise ValueError(f"num_experts must be >= 1, got {num_experts}")
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k must be from 1 to the {num_experts} experts there are, got {top_k}")
    if not 0 <= noise < 1:
        raise ValueError(f"noise must be >= 0 and < 1, got {noise}")
