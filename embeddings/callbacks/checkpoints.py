"""Checkpoints that are whole, checked and on disk once they have their name."""

import os
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import lightning as L
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from embeddings.common import OptionError
from embeddings.common.checkpoint_file import PackedContent, pack, read_checkpoint, write_checkpoint
from embeddings.common.io import Stage, check_disk_space, unnoticed
from embeddings.common.process import is_first_process, logger
from embeddings.training.strategy import training_strategy


class DurableCheckpointIO(CheckpointIO):
    """Writes a checkpoint beside its place, waits for the disk, reads it back, and only then gives it its name.

    After a crash at any point the name has the old checkpoint or the whole new one, and Lightning removes older ones
    after that. A checkpoint is never a pickle: see `embeddings.common.checkpoint_file`. Remote places (`s3://…`) get
    the file as it was made and checked here.

    Asynchronous, training waits only while the state is copied in main memory: the file is written by a thread, one at
    a time, and what Lightning would remove after it goes once the new one is whole. An error of the thread is raised by
    the next save or at the end of the run. The copy's memory, as large as the checkpoint, is kept for the next one.

    Args:
        asynchronous: Whether training goes on while a checkpoint is written.

    Attributes:
        on_stage: Told what comes next, as by `write_checkpoint`, and "prune" and "pruned" around each removal.

    Raises:
        InputError: If the checkpoint holds something else than tensors and plain types; the message names where.
        OSError: If the disk is full or the folder refuses the file; what had the name before is left.
    """

    def __init__(self, asynchronous: bool = False) -> None:
        self.asynchronous = asynchronous
        self.on_stage: Stage = unnoticed
        self._thread: ThreadPoolExecutor | None = None
        # The write under way, and the removals that wait for it.
        self._tasks: list[Future[None]] = []
        self._copy: PackedContent | None = None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write one checkpoint, or take a copy of it to write."""
        if storage_options is not None:
            raise TypeError("DurableCheckpointIO takes no storage_options")
        packed = pack(checkpoint)
        if not self.asynchronous:
            self._write(packed, path)
            return
        self.wait()
        self._copy = packed.copied(self._copy)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._tasks = [self._thread.submit(self._write, self._copy, path)]

    def load_checkpoint(self, path: str | Path, map_location: Any = None, weights_only: Any = None) -> dict[str, Any]:
        """The content of a checkpoint, its tensors in main memory; both options change nothing."""
        self.wait()
        if "://" not in str(path):
            return read_checkpoint(path)
        with tempfile.TemporaryDirectory() as folder:
            get_filesystem(path).get_file(str(path), f"{folder}/checkpoint")
            return read_checkpoint(f"{folder}/checkpoint")

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove one checkpoint; while another is being written, after that one is whole."""
        if self._thread is not None and self._tasks:
            self._tasks.append(self._thread.submit(self._remove_after, self._tasks[0], path))
        else:
            self._remove(path)

    def wait(self) -> None:
        """Wait until what was saved is on disk.

        Raises:
            OSError: If it could not be written; only once.
        """
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.result()

    def teardown(self) -> None:
        """Wait, and let go of the thread and of the memory."""
        try:
            self.wait()
        finally:
            if self._thread is not None:
                self._thread.shutdown()
            self._thread = self._copy = None

    def _write(self, packed: PackedContent, path: str | Path) -> None:
        if "://" not in str(path):
            write_checkpoint(packed, path, self.on_stage)
            return
        with tempfile.TemporaryDirectory() as folder:
            write_checkpoint(packed, f"{folder}/checkpoint", self.on_stage)
            remote = get_filesystem(path)
            remote.makedirs(str(path).rpartition("/")[0], exist_ok=True)
            remote.put_file(f"{folder}/checkpoint", str(path))

    def _remove_after(self, write: Future[None], path: str | Path) -> None:
        write.result()
        self._remove(path)

    def _remove(self, path: str | Path) -> None:
        self.on_stage("prune")
        places = get_filesystem(path)
        if places.exists(path):
            places.rm(path, recursive=True)  # DeepSpeed's are folders
        self.on_stage("pruned")


def make_checkpoints_durable(trainer: L.Trainer) -> None:
    """Have a trainer whose checkpoints are single files write them so.

    Raises:
        OptionError: If another way was chosen: nothing here would read what it writes.
    """
    strategy = trainer.strategy
    if not training_strategy(strategy).single_file_checkpoints:
        return
    if type(strategy.checkpoint_io) is TorchCheckpointIO:
        strategy.checkpoint_io = DurableCheckpointIO()
    elif not isinstance(strategy.checkpoint_io, DurableCheckpointIO):
        rule = "must write checkpoints that can be gone on from"
        fix = "give embeddings.callbacks.DurableCheckpointIO, with asynchronous: true if training is not to wait"
        raise OptionError("trainer.plugins", type(strategy.checkpoint_io).__name__, rule, fix)


def finish_writing(trainer: L.Trainer) -> None:
    """Wait until the checkpoints that this rank has saved are on disk.

    Raises:
        OSError: If one could not be written.
    """
    if isinstance(trainer.strategy.checkpoint_io, DurableCheckpointIO):
        trainer.strategy.checkpoint_io.wait()


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
    is_sharded = training_strategy(trainer.strategy).is_sharded
    if is_sharded:
        trainer.strategy.barrier()
    if not path or not Path(path).is_file():
        return trainer.global_step
    state = trainer.strategy.checkpoint_io.load_checkpoint(path)
    module.on_load_checkpoint(state)
    if is_sharded:
        trainer.strategy.load_model_state_dict(state)
    else:
        module.load_state_dict(state["state_dict"])
    logger.info("best checkpoint: %s", path)
    return int(state["global_step"])


def write_none_on_exception(trainer: L.Trainer) -> None:
    """Have no `ModelCheckpoint` answer the exception that is on its way: each is called after all other callbacks."""
    for kept in trainer.checkpoint_callbacks:
        if isinstance(kept, ModelCheckpoint):
            kept.save_on_exception = False
