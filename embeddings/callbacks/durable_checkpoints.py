"""Checkpoints that are whole and on disk once they have their name."""

from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from embeddings.common.fileio import atomic_path


class DurableCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint beside its place, waits until it is on disk, and only then gives it its name.

    After a crash at any point the name has the old checkpoint or the whole new one. Lightning's own writing renames
    what may still be in memory alone, and takes a refused folder for success. Remote places (`s3://…`) are left to it.

    Raises:
        OSError: If the disk is full or the folder refuses the file; what had the name before is left.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write one checkpoint."""
        if "://" in str(path) or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        with atomic_path(path) as temporary, open(temporary, "wb") as file:
            torch.save(checkpoint, file)


def make_checkpoints_durable(trainer: L.Trainer) -> None:
    """Have a trainer write its checkpoints so, where they are single files and no other way was chosen."""
    strategy = trainer.strategy
    if isinstance(strategy, SingleDeviceStrategy | DDPStrategy) and type(strategy.checkpoint_io) is TorchCheckpointIO:
        strategy.checkpoint_io = DurableCheckpointIO()
