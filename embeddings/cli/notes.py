"""What Lightning notes of seed and devices waits until a run begins: one that is refused ends in one line."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from logging.handlers import MemoryHandler

import lightning as L

_LOGGERS = ("lightning.fabric", "lightning.pytorch")
_MOST_NOTES = 1000


class HeldNotes(L.Callback):
    """Keeps Lightning's notes back and gives them when the run's data is read; warnings pass, with what came before."""

    def __init__(self) -> None:
        self._kept: list[MemoryHandler] = []

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
        try:
            yield
        finally:
            for logger, handler, kept in swapped:
                logger.removeHandler(kept)
                logger.addHandler(handler)
                kept.close()

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Give what was kept, and every further note at once."""
        for kept in self._kept:
            kept.flush()
            kept.flushLevel = logging.NOTSET
