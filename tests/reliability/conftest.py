"""Fixtures: one world for all cases, and a new folder for each."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.reliability.world import Place, World


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """The valid files and models; tests must not change them."""
    folder = tmp_path_factory.mktemp("world")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EMBED_CACHE", str(folder / "cache"))
        yield World(folder / "files")


@pytest.fixture
def place(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """An empty working folder."""
    folder = tmp_path / "place"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("EMBED_CACHE", "cache")
    for name in [name for name in os.environ if name.startswith("SLURM_") or name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    return Place(folder, world, monkeypatch)
