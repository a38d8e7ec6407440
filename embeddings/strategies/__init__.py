"""Floor 4: how the ranks of a run share its weights."""

from embeddings.strategies.sharded import FSDP2Strategy, ZeroStrategy

__all__ = ["FSDP2Strategy", "ZeroStrategy"]
