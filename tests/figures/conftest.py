"""Figures that are not written and closed, so that tests can inspect them."""

import warnings

import pytest


@pytest.fixture
def kept(monkeypatch):
    """The figures that were drawn, in order, laid out as they would be written."""
    pytest.importorskip("matplotlib")
    from embeddings.figures.drawing import pyplot

    figures = []

    def keep(figure, output):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph .* missing from font")
            figure.draw_without_rendering()
        figures.append(figure)

    for name in ("clusters", "drawing"):
        monkeypatch.setattr(f"embeddings.figures.{name}.write_png", keep)
    yield figures
    for figure in figures:
        pyplot().close(figure)
