"""Shared helpers of figures: output files, HTML pages, headings, and line styles of runs."""

import textwrap
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from embeddings.common.errors import require
from embeddings.common.io import GENERATOR, atomic_path, require_own_output, write_text
from embeddings.common.text import shorten

GREY, BLACK = "#777777", "#1a1a1a"
MAX_NAME_LENGTH = 70
# The first ten lines are solid, the next ten dashed, and so on.
_STYLES = ("-", "--", "-.", ":")


def pyplot() -> Any:
    """matplotlib's pyplot, with a backend that needs no screen."""
    require("matplotlib", "quickstart").use("Agg")
    import matplotlib.pyplot as plt

    return plt


def check_output(output: Path, needs_matplotlib: bool = True) -> None:
    """Check, before any work, that a figure can be drawn, and a path written without the loss of another file."""
    if needs_matplotlib:
        pyplot()
    require_own_output(output)


def write_png(figure: Any, output: Path) -> None:
    """Write a figure as a PNG, atomically, and close it."""
    try:
        with atomic_path(output) as temporary, warnings.catch_warnings():
            # A character that the font lacks is drawn as a box.
            warnings.filterwarnings("ignore", "Glyph .* missing from font")
            figure.savefig(temporary, dpi=120, format="png", metadata={"Software": GENERATOR})
    finally:
        pyplot().close(figure)


def write_page(output: Path, template: str, **values: Any) -> None:
    """Write an HTML page, atomically, from a template of this package; every value is escaped."""
    import jinja2

    environment = jinja2.Environment(loader=jinja2.PackageLoader(__package__), autoescape=True, trim_blocks=True)
    page = environment.get_template(template).render(values, generator=GENERATOR)
    # Lone surrogates, from damaged files, cannot be encoded.
    write_text(output, page.encode("utf-8", "replace").decode())


def drawn_label(text: str, length: int) -> str:
    return shorten(" ".join(text.split()), length) or "…"


def write_heading(figure: Any, axis: Any, title: str, subtitle: str, num_columns: int) -> None:
    """Write a title above a figure, and a wrapped subtitle above its axis."""
    lines = textwrap.wrap(subtitle, num_columns)
    axis.set_title("\n".join(lines), loc="left", size=9, color=GREY, parse_math=False)
    figure.suptitle(title, x=0.01, ha="left", size=12, weight="bold", color=BLACK, parse_math=False)


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


def colour_of(number: int) -> Any:
    """One of twenty distinguishable colours."""
    return pyplot().get_cmap("tab20")((2 * number) % 20 + (number >= 10))
