"""FSDP2 under Lightning: sharded weights, gradients and optimiser, and checkpoints that any strategy goes on from."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any

from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.strategies.strategy import Strategy
from torch.optim import Optimizer
from torch.optim.optimizer import StateDict

from embeddings.common import ContrastiveBatch, LossOutput
from embeddings.strategies.ranks import TIMEOUT
from embeddings.training import GradCache
from embeddings.training.sharding import sharded_like, whole_parameters, whole_state


class FSDP2Strategy(ModelParallelStrategy):
    """Cuts weights, gradients and optimiser state over all ranks; a layer is whole only while it is computed.

    For a model that with its optimiser does not fit on one device. The gradient is that of DDP; precision is the
    trainer's, as everywhere, and under `bf16-mixed` the layers' matrices are gathered in bfloat16. A module says in
    `configure_model` what is sharded (see `training.sharding.shard`).

    A checkpoint is one file with whole tensors, as a single process writes it: it goes on under any strategy and on any
    number of ranks. The first rank's memory has to hold it.

    Args:
        process_group_backend: "nccl", "gloo" …; None for what suits the device.
        timeout: How long a rank waits for the others in a collective before the run ends.
    """

    shards_weights = True
    equal_mini_batches = True
    one_file_checkpoints = True

    def __init__(self, process_group_backend: str | None = None, timeout: timedelta = TIMEOUT) -> None:
        super().__init__(
            tensor_parallel_size=1,
            save_distributed_checkpoint=False,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )

    def setup_environment(self) -> None:
        """Start the ranks' communication, with all of them in one dimension."""
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()

    def whole_weights(self) -> AbstractContextManager[None]:
        """A context in which rank 0 has all weights, for what is written; no forward may run inside."""
        assert self.model is not None
        return whole_parameters(self.model, keep=self.is_global_zero)

    def cached_forward_backward(
        self, engine: GradCache, module: Any, batch: ContrastiveBatch, scale: float, is_last: bool
    ) -> LossOutput:
        """GradCache's step but for the last backward, which Lightning runs; every one averages its gradients."""
        return engine.forward_backward(module, batch, scale=scale, syncs_each=True)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The whole weights, on rank 0; None in their place on the others."""
        assert self.model is not None
        state: dict[str, Any] = whole_state(self.model.state_dict(), keep=self.is_global_zero)
        return state

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Take this rank's part of the weights."""
        assert self.model is not None
        state = sharded_like(dict(checkpoint["state_dict"]), self.model.state_dict())
        self.model.load_state_dict(state, strict=strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimiser's whole state, as that of a single process, on rank 0."""
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer._optimizer
        state: dict[str, Any] = whole_state(optimizer.state_dict(), keep=self.is_global_zero)
        return state

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Yes: by `load_optimizer_state_dict`."""
        return True

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Take this rank's part of each optimiser's state."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(_sharded_optimizer_state(optimizer, state))

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Write the file, on rank 0."""
        Strategy.save_checkpoint(self, checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Read the file, on every rank."""
        return Strategy.load_checkpoint(self, checkpoint_path, weights_only)


def _sharded_optimizer_state(optimizer: Optimizer, state: Mapping[str, Any]) -> StateDict:
    """A whole state with each tensor that has its parameter's shape cut as the parameter is."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    of_parameter = {}
    for index, values in state["state"].items():
        parameter = parameters[int(index)]
        like = {name: parameter for name, value in values.items() if getattr(value, "shape", None) == parameter.shape}
        of_parameter[int(index)] = sharded_like(values, like)
    return {**state, "state": of_parameter}
