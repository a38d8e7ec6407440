"""Imports mteb without its warnings before any test module does; the models and data of most tests."""

import pytest

from embeddings.evaluation.mteb_library import load_mteb
from embeddings.inference.encoder import Encoder
from tests.inference.models import tiny_embedder
from tests.models.contextual_models import tiny_contextual

load_mteb()


@pytest.fixture(scope="package")
def encoder():
    return Encoder(tiny_embedder(), precision="float32")


@pytest.fixture(scope="package")
def contextual():
    return Encoder(tiny_contextual(), precision="float32")


@pytest.fixture(scope="package")
def sets(tmp_path_factory):
    from tests.evaluation.task_sets import write_sets

    return write_sets(tmp_path_factory.mktemp("world") / "sets")
