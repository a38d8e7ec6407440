"""A model directory at the end of training."""

import dataclasses
from pathlib import Path

import lightning as L

from embeddings.callbacks.best_checkpoint import load_best
from embeddings.callbacks.embedder_of import embedder_of
from embeddings.callbacks.run_record import RunRecord, check_output, mark_output
from embeddings.callbacks.whole_weights import cuts_weights, whole_weights
from embeddings.common import TextSettings
from embeddings.common.process import logger
from embeddings.models.directory import replaced_folder
from embeddings.models.model_card import keeps_card, write_model_card


class ExportModel(L.Callback):
    """Writes the trained model as a sentence-transformers directory with its card when training ends.

    With `best` the weights are those of the best checkpoint that a `ModelCheckpoint` kept, not the last ones.

    Args:
        output: The directory to write, once training has ended. A model of the same run that is there is replaced.
        best: Whether to take the best checkpoint where one was kept by a monitored metric: that of the first
            `ModelCheckpoint` that has a `monitor`.
        query_max_length: Most tokens of a query that the written model reads; None for what it was trained with.
        document_max_length: The same of a document.
        replace: Whether a model of another run is replaced too.

    Raises:
        OptionError: If a length is below 4 tokens or above the positions of the model, or another run's model or
            something else than a folder lies at `output`.
        UserError: If the module trains no embedder.
    """

    def __init__(
        self,
        output: str,
        best: bool = True,
        query_max_length: int | None = None,
        document_max_length: int | None = None,
        replace: bool = False,
    ) -> None:
        self.output = output
        self.best = best
        self.replace = replace
        self.query_max_length = query_max_length
        self.document_max_length = document_max_length
        self._with_lengths(TextSettings())

    def check_run(self, trainer: L.Trainer, module: L.LightningModule, data: L.LightningDataModule | None) -> None:
        """Check the place, and that the model has positions for the lengths that it is to be written with."""
        replace = self.replace or bool(trainer.fast_dev_run)  # type: ignore[attr-defined]
        check_output(trainer, self.output, "ExportModel", replace)
        embedder, text = embedder_of(module, self), getattr(data, "text", None)
        lengths = self._with_lengths(text if isinstance(text, TextSettings) else embedder.text)
        embedder.check_lengths(lengths, "ExportModel")

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Check the same before training."""
        if stage == "fit":
            self.check_run(trainer, pl_module, getattr(trainer, "datamodule", None))

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the directory, on rank 0; the others take part where weights are cut."""
        if trainer.fast_dev_run or not (trainer.is_global_zero or cuts_weights(trainer)):  # type: ignore[attr-defined]
            return
        embedder = embedder_of(pl_module, self)
        num_steps = load_best(trainer, pl_module) if self.best else trainer.global_step
        embedder.text = self._with_lengths(embedder.text)
        with whole_weights(trainer):
            if trainer.is_global_zero:
                record = RunRecord.of(trainer)
                facts = record.facts(num_steps) if record else None
                output = Path(self.output).expanduser()
                with replaced_folder(output) as new:
                    embedder.save_pretrained(new)
                    mark_output(trainer, new)
                    if not keeps_card(output):
                        write_model_card(new, embedder, facts, name=output.resolve().name)
                logger.info("model directory: %s", self.output)

    def _with_lengths(self, text: TextSettings) -> TextSettings:
        return dataclasses.replace(
            text,
            query_max_length=text.query_max_length if self.query_max_length is None else self.query_max_length,
            document_max_length=(
                text.document_max_length if self.document_max_length is None else self.document_max_length
            ),
        )
