"""What modules and callbacks ask a training strategy of: the one place that knows how strategies differ."""

from contextlib import AbstractContextManager, nullcontext

from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy, Strategy

from embeddings.common import ContrastiveBatch, ContrastiveStep, LossOutput
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
        equal_mini_batches: Whether GradCache must run equally many mini-batches on all ranks.
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
        """GradCache's step but for the last backward, which Lightning runs.

        Args:
            engine: GradCache.
            step: The module.
            batch: The batch.
            scale: As in `GradCache.forward_backward`.
            is_last: Whether the optimiser steps after this batch.
        """
        return engine.forward_backward(step, batch, scale=scale)


class _LightningStrategy(TrainingStrategy):
    """One of Lightning's own strategies, of which GradCache and durable checkpoints support one device and DDP."""

    def __init__(self, strategy: Strategy) -> None:
        is_covered = isinstance(strategy, SingleDeviceStrategy | DDPStrategy)
        self.single_file_checkpoints = self.supports_gradcache = is_covered
        self.is_sharded = isinstance(strategy, ModelParallelStrategy)


def training_strategy(strategy: Strategy) -> TrainingStrategy:
    """What a trainer's strategy offers."""
    return strategy if isinstance(strategy, TrainingStrategy) else _LightningStrategy(strategy)
