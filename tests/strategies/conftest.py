"""Fixtures for the tests of strategies."""

from pathlib import Path

import pytest

from tests.strategies.fits import write_models


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the models that `methods` loads; tests write checkpoints into it."""
    path = tmp_path_factory.mktemp("models")
    write_models(path)
    return path
