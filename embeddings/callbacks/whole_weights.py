"""What a callback has to know of strategies that cut the weights over the ranks."""

from contextlib import AbstractContextManager, nullcontext

import lightning as L


def cuts_weights(trainer: L.Trainer) -> bool:
    """Whether no rank has all weights (FSDP2, ZeRO-3), so that every rank must take part in a forward."""
    return bool(getattr(trainer.strategy, "shards_weights", False))


def whole_weights(trainer: L.Trainer) -> AbstractContextManager[None]:
    """A context in which rank 0 has all weights, and no forward may run; every rank must take part."""
    gather = getattr(trainer.strategy, "whole_weights", nullcontext)
    context: AbstractContextManager[None] = gather()
    return context
