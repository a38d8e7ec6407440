"""Texts whose pieces are shaded by a number each, on one colour scale."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from embeddings.common import InputError
from embeddings.figures.glyphs import MISSING, drawable, installed_fonts
from embeddings.figures.page import write
from embeddings.figures.png import pyplot, write_png
from embeddings.figures.shades import BLACK, EDGE, GREY, is_dark, shades
from embeddings.figures.text_layout import Part, Run, wrapped

COLUMNS = 92
# Of all texts together: matplotlib draws no picture of 65,536 dots' height.
MOST_LINES = 1000

# In points, 72 to the inch.
_FONT_SIZE = 11.0
_ADVANCE = 0.602 * _FONT_SIZE  # of every letter of DejaVu Sans Mono
_LINE = 20.0
_MARGIN = 22.0
_TITLE, _SUBTITLE, _CAPTION = 20.0, 14.0, 36.0
_SCALE_HEIGHT = 40.0
_SCALE_COLUMNS = 40
_WIDTH = COLUMNS * _ADVANCE + 2 * _MARGIN
_NOTE = f"{MISSING} stands for a character that no installed font has"


class ShadedPiece(NamedTuple):
    """A stretch of a text.

    Attributes:
        text: Its characters.
        value: What it is shaded by, >= 0; None for no shade and grey letters.
        is_special: Whether it is no part of the text itself (`[CLS]`): grey letters, and never broken over lines.
    """

    text: str
    value: float | None
    is_special: bool = False


class ShadedText(NamedTuple):
    """A text to draw.

    Attributes:
        pieces: Its pieces, those between the shaded ones too.
        caption: A line below it.
    """

    pieces: Sequence[ShadedPiece]
    caption: str


def draw_shaded_texts(texts: Sequence[ShadedText], title: str, subtitle: str, label: str, output: Path) -> None:
    """Draw texts below each other, the darker a piece the larger its value; the scale begins at 0.

    Args:
        texts: At least one, with at least one shaded piece.
        title: The line above all.
        subtitle: What else is to be known, wrapped over lines.
        label: What the colours mean.
        output: The PNG file to write.

    Raises:
        InputError: If the texts fill more lines than a picture has room for.
        MissingExtraError: If matplotlib is not installed.
    """
    plt = pyplot()
    fonts = installed_fonts()
    layouts = [wrapped(_parts(text, fonts.known), COLUMNS) for text in texts]
    heights = [max(run.line for run in layout) + 1 for layout in layouts]
    if sum(heights) > MOST_LINES:
        what = f"fills {sum(heights)} lines, and a picture has room for {MOST_LINES}"
        raise InputError("TEXT", what, "give shorter or fewer texts")
    notes = [*textwrap.wrap(subtitle, 118)]
    if any(MISSING in run.text for layout in layouts for run in layout):
        notes.append(_NOTE)
    height = 2 * _MARGIN + _TITLE + len(notes) * _SUBTITLE + 8 + _SCALE_HEIGHT
    height += sum(lines * _LINE + _CAPTION for lines in heights)
    figure = plt.figure(figsize=(_WIDTH / 72, height / 72), facecolor="white")
    axis = figure.add_axes((0, 0, 1, 1), xlim=(0, _WIDTH), ylim=(height, 0))
    axis.set_axis_off()
    colours, norm = shades(), _norm(texts)
    top = _MARGIN + 8
    write(axis, _MARGIN, top, title, size=12, weight="bold")
    for note in notes:
        top += _SUBTITLE
        write(axis, _MARGIN, top + 2, note, size=9, color=GREY)
    top += 18
    for text, layout, lines in zip(texts, layouts, heights, strict=True):
        for run in layout:
            _draw_run(axis, run, text.pieces[run.owner or 0], top, colours, norm, fonts.names)
        top += lines * _LINE
        write(axis, _MARGIN, top + 10, text.caption, size=8.5, color=GREY)
        top += _CAPTION
    bar = figure.add_axes((_MARGIN / _WIDTH, 42 / height, _SCALE_COLUMNS * _ADVANCE / _WIDTH, 8 / height))
    scale = figure.colorbar(plt.cm.ScalarMappable(norm, colours), cax=bar, orientation="horizontal")
    scale.set_label(label, size=8.5, color=GREY, loc="left")
    scale.ax.tick_params(labelsize=8, colors=GREY, length=2)
    scale.set_ticks(ticks := _ticks(norm.vmax), labels=[f"{tick:g}" for tick in ticks])
    scale.ax.minorticks_off()
    scale.outline.set_visible(False)
    write_png(figure, output)


def _parts(text: ShadedText, known: frozenset[int]) -> list[Part]:
    return [
        Part(drawable(piece.text, known), index, stays_whole=piece.is_special)
        for index, piece in enumerate(text.pieces)
    ]


def _norm(texts: Sequence[ShadedText]) -> Any:
    """From 0 to the largest value, by the square root, so that one large value leaves the others apart."""
    from matplotlib.colors import PowerNorm

    values = [piece.value for text in texts for piece in text.pieces if piece.value is not None]
    return PowerNorm(0.5, vmin=0.0, vmax=max([*values, 1e-12]))


def _ticks(largest: float) -> list[float]:
    """0, 1 and other round numbers up to the largest value, as many as have room under the scale."""
    ticks = [0.0]
    for tick in (1.0, *(digit * 10.0**power for power in range(-3, 7) for digit in (1, 2, 5))):
        if tick <= largest and all(abs(tick**0.5 - other**0.5) >= 0.12 * largest**0.5 for other in ticks):
            ticks.append(tick)
    return sorted(ticks)


def _draw_run(
    axis: Any, run: Run, piece: ShadedPiece, top: float, colours: Any, norm: Any, families: Sequence[str]
) -> None:
    """One run of letters, in a box where it has a value."""
    left, baseline = _MARGIN + run.column * _ADVANCE, top + run.line * _LINE + 13
    colour = GREY if piece.is_special or piece.value is None else BLACK
    if piece.value is not None:
        from matplotlib.patches import Rectangle

        shade = colours(norm(piece.value))
        box = (left, baseline - 11.5), run.num_columns * _ADVANCE - 1.0, 16.0
        axis.add_patch(Rectangle(*box, facecolor=shade, edgecolor=EDGE, linewidth=0.5))
        if is_dark(shade):
            colour = "white"
        elif piece.is_special:
            colour = "#444444"
    write(axis, left, baseline, run.text, size=_FONT_SIZE, color=colour, family=list(families))
