"""A model directory, and the folder that commands run in."""

import pytest

from embeddings.models import BackboneConfig, Embedder, MeanPooling, load_backbone
from tests.helpers.runs import backbone_folder


@pytest.fixture(autouse=True)
def _in_the_folder(tmp_path, monkeypatch):
    """Commands run in the test's folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A model directory that mean-pools a tiny BERT."""
    folder = tmp_path_factory.mktemp("model")
    backbone, tokenizer = load_backbone(BackboneConfig(backbone_folder(folder / "backbone")))
    Embedder(backbone, tokenizer, MeanPooling(32)).save_pretrained(folder / "model")
    return str(folder / "model")
