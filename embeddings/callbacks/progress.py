"""The progress of a run (steps, loss, remaining time) and its speed (pairs, tokens and operations per second)."""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelSummary, ProgressBar, TQDMProgressBar
from torch import nn

from embeddings.common import ContextualStep, ContrastiveBatch, UserError, require_minimum
from embeddings.common.distributed import count_values, mean_over_ranks, world_size
from embeddings.common.process import logger
from embeddings.common.progress import LINE_SECONDS, progress_bar, stop_reporting
from embeddings.common.protocols import RunData
from embeddings.common.types import Prediction
from embeddings.data.samplers.base import steps_of_batches
from embeddings.models.moe.upcycling import parameter_counts
from embeddings.models.pooling import plain_backbone
from embeddings.training.gradcache import (
    CANDIDATE,
    CONTEXT,
    QUERY,
    GradCache,
    GradCacheModule,
    has_context,
    lengths_read,
    plan_stages,
)


class StepProgress(TQDMProgressBar):
    """Shows the steps of the full run, including those before a resume.

    If stderr is a terminal, it is one bar. Otherwise it is a line at the first step, every `every_seconds`, and at the
    last step. Metrics that are logged with `prog_bar=True` are appended.

    Args:
        every_seconds: Seconds between two lines if stderr is not a terminal, >= 0.
    """

    def __init__(self, every_seconds: float = LINE_SECONDS) -> None:
        super().__init__()
        require_minimum("StepProgress.every_seconds", every_seconds, 0, "try 30")
        self.every_seconds = every_seconds

    def init_train_tqdm(self) -> Any:
        # Lightning's estimate ignores a `GradientAccumulationScheduler`.
        batches = self.trainer.num_training_batches
        return progress_bar(
            steps_of_batches(self.trainer, int(batches) if batches < float("inf") else None),
            "training",
            "step",
            delay=0,
            every_seconds=self.every_seconds,
            initial=self.trainer.global_step,
            mininterval=0.5,
            miniters=1,
            dynamic_ncols=True,
            smoothing=0,  # the mean speed, so that the estimate includes evaluations and checkpoints
            disable=self.is_disabled,
        )

    def on_train_epoch_start(self, trainer: L.Trainer, *_: Any) -> None:
        """Continue the bar, which Lightning resets."""

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (steps := trainer.global_step - self.train_progress_bar.n) > 0:
            self.train_progress_bar.set_postfix(self.get_metrics(trainer, pl_module), refresh=False)
            self.train_progress_bar.update(steps)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        if self._train_progress_bar is not None:
            self.train_progress_bar.close()

    def get_metrics(self, trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, Any]:
        shown = super().get_metrics(trainer, pl_module)
        shown.pop("v_num", None)
        return shown if trainer.max_epochs == 1 else {"epoch": trainer.current_epoch, **shown}


class ParameterCount(L.Callback):
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        total = count_values(pl_module.parameters())
        trained = count_values(weight for weight in pl_module.parameters() if weight.requires_grad)
        logger.info("%s parameters, %s of them trained", f"{total:,}", f"{trained:,}")


def replace_displays(trainer: L.Trainer, given: Sequence[L.Callback]) -> None:
    """Replace Lightning's default progress bar and layer table, but not the callbacks of the config (`given`)."""
    callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    for place, callback in enumerate(callbacks):
        if isinstance(callback, ProgressBar) and callback not in given:
            callbacks[place] = StepProgress()
        elif isinstance(callback, ModelSummary) and callback not in given:
            callbacks[place] = ParameterCount()
    if not any(isinstance(callback, StepProgress) for callback in callbacks):
        # The user wants no progress, or has another bar.
        stop_reporting()


class Work(NamedTuple):
    """The size of some batches."""

    pairs: int = 0  # queries, or rows of a language model
    tokens: int = 0  # of their texts and of context documents
    computed: int = 0  # positions, including padding
    read: int = 0  # positions of the texts without padding: tokens, context slots and soft prompts
    squares: int = 0  # sum over texts of squared positions, for the cost of attention
    context: int = 0  # tokens of context documents, the input of the first stage
    context_squares: int = 0  # sum over context documents of squared tokens


class Throughput(L.Callback):
    """Logs the speed of a run at regular optimiser steps, from wall time.

    - `throughput/pairs_per_second` and `throughput/tokens_per_second`: over all ranks; padding and context slots do not
      count as tokens.
    - `throughput/padding`: fraction of the computed positions that are padding. This and all following values are means
      over the ranks.
    - `throughput/waiting`: fraction of the time that a rank spent outside steps, in the loader or other callbacks.
    - `throughput/tflops`: the model's operations per second on a rank, in 10^12, without pooling, loss,
      embedding tables, padding and recomputation.

    Args:
        every_n_steps: Optimiser steps between two logged rows, > 0. The first row includes the first steps.
    """

    def __init__(self, every_n_steps: int = 50) -> None:
        require_minimum("Throughput.every_n_steps", every_n_steps, 1, "try 50")
        self.every_n_steps = every_n_steps
        self._work, self._logged_step = Work(), 0
        self._row_start = self._batch_start = self._busy = 0.0

    def check_run(self, trainer: L.Trainer, module: L.LightningModule, data: RunData | None) -> None:
        if backbone_of(module) is None:
            name = type(module).__name__
            raise UserError(f"Throughput needs a module with a backbone, got {name}; remove the callback")

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.check_run(trainer, pl_module, None)
        self._work, self._logged_step, self._busy = Work(), trainer.global_step, 0.0
        self._row_start = time.perf_counter()

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._batch_start = time.perf_counter()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: object, batch: Any, batch_idx: int
    ) -> None:
        self._busy += time.perf_counter() - self._batch_start
        read = getattr(pl_module, "read_batch", batch)  # with the context that the module adds
        work = work_of(read, pl_module.grad_cache if isinstance(pl_module, GradCacheModule) else None)
        self._work = Work(*map(sum, zip(self._work, work, strict=True)))
        step = trainer.global_step
        if step == self._logged_step or step % self.every_n_steps:
            return
        now = time.perf_counter()
        values = self._row(pl_module, now - self._row_start)
        for each in trainer.loggers:
            each.log_metrics(values, step=step)
        self._work, self._busy, self._row_start, self._logged_step = Work(), 0.0, now, step

    def _row(self, module: L.LightningModule, seconds: float) -> dict[str, float]:
        work, ranks = self._work, world_size()
        values = {
            "pairs_per_second": ranks * work.pairs / seconds,
            "tokens_per_second": ranks * work.tokens / seconds,
            "padding": 1 - (work.read + work.context) / max(1, work.computed),
            "waiting": 1 - self._busy / seconds,
            "tflops": flops(module, work) / seconds / 1e12,
        }
        means = mean_over_ranks({name: torch.tensor(value, device=module.device) for name, value in values.items()})
        return {f"throughput/{name}": float(value) for name, value in means.items()}


def work_of(batch: Any, engine: GradCache | None = None) -> Work:
    """The size of packed rows or of a contrastive batch, split into `engine`'s mini-batches or padded as a whole."""
    if isinstance(batch, Prediction):
        rows, length = batch.input_ids_NL.shape
        tokens = int((batch.document_NL >= 0).sum()) if batch.has_padding else rows * length
        return Work(rows, tokens, computed=rows * length, read=tokens, squares=rows * length**2)
    assert isinstance(batch, ContrastiveBatch)
    texts = [lengths_read(batch, tower) for tower in (QUERY, CANDIDATE)]
    context = [lengths_read(batch, CONTEXT)] if has_context(batch) else []
    if engine is None:
        computed = sum(len(length_N) * int(length_N.max()) for length_N in texts + context if len(length_N))
    else:
        stages = plan_stages(batch, engine.mini_batch_tokens, engine.mini_batch_texts)
        computed = sum(mini_batch.num_tokens for stage in stages for mini_batch in stage)
    tokens = sum(tower.num_tokens for tower in (batch.query, batch.candidate, batch.context) if tower is not None)
    # Sums of lengths and of squared lengths, for the texts and for the context.
    sums = (sum(int((length_N**power).sum()) for length_N in part) for part in (texts, context) for power in (1, 2))
    return Work(len(batch), tokens, computed, *sums)


def flops(module: nn.Module, work: Work) -> float:
    backbone, first_stage = backbone_of(module), getattr(getattr(module, "embedder", None), "first_stage", None)
    assert backbone is not None
    is_trained = any(parameter.requires_grad for parameter in backbone.parameters())
    total = backbone_flops(backbone, work.read, work.squares, is_trained)
    if first_stage is not None:
        is_trained = isinstance(module, ContextualStep) and module.trains_context
        total += backbone_flops(first_stage.backbone, work.context, work.context_squares, is_trained)
    return total


def backbone_flops(backbone: nn.Module, positions: int, squares: int, has_backward: bool = True) -> float:
    """Operations of one backbone; without `has_backward` those of the forward pass.

    For each weight and position: 2 forward, 2 backward to the states, 2 backward to trained weights. In each layer and
    text: 4 L^2 H forward for attention's two products, twice that backward.
    """
    # A token uses only some experts of a sparse layer.
    counts = parameter_counts(backbone)
    tables = [layer.weight for layer in backbone.modules() if isinstance(layer, nn.Embedding)]
    weights = counts.active - count_values(tables)
    trained = count_values(p for p in backbone.parameters() if p.requires_grad)
    share = min(1.0, max(0, trained - count_values(t for t in tables if t.requires_grad)) / max(1, weights))
    config = plain_backbone(backbone).config
    attention: float = 12.0 * config.num_hidden_layers * config.hidden_size * squares
    if not has_backward:
        return weights * 2.0 * positions + attention / 3
    return weights * (4.0 + 2.0 * share) * positions + attention


def backbone_of(module: nn.Module) -> nn.Module | None:
    model: Any = getattr(module, "embedder", None) or getattr(module, "language_model", None)
    found = getattr(model, "backbone", None)
    return found if isinstance(found, nn.Module) else None
