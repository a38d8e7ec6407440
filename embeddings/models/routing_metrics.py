"""How evenly the experts of each sparse layer are used, from what the routing of some tokens adds up to."""

import math
from typing import NamedTuple

import torch
from torch import Tensor


class LoadMetrics(NamedTuple):
    """How evenly the tokens of Y sparse layers are spread over X experts.

    Attributes:
        entropy_Y: Entropy of the experts' shares over its largest value, (Y,) float64, 0 to 1; 1 where all are loaded
            alike.
        highest_Y: Tokens of the busiest expert over an even share, (Y,) float32; 1 where all are loaded alike, X where
            one expert has all.
        idle_Y: Experts that were given no token, (Y,) int64.
    """

    entropy_Y: Tensor
    highest_Y: Tensor
    idle_Y: Tensor


def load_metrics(count_YX: Tensor) -> LoadMetrics:
    """The metrics of the tokens given to each expert of each sparse layer, (Y, X) int64."""
    highest_Y = count_YX.amax(dim=1) * count_YX.shape[1] / count_YX.sum(dim=1).clamp(min=1)
    return LoadMetrics(relative_entropy(count_YX), highest_Y, (count_YX == 0).sum(dim=1))


def routing_metrics(count_YX: Tensor, probability_YX: Tensor, layers: list[int]) -> dict[str, float]:
    """The metrics of one step by the names they are logged under (see `RoutingStatistics`).

    Args:
        count_YX: Tokens given to each expert of each sparse layer, (Y, X) int64.
        probability_YX: Sums of router probabilities, (Y, X) float.
        layers: The layers' indices.
    """
    load = load_metrics(count_YX)
    by_name = {
        "load_entropy": load.entropy_Y,
        "probability_entropy": relative_entropy(probability_YX),
        "highest_load": load.highest_Y,
        "idle_experts": load.idle_Y,
    }
    values = {
        f"routing/{name}_layer_{layer}": float(value)
        for name, value_Y in by_name.items()
        for layer, value in zip(layers, value_Y.tolist(), strict=True)
    }
    return values | {
        "routing/load_entropy": float(load.entropy_Y.mean()),
        "routing/idle_experts": float(load.idle_Y.sum()),
    }


def relative_entropy(amount_YX: Tensor) -> Tensor:
    """The entropy of each row's shares over log X, (Y,) float64; 1 where there is one expert alone."""
    share_YX = amount_YX.double() / amount_YX.sum(dim=1, keepdim=True).clamp(min=1e-12)
    most = math.log(amount_YX.shape[1])
    entropy_Y = torch.special.entr(share_YX).sum(dim=1)
    return entropy_Y / most if most else torch.ones_like(entropy_Y)
