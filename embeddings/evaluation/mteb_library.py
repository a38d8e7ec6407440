"""mteb, loaded on use and kept quiet."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partialmethod
from types import ModuleType
from typing import Any

from embeddings.common.errors import require

_TALKATIVE = ("mteb", "datasets", "huggingface_hub", "sentence_transformers")


def load_mteb() -> ModuleType:
    """The module mteb.

    Raises:
        MissingExtraError: If it is not installed; the message names the extra `eval`.
    """
    with quiet():
        return require("mteb", "eval")


@contextmanager
def quiet(keep_bars: bool = False) -> Iterator[None]:
    """Leave out what mteb and the libraries under it say: warnings, log lines, and bars of their own.

    This project's bars are drawn as ever. Not for several threads at once: all of it belongs to the process.

    Args:
        keep_bars: Whether their bars are drawn, such as that of a download.
    """
    import datasets
    import tqdm.auto

    loggers = [logging.getLogger(name) for name in _TALKATIVE]
    levels = [logger.level for logger in loggers]
    were_drawn = not datasets.are_progress_bars_disabled()
    # mteb draws bars that no option of it leaves out. They are all of this kind, and this project's are plain ones.
    bar: Any = tqdm.auto.tqdm
    draw = bar.__init__
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        if not keep_bars:
            datasets.disable_progress_bars()
            bar.__init__ = partialmethod(draw, disable=True)
        try:
            yield
        finally:
            bar.__init__ = draw
            if were_drawn:
                datasets.enable_progress_bars()
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
