"""Short waits before retries, and no proxy or API key from the environment."""

import pytest

from embeddings.synthesis import client


@pytest.fixture(autouse=True)
def short_and_direct(monkeypatch):
    monkeypatch.setattr(client, "BACKOFF_SECONDS", 0.001)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
