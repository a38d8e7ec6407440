"""Helpers for tests of figures: commands without drawing, a model directory, and layout checks."""

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


def check_layout(figure, min_texts):
    """Check that no text leaves the page or overlaps another."""
    texts = [figure._suptitle]
    for axis in figure.axes:
        texts += [*axis.texts, axis._left_title, axis.xaxis.label, axis.yaxis.label]
        texts += [*axis.get_xticklabels(), *axis.get_yticklabels()]
    boxes = on_the_page(figure, [text for text in texts if text.get_text() and text.get_visible()])
    assert len(boxes) > min_texts
    for place, box in enumerate(boxes):
        assert not any(
            min(box.x1, other.x1) - max(box.x0, other.x0) > 1 and min(box.y1, other.y1) - max(box.y0, other.y0) > 1
            for other in boxes[:place]
        )
