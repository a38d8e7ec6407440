"""What the routing of a backbone adds up to, read beside the states that a forward pass is asked for."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from embeddings.models.lora import plain_backbone
from embeddings.models.rotary_moe import RotaryMoeModel, RotaryMoeOutput

COUNTS, PROBABILITIES, SQUARED_LOGSUMEXP = "expert_counts", "expert_probabilities", "router_squared_logsumexp"


def has_experts(backbone: nn.Module) -> bool:
    """Whether a backbone, adapted by peft or not, has sparse layers."""
    return isinstance(plain_backbone(backbone), RotaryMoeModel)


def moe_layers(backbone: nn.Module) -> list[int]:
    """The indices of a backbone's sparse layers, from 0."""
    return list(plain_backbone(backbone).config.moe_layers) if has_experts(backbone) else []


@contextmanager
def read_routing(backbone: nn.Module) -> Iterator[Callable[[], dict[str, Tensor]]]:
    """Read the sums of the forward passes that a backbone runs inside.

    They are outputs of the backbone like its states (`RotaryMoeOutput`) and part of the same graph; a layer that runs
    again for the backward pass adds nothing.

    Yields:
        A function that gives the sums by name: `expert_counts` (Y, X) int64, `expert_probabilities` (Y, X) and
        `router_squared_logsumexp` (Y,), Y sparse layers; empty where the backbone is dense.
    """
    found: dict[str, Tensor] = {}

    def add(_: nn.Module, __: Any, output: Any) -> None:
        assert isinstance(output, RotaryMoeOutput)
        for name in (COUNTS, PROBABILITIES, SQUARED_LOGSUMEXP):
            value = getattr(output, name)
            found[name] = found[name] + value if name in found else value

    if not has_experts(backbone):
        yield dict
        return
    hook = plain_backbone(backbone).register_forward_hook(add)
    try:
        yield lambda: dict(found)
    finally:
        hook.remove()
