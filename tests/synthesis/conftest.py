"""Short waits before retries, and no proxy or API key from the environment."""

import pytest


@pytest.fixture(autouse=True)
def direct(monkeypatch):
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def quick_retries(monkeypatch):
    monkeypatch.setattr("embeddings.synthesis.client.FIRST_DELAY", 0.001)
