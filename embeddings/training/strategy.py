"""The interface of training strategies for modules and callbacks, and sharding of weights by FSDP2."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    Strategy,
)
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from embeddings.common import ContrastiveBatch, ContrastiveStep, LossOutput
from embeddings.models.bidirectional import layers
from embeddings.models.moe.experts import Experts
from embeddings.training.gradcache import GradCache


class TrainingStrategy:
    """Properties of a strategy beyond Lightning's interface. The defaults fit one device and DDP.

    A strategy of this library inherits from it and from Lightning's class; for others see `training_strategy`.
    """

    is_sharded: bool = False  # whether no rank has all weights, so that every rank must run each forward
    single_file_checkpoints: bool = True  # whether rank 0 writes a checkpoint as one file with full tensors
    checks_gradients: bool = False  # whether its optimiser step raises an error if a gradient is NaN or infinite
    keeps_float32_weights: bool = False  # whether weights in half precision have a float32 copy that is updated
    supports_gradcache: bool = True  # whether `gradcache_step` computes the correct gradient
    supports_context_stage: bool = True  # whether it is also correct for a `ContextualStep`
    compiles_layers: bool = False  # whether `compile: auto` compiles layers on a GPU
    # Whether every backward averages gradients, so that all ranks must run the same number of mini-batches.
    equal_mini_batches: bool = False

    def full_weights(self) -> AbstractContextManager[None]:
        """A context in which rank 0 has all weights and no forward may run; every rank must enter it."""
        return nullcontext()

    def gradcache_step(
        self, engine: GradCache, step: ContrastiveStep, batch: ContrastiveBatch, scale: float
    ) -> LossOutput:
        """GradCache's step without the last backward, which Lightning runs."""
        return engine.forward_backward(step, batch, scale=scale, syncs_each=self.equal_mini_batches)


def has_plain_weights(strategy: Strategy) -> bool:
    """Whether it is one device or DDP; DeepSpeed's strategy is a subclass of DDP's."""
    return isinstance(strategy, SingleDeviceStrategy | DDPStrategy) and not isinstance(strategy, DeepSpeedStrategy)


def training_strategy(strategy: Strategy) -> TrainingStrategy:
    """Return a strategy's properties. Of Lightning's, only one device and DDP support GradCache and single files."""
    if isinstance(strategy, TrainingStrategy):
        return strategy
    properties = TrainingStrategy()
    is_supported = has_plain_weights(strategy)
    properties.single_file_checkpoints = properties.supports_gradcache = properties.compiles_layers = is_supported
    properties.is_sharded = isinstance(strategy, ModelParallelStrategy)
    return properties


def shard(
    module: nn.Module, mesh: DeviceMesh, entries: Sequence[str] = (), product_dtype: torch.dtype | None = None
) -> None:
    """Shard a module by FSDP2, in place: each repeated layer is a separate group, the other weights are one group.

    `product_dtype` is autocast's: the layers' matrices are cast before they are gathered, to the same values, which
    halves the traffic; weights that autocast keeps in float32 (norms, routers) are separate groups. `entries` are
    methods other than `forward` that use the weights.
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
    """The outermost submodules with float32 weights that autocast does not use in matrix products."""
    for part in module.children():
        if any(isinstance(inner, nn.Linear | Experts) for inner in part.modules()):
            yield from _float32_parts(part)
        elif any(weight.dtype == torch.float32 for weight in part.parameters()):
            yield part


def make_contiguous(module: nn.Module) -> None:
    """Make every parameter contiguous, as sharding requires; the experts' second matrices are not."""
    for parameter in module.parameters():
        parameter.data = parameter.data.contiguous()


@contextmanager
def full_parameters(module: nn.Module, keep: bool) -> Iterator[None]:
    """A context with full parameters in CPU memory in place of sharded ones; no forward may run inside.

    Ranks with `keep` false take part in the gathers but discard the result.
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
            tensor = value.detach().full_tensor()
            full[value] = nn.Parameter(tensor.cpu(), value.requires_grad) if keep else value
    try:
        for part, name, value in sharded:
            part._parameters[name] = full[value]
        yield
    finally:
        for part, name, value in sharded:
            part._parameters[name] = value


def sharded_like(full: Any, sharded: Any) -> Any:
    """Shard full tensors, equal on all ranks, like those of another state dict, without communication."""
    if isinstance(full, dict):
        return {key: sharded_like(value, sharded.get(key)) for key, value in full.items()}
    if isinstance(sharded, DTensor) and not isinstance(full, DTensor):
        tensor = full.to(sharded.device, sharded.dtype)
        return distribute_tensor(tensor, sharded.device_mesh, sharded.placements, src_data_rank=None)
    return full


def time_left(trainer: L.Trainer) -> float:
    """The fraction of the trainer's `max_time` that is left, equal on all ranks; 1 without a limit."""
    left = 1.0
    for timer in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(timer, Timer) and (seconds := timer.time_remaining()) is not None:
            left = min(left, max(0.0, seconds / (seconds + timer.time_elapsed())))
    return trainer.strategy.broadcast(left)
