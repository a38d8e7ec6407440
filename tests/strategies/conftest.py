"""What the tests of strategies share."""

from pathlib import Path

import pytest

from tests.strategies.fits import write_models


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models that `methods` loads, and a place for checkpoints."""
    path = tmp_path_factory.mktemp("models")
    write_models(path)
    return path
