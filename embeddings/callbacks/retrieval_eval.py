"""Retrieval scores during training, for example to choose the best checkpoint."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint, WeightAveraging

from embeddings.callbacks.checkpoints import embedder_of
from embeddings.callbacks.run_record import callbacks_of, model_checkpoints
from embeddings.common import OptionError, require_minimum
from embeddings.common.protocols import RunData, run_data
from embeddings.evaluation import RetrievalFolder, evaluate_widths, read_retrieval_folder
from embeddings.inference import Encoder, require_context_size
from embeddings.training.strategy import training_strategy

METRICS = ("ndcg_at_10", "mrr_at_10", "recall_at_10")


class RetrievalEvaluation(L.Callback):
    """Scores the model on a retrieval folder at regular optimiser steps and logs `val/ndcg_at_10` and other metrics.

    A model that is trained at several dimensions is scored at each; scores of truncated embeddings are logged as
    `val/ndcg_at_10_128`. A `ModelCheckpoint` with `monitor: val/ndcg_at_10`, `mode: max` and the same
    `every_n_train_steps`, or a multiple, keeps the best model. Rank 0 evaluates while the others wait. Under
    `EMAWeightAveraging` the averages are scored, which checkpoints and exports contain.

    Args:
        folder: A retrieval folder (`corpus.jsonl[.gz]`, `queries.jsonl`, `qrels.tsv`).
        every_n_steps: Optimiser steps between two evaluations, > 0; None evaluates at the end of each epoch, before
            `EarlyStopping` and `ModelCheckpoint` read the scores.
        name: Prefix of the logged metrics.
        at_start: Whether the model is also scored before its first step.
        context_size: Number of documents of the folder, sampled once, that are the context of a contextual model; None
            for the number of its slots, 0 for no context.
    """

    def __init__(
        self,
        folder: str,
        every_n_steps: int | None = 100,
        name: str = "val",
        at_start: bool = True,
        context_size: int | None = None,
    ) -> None:
        require_minimum("RetrievalEvaluation.every_n_steps", every_n_steps, 1, "try 100", optional=True)
        self.context_size = context_size
        self.folder = folder
        self.every_n_steps = every_n_steps
        self.name = name
        self.at_start = at_start
        self._data: RetrievalFolder | None = None
        self._scored_step = -1
        # The first metric by optimiser step.
        self._scores: dict[int, float] = {}

    def check_before_model(self, trainer: L.Trainer) -> None:
        for other in callbacks_of(trainer, RetrievalEvaluation):
            if other is not self and other.name == self.name:
                rule = f"must differ between {self.folder} and {other.folder}"
                fix = "name one of them, or leave one out"
                raise OptionError("RetrievalEvaluation.name", self.name, rule, fix)
        if self._data is None:
            self._data = read_retrieval_folder(self.folder)
        for kept in model_checkpoints(trainer):
            if (kept.monitor or "").startswith(tuple(f"{self.name}/{metric}" for metric in METRICS)):
                self._check_schedule(kept)

    def _check_schedule(self, kept: ModelCheckpoint) -> None:
        """Check that checkpoints are written at steps that are scored, not under the score of earlier weights."""
        steps, every = kept._every_n_train_steps, self.every_n_steps
        if every is None and (steps or kept._train_time_interval is not None):
            rule = f"must be set to choose the best {kept.monitor} within an epoch"
            fix = "set it to ModelCheckpoint's every_n_train_steps, or that to 0 and its every_n_epochs to 1"
            raise OptionError("RetrievalEvaluation.every_n_steps", None, rule, fix)
        if every is not None and (not steps or steps % every):
            rule = f"must be a multiple of {every}, the steps between scores, to choose the best {kept.monitor}"
            fix = "change it, or set every_n_steps: null and every_n_epochs: 1"
            raise OptionError("ModelCheckpoint.every_n_train_steps", steps, rule, fix)

    def check_run(self, trainer: L.Trainer, module: L.LightningModule, data: RunData | None) -> None:
        encoder = Encoder(embedder_of(module, self))
        if self.context_size:
            require_context_size(encoder, self.context_size)
        self.check_before_model(trainer)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == "fit":
            self.check_run(trainer, pl_module, run_data(trainer))

    @property
    def state_key(self) -> str:
        return self._generate_state_key(name=self.name, folder=self.folder)

    def state_dict(self) -> dict[str, Any]:
        return {"scored_step": self._scored_step, "scores": list(self._scores.items())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._scored_step, self._scores = state_dict["scored_step"], dict(state_dict["scores"])

    def harm(self) -> str:
        """A line if no score after the start of training exists or reached that of the start, else an empty string."""
        later = {step: score for step, score in self._scores.items() if step > 0}
        if not later:
            return f"no step of the run was scored on {self.folder}; lower every_n_steps, {self.every_n_steps}"
        if 0 not in self._scores:
            return ""
        best = max(later, key=lambda step: later[step])
        if later[best] >= self._scores[0]:
            return ""
        scores = f"{self._scores[0]:.3f} before, {later[best]:.3f} at best (step {best})"
        return f"training lowered nDCG@10 on {self.folder}: {scores}; lower the learning rate, or check the data"

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Score the untrained model, for the loggers only: Lightning would log these scores at the end of the epoch."""
        if trainer.global_step == 0:
            self._scored_step = 0
            if self.at_start:
                self._score(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        if self.every_n_steps is not None and trainer.global_step % self.every_n_steps == 0:
            self._score_and_log(trainer, pl_module)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.every_n_steps is None:
            self._score_and_log(trainer, pl_module)

    def _score_and_log(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.global_step == self._scored_step:
            return
        for name, value in self._score(trainer, pl_module).items():
            pl_module.log(name, value, prog_bar=name.endswith(METRICS[0]), logger=False)

    def _score(self, trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, float]:
        assert self._data is not None
        self._scored_step = trainer.global_step
        scores: dict[str, float] | None = None
        # With sharded weights each rank encodes the same texts, because all ranks must take part in a forward.
        if trainer.is_global_zero or training_strategy(trainer.strategy).is_sharded:
            with _saved_weights(trainer, pl_module):
                encoder = Encoder(embedder_of(pl_module, self))
                size = encoder.num_context if self.context_size is None else self.context_size
                widths = [encoder.embedding_dim, *encoder.embedder.trained_widths]
                # The name chooses the prompts.
                options: Any = {"name": Path(self.folder).resolve().name, "context_size": size or None}
                found = evaluate_widths(encoder, self._data, list(dict.fromkeys(widths)), **options)
            scores = {metric: float(found[0].metrics[metric]) for metric in METRICS}
            for shorter in found[1:]:
                scores |= {f"{metric}_{shorter.dimensions}": float(shorter.metrics[metric]) for metric in METRICS}
        scores = trainer.strategy.broadcast(scores)
        assert scores is not None
        self._scores[trainer.global_step] = scores[METRICS[0]]
        named = {f"{self.name}/{metric}": value for metric, value in scores.items()}
        # Lightning would log them under the next logged step, so they are passed to the loggers directly.
        for logger in trainer.loggers:
            logger.log_metrics(named, step=trainer.global_step)
        return named


@contextmanager
def _saved_weights(trainer: L.Trainer, module: L.LightningModule) -> Iterator[None]:
    """Inside, the module has the weights that a checkpoint gets: under `WeightAveraging` the averages."""
    averages = callbacks_of(trainer, WeightAveraging)
    # The callback exchanges the weights for a validation loop.
    for average in averages:
        average.on_validation_epoch_start(trainer, module)
    try:
        yield
    finally:
        for average in averages:
            average.on_validation_epoch_end(trainer, module)
