"""`fit --check`: everything that can be known of a run before its first step, on a machine without its hardware."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import lightning as L
import torch

from embeddings.callbacks.export import ExportLanguageModel, ExportModel
from embeddings.callbacks.run_record import plain_types, run_logger
from embeddings.cli.fit import TrainerCLI, run_trainer
from embeddings.cli.trainer import start_checks
from embeddings.common import UserError
from embeddings.common.checkpoint_file import peek_checkpoint
from embeddings.common.distributed import count_values, planning_for
from embeddings.common.text import format_table
from embeddings.data.datamodule import PlannedDataModule
from embeddings.data.samplers.base import run_steps
from embeddings.data.store import borrowed_cache
from embeddings.models.moe.upcycling import parameter_counts


def check_run(argv: Sequence[str]) -> None:
    """Check a run as `fit` would begin it, and print what it would do; nothing is trained or written.

    Config, model, data and checkpoint are read as the run reads them. A source that is not converted yet is converted
    in a temporary folder, so that each of its rows is checked. One line names all faults found before data are read.
    """
    run_trainer(argv, RunCheck)


class RunCheck(TrainerCLI):
    """`fit` up to its first step, with accelerator and devices as the config says wherever they are."""

    only_checks = True

    def instantiate_classes(self) -> None:
        """Make module, data and trainer; without a GPU weights in 4 bits are read as they are in their file."""
        arguments: Any = self.config.fit.model.get("init_args")
        backbone = None if arguments is None else arguments.get("backbone")
        if backbone is not None and backbone.get("quantization") and not torch.cuda.is_available():
            backbone["quantization"] = None
        super().instantiate_classes()

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        """Make the trainer; where its devices are not here, as many processes on the CPU stand for them."""
        given = self.config_init.fit.trainer
        count = num_devices(given.devices)
        self.is_here = is_here(given.accelerator, count)
        return super().instantiate_trainer(
            **kwargs, **({} if self.is_here else {"accelerator": "cpu", "devices": count or 1})
        )

    def before_fit(self) -> None:
        """Have each part check the run, and collect what they find."""
        faults: dict[str, UserError] = {}
        for check in start_checks(self.trainer, self.model, self.datamodule, self.config.fit.ckpt_path):
            try:
                check()
            except UserError as error:
                faults.setdefault(str(error), error)
        if len(faults) > 1:
            raise UserError(f"{len(faults)} faults: {' | '.join(faults)}")
        for fault in faults.values():
            raise fault

    def fit(self, **options: Any) -> None:
        """Read the data, check it against the model and the batch, and print what the run would do."""
        trainer, module, data = self.trainer, self.model, self.datamodule
        with ExitStack() as stack:
            stack.enter_context(planning_for(trainer.world_size))
            trainer.strategy.connect(module)
            module.trainer = trainer
            if data is not None:
                data.trainer = trainer
                trainer.datamodule = data  # type: ignore[attr-defined]
            if isinstance(data, PlannedDataModule):
                data.cache_dir = stack.enter_context(borrowed_cache(data.cache_dir))
                data.prepare_data()
            module.prepare_data()
            print("\n".join(self.lines()))

    def after_fit(self) -> None:
        """No run has ended that could be told of."""

    def lines(self) -> list[str]:
        """What the run would do."""
        module, given = self.model, self.config.fit
        model = plain_types(self._parser("fit"), given)["model"]["init_args"]
        name = (model.get("backbone") or {}).get("name")
        total = parameter_counts(module).total
        trained = count_values(weight for weight in module.parameters() if weight.requires_grad)
        counts = f"{total:,} parameters, {trained:,} of them trained and {total - trained:,} frozen"
        options = {option: given.trainer[option] for option in ("accelerator", "devices", "num_nodes", "strategy")}
        options |= {"precision": given.trainer.precision}
        shown = [f"{option} {value}" for option, value in options.items() if isinstance(value, int | str)]
        taken = "" if self.is_here else "; as given, not tried here"
        return [
            f"model: {type(module).__name__}{f' on {name}' if name else ''}: {counts}",
            *self.data_lines(),
            f"hardware: {', '.join(shown)}{taken}",
            *self.place_lines(),
            "no fault was found, and nothing was written",
        ]

    def data_lines(self) -> list[str]:
        """Sources, batch and steps."""
        trainer, data = self.trainer, self.datamodule
        if not isinstance(data, PlannedDataModule):
            return []
        rows = [[f"  {name}", f"{count:,}"] for name, count in data.source_rows.items()]
        batches, ranks = data.batches_per_epoch, trainer.world_size
        accumulated = trainer.accumulate_grad_batches
        factors = f"{data.batch_size} on each of {ranks} processes"
        factors += f"; {accumulated} batches are one step" if accumulated > 1 else ""
        steps = run_steps(trainer, batches)
        return [
            *format_table([["sources:", "rows"], *rows]).splitlines(),
            f"global batch: {data.batch_size * ranks:,} ({factors})",
            f"steps: {'without an end' if steps is None else f'{steps:,}'}, {batches:,} batches an epoch",
        ]

    def place_lines(self) -> list[str]:
        """Where the run would write, and whether it would resume another."""
        trainer, found = self.trainer, self.config.fit.ckpt_path
        logger = run_logger(trainer)
        lines = [] if logger is None else [f"run: {logger.log_dir}"]
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, ExportModel | ExportLanguageModel):
                lines.append(f"model directory: {callback.output}")
        if not found:
            return [*lines, "resume: no"]
        content = peek_checkpoint(found) if Path(found).is_file() else {}
        return [*lines, f"resume: {found}, step {content.get('global_step', 'unknown')}"]


def num_devices(devices: Any) -> int | None:
    """How many devices of a machine an option of the trainer asks for; None for as many as there are."""
    if isinstance(devices, list):
        return len(devices)
    words = str(devices).split(",")
    if len(words) > 1:
        return len([word for word in words if word.strip()])
    return int(words[0]) if words[0].strip().isdecimal() else None


def is_here(accelerator: Any, count: int | None) -> bool:
    """Whether this machine has the devices that a config names."""
    if accelerator in ("gpu", "cuda"):
        return torch.cuda.is_available() and (count or 1) <= torch.cuda.device_count()
    return accelerator not in ("mps", "tpu")
