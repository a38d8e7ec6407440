"""The results of a run: durable checkpoints, the choice of the best one, and exported model directories."""

import dataclasses
import os
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from embeddings.callbacks.run_record import RunRecord, callbacks_of, check_output, mark_output, model_checkpoints
from embeddings.common import OptionError, TextSettings, UserError
from embeddings.common.checkpoint_file import add_own_path, copied, read_checkpoint, write_checkpoint
from embeddings.common.io import check_disk_space
from embeddings.common.own_folder import replaced_folder
from embeddings.common.process import is_first_process, logger
from embeddings.common.protocols import RunData, run_data
from embeddings.common.text import LENGTHS
from embeddings.interop.golden import add_golden
from embeddings.models import Embedder, LanguageModel
from embeddings.models.model_card import check_licence, write_model_card
from embeddings.training.strategy import training_strategy


class DurableCheckpointIO(CheckpointIO):
    """Writes checkpoints atomically, with a checksum, and reads them without running code.

    After a crash at any point the path has the old checkpoint or the complete new one. A remote path (`s3://…`)
    receives a copy of a local file. With `asynchronous`, training waits only while the state is copied to main memory;
    the next save or the end of the run raises an error of the thread that writes.

    Args:
        asynchronous: Whether training continues while a checkpoint is written.
    """

    def __init__(self, asynchronous: bool = False) -> None:
        self.asynchronous = asynchronous
        self._thread: ThreadPoolExecutor | None = None
        # The current write, and the removals to do after it.
        self._tasks: list[Future[None]] = []
        # The run's local checkpoints, including those that a killed process did not remove.
        self.written: set[str] = set()

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        add_own_path(checkpoint, path)
        if self.asynchronous:
            self.wait()
            self.start(_write, copied(checkpoint), path)
        else:
            _write(checkpoint, path)
        self.written.add(os.path.abspath(path))

    def start(self, write: Callable[..., None], *arguments: Any) -> None:
        """Write a checkpoint in the thread, after `wait`."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._tasks = [self._thread.submit(write, *arguments)]

    def load_checkpoint(self, path: str | Path, map_location: Any = None, weights_only: Any = None) -> dict[str, Any]:
        self.wait()
        if "://" not in str(path):
            return read_checkpoint(path)
        with tempfile.TemporaryDirectory() as folder:
            get_filesystem(path).get_file(str(path), f"{folder}/checkpoint")
            return read_checkpoint(f"{folder}/checkpoint")

    def remove_checkpoint(self, path: str | Path) -> None:
        self.written.discard(os.path.abspath(path))
        if self._thread is not None and self._tasks:
            self._tasks.append(self._thread.submit(_remove, path, self._tasks[0]))
        else:
            _remove(path)

    def wait(self) -> None:
        """Wait until all saved checkpoints are on disk; an `OSError` of the thread is raised once."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.result()

    def teardown(self) -> None:
        try:
            self.wait()
        finally:
            if self._thread is not None:
                self._thread.shutdown()
            self._thread = None


def _write(checkpoint: dict[str, Any], path: str | Path) -> None:
    if "://" not in str(path):
        write_checkpoint(checkpoint, path)
        return
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(checkpoint, f"{folder}/checkpoint")
        remote = get_filesystem(path)
        remote.makedirs(str(path).rpartition("/")[0], exist_ok=True)
        remote.put_file(f"{folder}/checkpoint", str(path))


def _remove(path: str | Path, write: Future[None] | None = None) -> None:
    if write is not None:
        write.result()
    places = get_filesystem(path)
    if places.exists(path):
        places.rm(path, recursive=True)  # checkpoints of sharded weights are folders


def make_checkpoints_durable(trainer: L.Trainer) -> None:
    """Set `DurableCheckpointIO` for a trainer with single-file checkpoints; refuse another choice."""
    strategy = trainer.strategy
    is_covered = training_strategy(strategy).single_file_checkpoints
    if is_covered and type(strategy.checkpoint_io) is TorchCheckpointIO:
        strategy.checkpoint_io = DurableCheckpointIO()
    elif is_covered and not isinstance(strategy.checkpoint_io, DurableCheckpointIO):
        rule = "must write checkpoints that can be resumed"
        fix = "use embeddings.callbacks.DurableCheckpointIO; with asynchronous: true training does not wait"
        raise OptionError("trainer.plugins", type(strategy.checkpoint_io).__name__, rule, fix)


def remove_superseded(trainer: L.Trainer, resumed: str | None = None) -> None:
    """Remove the checkpoints that a `ModelCheckpoint` has written and none keeps, except `resumed`.

    A killed process may not have removed them, and Lightning never removes the one from which a run was resumed.
    """
    writer, kept = trainer.strategy.checkpoint_io, model_checkpoints(trainer)
    # Without a metric, `save_top_k: -1` keeps all files and names only the newest.
    if not isinstance(writer, DurableCheckpointIO) or any(each.save_top_k == -1 for each in kept):
        return
    named = {name for each in kept for name in (each.last_model_path, each.best_model_path, *each.best_k_models)}
    named = {os.path.abspath(name) for name in (resumed, *named) if name}
    for path in sorted(writer.written - named):
        if any(_names(each, path) for each in kept):
            trainer.strategy.remove_checkpoint(path)


def _names(kept: ModelCheckpoint, path: str) -> bool:
    """Whether a `ModelCheckpoint` may have chosen an absolute path; the user's own files have other names."""
    value = r"\1=.*" if kept.auto_insert_metric_name else ".*"
    names = (kept.filename or "{epoch}-{step}", kept.CHECKPOINT_NAME_LAST)
    patterns = (re.sub(r"\\\{(.*?)(:.*?)?\\\}", value, re.escape(name)) for name in names)
    folder, name = os.path.split(path)
    is_inside = kept.dirpath is not None and folder == os.path.abspath(str(kept.dirpath))
    return is_inside and re.fullmatch(rf"({'|'.join(patterns)})(-v\d+)?\.ckpt", name) is not None


def finish_writing(trainer: L.Trainer) -> None:
    """Wait until the checkpoints that this rank has saved are on disk."""
    if isinstance(trainer.strategy.checkpoint_io, DurableCheckpointIO):
        trainer.strategy.checkpoint_io.wait()


def check_checkpoint_room(trainer: L.Trainer, module: L.LightningModule, resumed: str | None = None) -> None:
    """Check on rank 0 that each local checkpoint folder has disk space for the checkpoints that are there at once."""
    kept = model_checkpoints(trainer)
    if not kept or trainer.fast_dev_run or not is_first_process():  # type: ignore[attr-defined]
        return
    logger_folder = trainer.loggers[0].save_dir if trainer.loggers else None
    size_of = partial(checkpoint_bytes, module, str(trainer.precision))
    # Beside the kept checkpoints the new one during its write, and a fifth of it for other files.
    needed = defaultdict[str, int](lambda: size_of() * 6 // 5)
    for callback in kept:
        folder = str(callback.dirpath or logger_folder or trainer.default_root_dir)
        needed[folder] += (abs(callback.save_top_k) + (callback.save_last is True)) * size_of(
            callback.save_weights_only
        )
    for folder, num_bytes in needed.items():
        if "://" not in folder:
            own, place = Path(resumed or ""), Path(folder).resolve()
            files = place.rglob("*") if own.exists() and own.resolve().parent == place else []
            check_disk_space(folder, num_bytes - sum(path.stat().st_size for path in files if path.is_file()))


def checkpoint_bytes(module: nn.Module, precision: str = "32-true", weights_only: bool = False) -> int:
    """The approximate size of a run's checkpoint; called before the module is converted to `precision`."""
    halves = precision in ("bf16-true", "16-true")
    module_of_method: Any = module
    is_of_method = hasattr(module, "state_per_weight")
    per_weight = module_of_method.state_per_weight() if is_of_method and not weights_only else 0.0
    left_out = module_of_method.frozen_names() if is_of_method else set()
    total = 0.0
    for name, value in (*module.named_parameters(), *module.named_buffers()):
        size = 2 if halves and value.is_floating_point() else value.itemsize
        total += value.numel() * size * (1 + per_weight * value.requires_grad) * (name not in left_out)
    return int(total)


def load_best(trainer: L.Trainer, module: L.LightningModule) -> int:
    """Load the best checkpoint of the first `ModelCheckpoint` with a `monitor`, if any; returns the weights' step."""
    monitored = [kept for kept in model_checkpoints(trainer) if kept.monitor is not None]
    if not monitored:
        return trainer.global_step
    path = monitored[0].best_model_path
    finish_writing(trainer)
    is_sharded = training_strategy(trainer.strategy).is_sharded
    if is_sharded:
        trainer.strategy.barrier()
    if not path or not get_filesystem(path).exists(path):
        line = "there is no checkpoint with the best %s%s: the last weights are used"
        logger.warning(line, monitored[0].monitor, f" ({path} is missing)" if path else "")
        return trainer.global_step
    state = (trainer.strategy if is_sharded else trainer.strategy.checkpoint_io).load_checkpoint(path)
    module.on_load_checkpoint(state)
    if is_sharded:
        trainer.strategy.load_model_state_dict(state)
    else:
        module.load_state_dict(state["state_dict"])
    logger.info("best checkpoint: %s", path)
    return int(state["global_step"])


def embedder_of(module: L.LightningModule, callback: L.Callback) -> Embedder:
    embedder = getattr(module, "embedder", None)
    if not isinstance(embedder, Embedder):
        name = type(callback).__name__
        raise UserError(f"{name} needs a module with an embedder, got {type(module).__name__}; remove {name}")
    return embedder


class Export(L.Callback):
    """Writes a directory on rank 0 when training ends; with sharded weights all ranks take part."""

    def __init__(self, output: str, best: bool, replace: bool) -> None:
        self.output, self.best, self.replace = output, best, replace

    def check_before_model(self, trainer: L.Trainer) -> None:
        replace = self.replace or bool(trainer.fast_dev_run)  # type: ignore[attr-defined]
        check_output(trainer, self.output, type(self).__name__, replace)

    def check_run(self, trainer: L.Trainer, module: L.LightningModule, data: RunData | None) -> None:
        self.check_before_model(trainer)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == "fit":
            self.check_run(trainer, pl_module, run_data(trainer))

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        exports = callbacks_of(trainer, Export)
        # The best weights replace the last ones in the module.
        for export in sorted(exports, key=lambda export: export.best) if self is exports[-1] else ():
            export.write(trainer, pl_module)

    def write(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        strategy = training_strategy(trainer.strategy)
        if trainer.fast_dev_run or not (trainer.is_global_zero or strategy.is_sharded):  # type: ignore[attr-defined]
            return
        num_steps = load_best(trainer, pl_module) if self.best else trainer.global_step
        with strategy.full_weights():
            if trainer.is_global_zero:
                with replaced_folder(Path(self.output).expanduser()) as new:
                    self._write(trainer, pl_module, new, num_steps)
                    mark_output(trainer, new)
                logger.info("model directory: %s", self.output)

    def _write(self, trainer: L.Trainer, module: L.LightningModule, folder: Path, num_steps: int) -> None:
        raise NotImplementedError


class ExportModel(Export):
    """Writes the trained model as a sentence-transformers directory with its card when training ends.

    Under ZeRO with `bf16-mixed` trained weights are the engine's, in bfloat16; `export` writes a checkpoint's float32.

    Args:
        output: The directory to write. It may contain a model of the same run, which is replaced.
        best: Whether to export the best checkpoint of the first `ModelCheckpoint` with a `monitor`, if there is one.
        query_max_length: Maximum number of tokens of a query in the exported model, >= 4; None for that of training.
        document_max_length: The same for a document.
        replace: Whether a model of another run is replaced too.
        licence: The model's licence for the card, by its name on the Hub (`apache-2.0`).
    """

    def __init__(
        self,
        output: str,
        best: bool = True,
        query_max_length: int | None = None,
        document_max_length: int | None = None,
        replace: bool = False,
        licence: str | None = None,
    ) -> None:
        check_licence("ExportModel.licence", licence)
        super().__init__(output, best, replace)
        self.query_max_length = query_max_length
        self.document_max_length = document_max_length
        self.licence = licence
        self._with_lengths(TextSettings())

    def check_run(self, trainer: L.Trainer, module: L.LightningModule, data: RunData | None) -> None:
        super().check_run(trainer, module, data)
        embedder = embedder_of(module, self)
        embedder.check_saving()
        text = embedder.text if data is None else data.text_for(embedder.text)
        embedder.check_lengths(self._with_lengths(text), "ExportModel")

    def _write(self, trainer: L.Trainer, module: L.LightningModule, folder: Path, num_steps: int) -> None:
        embedder, record, output = embedder_of(module, self), RunRecord.of(trainer), Path(self.output).expanduser()
        text, embedder.text = embedder.text, self._with_lengths(embedder.text)
        embedder.save_pretrained(folder, card=False)
        add_golden(folder)
        for logger_of_run in trainer.loggers:
            logger_of_run.save()  # the card shows the validation scores
        facts = record.facts(num_steps) if record else None
        write_model_card(folder, embedder, facts, licence=self.licence, location=output)
        embedder.text = text

    def _with_lengths(self, text: TextSettings) -> TextSettings:
        lengths: dict[str, Any] = {name: getattr(self, name) for name in LENGTHS if getattr(self, name) is not None}
        return dataclasses.replace(text, **lengths)


class ExportLanguageModel(Export):
    """Writes a trained language model as a Hugging Face directory when training ends, with merged LoRA matrices.

    Any method can start from it with `backbone: {name: OUTPUT}`.

    Args:
        output: The directory to write. It may contain a model of the same run, which is replaced.
        best: Whether to export the best checkpoint of the first `ModelCheckpoint` with a `monitor`, such as `val/loss`.
        replace: Whether a model of another run is replaced too.
    """

    def __init__(self, output: str, best: bool = False, replace: bool = False) -> None:
        super().__init__(output, best, replace)

    def check_run(self, trainer: L.Trainer, module: L.LightningModule, data: RunData | None) -> None:
        self._language_model(module)
        super().check_run(trainer, module, data)

    def _write(self, trainer: L.Trainer, module: L.LightningModule, folder: Path, num_steps: int) -> None:
        self._language_model(module).save_pretrained(folder)

    def _language_model(self, module: L.LightningModule) -> LanguageModel:
        found = getattr(module, "language_model", None)
        if not isinstance(found, LanguageModel):
            name = type(module).__name__
            raise UserError(f"ExportLanguageModel needs a module with a language model, got {name}; use ExportModel")
        return found
