"""The base of every method: how a contrastive step runs under Lightning, with or without GradCache."""

from collections.abc import Sequence
from typing import Any

import lightning as L
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PreTrainedTokenizerBase

from embeddings.common import (
    BatchNeeds,
    ContextualStep,
    ContrastiveBatch,
    LossOutput,
    Representations,
    TextSettings,
    TokenBatch,
)
from embeddings.losses import InfoNCE
from embeddings.losses.masks import without_surrogates
from embeddings.models import Embedder
from embeddings.modules.optimized import OptimizedModule
from embeddings.modules.optimized import OptimizerFactory as OptimizerFactory
from embeddings.training.gradcache import GradCache
from embeddings.training.plain_step import plain_step
from embeddings.training.schedule import Schedule


class ContrastiveModule(OptimizedModule):
    """Trains an `Embedder` with a contrastive loss; a method says how to embed and how to score.

    The plain step is `loss(embed(queries), embed(candidates))`. The GradCache callback sets `grad_cache`, and the same
    two functions then run in mini-batches with the same gradient. Both keep Lightning's automatic optimisation:
    precision, accumulation, clipping and schedules work as in any module.

    Determinism: every random choice of a step (dropout) follows from (seed, epoch, batch, rank), so a resumed run
    draws what the uninterrupted run would have drawn.

    Args:
        embedder: The model that is trained and saved.
        loss: The contrastive loss.
        optimizer: Makes the optimiser from parameter groups.
        schedule: Learning-rate schedule in optimiser steps.
        seed: Seed of the step's random choices, None for the run's (`seed_everything`).
    """

    # The batch sampler that a method is made for, and what it loses by another (`BatchNeeds`); none where any serves.
    made_for: tuple[()] | tuple[str, str] = ()

    def __init__(
        self,
        embedder: Embedder,
        loss: InfoNCE,
        optimizer: OptimizerFactory,
        schedule: Schedule,
        seed: int | None = None,
    ) -> None:
        super().__init__(optimizer, schedule, seed)
        self.embedder = embedder
        self.frozen_base = embedder.frozen_base
        embedder.trained_widths = tuple(sorted(loss.widths, reverse=True))
        self.loss = loss
        self.grad_cache: GradCache | None = None

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The backbone's tokenizer, which the data module uses."""
        return self.embedder.tokenizer

    @property
    def batch_needs(self) -> BatchNeeds:
        """What the loss takes of a batch."""
        gathers = self.loss.gather_across_devices and self.loss.in_batch_negatives != "off"
        return BatchNeeds(self.loss.in_batch_negatives, gathers, *self.made_for)

    @property
    def text(self) -> TextSettings:
        """How the model reads its texts."""
        return self.embedder.text

    def check_run(self, trainer: L.Trainer, module: L.LightningModule, data: L.LightningDataModule | None) -> None:
        """Check loss, lengths, optimiser and schedule against what the trainer and the data say of themselves.

        Raises:
            OptionError: If the loss does not suit the width of the vectors, a filter has no vectors to go by, a text is
                longer than the backbone has positions, or the schedule does not fit the run.
            InputError: If the optimiser refuses its options.
        """
        if self.loss.false_negative_filter is not None and not getattr(data, "has_surrogates", False):
            raise without_surrogates()
        self.loss.check_width(self.embedder.embedding_dim)
        text = getattr(data, "text", None)
        if isinstance(text, TextSettings):
            self.embedder.check_lengths(text)
        super().check_run(trainer, module, data)

    def sharded_parts(self) -> Sequence[tuple[nn.Module, Sequence[str]]]:
        """The embedder."""
        return [(self.embedder, self.embedder.entries)]

    def setup(self, stage: str) -> None:
        """Take the text settings from the data module, so that a saved model encodes as it was trained.

        What they leave to the model stays: the pooling rule of an imported one.
        """
        text = getattr(getattr(self.trainer, "datamodule", None), "text", None)
        if isinstance(text, TextSettings):
            self.embedder.text = text.following(self.embedder.text)

    def embed(self, tokens: TokenBatch, context: Any = None) -> Representations:
        """Vectors of all texts in their order, (N, D) float32, unit norm where the embedder normalises."""
        return Representations(self.embedder(tokens.padded(pad_token_id=self.embedder.pad_token_id)))

    def loss_from_representations(
        self, query: Representations, candidate: Representations, batch: ContrastiveBatch
    ) -> LossOutput:
        """The contrastive loss of a whole batch."""
        output = self.loss(query.vector_ND, candidate.vector_ND, batch)
        assert isinstance(output, LossOutput)
        return output

    def forward(
        self, tokens: TokenBatch, context: Any = None, is_context: bool = False
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """`embed` or, for a context, `embed_context`, in plain tensors: the entry for a wrapper (ZeRO's engine)."""
        if is_context:
            assert isinstance(self, ContextualStep)
            return self.embed_context(tokens), {}
        found = self.embed(tokens, context)
        return found.vector_ND, found.statistics

    def training_step(self, batch: ContrastiveBatch, batch_idx: int) -> Tensor:
        """The loss of one batch; under GradCache all backward passes but the last mini-batch's have then run."""
        if self.grad_cache is None:
            output = plain_step(self, batch)
        else:
            if batch_idx % self.trainer.accumulate_grad_batches == 0:
                for optimizer in self.trainer.optimizers:
                    optimizer.zero_grad()
            is_last = (batch_idx + 1) % self.trainer.accumulate_grad_batches == 0
            run = getattr(self.trainer.strategy, "cached_forward_backward", _cached_forward_backward)
            output = run(self.grad_cache, self, batch, self._early_scale(), is_last)
        self.check_loss(output.loss)
        self.log("train/loss", output.loss.detach(), prog_bar=True, batch_size=len(batch))
        self.log_dict({f"train/{name}": value for name, value in output.terms.items()}, batch_size=len(batch))
        if batch.negative_level:
            self.log("train/level", float(batch.negative_level), prog_bar=True, batch_size=len(batch))
        return output.loss

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        """Clear gradients, unless GradCache did so before its first backward pass.

        Lightning calls this between `training_step` and its own backward pass, where GradCache's early gradients are
        already in place.
        """
        if self.grad_cache is None:
            optimizer.zero_grad()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep the text settings beside the weights."""
        super().on_save_checkpoint(checkpoint)
        checkpoint["text_settings"] = self.embedder.text.to_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the text settings."""
        super().on_load_checkpoint(checkpoint)
        if "text_settings" in checkpoint:
            self.embedder.text = TextSettings.from_dict(checkpoint["text_settings"])

    def _early_scale(self) -> float:
        """The factor that Lightning puts on the returned loss, for the backward passes that run before."""
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        loss_scale = 1.0 if scaler is None else float(scaler.get_scale())
        return loss_scale / self.trainer.accumulate_grad_batches


def _cached_forward_backward(
    engine: GradCache, module: ContrastiveModule, batch: ContrastiveBatch, scale: float, is_last: bool
) -> LossOutput:
    """GradCache's step but for the last backward, where that one synchronises gradients for all (DDP)."""
    return engine.forward_backward(module, batch, scale=scale)
