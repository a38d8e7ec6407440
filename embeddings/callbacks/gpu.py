"""Settings of torch for training on a CUDA GPU, where the user has chosen none, and their record."""

import math
import os
import time
from contextlib import suppress
from statistics import median
from typing import Any

import lightning as L
import torch

from embeddings.callbacks.run_record import RunRecord
from embeddings.common.process import logger
from embeddings.common.protocols import run_data
from embeddings.data.samplers.base import run_steps
from embeddings.models import Embedder
from embeddings.models.compilation import COMPILED_ROWS, compilation_line, compile_automatic, is_compiled
from embeddings.training.strategy import training_strategy

# The user's own settings of the allocator, in torch's new and old name.
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
# Segments that grow do not fragment when mini-batches change their size.
_ALLOCATOR = "expandable_segments:True"
# Batches whose waits are measured, after those in which the loader and the compiler start.
_FIRST_BATCHES, _MEASURED_BATCHES = 10, 30
# Share of the time from which waiting for batches is reported.
_MUCH_WAITING = 0.3


class GPUTraining(L.Callback):
    """On a CUDA GPU, lets memory segments grow, allows TF32 under mixed precision, and compiles layers in long runs.

    `run.json` gets the settings as `gpu`. On another device nothing changes. `fit` and `embeddings.Trainer` add it.
    If training waits for batches for over 30 % of the time, one line says so and names `data.num_workers`.

    Under mixed precision the products that autocast leaves in float32, such as a router's, round their inputs to TF32,
    which has more digits than bfloat16. Under `32-true` they do not. After the run the process has its own setting.
    """

    def __init__(self) -> None:
        self.settings: dict[str, str] = {}
        self._precision_before: str | None = None
        # Seconds of waiting and of all, for each batch; None if nothing is to be measured.
        self._waits: list[tuple[float, float]] | None = None
        self._ended = math.nan

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage != "fit" or trainer.strategy.root_device.type != "cuda":
            return
        before = torch.get_float32_matmul_precision()
        if str(trainer.precision).endswith("-mixed") and before == "highest":
            self._precision_before = before
            torch.set_float32_matmul_precision("high")
        self._waits, self._ended = [], math.nan
        self.settings = {"allocator": set_allocator(), "float32_products": torch.get_float32_matmul_precision()}

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not self.settings:
            return
        if training_strategy(trainer.strategy).compiles_layers and _num_rows(trainer) >= COMPILED_ROWS:
            compile_automatic(pl_module)
        self.settings["compiled_layers"] = "yes" if is_compiled(pl_module) else "no"
        embedder = getattr(pl_module, "embedder", None)
        if isinstance(embedder, Embedder) and trainer.precision != "32-true":
            ignored = embedder.ignored_dropout(trainer.strategy.root_device)
            if ignored:
                line = "attention dropout is 0, not %g, in texts without padding; backbone.unpadded: false restores it"
                logger.info(line, ignored)
                self.settings["attention_dropout"] = "0"

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self._waited = time.perf_counter() - self._ended

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        """Report and record the settings after the first batch, when the compiler has run, and waiting later."""
        if self._waits is not None:
            before, self._ended = self._ended, time.perf_counter()
            self._waits.append((self._waited, self._ended - before))
            if len(self._waits) == _FIRST_BATCHES + _MEASURED_BATCHES:
                self._report_waiting(trainer)
        if not self.settings:
            return
        settings, self.settings = self.settings, {}
        if (line := compilation_line(pl_module)) is not None:
            settings["compilation"] = line
            if trainer.is_global_zero:
                logger.info(line)
        record = RunRecord.of(trainer)
        if record is not None:
            record.add("gpu", settings)

    def _report_waiting(self, trainer: L.Trainer) -> None:
        assert self._waits is not None
        # Medians, because other callbacks take much time after some batches.
        waited, total = (median(each) for each in zip(*self._waits[_FIRST_BATCHES:], strict=True))
        self._waits = None
        if waited >= _MUCH_WAITING * total and trainer.is_global_zero:
            line = "training waits for batches for %.0f%% of the time; raise data.num_workers"
            logger.warning(line, 100 * waited / total)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "fit")

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if self._precision_before is not None:
            torch.set_float32_matmul_precision(self._precision_before)
        self._precision_before = None


def _num_rows(trainer: L.Trainer) -> float:
    """The rows of the run in this process; infinite if it has no limit."""
    data = run_data(trainer)
    steps = run_steps(trainer, None if data is None else data.batches_per_epoch)
    batch_size = 1 if data is None else data.batch_size
    return math.inf if steps is None else steps * trainer.accumulate_grad_batches * batch_size


def set_allocator() -> str:
    """Let the memory segments of CUDA grow, unless the user has set the allocator; returns its setting."""
    chosen = [os.environ[name] for name in _ALLOCATOR_VARIABLES if os.environ.get(name)]
    if chosen:
        return chosen[0]
    # torch has no public function for it.
    functions: Any = torch._C
    set_settings = getattr(functions, "_accelerator_setAllocatorSettings", None)
    set_settings = set_settings or getattr(torch.cuda.memory, "_set_allocator_settings", None)
    if set_settings is not None:
        # Another release may not know the setting.
        with suppress(RuntimeError, ValueError):
            set_settings(_ALLOCATOR)
            return _ALLOCATOR
    return "torch's default"
