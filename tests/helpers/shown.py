"""Helpers for tests of figures: commands without drawing, a model directory, and a layout check."""

from pathlib import Path
from typing import Any

import pytest

from embeddings.common import TextSettings
from embeddings.models import Embedder


def collected_drawings(monkeypatch: pytest.MonkeyPatch, folder: Path, *names: str) -> list[tuple[Any, ...]]:
    """Replace drawing functions and enter a folder; returns a list that collects their arguments."""
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(folder)
    drawn: list[tuple[Any, ...]] = []
    for name in names:
        monkeypatch.setattr(f"embeddings.figures.{name}", lambda *arguments: drawn.append(arguments))
    return drawn


def save_model(folder: Path, *parts: Any) -> None:
    """Save a model of a backbone, tokenizer and pooling, with texts of 24 tokens and a prompt."""
    Embedder(*parts, text=TextSettings(24, 24, prompts={"query": "search_query: "})).save_pretrained(folder)


def on_the_page(figure, parts):
    """The bounding boxes of texts or legends, which must be inside the page."""
    boxes = [part.get_window_extent() for part in parts]
    for box in boxes:
        assert figure.bbox.x0 <= box.x0 <= box.x1 <= figure.bbox.x1
        assert figure.bbox.y0 <= box.y0 <= box.y1 <= figure.bbox.y1
    return boxes
