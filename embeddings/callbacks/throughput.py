"""How fast a run is, in pairs, tokens and arithmetic, beside what the machine's matrix products reach."""

import time
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from torch import nn

from embeddings.common import ContrastiveBatch, OptionError, UserError
from embeddings.common.distributed import gather_counts
from embeddings.common.packed_rows import Prediction
from embeddings.models.lora import plain_backbone
from embeddings.models.upcycling import parameter_counts
from embeddings.training.mini_batch_plan import plan_stages

_PEAK_WIDTH = {"cpu": 1024, "cuda": 8192}
_PEAK_RUNS = 5


@dataclass
class Work:
    """What some batches were.

    Attributes:
        pairs: Queries, or rows of a language model.
        tokens: Tokens of their texts.
        positions: Positions that the encoder computed for them: tokens and padding.
        squares: The sum over texts of squared lengths, which attention costs.
    """

    pairs: int = 0
    tokens: int = 0
    positions: int = 0
    squares: int = 0

    def add(self, other: "Work") -> None:
        """Add another's numbers."""
        self.pairs += other.pairs
        self.tokens += other.tokens
        self.positions += other.positions
        self.squares += other.squares


class Throughput(L.Callback):
    """Logs the speed of a run every so many optimiser steps, from wall time.

    - `throughput/pairs_per_second` and `throughput/tokens_per_second`: of all ranks; padding is no token.
    - `throughput/padding`: share of the computed positions that are padding, on rank 0.
    - `throughput/waiting`: share of the time that rank 0 was not in a step: the loader, or other callbacks.
    - `throughput/tflops`: arithmetic of the model a second on rank 0, in 10^12. Counted is what the mathematics needs
      of the tokens, once forward and twice backward (once through frozen weights), but for the loss and the embedding
      tables: neither padding nor what GradCache and checkpointing compute again.
    - `throughput/matmul_share`: the same over what one square matrix product of the run's precision reaches, which is
      measured before the first step.

    Args:
        every_n_steps: Optimiser steps between two rows, > 0. The first row covers the first steps too.

    Distributed: an all-gather of two numbers every `every_n_steps` optimiser steps.
    Raises:
        OptionError: If `every_n_steps` is not positive.
        UserError: If the module trains no backbone whose arithmetic can be counted.
    """

    def __init__(self, every_n_steps: int = 50) -> None:
        if every_n_steps < 1:
            raise OptionError("Throughput.every_n_steps", every_n_steps, "must be >= 1", "try 50")
        self.every_n_steps = every_n_steps
        self._work, self._logged_step = Work(), 0
        self._row_start = self._batch_start = self._busy = 0.0
        self._peak = float("nan")

    def check_run(self, trainer: L.Trainer, module: L.LightningModule, data: L.LightningDataModule | None) -> None:
        """Check that there is a backbone."""
        if backbone_of(module) is None:
            raise UserError(
                f"Throughput needs a module with a backbone, got {type(module).__name__}; remove the callback"
            )

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Measure a matrix product, and begin to count."""
        self.check_run(trainer, pl_module, None)
        self._peak = matmul_tflops(pl_module.device, dtype_of(str(trainer.precision)))
        self._work, self._logged_step, self._busy = Work(), trainer.global_step, 0.0
        self._row_start = time.perf_counter()

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Note when the step begins."""
        self._batch_start = time.perf_counter()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: object, batch: Any, batch_idx: int
    ) -> None:
        """Count the step, and log a row when it is time."""
        self._busy += time.perf_counter() - self._batch_start
        self._work.add(work_of(batch, getattr(pl_module, "grad_cache", None)))
        step = trainer.global_step
        if step == self._logged_step or step % self.every_n_steps:
            return
        now = time.perf_counter()
        values = self._row(pl_module, now - self._row_start)
        for logger in trainer.loggers:
            logger.log_metrics(values, step=step)
        self._work, self._busy, self._row_start, self._logged_step = Work(), 0.0, now, step

    def _row(self, module: L.LightningModule, seconds: float) -> dict[str, float]:
        work = self._work
        pairs, tokens = (sum(gather_counts(count, module.device)) for count in (work.pairs, work.tokens))
        tflops = flops(module, work) / seconds / 1e12
        return {
            "throughput/pairs_per_second": pairs / seconds,
            "throughput/tokens_per_second": tokens / seconds,
            "throughput/padding": 1 - work.tokens / max(1, work.positions),
            "throughput/waiting": 1 - self._busy / seconds,
            "throughput/tflops": tflops,
            "throughput/matmul_share": tflops / self._peak,
        }


def work_of(batch: Any, engine: Any = None) -> Work:
    """What a batch is.

    Args:
        batch: A contrastive batch, or a language model's.
        engine: The GradCache that cuts it into mini-batches, or None where each tower is padded whole.
    """
    if isinstance(batch, Prediction):
        rows, length = batch.input_ids_NL.shape
        tokens = int((batch.document_NL >= 0).sum()) if batch.has_padding else rows * length
        return Work(rows, tokens, rows * length, rows * length**2)
    assert isinstance(batch, ContrastiveBatch)
    towers = [tower for tower in (batch.query, batch.candidate, batch.context) if tower is not None]
    if engine is None:
        positions = sum(len(tower) * int(tower.lengths_N.max()) for tower in towers if len(tower))
    else:
        stages = plan_stages(batch, engine.mini_batch_tokens, engine.mini_batch_texts)
        positions = sum(mini_batch.num_tokens for stage in stages for mini_batch in stage)
    return Work(
        len(batch),
        sum(tower.num_tokens for tower in towers),
        positions,
        sum(int(tower.lengths_N.square().sum()) for tower in towers),
    )


def flops(module: nn.Module, work: Work) -> float:
    """Operations that training on some tokens needs, a product and its sum as two.

    2 a weight and token forward, 2 backward to the states, 2 to the weights that are trained; and in each layer
    4 L^2 H a text forward for attention's two products, twice that backward.
    """
    backbone = backbone_of(module)
    assert backbone is not None
    # Of a sparse layer's experts a token passes a share.
    counts = parameter_counts(backbone)
    tables = [layer.weight for layer in backbone.modules() if isinstance(layer, nn.Embedding)]
    weights = counts.active - sum(table.numel() for table in tables)
    trained = sum(p.numel() for p in backbone.parameters() if p.requires_grad)
    share = min(1.0, max(0, trained - sum(t.numel() for t in tables if t.requires_grad)) / max(1, weights))
    config = plain_backbone(backbone).config
    attention: float = 12.0 * config.num_hidden_layers * config.hidden_size * work.squares
    return weights * (4.0 + 2.0 * share) * work.tokens + attention


def backbone_of(module: nn.Module) -> nn.Module | None:
    """The backbone that a module trains: of its embedder, or of its language model."""
    embedder: Any = getattr(module, "embedder", None)
    language_model: Any = getattr(module, "language_model", None)
    found = getattr(embedder, "backbone", None) or getattr(language_model, "backbone", None)
    return found if isinstance(found, nn.Module) else None


def dtype_of(precision: str) -> torch.dtype:
    """The type that products are computed in under one of Lightning's precisions."""
    if precision.startswith("bf16"):
        return torch.bfloat16
    if precision.startswith("16"):
        return torch.float16
    return torch.float64 if precision.startswith("64") else torch.float32


def matmul_tflops(device: torch.device, dtype: torch.dtype) -> float:
    """10^12 operations a second of a square matrix product, the best of a few."""
    width = _PEAK_WIDTH.get(device.type, 1024)
    left = torch.randn(width, width, device=device).to(dtype)
    best = float("inf")
    for _ in range(_PEAK_RUNS):
        start = time.perf_counter()
        torch.mm(left, left)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2.0 * width**3 / best / 1e12
