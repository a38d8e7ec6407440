"""Parameter groups for an optimiser, and what it keeps of them."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


def parameter_groups(module: nn.Module, parts: Mapping[str, nn.Module] | None = None) -> list[dict[str, Any]]:
    """The trainable parameters in two groups: matrices, and vectors and scalars without weight decay.

    Biases, norm weights and temperatures are pulled to zero by weight decay without any gain, so their group sets
    `weight_decay` to 0; the matrices take the optimiser's own value.

    Args:
        module: The module.
        parts: Modules inside it that get two groups each of their own, whose `part` is the name; the other parameters
            are in groups without it.

    Raises:
        ValueError: If nothing is trainable.
    """
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not trainable:
        raise ValueError("no parameter is trainable: the whole model is frozen")
    part_of = {parameter: name for name, part in (parts or {}).items() for parameter in part.parameters()}
    groups: list[dict[str, Any]] = []
    for name in (None, *(parts or {})):
        own = [parameter for parameter in trainable if part_of.get(parameter) == name]
        options = {} if name is None else {"part": name}
        if matrices := [parameter for parameter in own if parameter.ndim >= 2]:
            groups.append({"params": matrices, **options})
        if vectors := [parameter for parameter in own if parameter.ndim < 2]:
            groups.append({"params": vectors, "weight_decay": 0.0, **options})
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
