"""How training strategies differ, in one place: what modules and callbacks ask of one, and weights sharded by FSDP2."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from embeddings.common import ContrastiveBatch, ContrastiveStep, LossOutput
from embeddings.models.bidirectional import layers
from embeddings.models.moe.experts import Experts
from embeddings.training.gradcache import GradCache


class TrainingStrategy:
    """What a strategy offers beyond Lightning's own interface. The defaults are those of one device and of DDP.

    A strategy of this library inherits it beside Lightning's class; `training_strategy` answers for all others.

    Attributes:
        is_sharded: Whether no rank has all weights (FSDP2, ZeRO-3), so that every rank takes part in each forward.
        single_file_checkpoints: Whether rank 0 writes a checkpoint as one file with full tensors.
        checks_gradients: Whether the strategy's own optimiser step refuses gradients that are NaN or infinite.
        keeps_float32_weights: Whether weights in half precision have a float32 copy that the optimiser updates.
        supports_gradcache: Whether `gradcache_step` gives the right gradient.
        supports_context_stage: Whether it does so for a `ContextualStep` too.
        equal_mini_batches: Whether every backward averages gradients, so that GradCache must run equally many
            mini-batches on all ranks.
    """

    is_sharded: bool = False
    single_file_checkpoints: bool = True
    checks_gradients: bool = False
    keeps_float32_weights: bool = False
    supports_gradcache: bool = True
    supports_context_stage: bool = True
    equal_mini_batches: bool = False

    def full_weights(self) -> AbstractContextManager[None]:
        """A context in which rank 0 has all weights and no forward may run; every rank must enter it."""
        return nullcontext()

    def gradcache_step(
        self, engine: GradCache, step: ContrastiveStep, batch: ContrastiveBatch, scale: float, is_last: bool
    ) -> LossOutput:
        """GradCache's step but for the last backward, which Lightning runs; the optimiser steps next if `is_last`."""
        return engine.forward_backward(step, batch, scale=scale, syncs_each=self.equal_mini_batches)


def training_strategy(strategy: Strategy) -> TrainingStrategy:
    """What a trainer's strategy offers; of Lightning's own, one device and DDP support GradCache and single files."""
    if isinstance(strategy, TrainingStrategy):
        return strategy
    found = TrainingStrategy()
    found.single_file_checkpoints = found.supports_gradcache = isinstance(strategy, SingleDeviceStrategy | DDPStrategy)
    found.is_sharded = isinstance(strategy, ModelParallelStrategy)
    return found


def shard(
    module: nn.Module, mesh: DeviceMesh, entries: Sequence[str] = (), product_dtype: torch.dtype | None = None
) -> None:
    """Shard a module by FSDP2, in place: each repeated layer is a group of its own, the other weights are one group.

    A layer's weights are gathered when its forward or backward begins and freed after it. Every backward averages its
    gradient over the ranks, and scatters it. While one layer is computed the next one's weights are gathered: in the
    backward FSDP2 asks for them early, and in the forward the host runs ahead, as nothing in a layer waits for a value.

    With a `product_dtype`, that of autocast, the layers' matrices are cast before they are gathered, which halves the
    traffic, and gradients are averaged in float32. Autocast would cast them afterwards, to the same values; only the
    bias that experts share is rounded too. Weights that autocast leaves in float32 (norms, routers) are a group of
    their own. `entries` are methods other than `forward` that use the weights.
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
        if any(isinstance(inner, nn.Linear | Experts) for inner in part.modules()):
            yield from _float32_parts(part)
        elif any(weight.dtype == torch.float32 for weight in part.parameters()):
            yield part


def make_contiguous(module: nn.Module) -> None:
    """Store every parameter row by row, as sharding needs; the experts' second matrices are not."""
    for parameter in module.parameters():
        parameter.data = parameter.data.contiguous()


@contextmanager
def full_parameters(module: nn.Module, keep: bool) -> Iterator[None]:
    """A context with full parameters in CPU memory in place of sharded ones; no forward may run inside.

    A rank that does not want them (`keep`) takes part in the gathers all the same.

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
    """A state dict, nested dicts and lists, in CPU memory with every sharded tensor gathered; `keep` as above."""
    if isinstance(state, Tensor):
        full = state.full_tensor() if isinstance(state, DTensor) else state
        return full.detach().cpu() if keep else None
    if isinstance(state, dict):
        return {key: full_state(value, keep) for key, value in state.items()}
    if isinstance(state, list):
        return [full_state(value, keep) for value in state]
    return state


def sharded_like(full: Any, sharded: Any) -> Any:
    """A state dict of full tensors, the same on all ranks, sharded as another one is; nothing is sent."""
    if isinstance(full, dict):
        return {key: sharded_like(value, sharded.get(key)) for key, value in full.items()}
    if isinstance(sharded, DTensor):
        tensor = full.to(sharded.device, sharded.dtype)
        return distribute_tensor(tensor, sharded.device_mesh, sharded.placements, src_data_rank=None)
    return full
