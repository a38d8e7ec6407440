"""What a run was: its merged config, command, commit, versions and hardware, beside its checkpoints and in them."""

import json
import shlex
import subprocess
import uuid
from contextlib import suppress
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import lightning as L
import yaml
from lightning.pytorch.cli import LightningArgumentParser, SaveConfigCallback

from embeddings.callbacks.exception_checkpoints import write_none_on_exception
from embeddings.callbacks.run_folder import run_logger
from embeddings.common import OptionError, PreemptedError
from embeddings.common.distributed import full_shape
from embeddings.common.io import package_versions, write_json
from embeddings.common.process import device_name
from embeddings.models.directory import require_folder_or_nothing
from embeddings.models.model_card import TrainingFacts
from embeddings.models.upcycling import parameter_counts

# In a model directory: the run that wrote it.
MODEL_RUN_FILE = "training_run.json"


class RunRecord(SaveConfigCallback):
    """Writes `config.yaml` and `run.json` into the run's folder, and the config into every checkpoint.

    A checkpoint therefore says by itself how its module is built, which `export` relies on, and of which run it is.
    `run.json` gets an `end` once the run is over, however it is: one without was killed, or is still at work. A process
    that resumes a run in its folder keeps the run's `id`, and puts the records of the processes before it into
    `earlier`.

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
        previous = self._previous(trainer)
        earlier = [*previous.pop("earlier", []), previous] if previous else []
        self._record = {
            "id": previous.get("id") or uuid.uuid4().hex,
            "resumed_from": self.plain_config.get("ckpt_path"),
            "command": shlex.join(["python", *self.command]),
            "commit": git_commit(),
            "world_size": trainer.world_size,
            "precision": str(trainer.precision),
            "versions": package_versions(),
            "hardware": device_name(trainer.strategy.root_device),
            "started": _now(),
            "parameters": {
                **parameter_counts(pl_module)._asdict(),
                "trained": sum(full_shape(weight).numel() for weight in pl_module.parameters() if weight.requires_grad),
            },
            "source_rows": getattr(getattr(trainer, "datamodule", None), "source_rows", {}),
            "earlier": earlier,
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
        # A second Ctrl-C ends the run at once. Other callbacks that know of it come after those that write checkpoints.
        if isinstance(exception, KeyboardInterrupt):
            write_none_on_exception(trainer)
        with suppress(OSError):
            if isinstance(exception, PreemptedError | KeyboardInterrupt):
                self._note_end(trainer, "interrupted", getattr(exception, "line", ""))
            else:
                self._note_end(trainer, "failed", f"{type(exception).__name__}: {exception}")

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Put the merged config into the checkpoint, as plain types, and which run it is of."""
        checkpoint["run_config"] = self.plain_config
        checkpoint["run"] = {"id": self.id, "folder": str(self.log_dir)}

    @property
    def id(self) -> str:
        """What tells the run from all others, however often it is resumed; empty where this is not the first rank."""
        return str(self._record.get("id", ""))

    @staticmethod
    def of(trainer: L.Trainer) -> "RunRecord | None":
        """The trainer's record; None where it has none."""
        callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        return next((callback for callback in callbacks if isinstance(callback, RunRecord)), None)

    def facts(self, num_steps: int) -> TrainingFacts:
        """What a model card says of the run, for weights that have taken so many optimiser steps; on rank 0."""
        return TrainingFacts(self.plain_config, num_steps, self._record)

    @cached_property
    def plain_config(self) -> dict[str, Any]:
        """The merged config as plain types; made once, since training waits for a checkpoint's content."""
        return plain_types(self.parser, self.config)

    def _previous(self, trainer: L.Trainer) -> dict[str, Any]:
        """What `run.json` says of the run that is resumed in its folder; nothing of a new run."""
        logger = run_logger(trainer)
        path = self.log_dir / "run.json"
        if logger is None or logger.resumed is None or not path.is_file():
            return {}
        found: dict[str, Any] = json.loads(path.read_bytes())
        return found

    def _note_end(self, trainer: L.Trainer, how: Literal["finished", "interrupted", "failed"], why: str) -> None:
        # Only rank 0 has a record, and none has one before its folder is known.
        if self._record:
            end = {"time": _now(), "step": trainer.global_step, "how": how, "why": why}
            write_json(self.log_dir / "run.json", {**self._record, "end": end})


def check_output(trainer: L.Trainer, output: str, option: str, replace: bool) -> None:
    """Check the place of a model directory: a model that another run wrote there is not replaced unasked.

    Args:
        trainer: The run's trainer.
        output: The directory.
        option: What names it.
        replace: Whether another run's model is replaced.

    Raises:
        OptionError: If another run's model, or something else than a folder, lies there.
    """
    require_folder_or_nothing(output)
    place, logger = Path(output).expanduser(), run_logger(trainer)
    # Without a record no run can be told from another.
    if replace or logger is None or RunRecord.of(trainer) is None or not (place / "config.json").is_file():
        return
    own = None if logger.resumed is None else _id_in(logger.resumed.folder / "run.json")
    if own is None or _id_in(place / MODEL_RUN_FILE) != own:
        fix = f"name another one, or set {option}'s replace: true"
        raise OptionError(f"{option}.output", output, "must not hold a model of another run", fix)


def mark_output(trainer: L.Trainer, folder: Path) -> None:
    """Write into a model directory which run it is of."""
    record = RunRecord.of(trainer)
    if record is not None:
        write_json(folder / MODEL_RUN_FILE, {"id": record.id, "step": trainer.global_step})


def _id_in(path: Path) -> str | None:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return found.get("id") if isinstance(found, dict) else None


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
