"""Floor 2: how a method is trained, whatever the method."""

from embeddings.training.gradcache import GradCache

__all__ = ["GradCache"]
