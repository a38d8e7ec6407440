"""A language model's directory at the end of training."""

from pathlib import Path

import lightning as L

from embeddings.callbacks.best_checkpoint import load_best
from embeddings.callbacks.run_record import check_output, mark_output
from embeddings.callbacks.whole_weights import cuts_weights, whole_weights
from embeddings.common import UserError
from embeddings.common.process import logger
from embeddings.models import LanguageModel
from embeddings.models.directory import replaced_folder


class ExportLanguageModel(L.Callback):
    """Writes a trained language model as a Hugging Face directory when training ends, LoRA matrices merged.

    `backbone: {name: OUTPUT}` of any method starts from it.

    Args:
        output: The directory to write, once training has ended. A model of the same run that is there is replaced.
        best: Whether to take the best checkpoint where one was kept by a monitored metric, such as `val/loss`.
        replace: Whether a model of another run is replaced too.

    Raises:
        OptionError: If another run's model, or something else than a folder, lies at `output`.
        UserError: If the module trains no language model.
    """

    def __init__(self, output: str, best: bool = False, replace: bool = False) -> None:
        self.output, self.best, self.replace = output, best, replace

    def check_run(self, trainer: L.Trainer, module: L.LightningModule, data: L.LightningDataModule | None) -> None:
        """Check the place and the module."""
        self._language_model(module)
        replace = self.replace or bool(trainer.fast_dev_run)  # type: ignore[attr-defined]
        check_output(trainer, self.output, "ExportLanguageModel", replace)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Check the same before training."""
        if stage == "fit":
            self.check_run(trainer, pl_module, getattr(trainer, "datamodule", None))

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the directory, on rank 0; the others take part where weights are cut."""
        if trainer.fast_dev_run or not (trainer.is_global_zero or cuts_weights(trainer)):  # type: ignore[attr-defined]
            return
        if self.best:
            load_best(trainer, pl_module)
        with whole_weights(trainer):
            if trainer.is_global_zero:
                with replaced_folder(Path(self.output)) as new:
                    self._language_model(pl_module).save_pretrained(new)
                    mark_output(trainer, new)
                logger.info("language model: %s", self.output)

    def _language_model(self, module: L.LightningModule) -> LanguageModel:
        found = getattr(module, "language_model", None)
        if not isinstance(found, LanguageModel):
            name = type(module).__name__
            raise UserError(f"ExportLanguageModel needs a language model, {name} trains none; use ExportModel")
        return found
