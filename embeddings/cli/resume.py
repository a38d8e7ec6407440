"""`--ckpt_path auto`: where a run that SLURM starts again goes on."""

import os
from pathlib import Path
from zipfile import is_zipfile

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint

AUTO = "auto"


def newest_checkpoint(folder: str | Path | None) -> str | None:
    """The newest whole `last*.ckpt` at any depth of a folder, or None: the run then starts anew.

    DeepSpeed's checkpoints are folders, and are taken for whole.

    Args:
        folder: `trainer.default_root_dir`, which should be this run's alone; None for the working folder.
    """
    # Lightning's own spelling of the folder, by which it knows a run's folder again.
    root = os.path.normpath(os.path.expanduser(folder or "."))
    found = [path for path in Path(root).rglob("last*.ckpt") if path.is_dir() or is_zipfile(path)]
    return str(max(found, key=lambda path: path.stat().st_mtime_ns)) if found else None


def keep_on_in_its_folder(trainer: L.Trainer, checkpoint: str) -> None:
    """Have the run keep its next checkpoints beside the one that it goes on from.

    A logger takes a new folder each time. In another folder Lightning would forget which checkpoints were the best.
    """
    for kept in trainer.checkpoint_callbacks:
        if isinstance(kept, ModelCheckpoint) and kept.dirpath is None:
            kept.dirpath = str(Path(checkpoint).parent)
