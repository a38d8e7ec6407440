"""A model directory at the end of training."""

from pathlib import Path

import lightning as L
import torch

from embeddings.callbacks.embedder_of import embedder_of
from embeddings.common.log import logger


class ExportModel(L.Callback):
    """Writes the trained model as a sentence-transformers directory when training ends.

    With `best` the weights are those of the best checkpoint that a `ModelCheckpoint` kept, not the last ones.

    Args:
        output: The directory to write; one that is there is replaced once the new one is whole.
        best: Whether to take the best checkpoint where one was kept by a monitored metric.
    """

    def __init__(self, output: str, best: bool = True) -> None:
        self.output = output
        self.best = best

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the directory, on rank 0."""
        if not trainer.is_global_zero or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        embedder = embedder_of(pl_module, self)
        if self.best:
            self._load_best(trainer, pl_module)
        embedder.save_pretrained(self.output)
        logger.info("model directory: %s", self.output)

    def _load_best(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        checkpoint = trainer.checkpoint_callback
        path = getattr(checkpoint, "best_model_path", "")
        if not path or getattr(checkpoint, "monitor", None) is None or not Path(path).is_file():
            return
        state = torch.load(path, map_location="cpu", weights_only=True)["state_dict"]
        pl_module.load_state_dict(state)
        logger.info("best checkpoint: %s", path)
