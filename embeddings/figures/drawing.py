"""Shared helpers of figures: output files, HTML pages, colours, fonts, headings, and line styles of runs."""

import textwrap
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any
from unicodedata import category

from embeddings.common import InputError
from embeddings.common.errors import require
from embeddings.common.io import atomic_path, write_text
from embeddings.common.text import shorten

GREY, BLACK, EDGE = "#777777", "#1a1a1a", "#e4dccb"
MISSING, LINE_BREAK = "□", "↵"
MAX_NAME_LENGTH = 70
# The first ten lines are solid, the next ten dashed, and so on.
_STYLES = ("-", "--", "-.", ":")


def pyplot() -> Any:
    """matplotlib's pyplot with a backend without a screen; a `MissingExtraError` if matplotlib is not installed."""
    require("matplotlib", "quickstart").use("Agg")
    import matplotlib.pyplot as plt

    return plt


def check_output(output: Path, kind: str = "a PNG file", needs_matplotlib: bool = True) -> None:
    """Check, before any work, that a figure can be drawn and written to a path."""
    if needs_matplotlib:
        pyplot()
    if output.is_dir():
        raise InputError(f"--output {output}", "is a directory", f"name {kind}")
    existing = next(path for path in output.absolute().parents if path.exists())
    if not existing.is_dir():
        raise InputError(f"--output {output}", f"{existing} is not a folder", "name a new file")


def write_png(figure: Any, output: Path) -> None:
    """Write a figure as a PNG, atomically, and close it; an existing file is replaced."""
    try:
        with atomic_path(output) as temporary:
            figure.savefig(temporary, dpi=120, format="png")
    finally:
        pyplot().close(figure)


def write_page(output: Path, template: str, **values: Any) -> None:
    """Write an HTML page, atomically, from a template of this package; every value is escaped."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(__package__), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    environment.tests["number_like"] = _is_number_like
    page = environment.get_template(template).render(values)
    # Lone surrogates, from damaged files, cannot be encoded.
    write_text(output, page.encode("utf-8", "replace").decode())


def _is_number_like(cell: str) -> bool:
    return cell.lstrip("-+").replace(",", "").split(" ")[0].rstrip("%").replace(".", "", 1).isdecimal()


@cache
def shades() -> Any:
    """The colour map of all heat maps, from 0 (white) to 1 (dark red)."""
    plt = pyplot()
    from matplotlib.colors import LinearSegmentedColormap

    colours = [plt.get_cmap("YlOrRd")(percent / 100) for percent in range(0, 86, 5)]
    return LinearSegmentedColormap.from_list("shades", [(1, 1, 1, 1), *colours])


def is_dark(shade: tuple[float, ...]) -> bool:
    """Whether text on a colour (red, green, blue, from 0 to 1) must be white."""
    return 0.299 * shade[0] + 0.587 * shade[1] + 0.114 * shade[2] < 0.5


def drawable(text: str) -> str:
    """A text in which matplotlib can draw every character; call it before the axes are created.

    White space becomes spaces, a line break becomes an arrow, and a character without an installed font becomes a box.
    If the default font has no glyph for a character, another installed font is added.
    """
    return "".join(_drawable_character(character) for character in text)


@cache
def _drawable_character(character: str) -> str:
    if character == "\n":
        return LINE_BREAK
    if character.isspace():
        return " "
    return character if category(character) == "Cf" or _find_font(ord(character)) else MISSING


def _find_font(code: int) -> bool:
    """Whether an installed font has a character; matplotlib will use that font from now on."""
    families = pyplot().rcParams["font.family"]
    for name, path in _fonts():
        if code in _charmap(path):
            if name not in families and name != _fonts()[0][0]:
                families.append(name)
            return True
    return False


@cache
def _fonts() -> list[tuple[str, str]]:
    """Name and file of the installed regular fonts, the default font first."""
    from matplotlib.font_manager import FontProperties, findfont, fontManager

    default = findfont(FontProperties())
    regular = [entry for entry in fontManager.ttflist if str(entry.weight) in ("400", "normal", "regular", "book")]
    upright = [entry for entry in regular if entry.style == "normal" and "Last Resort" not in entry.name]
    files = {entry.name: entry.fname for entry in upright}
    return sorted(files.items(), key=lambda font: (font[1] != default, font[0]))


@cache
def _charmap(path: str) -> frozenset[int]:
    from matplotlib.ft2font import FT2Font

    return frozenset(FT2Font(path).get_charmap())


def drawn_label(text: str, length: int) -> str:
    """The start of a text on one line, as `drawable`; an ellipsis if it is empty."""
    return shorten(drawable(text), length) or "…"


def write_heading(figure: Any, axis: Any, title: str, subtitle: str, num_columns: int) -> None:
    """Write a title above a figure, and a wrapped subtitle above its axis."""
    lines = textwrap.wrap(drawable(subtitle), num_columns)
    axis.set_title("\n".join(lines), loc="left", size=9, color=GREY, parse_math=False)
    figure.suptitle(drawable(title), x=0.01, ha="left", size=12, weight="bold", color=BLACK, parse_math=False)


def plain_axes(*axes: Any) -> None:
    """A pale grid and no frame above or at the right."""
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)


def run_names(runs: Sequence[Path]) -> list[str]:
    """The last two parts of each run's path, or the full path where two runs share them."""
    short = ["/".join(run.absolute().parts[-2:]) for run in runs]
    return [name if short.count(name) == 1 else str(run) for name, run in zip(short, runs, strict=True)]


def line_label(name: str) -> str:
    """A name as a label of the legend: escaped, not hidden by a leading underscore, and shortened."""
    short = name if len(name) <= MAX_NAME_LENGTH else f"…{name[1 - MAX_NAME_LENGTH :]}"
    return " " * short.startswith("_") + short.replace("$", r"\$")


def line_style(number: int) -> dict[str, Any]:
    return {"color": f"C{number % 10}", "linestyle": _STYLES[number // 10 % len(_STYLES)], "linewidth": 1.6}


def point_markers(num_points: int) -> dict[str, Any]:
    """Dots for a line with few points; a single point would draw no line."""
    return {"marker": "o", "markersize": 3.5} if num_points <= 40 else {}


def colour_of(number: int) -> Any:
    """One of twenty distinguishable colours."""
    return pyplot().get_cmap("tab20")((2 * number) % 20 + (number >= 10))
