"""Floor 4: the methods, one file each."""

from embeddings.modules.base import ContrastiveModule
from embeddings.modules.nv_embed import NVEmbedModule

__all__ = ["ContrastiveModule", "NVEmbedModule"]
