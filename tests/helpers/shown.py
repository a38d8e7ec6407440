"""What the tests of the pictures share: the command line up to the drawing, and a model's directory."""

from pathlib import Path
from typing import Any

import pytest

from embeddings.common import TextSettings
from embeddings.models import Embedder


def kept_drawings(monkeypatch: pytest.MonkeyPatch, folder: Path, *names: str) -> list[tuple[Any, ...]]:
    """Run commands in a folder without the drawing by these functions; returns the list of what would be drawn."""
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(folder)
    drawn: list[tuple[Any, ...]] = []
    for name in names:
        monkeypatch.setattr(f"embeddings.figures.{name}", lambda *what: drawn.append(what))
    return drawn


def save_model(folder: Path, *parts: Any) -> None:
    """Write the directory of a model of a backbone, tokenizer and pooling, with texts of 24 tokens and a prompt."""
    Embedder(*parts, text=TextSettings(24, 24, prompts={"query": "search_query: "})).save_pretrained(folder)
