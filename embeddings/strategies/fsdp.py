"""FSDP2 under Lightning: sharded weights, gradients and optimiser, with checkpoints that any strategy resumes."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.strategies.strategy import Strategy
from torch.optim import Optimizer
from torch.optim.optimizer import StateDict

from embeddings.strategies.ranks import TIMEOUT
from embeddings.training.strategy import TrainingStrategy, full_parameters, full_state, sharded_like


class FSDP2Strategy(TrainingStrategy, ModelParallelStrategy):
    """Shards weights, gradients and optimiser state over all ranks; a layer is gathered only while it is computed.

    The gradient equals DDP's; under `bf16-mixed` the layers' matrices are gathered in bfloat16. A module says in
    `configure_model` what is sharded (see `training.strategy.shard`).

    A checkpoint is one file with full tensors, which rank 0's memory has to hold: any strategy resumes it, on any
    number of ranks.

    Args:
        process_group_backend: "nccl", "gloo" …; None for what suits the device.
        timeout: How long a rank waits for the others in a collective before the run ends.
    """

    is_sharded = equal_mini_batches = True
    # One file, by rank 0, as Lightning's base class has it.
    save_checkpoint, load_checkpoint = Strategy.save_checkpoint, Strategy.load_checkpoint
    lightning_restore_optimizer = Strategy.lightning_restore_optimizer

    def __init__(self, process_group_backend: str | None = None, timeout: timedelta = TIMEOUT) -> None:
        options: dict[str, Any] = {"process_group_backend": process_group_backend, "timeout": timeout}
        super().__init__(tensor_parallel_size=1, save_distributed_checkpoint=False, **options)

    def setup_environment(self) -> None:
        """Start the ranks' communication, with all of them in one dimension."""
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()

    def full_weights(self) -> AbstractContextManager[None]:
        assert self.model is not None
        return full_parameters(self.model, keep=self.is_global_zero)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.model is not None
        state: dict[str, Any] = full_state(self.model.state_dict(), keep=self.is_global_zero)
        return state

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.model is not None
        state = sharded_like(dict(checkpoint["state_dict"]), self.model.state_dict())
        self.model.load_state_dict(state, strict=strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer._optimizer
        state: dict[str, Any] = full_state(optimizer.state_dict(), keep=self.is_global_zero)
        return state

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(_sharded_optimizer_state(optimizer, state))


def _sharded_optimizer_state(optimizer: Optimizer, state: Mapping[str, Any]) -> StateDict:
    """A full state in which each tensor of its parameter's shape is sharded as the parameter is."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    of_parameter = {}
    for index, values in state["state"].items():
        parameter = parameters[int(index)]
        like = {name: parameter for name, value in values.items() if getattr(value, "shape", None) == parameter.shape}
        of_parameter[int(index)] = sharded_like(values, like)
    return {**state, "state": of_parameter}
