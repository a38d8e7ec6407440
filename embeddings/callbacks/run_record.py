"""What a run was: its merged config, command, commit, versions and hardware, beside its checkpoints and in them."""

import shlex
import subprocess
from contextlib import suppress
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import lightning as L
import yaml
from lightning.pytorch.cli import LightningArgumentParser, SaveConfigCallback

from embeddings.common import PreemptedError
from embeddings.common.distributed import whole_shape
from embeddings.common.fileio import installed_versions, write_json
from embeddings.common.hardware import device_name
from embeddings.models.model_card import TrainingFacts
from embeddings.models.upcycling import parameter_counts


class RunRecord(SaveConfigCallback):
    """Writes `config.yaml` and `run.json` into the run's folder, and the config into every checkpoint.

    A checkpoint therefore says by itself how its module is built, which `export` relies on. `run.json` gets an `end`
    once the run is over, however it is: one without was killed, or is still at work.

    Args:
        parser: The parser that read the config.
        config: What it read.
        command: The command line's words.
        **kwargs: As in Lightning's `SaveConfigCallback`.
    """

    def __init__(self, parser: LightningArgumentParser, config: Any, command: list[str], **kwargs: Any) -> None:
        super().__init__(parser, config, **kwargs)
        self.command = command
        self.log_dir = Path()
        self._record: dict[str, Any] = {}

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Write the record, once; all ranks take part, because asking the trainer for its folder is a broadcast."""
        log_dir = trainer.log_dir
        assert log_dir is not None
        self.log_dir = Path(log_dir)
        super().setup(trainer, pl_module, stage)

    def save_config(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Write `run.json` beside `config.yaml`, on rank 0."""
        self._record = {
            "command": shlex.join(["python", *self.command]),
            "commit": git_commit(),
            "world_size": trainer.world_size,
            "precision": str(trainer.precision),
            "versions": installed_versions(),
            "hardware": device_name(trainer.strategy.root_device),
            "started": _now(),
            "parameters": {
                **parameter_counts(pl_module)._asdict(),
                "trained": sum(
                    whole_shape(weight).numel() for weight in pl_module.parameters() if weight.requires_grad
                ),
            },
            "source_rows": getattr(getattr(trainer, "datamodule", None), "source_rows", {}),
        }
        write_json(self.log_dir / "run.json", self._record)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Note that the run is finished."""
        self._note_end(trainer, "finished", "")

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Note how the run ended before its time; a disk that takes no note hides nothing of it."""
        if self.log_dir != Path():
            # Where the command line puts the traceback.
            exception.run_folder = str(self.log_dir)  # type: ignore[attr-defined]
        with suppress(OSError):
            if isinstance(exception, PreemptedError | KeyboardInterrupt):
                self._note_end(trainer, "interrupted", getattr(exception, "line", ""))
            else:
                self._note_end(trainer, "failed", f"{type(exception).__name__}: {exception}")

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Put the merged config into the checkpoint, as plain types."""
        checkpoint["run_config"] = self.plain_config

    def facts(self, num_steps: int) -> TrainingFacts:
        """What a model card says of the run, for weights that have taken so many optimiser steps; on rank 0."""
        return TrainingFacts(self.plain_config, num_steps, self._record)

    @cached_property
    def plain_config(self) -> dict[str, Any]:
        """The merged config as plain types; made once, since training waits for a checkpoint's content."""
        return plain_types(self.parser, self.config)

    def _note_end(self, trainer: L.Trainer, how: Literal["finished", "interrupted", "failed"], why: str) -> None:
        # Only rank 0 has a record, and none has one before its folder is known.
        if self._record:
            end = {"time": _now(), "step": trainer.global_step, "how": how, "why": why}
            write_json(self.log_dir / "run.json", {**self._record, "end": end})


def plain_types(parser: LightningArgumentParser, config: Any) -> dict[str, Any]:
    """A config that a parser has read, as plain types."""
    plain: dict[str, Any] = yaml.safe_load(parser.dump(config, skip_none=False, format="yaml"))
    return plain


def git_commit() -> str | None:
    """The commit of the working folder, with `+` where it has uncommitted changes; None outside a checkout."""
    try:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True, timeout=10)
        status = subprocess.run(
            ["git", "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True, timeout=10
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return commit.stdout.strip() + ("+" if status.stdout.strip() else "")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
