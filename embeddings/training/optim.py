"""Parameter groups for an optimiser, and what it keeps of them."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


def parameter_groups(module: nn.Module) -> list[dict[str, Any]]:
    """The trainable parameters in two groups: matrices, and vectors and scalars without weight decay.

    Biases, norm weights and temperatures are pulled to zero by weight decay without any gain, so their group sets
    `weight_decay` to 0; the matrices take the optimiser's own value.

    Raises:
        ValueError: If nothing is trainable.
    """
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not trainable:
        raise ValueError("no parameter is trainable: the whole model is frozen")
    matrices = [parameter for parameter in trainable if parameter.ndim >= 2]
    vectors = [parameter for parameter in trainable if parameter.ndim < 2]
    groups: list[dict[str, Any]] = []
    if matrices:
        groups.append({"params": matrices})
    if vectors:
        groups.append({"params": vectors, "weight_decay": 0.0})
    return groups


def state_per_weight(make: Callable[[Iterable[Any]], Optimizer]) -> float:
    """How many numbers an optimiser keeps for each that it trains, tried on a small matrix: 2 of AdamW.

    Args:
        make: Makes it; 0 is the answer for one that takes no dense gradient on a processor.
    """
    matrix = nn.Parameter(torch.zeros(64, 64))
    matrix.grad = torch.zeros_like(matrix)
    optimizer = make([matrix])
    try:
        optimizer.step(lambda: 0.0)
    except (RuntimeError, AssertionError):
        return 0.0
    kept = [value.numel() for value in optimizer.state[matrix].values() if isinstance(value, Tensor)]
    return round(sum(kept) / matrix.numel(), 2)
