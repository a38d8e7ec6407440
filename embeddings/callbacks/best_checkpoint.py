"""The weights of the best checkpoint that a run kept."""

from pathlib import Path

import lightning as L

from embeddings.callbacks.durable_checkpoints import finish_writing
from embeddings.callbacks.whole_weights import cuts_weights
from embeddings.common.process import logger


def load_best(trainer: L.Trainer, module: L.LightningModule) -> int:
    """Load the best checkpoint into the module: that of the first `ModelCheckpoint` with a `monitor`, if there is one.

    Without such a checkpoint the module keeps its last weights. Where weights are cut over the ranks, each loads its
    own part.

    Returns:
        The optimiser steps that the module's weights have taken then.
    """
    monitored = [kept for kept in trainer.checkpoint_callbacks if getattr(kept, "monitor", None) is not None]
    path = getattr(monitored[0], "best_model_path", "") if monitored else ""
    finish_writing(trainer)
    if cuts_weights(trainer):
        trainer.strategy.barrier()
    if not path or not Path(path).is_file():
        return trainer.global_step
    state = trainer.strategy.checkpoint_io.load_checkpoint(path)
    module.on_load_checkpoint(state)
    if cuts_weights(trainer):
        trainer.strategy.load_model_state_dict(state)
    else:
        module.load_state_dict(state["state_dict"])
    logger.info("best checkpoint: %s", path)
    return int(state["global_step"])
