"""The loss that keeps experts evenly loaded, and the one that keeps router logits small."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from embeddings.common import OptionError

Normalization = Literal["balanced", "paper", "transformers"]


@dataclass(frozen=True)
class LoadBalancing:
    """How much the routing's losses weigh, and how they are scaled.

    Args:
        coefficient: Weight alpha of the load-balancing loss. The paper: 1 in pre-training; released for fine-tuning: 0.
        normalization: Which of the published scales it has (see `load_balancing_loss`).
        z_coefficient: Weight of the router's z-loss. The paper has none; ST-MoE uses 0.001.

    Raises:
        OptionError: If a weight is negative, or there is no such scale.
    """

    coefficient: float = 1.0
    normalization: Normalization = "balanced"
    z_coefficient: float = 0.0

    def __post_init__(self) -> None:
        for name in ("coefficient", "z_coefficient"):
            if not 0 <= getattr(self, name) < float("inf"):
                option = f"load_balancing.{name}"
                raise OptionError(option, getattr(self, name), "must be >= 0", "0 switches it off")
        if self.normalization not in ("balanced", "paper", "transformers"):
            rule = "must be balanced, paper or transformers"
            raise OptionError("load_balancing.normalization", self.normalization, rule, "leave it out for balanced")


def load_balancing_loss(
    count_YX: Tensor, probability_YX: Tensor, top_k: int, normalization: Normalization = "balanced"
) -> Tensor:
    """How unevenly experts are loaded, () float32: smallest where all are alike, zero without a token.

    With c the tokens given to an expert, P the sum of its router probabilities, over T tokens, K experts a token and
    Y layers of X experts:

        balanced      X / Y * sum over layers and experts of  c / (T K) * P / T      1 where all are alike
        paper         1 / Y * sum over layers and experts of  c / (T K) * P / T      1 / X
        transformers  X * sum over experts of  mean over layers of (c / T) * mean over layers of (P / T)      K

    The gradient goes through P alone, so it pushes probability away from experts that were given much. The sums must
    be the whole batch's: a mean of the losses of its parts is another loss.

    Args:
        count_YX: Tokens given to each expert of each layer, (Y, X) int64.
        probability_YX: Sums of router probabilities, (Y, X) float32.
        top_k: Experts a token, K.
        normalization: Which of the three.

    Source: Nussbaum and Duderstadt 2025, arXiv:2502.07972, Eq. 1, whose printed form is `paper`. `balanced` is that of
        megablocks, which the released model was trained with: only there does a coefficient of 1 mean 1. `transformers`
        is the library's Mixtral loss, which takes the means over layers before the product. Differs: released code adds
        one such loss for queries and one for documents; here the sums are both towers'.
    """
    num_layers, num_experts = count_YX.shape
    # Every layer routes the same tokens.
    tokens = (count_YX.sum() / (num_layers * top_k)).clamp(min=1.0).to(probability_YX.dtype)
    load_YX, mean_YX = count_YX.to(probability_YX.dtype) / tokens, probability_YX / tokens
    if normalization == "transformers":
        return num_experts * torch.dot(load_YX.mean(dim=0), mean_YX.mean(dim=0))
    evenness = (load_YX * mean_YX).sum() / (num_layers * top_k)
    return evenness if normalization == "paper" else num_experts * evenness


def router_z_loss(squared_logsumexp_Y: Tensor, num_tokens: Tensor) -> Tensor:
    """The mean over tokens and layers of logsumexp(router logits)^2, () float32, which keeps the logits from growing.

    Args:
        squared_logsumexp_Y: Sums over tokens, (Y,) float32.
        num_tokens: Tokens that each layer routed, T, ().

    Source: Zoph 2022 (ST-MoE), arXiv:2202.08906, Eq. 5.
    """
    return squared_logsumexp_Y.mean() / num_tokens.clamp(min=1).to(squared_logsumexp_Y.dtype)
