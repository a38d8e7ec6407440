"""The base of every method: how a contrastive step runs under Lightning, with or without GradCache."""

from collections.abc import Callable, Iterable
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.optim import Optimizer
from transformers import PreTrainedTokenizerBase

from embeddings.common import (
    ContrastiveBatch,
    InputError,
    LossOutput,
    NumericError,
    Representations,
    TextSettings,
    TokenBatch,
)
from embeddings.common.randomness import derive_seed
from embeddings.data.run_length import run_steps
from embeddings.losses import InfoNCE
from embeddings.losses.surrogate_filter import without_surrogates
from embeddings.models import Embedder
from embeddings.training.gradcache import GradCache
from embeddings.training.optim import parameter_groups
from embeddings.training.plain_step import plain_step
from embeddings.training.schedule import Schedule

OptimizerFactory = Callable[[Iterable[Any]], Optimizer]


class ContrastiveModule(L.LightningModule):
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
        seed: Seed of the step's random choices.
    """

    def __init__(
        self,
        embedder: Embedder,
        loss: InfoNCE,
        optimizer: OptimizerFactory,
        schedule: Schedule,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.embedder = embedder
        self.loss = loss
        self.grad_cache: GradCache | None = None
        self._optimizer = optimizer
        self._schedule = schedule
        self._seed = seed

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The backbone's tokenizer, which the data module uses."""
        return self.embedder.tokenizer

    def check_run(self, trainer: L.Trainer, module: L.LightningModule, data: L.LightningDataModule | None) -> None:
        """Check loss, lengths, optimiser and schedule against what the trainer and the data say of themselves.

        Raises:
            OptionError: If a filter has no vectors to go by, a text is longer than the backbone has positions, or the
                schedule does not fit the run.
            InputError: If the optimiser refuses its options.
        """
        if self.loss.false_negative_filter is not None and not getattr(data, "has_surrogates", False):
            raise without_surrogates()
        text = getattr(data, "text", None)
        if isinstance(text, TextSettings):
            self.embedder.check_lengths(text)
        self._make_optimizer()
        if trainer.max_steps > 0 or trainer.max_epochs == -1:
            self._check_schedule(trainer, trainer.max_steps if trainer.max_steps > 0 else None)

    def prepare_data(self) -> None:
        """Check all of this, and the schedule against the length of the data, before anything of the run is written."""
        self.check_run(self.trainer, self, getattr(self.trainer, "datamodule", None))
        self._check_schedule(self.trainer, self._trainer_steps())

    def setup(self, stage: str) -> None:
        """Take the text settings from the data module, so that a saved model encodes as it was trained."""
        text = getattr(getattr(self.trainer, "datamodule", None), "text", None)
        if isinstance(text, TextSettings):
            self.embedder.text = text

    def on_fit_start(self) -> None:
        """Switch dropout on: Lightning leaves modes as they are, and a model that was loaded is in evaluation mode."""
        self.train()

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

    def training_step(self, batch: ContrastiveBatch, batch_idx: int) -> Tensor:
        """The loss of one batch; under GradCache all backward passes but the last mini-batch's have then run."""
        if self.grad_cache is None:
            output = plain_step(self, batch)
        else:
            if batch_idx % self.trainer.accumulate_grad_batches == 0:
                for optimizer in self.trainer.optimizers:
                    optimizer.zero_grad()
            output = self.grad_cache.forward_backward(self, batch, scale=self._early_scale())
        if not torch.isfinite(output.loss):
            raise NumericError(f"loss is {output.loss.item()} at step {self.global_step}: no update was made")
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

    def on_train_batch_start(self, batch: ContrastiveBatch, batch_idx: int) -> None:
        """Seed the step's random choices from what the step is, not from what ran before."""
        progress: Any = self.trainer.fit_loop.epoch_progress
        if progress.current.ready == progress.current.processed:
            # Lightning 2.6 does not count an epoch that begins after a resume from the end of another, and would then
            # drop the loader's place from the next checkpoint.
            progress.increment_ready()
            progress.increment_started()
        torch.manual_seed(derive_seed(self._seed, "step", self.current_epoch, batch_idx, self.global_rank))

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """The optimiser over trainable parameters and its schedule, stepped once an optimiser step."""
        optimizer = self._make_optimizer()
        scheduler = self._schedule.scheduler(optimizer, self._trainer_steps())
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep the text settings beside the weights."""
        checkpoint["text_settings"] = self.embedder.text.to_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the text settings."""
        if "text_settings" in checkpoint:
            self.embedder.text = TextSettings.from_dict(checkpoint["text_settings"])

    def _make_optimizer(self) -> Optimizer:
        groups = parameter_groups(self)
        try:
            return self._optimizer(groups)
        except ValueError as error:
            raise InputError("model.optimizer", str(error), "the method configs hold usual values") from error

    def _check_schedule(self, trainer: L.Trainer, steps: int | None) -> None:
        if not trainer.fast_dev_run:  # type: ignore[attr-defined]
            self._schedule.check(steps)

    def _early_scale(self) -> float:
        """The factor that Lightning puts on the returned loss, for the backward passes that run before."""
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        loss_scale = 1.0 if scaler is None else float(scaler.get_scale())
        return loss_scale / self.trainer.accumulate_grad_batches

    def _trainer_steps(self) -> int | None:
        """Optimiser steps of the run, None where the trainer sets no end."""
        batches = getattr(getattr(self.trainer, "datamodule", None), "batches_per_epoch", None)
        return run_steps(self.trainer, batches)
