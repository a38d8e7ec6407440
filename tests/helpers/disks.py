"""A disk that has as much room as a test says."""

import shutil
from types import SimpleNamespace

import pytest


def fake_disk(patch: pytest.MonkeyPatch, free: int, total: int = 10**15) -> list[object]:
    """Have every disk say so many bytes; returns the places that are asked of from now on."""
    asked: list[object] = []

    def usage(place: object) -> SimpleNamespace:
        asked.append(place)
        return SimpleNamespace(total=total, free=free)

    patch.setattr(shutil, "disk_usage", usage)
    return asked
