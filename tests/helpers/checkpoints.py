"""Checkpoint files without training."""

import os
from pathlib import Path
from typing import Any

from embeddings.common.checkpoint_file import write_checkpoint

# The keys that a resumable checkpoint must have.
RESUMABLE: dict[str, Any] = {
    "pytorch-lightning_version": "2.6.6",
    "global_step": 1,
    "state_dict": {},
    "loops": {},
    "optimizer_states": [],
    "lr_schedulers": [],
}


def save(content: Any, path: Path, seconds: float | None = None) -> str:
    """Write a checkpoint with a modification time; returns its path."""
    write_checkpoint(content, path)
    if seconds is not None:
        os.utime(path, (seconds, seconds))
    return str(path)


def damage(path: Path | str) -> None:
    """Invert the last byte of a file without changing its modification time."""
    times = os.stat(path)
    content = Path(path).read_bytes()
    Path(path).write_bytes(content[:-1] + bytes([content[-1] ^ 0xFF]))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
