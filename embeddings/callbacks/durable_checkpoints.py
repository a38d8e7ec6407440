"""Checkpoints that are whole, checked and on disk once they have their name."""

import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import lightning as L
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from embeddings.common import OptionError
from embeddings.common.checkpoint_file import PackedContent, pack, read_checkpoint, write_checkpoint
from embeddings.common.io import Stage, unnoticed


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
    is_plain = isinstance(strategy, SingleDeviceStrategy | DDPStrategy)
    if not is_plain and not getattr(strategy, "one_file_checkpoints", False):
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
