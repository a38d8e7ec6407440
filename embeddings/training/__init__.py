"""Floor 2: training code that all methods share."""

from embeddings.training.gradcache import GradCache

__all__ = ["GradCache"]
