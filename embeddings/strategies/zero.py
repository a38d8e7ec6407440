"""DeepSpeed's ZeRO under Lightning, for plain steps and for GradCache."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import lightning as L
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.strategies.strategy import Strategy
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.optim import Optimizer

from embeddings.common import ContrastiveBatch, LossOutput, NumericError, Representations, TokenBatch
from embeddings.strategies import zero_state
from embeddings.strategies.ranks import TIMEOUT
from embeddings.training import GradCache
from embeddings.training.sharding import make_contiguous


class ZeroStrategy(DeepSpeedStrategy):
    """Cuts the optimiser's state over all ranks (stage 1), the gradients too (2), the weights too (3).

    The gradient is DDP's, with accumulation and under GradCache too. There each mini-batch's forward goes through
    DeepSpeed's engine, since the training step as a whole does not.

    A checkpoint is one file with whole tensors, as a single process writes it, and none of DeepSpeed's own: it goes on
    under any strategy and on any number of ranks. The first rank's memory has to hold it.

    Args:
        stage: What is cut.
        offload_optimizer: Whether the optimiser's state lies in the processor's memory.
        offload_parameters: Whether the weights do where they are not in use; stage 3 alone.
        process_group_backend: "nccl", "gloo" …; None for what suits the device.
        timeout: How long a rank waits for the others in a collective before the run ends.
    """

    one_file_checkpoints = True
    checks_gradients = True
    # Under bf16-mixed and 16-mixed the engine's optimiser has the weights in float32 beside the model's own.
    keeps_float32_weights = True

    def __init__(
        self,
        stage: Literal[1, 2, 3] = 2,
        offload_optimizer: bool = False,
        offload_parameters: bool = False,
        process_group_backend: str | None = None,
        timeout: timedelta = TIMEOUT,
    ) -> None:
        super().__init__(
            stage=stage,
            offload_optimizer=offload_optimizer,
            offload_parameters=offload_parameters,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        self.shards_weights = stage == 3
        # From stage 2 on every backward averages its gradients; before, the last one does for all.
        self.equal_mini_batches = stage >= 2
        # Stage 1 then takes garbage for the gradient of what only earlier backwards reached (DeepSpeed 0.19).
        self.one_stage_alone = stage == 1
        # DeepSpeed logs a throughput by it; Lightning would ask the loader, which knows its batches later.
        assert isinstance(self.config, dict)
        self.config["train_micro_batch_size_per_gpu"] = 1

    def setup(self, trainer: L.Trainer) -> None:
        """Hand the module to DeepSpeed."""
        assert self.model is not None
        make_contiguous(self.model)
        super().setup(trainer)

    def whole_weights(self) -> AbstractContextManager[None]:
        """A context in which the ranks have all weights, for what is written; no forward may run inside."""
        assert self.lightning_module is not None
        return zero_state.gathered(list(self.lightning_module.parameters()))

    def _setup_model_and_optimizer(self, model: nn.Module, optimizer: Optimizer | None, *args: Any) -> Any:
        # DeepSpeed takes the parameters out of the groups.
        assert optimizer is not None
        self._groups = [list(group["params"]) for group in optimizer.param_groups]
        return super()._setup_model_and_optimizer(model, optimizer, *args)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The whole weights, on rank 0; None in their place on the others."""
        assert self.lightning_module is not None
        return dict(zero_state.weights(self.lightning_module, keep=self.is_global_zero))

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Take this rank's part of the weights."""
        assert self.lightning_module is not None
        zero_state.set_weights(self.lightning_module, checkpoint["state_dict"])

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimiser's whole state, as that of a single process, on rank 0."""
        zero = self.deepspeed_engine.optimizer
        return zero_state.optimizer_state(zero, self._groups, keep=self.is_global_zero)

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Yes: by `load_optimizer_state_dict`."""
        return True

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Take this rank's part of the optimiser's state."""
        (state,) = checkpoint["optimizer_states"]
        zero_state.set_optimizer_state(self.deepspeed_engine.optimizer, self._groups, state)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Write the file, on rank 0."""
        Strategy.save_checkpoint(self, checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Read the file, on every rank."""
        return Strategy.load_checkpoint(self, checkpoint_path, weights_only)

    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """The module's step, inside the engine's forward unless GradCache calls that one for each mini-batch."""
        if getattr(self.lightning_module, "grad_cache", None) is None:
            return super().training_step(*args, **kwargs)
        assert self.lightning_module is not None
        with self.precision_plugin.train_step_context():
            return self.lightning_module.training_step(*args, **kwargs)

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """The backward of a step's loss, which Lightning has divided by the number of accumulated batches already."""
        return super().backward(closure_loss, optimizer, *args, scale_wrt_gas=False, **kwargs)

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any | None = None, **kwargs: Any
    ) -> Any:
        """The engine's step; it leaves an update out where a gradient is no number, and the run ends then.

        Under float16 that is the loss scaler's way, and the run goes on.

        Distributed: the engine asks all ranks, so all of them end.
        Raises:
            NumericError: If it is not.
        """
        assert self.lightning_module is not None
        step, engine = self.lightning_module.global_step, self.deepspeed_engine
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        if engine.optimizer.overflow and not engine.fp16_enabled():
            raise NumericError(f"gradient is NaN or infinite at step {step}: no update was made")
        return output

    def cached_forward_backward(
        self, engine: GradCache, module: L.LightningModule, batch: ContrastiveBatch, scale: float, is_last: bool
    ) -> LossOutput:
        """GradCache's step but for the last backward, which Lightning runs.

        Args:
            engine: GradCache.
            module: A contrastive module.
            batch: The batch.
            scale: As in `GradCache.forward_backward`.
            is_last: Whether the optimiser steps after this batch.
        """
        zero = self.deepspeed_engine

        def backward(loss: Tensor) -> None:
            self._count_backward()
            zero.set_gradient_accumulation_boundary(False)
            zero.backward(loss, scale_wrt_gas=False)

        step = _ThroughEngine(zero, module)
        output = engine.forward_backward(step, batch, backward, scale=scale, syncs_each=self.equal_mini_batches)
        self._count_backward()
        zero.set_gradient_accumulation_boundary(is_last)
        return output

    def _count_backward(self) -> None:
        """Have stage 3 add the next backward's gradient to what there is.

        It replaces it otherwise, unless a forward came between the two: the engine's begins with this call. A kept
        graph has its forward long before.
        """
        clear = getattr(self.deepspeed_engine.optimizer, "clear_backward_seen_flag", None)
        if clear is not None:
            clear()


class _ThroughEngine(nn.Module):
    """A contrastive step whose forwards go through DeepSpeed's engine."""

    def __init__(self, engine: nn.Module, module: Any) -> None:
        super().__init__()
        self.engine, self.module = engine, module
        self.trains_context = getattr(module, "trains_context", True)

    def embed_context(self, tokens: TokenBatch) -> Tensor:
        vector_MH: Tensor = self.engine(tokens, is_context=True)[0]
        return vector_MH

    def embed(self, tokens: TokenBatch, context: Any = None) -> Representations:
        return Representations(*self.engine(tokens, context))

    def loss_from_representations(
        self, query: Representations, candidate: Representations, batch: ContrastiveBatch
    ) -> LossOutput:
        output: LossOutput = self.module.loss_from_representations(query, candidate, batch)
        return output
