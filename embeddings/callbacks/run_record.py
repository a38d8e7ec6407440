"""What a run was: its merged config, command, commit, versions and world size, beside its checkpoints and in them."""

import shlex
import subprocess
from functools import cached_property
from pathlib import Path
from typing import Any

import lightning as L
import yaml
from lightning.pytorch.cli import LightningArgumentParser, SaveConfigCallback

from embeddings.common.fileio import installed_versions, write_json


class RunRecord(SaveConfigCallback):
    """Writes `config.yaml` and `run.json` into the run's folder, and the config into every checkpoint.

    A checkpoint therefore says by itself how its module is built, which `export` relies on.

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

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Write the record, once; all ranks take part, because asking the trainer for its folder is a broadcast."""
        log_dir = trainer.log_dir
        assert log_dir is not None
        self.log_dir = Path(log_dir)
        super().setup(trainer, pl_module, stage)

    def save_config(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Write `run.json` beside `config.yaml`, on rank 0."""
        write_json(
            self.log_dir / "run.json",
            {
                "command": shlex.join(["python", *self.command]),
                "commit": git_commit(),
                "world_size": trainer.world_size,
                "precision": str(trainer.precision),
                "versions": installed_versions(),
            },
        )

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Put the merged config into the checkpoint, as plain types."""
        checkpoint["run_config"] = self.plain_config

    @cached_property
    def plain_config(self) -> dict[str, Any]:
        """The merged config as plain types; made once, since training waits for a checkpoint's content."""
        plain: dict[str, Any] = yaml.safe_load(self.parser.dump(self.config, skip_none=False, format="yaml"))
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
