"""Parameter groups for an optimiser."""

from typing import Any

from torch import nn


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
