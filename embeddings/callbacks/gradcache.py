"""GradCache under Lightning's automatic optimisation."""

import lightning as L

from embeddings.common import ContextualStep, UserError
from embeddings.common.protocols import RunData, run_data
from embeddings.training.gradcache import GradCache, GradCacheModule
from embeddings.training.strategy import training_strategy


class GradCacheCallback(L.Callback):
    """Trains any contrastive module in mini-batches with the gradient of the full batch.

    The size of the batch is then limited by its vectors, not by the encoder's activations. Precision, gradient
    clipping, accumulation, schedules and logging work as in a plain step, because the module stays under automatic
    optimisation: its `training_step` runs every backward pass but the last one, and returns the batch's loss with the
    rest of the gradient.

    Args:
        mini_batch_tokens: Maximum of padded tokens of a mini-batch. A text's context counts as one token a slot, and
            soft prompts count too.
        mini_batch_texts: Maximum of texts of a mini-batch; None for no limit.
        kept_fraction: Share of all padded tokens, 0 to 1, whose graphs may be kept instead of recomputed.
        kept_gib: Memory that kept graphs may hold together, in GiB on this rank.
        equal_mini_batches: Whether all ranks run equally many mini-batches; always where every backward has
            collectives (FSDP2, ZeRO-2 and 3).

    Raises:
        OptionError: If an option is impossible.
        UserError: If the module is not contrastive, or the strategy synchronises gradients in a way that is not
            supported.
    Related: `training.gradcache.GradCache`, the engine without Lightning.
    """

    def __init__(
        self,
        mini_batch_tokens: int = 8192,
        mini_batch_texts: int | None = None,
        kept_fraction: float | None = None,
        kept_gib: float | None = None,
        equal_mini_batches: bool = False,
    ) -> None:
        self.engine = GradCache(mini_batch_tokens, mini_batch_texts, kept_fraction, kept_gib, equal_mini_batches)

    def check_run(self, trainer: L.Trainer, module: L.LightningModule, data: RunData | None) -> None:
        """Check that module and strategy support GradCache."""
        if not isinstance(module, GradCacheModule):
            name = type(module).__name__
            raise UserError(f"GradCacheCallback needs a contrastive module, got {name}; remove the callback")
        strategy = training_strategy(trainer.strategy)
        if not strategy.supports_gradcache:
            name = type(trainer.strategy).__name__
            fix = "set trainer.strategy to ddp, or to embeddings.strategies.FSDP2Strategy or ZeroStrategy"
            raise UserError(f"GradCacheCallback does not run under {name}; {fix}")
        if isinstance(module, ContextualStep) and not strategy.supports_context_stage:
            what = "ZeRO-1 loses the gradients of the second stage, which the last backward does not reach"
            raise UserError(f"GradCacheCallback: {what}; set trainer.strategy.init_args.stage to 2")

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Hand the engine to the module."""
        self.check_run(trainer, pl_module, run_data(trainer))
        assert isinstance(pl_module, GradCacheModule)
        self.engine.equal_mini_batches |= training_strategy(trainer.strategy).equal_mini_batches
        pl_module.grad_cache = self.engine

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Take it away again."""
        assert isinstance(pl_module, GradCacheModule)
        pl_module.grad_cache = None
