"""FSDP2: a model whose weights lie in parts, one on each rank, and are put together a layer at a time."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from embeddings.models.experts import Experts
from embeddings.models.layers import layers


def shard(
    module: nn.Module, mesh: DeviceMesh, entries: Sequence[str] = (), product_dtype: torch.dtype | None = None
) -> None:
    """Shard a module: each of its repeated layers for itself, and what is left as one group.

    A layer's weights are gathered when its forward or backward begins and freed after it; its gradient is averaged over
    the ranks, and scattered, by every backward.

    With a `product_dtype` the matrices of the layers are cast before they are gathered, which halves what is sent, and
    the gradients are averaged in float32. Autocast would cast them after, to the same values; only the bias that
    experts share is rounded too. What autocast leaves in float32 (norms, routers) is a group of its own, gathered as it
    is.

    Args:
        module: The module, whose calls are its forward; it becomes an `FSDPModule` in place.
        mesh: The ranks, one dimension.
        entries: Methods beside `forward` that use its weights.
        product_dtype: What autocast computes products in, None without autocast.
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
    """The outermost parts with float32 weights none of which is of a product under autocast."""
    for part in module.children():
        weights = list(part.parameters())
        if any(isinstance(inner, nn.Linear | Experts) for inner in part.modules()):
            yield from _float32_parts(part)
        elif any(weight.dtype == torch.float32 for weight in weights):
            yield part


def make_contiguous(module: nn.Module) -> None:
    """Lay every parameter out row by row, as what cuts parameters wants it; the experts' second matrices are not."""
    for parameter in module.parameters():
        parameter.data = parameter.data.contiguous()


@contextmanager
def whole_parameters(module: nn.Module, keep: bool) -> Iterator[None]:
    """Have whole parameters, in the memory of the processor, in place of the cut ones; no forward may run inside.

    Args:
        module: The sharded module.
        keep: Whether this rank wants them; it takes part in the gathers all the same.

    Distributed: an all-gather a parameter, one after another.
    """
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
    named: list[tuple[nn.Module, str, Any]] = [
        (part, name, value) for part in module.modules() for name, value in part._parameters.items()
    ]
    cut: list[tuple[nn.Module, str, Any]] = [of for of in named if isinstance(of[2], DTensor)]
    whole: dict[Any, nn.Parameter] = {}
    for _, _, value in cut:
        if value not in whole:
            tensor = whole_state(value.detach(), keep)
            whole[value] = nn.Parameter(tensor, value.requires_grad) if keep else value
    try:
        for part, name, value in cut:
            part._parameters[name] = whole[value]
        yield
    finally:
        for part, name, value in cut:
            part._parameters[name] = value


def whole_state(state: Any, keep: bool) -> Any:
    """A state dict with every sharded tensor put together, in the memory of the processor.

    Args:
        state: Nested dicts and lists with tensors.
        keep: Whether this rank wants the tensors; it takes part in the gathers all the same.

    Distributed: an all-gather a sharded tensor, one after another.
    """

    def whole(tensor: Tensor) -> Tensor | None:
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        return full.detach().cpu() if keep else None

    return _mapped(state, whole)


def sharded_like(whole: Any, sharded: Any) -> Any:
    """A state dict of whole tensors, cut as another one's are; each rank cuts its own part, so nothing is sent.

    Args:
        whole: Nested dicts and lists with whole tensors, the same on all ranks.
        sharded: A dict that has a sharded tensor wherever `whole` is to have one.
    """
    if isinstance(whole, dict):
        return {key: sharded_like(value, sharded.get(key)) for key, value in whole.items()}
    if isinstance(sharded, DTensor):
        tensor = whole.to(sharded.device, sharded.dtype)
        return distribute_tensor(tensor, sharded.device_mesh, sharded.placements, src_data_rank=None)
    return whole


def _mapped(state: Any, function: Callable[[Tensor], Any]) -> Any:
    if isinstance(state, Tensor):
        return function(state)
    if isinstance(state, dict):
        return {key: _mapped(value, function) for key, value in state.items()}
    if isinstance(state, list):
        return [_mapped(value, function) for value in state]
    return state
