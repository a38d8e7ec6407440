"""Floor 3: published checkpoints as models of this library, without running their code."""

from embeddings.interop.released.importer import import_released

__all__ = ["import_released"]
