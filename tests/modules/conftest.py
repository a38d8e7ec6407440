"""Tiny backbones on disk for the tests of several methods."""

import pytest

from tests.helpers.runs import backbone_folder


@pytest.fixture(scope="session")
def bert(tmp_path_factory: pytest.TempPathFactory) -> str:
    return backbone_folder(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="session")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> str:
    return backbone_folder(tmp_path_factory.mktemp("mistral"), "mistral")
