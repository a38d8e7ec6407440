"""No test waits a second before a retry."""

import pytest

from embeddings.synthesis import runner


@pytest.fixture(autouse=True)
def short_backoff(monkeypatch):
    monkeypatch.setattr(runner, "BACKOFF_SECONDS", 0.001)
