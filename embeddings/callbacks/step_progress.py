"""How far a run is: its optimiser steps, the loss and the time left, as a bar in a terminal and as lines in a file."""

import sys
from collections.abc import Sequence
from typing import Any, TextIO

import lightning as L
from lightning.pytorch.callbacks import ProgressBar
from tqdm import tqdm

from embeddings.common import OptionError

_BAR_SECONDS = 0.5
# Weight of the newest pace: none, so that evaluations and checkpoints are part of the pace that the time left is by.
_SMOOTHING = 0.0


class StepProgress(ProgressBar):
    """Shows the steps of a whole run, resumed ones included, where Lightning's bars show the batches of one epoch.

    In a terminal it is one bar on stderr. Elsewhere, as in the log of a job, it is a line now and then, at the first
    step and at the last. The time left follows from the mean pace since this process began to train. What modules and
    callbacks log with `prog_bar=True` stands behind it. Rank 0 alone shows it.

    Args:
        every_seconds: Seconds between two lines where stderr is no terminal, >= 0.

    Raises:
        OptionError: If `every_seconds` is negative.
    """

    def __init__(self, every_seconds: float = 30.0) -> None:
        super().__init__()
        if not every_seconds >= 0:
            raise OptionError("StepProgress.every_seconds", every_seconds, "must be >= 0", "try 30")
        self.every_seconds = every_seconds
        self._enabled = True
        self._bar: tqdm[Any] | None = None

    def disable(self) -> None:
        """Show nothing from now on."""
        self._enabled = False

    def enable(self) -> None:
        """Show it again."""
        self._enabled = True

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begin at the step that the run has reached."""
        total = trainer.estimated_stepping_batches
        in_terminal = sys.stderr.isatty()
        self._bar = tqdm(
            desc="training",
            unit="step",
            initial=trainer.global_step,
            total=int(total) if 0 <= total < float("inf") else None,
            file=None if in_terminal else _Lines(sys.stderr),
            mininterval=_BAR_SECONDS if in_terminal else self.every_seconds,
            miniters=1,
            dynamic_ncols=True,
            smoothing=_SMOOTHING,
            disable=not self._enabled,
        )

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the optimiser step, if this batch ended one."""
        if self._bar is None or trainer.global_step == self._bar.n:
            return
        self._bar.set_postfix(self.get_metrics(trainer, pl_module), refresh=False)
        self._bar.update(trainer.global_step - self._bar.n)

    def get_metrics(self, trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, Any]:
        """What was logged for it, and the epoch where there are several; not the version number of the run's folder."""
        shown = super().get_metrics(trainer, pl_module)
        shown.pop("v_num", None)
        return shown if trainer.max_epochs == 1 else {"epoch": trainer.current_epoch, **shown}

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Show the last step."""
        self._close()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Leave the step that was reached on its own line."""
        self._close()

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print above the bar."""
        if self._bar is not None and not self._bar.disable:
            self._bar.write(kwargs.get("sep", " ").join(map(str, args)), file=kwargs.get("file"))
        else:
            super().print(*args, **kwargs)

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.refresh()
            self._bar.close()
            self._bar = None


def show_whole_run(trainer: L.Trainer, given: Sequence[L.Callback]) -> None:
    """Put `StepProgress` in the place of the bar that Lightning chose itself.

    Args:
        trainer: It keeps a bar that it was given, and has none where none is wanted.
        given: The callbacks that it was given.
    """
    chosen = trainer.progress_bar_callback
    if chosen is not None and chosen not in given:
        callbacks = getattr(trainer, "callbacks")  # noqa: B009 - Lightning does not type it
        callbacks[callbacks.index(chosen)] = StepProgress()


class _Lines:
    """A stream on which a bar is one line after another, each once, and not one line that is written over."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._last = stream, ""

    def write(self, text: str) -> None:
        """Write what the bar shows, unless it is the step that was last shown."""
        # The last step is shown once while it is taken and once at the end, with other seconds.
        line = text.strip()
        if line and line.partition("[")[0] != self._last.partition("[")[0]:
            self._stream.write(line + "\n")
            self._last = line

    def flush(self) -> None:
        """Pass it on."""
        self._stream.flush()
