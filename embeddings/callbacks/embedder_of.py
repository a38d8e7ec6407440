"""The embedder that a Lightning module trains."""

import lightning as L

from embeddings.common import UserError
from embeddings.models import Embedder


def embedder_of(module: L.LightningModule, callback: L.Callback) -> Embedder:
    """The module's `embedder`.

    Raises:
        UserError: If the module trains none; the message names the callback that needs it.
    """
    embedder = getattr(module, "embedder", None)
    if not isinstance(embedder, Embedder):
        name = type(callback).__name__
        raise UserError(f"{name} needs a module with an embedder, {type(module).__name__} has none; remove {name}")
    return embedder
