"""Whether the disk has room for a run's checkpoints, asked before the run begins."""

import os
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from embeddings.common.io import check_disk_space
from embeddings.common.process import is_first_process

# The old checkpoint and the new one while it is written, and a tenth for what lies beside.
_CHECKPOINTS = 2.2


def check_checkpoint_room(trainer: L.Trainer, module: L.LightningModule, resumed: str | None = None) -> None:
    """Check that two checkpoints fit on the disk of each folder that the run keeps them in; rank 0's, which writes.

    Their size is estimated: the weights, and what the optimiser keeps of those that are trained. Remote places and the
    files that a run of many checkpoints piles up are left out.

    Args:
        trainer: The trainer, before the run.
        module: What it trains, whole.
        resumed: The checkpoint that the run goes on from. In the folder that it lies in it will be replaced: of the two
            it is there already.

    Raises:
        OSError: If they do not.
    """
    kept = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
    if not kept or trainer.fast_dev_run or not is_first_process():  # type: ignore[attr-defined]
        return
    of_logger = trainer.loggers[0].save_dir if trainer.loggers else None
    usual = of_logger or trainer.default_root_dir
    needed = int(_CHECKPOINTS * checkpoint_bytes(module, str(trainer.precision)))
    for folder in {str(callback.dirpath or usual) for callback in kept}:
        if "://" not in folder:
            check_disk_space(folder, needed, _replaced_bytes(folder, resumed))


def checkpoint_bytes(module: nn.Module, precision: str = "32-true") -> int:
    """The size of a checkpoint of a run, but for what is small.

    Args:
        module: The module, whole, and before the trainer gives its weights another type.
        precision: One of Lightning's.
    """
    halves = precision in ("bf16-true", "16-true")
    state: Any = getattr(module, "state_per_weight", None)
    per_weight = 0.0 if state is None else state()
    left_out: set[str] = getattr(module, "frozen_names", set)()
    total = 0.0
    for name, value in (*module.named_parameters(), *module.named_buffers()):
        if name in left_out:
            continue
        size = 2 if halves and value.is_floating_point() else value.itemsize
        total += value.numel() * size * (1 + per_weight * value.requires_grad)
    return int(total)


def _replaced_bytes(folder: str, resumed: str | None) -> int:
    """The bytes of the checkpoint that a run goes on from where it lies in the folder of the next ones, else none."""
    if resumed is None or not Path(resumed).is_file() or Path(resumed).resolve().parent != Path(folder).resolve():
        return 0
    return os.path.getsize(resumed)
