"""Floor 4: Lightning strategies that shard weights, gradients and optimiser state."""

from embeddings.strategies.sharded import FSDP2Strategy, ZeroStrategy

__all__ = ["FSDP2Strategy", "ZeroStrategy"]
