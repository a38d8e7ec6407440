"""How long a rank waits for the others."""

from datetime import timedelta

import lightning as L
from torch.distributed.constants import default_pg_timeout

TIMEOUT = timedelta(minutes=10)


def limit_waiting(trainer: L.Trainer) -> None:
    """Have the ranks wait ten minutes in a collective where the config does not say how long; torch waits thirty."""
    strategy = trainer.strategy
    if getattr(strategy, "_timeout", None) == default_pg_timeout:
        strategy._timeout = TIMEOUT  # type: ignore[attr-defined]
