"""Checks of a run: equal weights on all ranks, the examples of a failed step, and the load of the experts."""

import hashlib
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

from embeddings.callbacks.run_record import write_none_on_exception
from embeddings.common import NumericError, UserError, require_minimum
from embeddings.common.distributed import gather_counts
from embeddings.common.io import write_json
from embeddings.common.protocols import RunData, run_data
from embeddings.models.moe.upcycling import routing_metrics

# The integer type with an item size in bytes.
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class RunHealth(L.Callback):
    """Compares the ranks' weights at regular steps, and records the examples of a step with a numeric error.

    A module of this library stops all ranks before an update if a loss or a gradient is NaN or infinite. Each rank then
    writes `numeric-error-rank-R.json` into the run's folder: the step, the message, and the rows of each source that it
    read since the last update. Under DDP this callback also compares checksums of the ranks' weights, which differ if
    memory is faulty.

    Args:
        compare_every_n_steps: Optimiser steps between two comparisons of the weights, > 0; None for no comparison.
    """

    def __init__(self, compare_every_n_steps: int | None = 500) -> None:
        require_minimum("RunHealth.compare_every_n_steps", compare_every_n_steps, 1, "try 500", optional=True)
        self.compare_every_n_steps = compare_every_n_steps
        self._folder = Path()
        self._read: list[dict[str, Any]] = []
        self._step = 0

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        # All ranks take part, because the trainer broadcasts its folder.
        self._folder = Path(trainer.log_dir or trainer.default_root_dir)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._step, self._read = trainer.global_step, []

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._read.append({"batch": batch_idx, "rows": getattr(batch, "row_B", getattr(batch, "row_N", None))})

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        if trainer.global_step == self._step:
            return
        self._step, self._read = trainer.global_step, []
        every = self.compare_every_n_steps
        if every is not None and self._step % every == 0 and trainer.world_size > 1:
            self._compare(trainer, pl_module)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        if not isinstance(exception, NumericError):
            return
        write_none_on_exception(trainer)
        data, rank = run_data(trainer), trainer.global_rank
        located: Any = list if data is None else data.located
        batches = [
            {**read, "rows": None if (rows := read["rows"]) is None else located(rows.tolist())} for read in self._read
        ]
        content = {"error": str(exception), "step": trainer.global_step, "epoch": trainer.current_epoch, "rank": rank}
        write_json(self._folder / f"numeric-error-rank-{rank}.json", {**content, "batches": batches})

    def _compare(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if not isinstance(trainer.strategy, DDPStrategy):
            return
        checksums = gather_counts(weights_checksum(module), module.device)
        different = [rank for rank, checksum in enumerate(checksums) if checksum != checksums[0]]
        if different:
            ranks = ", ".join(map(str, different))
            what = f"the weights of rank {ranks} differ from those of rank 0 after step {trainer.global_step}"
            fix = "resume from the last checkpoint; if the error recurs, use another machine"
            raise NumericError(f"{what}; {fix}")


def weights_checksum(module: nn.Module) -> int:
    """An integer checksum of the weights: of each parameter's bits, times an odd number derived from its name."""
    parameters = dict(module.named_parameters())
    sums = [
        parameter.detach().contiguous().flatten().view(_INTEGERS[parameter.element_size()]).sum(dtype=torch.int64)
        for parameter in parameters.values()
    ]
    total = 0
    for name, of_bits in zip(parameters, torch.stack(sums).tolist(), strict=True):
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        total += of_bits * (int.from_bytes(digest, "little") | 1)
    # Signed 64-bit, the type that ranks exchange.
    return (total + 2**63) % 2**64 - 2**63


@runtime_checkable
class RoutedModule(Protocol):
    """A module that stores the routing sums of its last step by name, (sparse layers, experts), over all ranks."""

    moe_layers: list[int]
    load_balancing: object | None  # None if no sums are collected
    routing: dict[str, Tensor]


class RoutingStatistics(L.Callback):
    """Logs how evenly the experts of each layer are used, at regular optimiser steps.

    For a sparse layer `i`, over all tokens of the queries and documents of the step's last batch on all ranks:
    - `routing/load_entropy_layer_i`: entropy of the experts' token fractions divided by its maximum, 0 to 1; 1 if all
      loads are equal.
    - `routing/probability_entropy_layer_i`: the same for the router's mean probabilities.
    - `routing/highest_load_layer_i`: tokens of the busiest expert divided by the mean load; 1 if all loads are equal.
    - `routing/idle_experts_layer_i`: number of experts that received no token.
    `routing/load_entropy` is the mean over layers, and `routing/idle_experts` the sum.

    Args:
        every_n_steps: Optimiser steps between two logged rows, > 0.
    """

    def __init__(self, every_n_steps: int = 50) -> None:
        require_minimum("RoutingStatistics.every_n_steps", every_n_steps, 1, "try 50")
        self.every_n_steps = every_n_steps
        self._logged_step = -1

    def check_run(self, trainer: L.Trainer, module: L.LightningModule, data: RunData | None) -> None:
        if not isinstance(module, RoutedModule) or not module.moe_layers or module.load_balancing is None:
            name = type(module).__name__
            needed = "a module with experts and load_balancing"
            raise UserError(f"RoutingStatistics needs {needed}, got {name}; remove the callback")

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == "fit":
            self.check_run(trainer, pl_module, run_data(trainer))

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._logged_step = trainer.global_step

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if step == self._logged_step or step % self.every_n_steps:
            return
        self._logged_step = step
        assert isinstance(pl_module, RoutedModule)
        sums = pl_module.routing
        values = routing_metrics(sums["expert_counts"], sums["expert_probabilities"], pl_module.moe_layers)
        # Lightning would log them under the next logged step, so they are passed to the loggers directly.
        for logger in trainer.loggers:
            logger.log_metrics(values, step=step)
        for name, value in values.items():
            pl_module.log(name, value, logger=False)
