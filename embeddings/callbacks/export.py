"""Model directories that are written when training ends."""

import dataclasses
from pathlib import Path
from typing import Any

import lightning as L

from embeddings.callbacks.checkpoints import load_best
from embeddings.callbacks.run_record import RunRecord, check_output, mark_output
from embeddings.common import TextSettings, UserError
from embeddings.common.process import logger
from embeddings.common.protocols import RunData, run_data
from embeddings.models import Embedder, LanguageModel
from embeddings.models.model_card import check_licence, keeps_card, write_model_card
from embeddings.models.model_files import replaced_folder
from embeddings.training.strategy import training_strategy


def embedder_of(module: L.LightningModule, callback: L.Callback) -> Embedder:
    """The module's `embedder`, which a callback needs."""
    embedder = getattr(module, "embedder", None)
    if not isinstance(embedder, Embedder):
        name = type(callback).__name__
        raise UserError(f"{name} needs a module with an embedder, {type(module).__name__} has none; remove {name}")
    return embedder


class _Export(L.Callback):
    """Writes a directory on rank 0 when training ends; where weights are sharded the other ranks take part."""

    def __init__(self, output: str, best: bool, replace: bool) -> None:
        self.output, self.best, self.replace = output, best, replace

    def check_run(self, trainer: L.Trainer, module: L.LightningModule, data: RunData | None) -> None:
        replace = self.replace or bool(trainer.fast_dev_run)  # type: ignore[attr-defined]
        check_output(trainer, self.output, type(self).__name__, replace)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == "fit":
            self.check_run(trainer, pl_module, run_data(trainer))

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        strategy = training_strategy(trainer.strategy)
        if trainer.fast_dev_run or not (trainer.is_global_zero or strategy.is_sharded):  # type: ignore[attr-defined]
            return
        num_steps = load_best(trainer, pl_module) if self.best else trainer.global_step
        with strategy.full_weights():
            if trainer.is_global_zero:
                with replaced_folder(Path(self.output).expanduser()) as new:
                    self._write(trainer, pl_module, new, num_steps)
                    mark_output(trainer, new)
                logger.info("model directory: %s", self.output)

    def _write(self, trainer: L.Trainer, module: L.LightningModule, folder: Path, num_steps: int) -> None:
        raise NotImplementedError


class ExportModel(_Export):
    """Writes the trained model as a sentence-transformers directory with its card when training ends.

    Args:
        output: The directory to write. A model of the same run that is there is replaced.
        best: Whether to take the best checkpoint of the first `ModelCheckpoint` that has a `monitor`, where there is
            one, and not the last weights.
        query_max_length: Maximum of tokens of a query that the written model reads, >= 4; None for that in training.
        document_max_length: The same of a document.
        replace: Whether a model of another run is replaced too.
        licence: The model's licence for the card, as the Hub names it (`apache-2.0`).

    Raises:
        OptionError: If a length is impossible, or another run's model or anything but a folder is at `output`.
        UserError: If the module trains no embedder.
    """

    def __init__(
        self,
        output: str,
        best: bool = True,
        query_max_length: int | None = None,
        document_max_length: int | None = None,
        replace: bool = False,
        licence: str | None = None,
    ) -> None:
        check_licence("ExportModel.licence", licence)
        super().__init__(output, best, replace)
        self.query_max_length = query_max_length
        self.document_max_length = document_max_length
        self.licence = licence
        self._with_lengths(TextSettings())

    def check_run(self, trainer: L.Trainer, module: L.LightningModule, data: RunData | None) -> None:
        """Check the place, and that the model has positions for its lengths."""
        super().check_run(trainer, module, data)
        embedder = embedder_of(module, self)
        text = None if data is None else data.text
        embedder.check_lengths(self._with_lengths(text or embedder.text), "ExportModel")

    def _write(self, trainer: L.Trainer, module: L.LightningModule, folder: Path, num_steps: int) -> None:
        embedder, record, output = embedder_of(module, self), RunRecord.of(trainer), Path(self.output).expanduser()
        embedder.text = self._with_lengths(embedder.text)
        embedder.save_pretrained(folder)
        if not keeps_card(output):
            facts = record.facts(num_steps) if record else None
            write_model_card(folder, embedder, facts, licence=self.licence, name=output.resolve().name)

    def _with_lengths(self, text: TextSettings) -> TextSettings:
        names = ("query_max_length", "document_max_length")
        lengths: dict[str, Any] = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return dataclasses.replace(text, **lengths)


class ExportLanguageModel(_Export):
    """Writes a trained language model as a Hugging Face directory when training ends, LoRA matrices merged.

    `backbone: {name: OUTPUT}` of any method starts from it.

    Args:
        output: The directory to write. A model of the same run that is there is replaced.
        best: Whether to take the best checkpoint of the first `ModelCheckpoint` that has a `monitor`, such as
            `val/loss`.
        replace: Whether a model of another run is replaced too.

    Raises:
        OptionError: If another run's model or anything but a folder is at `output`.
        UserError: If the module trains no language model.
    """

    def __init__(self, output: str, best: bool = False, replace: bool = False) -> None:
        super().__init__(output, best, replace)

    def check_run(self, trainer: L.Trainer, module: L.LightningModule, data: RunData | None) -> None:
        self._language_model(module)
        super().check_run(trainer, module, data)

    def _write(self, trainer: L.Trainer, module: L.LightningModule, folder: Path, num_steps: int) -> None:
        self._language_model(module).save_pretrained(folder)

    def _language_model(self, module: L.LightningModule) -> LanguageModel:
        found = getattr(module, "language_model", None)
        if not isinstance(found, LanguageModel):
            name = type(module).__name__
            raise UserError(f"ExportLanguageModel needs a language model, {name} trains none; use ExportModel")
        return found
