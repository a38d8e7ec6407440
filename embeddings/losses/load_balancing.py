"""Router losses: load balancing, which keeps experts evenly loaded, and the z-loss, which keeps logits small."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from embeddings.common import OptionError

Normalization = Literal["balanced", "paper", "transformers"]


@dataclass(frozen=True)
class LoadBalancing:
    """Weights and normalization of the router losses.

    Args:
        coefficient: Weight alpha of the load-balancing loss. The paper: 1 in pre-training; the released fine-tuning: 0.
        normalization: One of the published normalizations (see `load_balancing_loss`).
        z_coefficient: Weight of the router z-loss. The paper has none; ST-MoE uses 0.001.
    """

    coefficient: float = 1.0
    normalization: Normalization = "balanced"
    z_coefficient: float = 0.0

    def __post_init__(self) -> None:
        for name in ("coefficient", "z_coefficient"):
            if not 0 <= getattr(self, name) < float("inf"):
                option = f"load_balancing.{name}"
                raise OptionError(option, getattr(self, name), "must be >= 0", "0 disables it")


def load_balancing_loss(
    count_YX: Tensor, probability_YX: Tensor, top_k: int, normalization: Normalization = "balanced"
) -> Tensor:
    """The imbalance of the experts' load, () float32: smallest if all experts are used equally, zero without tokens.

    c is the number of tokens routed to an expert and P the sum of its router probabilities, over T tokens, K experts
    per token and Y layers of X experts:

        normalization                                                                value at equal load
        balanced      X / Y * sum over layers and experts of  c / (T K) * P / T      1
        paper         1 / Y * sum over layers and experts of  c / (T K) * P / T      1 / X
        transformers  X * sum over experts of  mean over layers of (c / T) * mean over layers of (P / T)      K

    Gradients flow through P only. The sums must be those of the full batch.

    Args:
        count_YX: Tokens routed to each expert of each layer, (Y, X) int64.
        probability_YX: Sums of router probabilities, (Y, X) float32.
        top_k: Experts per token, K.
        normalization: `balanced`, `paper` or `transformers`.

    Source: Nussbaum and Duderstadt 2025, arXiv:2502.07972, Eq. 1, printed as `paper`. `balanced` is that of megablocks,
        to which the released model's coefficient of 1 refers. `transformers` is that library's Mixtral loss, which
        averages over layers before the product. Differs: the release adds one loss for queries and one for documents;
        here the sums include both.
    """
    num_layers, num_experts = count_YX.shape
    # Every layer routes the same tokens.
    tokens = (count_YX.sum() / (num_layers * top_k)).clamp(min=1.0).to(probability_YX.dtype)
    load_YX, mean_YX = count_YX.to(probability_YX.dtype) / tokens, probability_YX / tokens
    if normalization == "transformers":
        return num_experts * torch.dot(load_YX.mean(dim=0), mean_YX.mean(dim=0))
    evenness = (load_YX * mean_YX).sum() / (num_layers * top_k)
    return {"balanced": num_experts, "paper": 1}[normalization] * evenness


def router_z_loss(squared_logsumexp_Y: Tensor, num_tokens: Tensor) -> Tensor:
    """The mean over tokens and layers of logsumexp(router logits)^2, () float32.

    Args:
        squared_logsumexp_Y: Sums over tokens, (Y,) float32.
        num_tokens: Tokens that each layer routed, T, ().

    Source: Zoph 2022 (ST-MoE), arXiv:2202.08906, Eq. 5.
    """
    return squared_logsumexp_Y.mean() / num_tokens.clamp(min=1).to(squared_logsumexp_Y.dtype)
