"""A language model's directory at the end of training."""

import lightning as L

from embeddings.callbacks.best_checkpoint import load_best
from embeddings.callbacks.whole_weights import cuts_weights, whole_weights
from embeddings.common import UserError
from embeddings.common.log import logger
from embeddings.models import LanguageModel
from embeddings.models.directory import require_folder_or_nothing


class ExportLanguageModel(L.Callback):
    """Writes a trained language model as a Hugging Face directory when training ends, LoRA matrices merged.

    `backbone: {name: OUTPUT}` of any method starts from it.

    Args:
        output: The directory to write; one that is there is replaced once the new one is whole.
        best: Whether to take the best checkpoint where one was kept by a monitored metric, such as `val/loss`.

    Raises:
        OptionError: If something else than a folder lies at `output`.
        UserError: If the module trains no language model.
    """

    def __init__(self, output: str, best: bool = False) -> None:
        self.output, self.best = output, best

    def check_run(self, trainer: L.Trainer, module: L.LightningModule, data: L.LightningDataModule | None) -> None:
        """Check the place and the module."""
        self._language_model(module)
        require_folder_or_nothing(self.output)

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
                self._language_model(pl_module).save_pretrained(self.output)
                logger.info("language model: %s", self.output)

    def _language_model(self, module: L.LightningModule) -> LanguageModel:
        found = getattr(module, "language_model", None)
        if not isinstance(found, LanguageModel):
            name = type(module).__name__
            raise UserError(f"ExportLanguageModel needs a language model, {name} trains none; use ExportModel")
        return found
