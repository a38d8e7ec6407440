"""FSDP2: weights are sharded over the ranks and gathered one layer at a time."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from embeddings.models.bidirectional import layers
from embeddings.models.moe.experts import Experts


def shard(
    module: nn.Module, mesh: DeviceMesh, entries: Sequence[str] = (), product_dtype: torch.dtype | None = None
) -> None:
    """Shard a module: each repeated layer is a group of its own, the other weights are one group.

    A layer's weights are gathered when its forward or backward begins and freed after it; its gradient is averaged over
    the ranks, and scattered, by every backward.

    With a `product_dtype` the layers' matrices are cast before they are gathered, which halves the traffic, and the
    gradients are averaged in float32. Autocast would cast them afterwards, to the same values; only the bias that
    experts share is rounded too. Weights that autocast leaves in float32 (norms, routers) are a group of their own.

    Args:
        module: The module, whose calls are its forward; it becomes an `FSDPModule` in place.
        mesh: The ranks, one dimension.
        entries: Methods other than `forward` that use its weights.
        product_dtype: The dtype in which autocast computes products, None without autocast.
    """
    make_contiguous(module)
    for layer in layers(module):
        if product_dtype is None:
            fully_shard(layer, mesh=mesh)
            continue
        for part in _float32_parts(layer):
            fully_shard(part, mesh=mesh)
        policy = MixedPrecisionPolicy(product_dtype, torch.float32, cast_forward_inputs=False)
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(module, mesh=mesh)
    for entry in entries:
        register_fsdp_forward_method(module, entry)


def _float32_parts(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost parts with float32 weights that autocast uses in no product."""
    for part in module.children():
        weights = list(part.parameters())
        if any(isinstance(inner, nn.Linear | Experts) for inner in part.modules()):
            yield from _float32_parts(part)
        elif any(weight.dtype == torch.float32 for weight in weights):
            yield part


def make_contiguous(module: nn.Module) -> None:
    """Store every parameter row by row, as sharding needs; the experts' second matrices are not."""
    for parameter in module.parameters():
        parameter.data = parameter.data.contiguous()


@contextmanager
def full_parameters(module: nn.Module, keep: bool) -> Iterator[None]:
    """A context with full parameters in CPU memory in place of sharded ones; no forward may run inside.

    Args:
        module: The sharded module.
        keep: Whether this rank wants them; it takes part in the gathers all the same.

    Distributed: an all-gather a parameter, one after another.
    """
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
    sharded: list[tuple[nn.Module, str, Any]] = [
        (part, name, value)
        for part in module.modules()
        for name, value in part._parameters.items()
        if isinstance(value, DTensor)
    ]
    full: dict[Any, nn.Parameter] = {}
    for _, _, value in sharded:
        if value not in full:
            tensor = full_state(value.detach(), keep)
            full[value] = nn.Parameter(tensor, value.requires_grad) if keep else value
    try:
        for part, name, value in sharded:
            part._parameters[name] = full[value]
        yield
    finally:
        for part, name, value in sharded:
            part._parameters[name] = value


def full_state(state: Any, keep: bool) -> Any:
    """A state dict in CPU memory with every sharded tensor gathered.

    Args:
        state: Nested dicts and lists with tensors.
        keep: Whether this rank wants the tensors; it takes part in the gathers all the same.

    Distributed: an all-gather a sharded tensor, one after another.
    """
    if isinstance(state, Tensor):
        full = state.full_tensor() if isinstance(state, DTensor) else state
        return full.detach().cpu() if keep else None
    if isinstance(state, dict):
        return {key: full_state(value, keep) for key, value in state.items()}
    if isinstance(state, list):
        return [full_state(value, keep) for value in state]
    return state


def sharded_like(full: Any, sharded: Any) -> Any:
    """A state dict of full tensors, sharded as another one is; each rank takes its own part, so nothing is sent.

    Args:
        full: Nested dicts and lists with full tensors, the same on all ranks.
        sharded: A dict with a sharded tensor wherever the result has one.
    """
    if isinstance(full, dict):
        return {key: sharded_like(value, sharded.get(key)) for key, value in full.items()}
    if isinstance(sharded, DTensor):
        tensor = full.to(sharded.device, sharded.dtype)
        return distribute_tensor(tensor, sharded.device_mesh, sharded.placements, src_data_rank=None)
    return full
