"""Floor 4: how the ranks of a run share its weights."""

from embeddings.strategies.fsdp import FSDP2Strategy
from embeddings.strategies.zero import ZeroStrategy

__all__ = ["FSDP2Strategy", "ZeroStrategy"]
