"""What pictures share: a line of text, a heading, and the scale below a heat map."""

import textwrap
from typing import Any

from embeddings.figures.glyphs import drawable, installed_fonts
from embeddings.figures.shades import BLACK, GREY


def write(page: Any, left: float, baseline: float, text: str, **style: Any) -> None:
    """Write a line of text on an axis whose units are points; no dollar sign begins a formula.

    What no font has is a box. The fonts are those of headings if `style` names no others.
    """
    fonts = installed_fonts()
    style = {"family": fonts.of_headings, **style}
    page.text(left, baseline, drawable(text, fonts.known), va="baseline", ha="left", parse_math=False, **style)


def write_heading(figure: Any, axis: Any, title: str, subtitle: str, num_columns: int) -> None:
    """Write a title over a figure, and what else is to be known over its axis, wrapped over lines."""
    fonts = installed_fonts()
    title, subtitle = (drawable(text, fonts.known) for text in (title, subtitle))
    lines, style = textwrap.wrap(subtitle, num_columns), {"family": fonts.of_headings, "parse_math": False}
    axis.set_title("\n".join(lines), loc="left", size=9, color=GREY, **style)
    figure.suptitle(title, x=0.01, ha="left", size=12, weight="bold", color=BLACK, **style)


def draw_scale(figure: Any, image: Any, left: float, size: tuple[float, float], label: str, even: float) -> None:
    """Draw what the colours of a heat map of shares mean, with the even share marked.

    Args:
        figure: The figure.
        image: The heat map, whose colours begin at 0.
        left: Where the scale begins, in points.
        size: Width and height of the page, in points; the scale's own place is 40 points above its lower edge.
        label: What a share is of.
        even: The share where all are alike.
    """
    width, height = size
    bar = figure.add_axes((left / width, 40 / height, 250 / width, 8 / height))
    scale = figure.colorbar(image, cax=bar, orientation="horizontal")
    most = image.get_clim()[1]
    # Labels need room: the even share stands in the bar's own label too.
    ticks = [0.0, *([even] if 0.12 * most < even < most else []), most]
    scale.set_ticks(ticks, labels=[f"{tick:.1%}" for tick in ticks])
    scale.set_label(f"{label} (even: {even:.1%})", size=8.5, color=GREY, loc="left")
    scale.ax.tick_params(labelsize=8, colors=GREY, length=2)
    scale.ax.minorticks_off()
    scale.outline.set_visible(False)
