"""A fake disk with a chosen amount of free space."""

import shutil
from types import SimpleNamespace

import pytest


def fake_disk(patch: pytest.MonkeyPatch, free: int, total: int = 10**15) -> list[object]:
    """Make every disk report these sizes in bytes; returns a list that collects the queried paths."""
    queried: list[object] = []

    def usage(path: object) -> SimpleNamespace:
        queried.append(path)
        return SimpleNamespace(total=total, free=free)

    patch.setattr(shutil, "disk_usage", usage)
    return queried
