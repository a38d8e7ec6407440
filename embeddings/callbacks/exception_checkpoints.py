"""The checkpoints that are written because a run ends by an exception."""

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint


def write_none_on_exception(trainer: L.Trainer) -> None:
    """Have no `ModelCheckpoint` answer the exception that is on its way: each is called after all other callbacks."""
    for kept in trainer.checkpoint_callbacks:
        if isinstance(kept, ModelCheckpoint):
            kept.save_on_exception = False
