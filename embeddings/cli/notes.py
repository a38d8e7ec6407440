"""What Lightning notes of seed and devices waits until a run begins: one that is refused ends in one line."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from logging.handlers import MemoryHandler
from typing import Any

import lightning as L

_LOGGERS = ("lightning.fabric", "lightning.pytorch")
_MOST_NOTES = 1000


class HeldNotes(L.Callback):
    """Keeps Lightning's notes and all warnings back, and gives them when the run's data is read.

    What Lightning logs as a warning passes, with what came before it.
    """

    def __init__(self) -> None:
        self._kept: list[MemoryHandler] = []
        self._warnings: list[tuple[Any, ...]] = []
        self._show = warnings.showwarning

    @contextmanager
    def holding(self) -> Iterator[None]:
        """The time in which notes are kept back; those of a run that never begins are dropped."""
        swapped = []
        for logger in map(logging.getLogger, _LOGGERS):
            for handler in list(logger.handlers):
                kept = MemoryHandler(_MOST_NOTES, logging.WARNING, handler, flushOnClose=False)
                swapped.append((logger, handler, kept))
                logger.removeHandler(handler)
                logger.addHandler(kept)
        self._kept = [kept for _, _, kept in swapped]
        self._show = warnings.showwarning
        setattr(warnings, "showwarning", self._keep)  # noqa: B010 - its type says that nobody may
        try:
            yield
        finally:
            warnings.showwarning = self._show
            for logger, handler, kept in swapped:
                logger.removeHandler(kept)
                logger.addHandler(handler)
                kept.close()

    def _keep(self, *warning: Any) -> None:
        self._warnings.append(warning)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Give what was kept, and everything further at once."""
        warnings.showwarning = self._show
        for warning in self._warnings:
            self._show(*warning)
        self._warnings.clear()
        for kept in self._kept:
            kept.flush()
            kept.flushLevel = logging.NOTSET
