import lightning as L
import pytest

from embeddings.callbacks.export import embedder_of
from embeddings.common import UserError


def test_a_module_without_an_embedder_is_refused_by_name():
    class Bare(L.LightningModule):
        pass

    class Needy(L.Callback):
        pass

    with pytest.raises(UserError, match="Needy needs a module with an embedder, Bare has none; remove Needy"):
        embedder_of(Bare(), Needy())
