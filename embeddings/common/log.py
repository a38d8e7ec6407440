"""The one logger of the library, and where a command shows what it says."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from embeddings.common.slurm import is_first_process

logger = logging.getLogger("embeddings")


@contextmanager
def shown_on_stderr() -> Iterator[None]:
    """Inside, the logger writes lines to standard error: notes of a run's first process, and warnings of all."""
    handler, level = logging.StreamHandler(sys.stderr), logger.level
    handler.setFormatter(logging.Formatter("%(message)s"))
    handler.setLevel(logging.INFO if is_first_process() else logging.WARNING)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
