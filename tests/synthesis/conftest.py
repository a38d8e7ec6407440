"""Short waits before retries."""

import pytest


@pytest.fixture
def quick_retries(monkeypatch):
    monkeypatch.setattr("embeddings.synthesis.client.FIRST_DELAY", 0.001)
