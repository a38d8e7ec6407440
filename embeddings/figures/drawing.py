"""What all figures share, output files, HTML pages, headings and styles, and the plots of runs over optimiser steps."""

import textwrap
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from embeddings.common.errors import InputError, require
from embeddings.common.io import GENERATOR, atomic_path, require_own_output, steps_made, write_text
from embeddings.common.text import shorten
from embeddings.figures.run_facts import LOSS, SCORE, metrics_path, read_curves

ENTROPY, IDLE = "routing/load_entropy", "routing/idle_experts"
# Number of logged values in the running mean of the loss.
WINDOW = 8
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
    return shorten(text, length) or "…"


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


def draw_curves(runs: Sequence[Path], output: Path) -> None:
    """Plot the loss of runs and, if any run logged it, their validation nDCG@10, over the optimiser steps."""
    labels = {LOSS: f"training loss\n(bold: mean of {WINDOW} logged values)", SCORE: "validation nDCG@10"}
    _draw(runs, labels, "name a run that logged its loss", output)


def draw_routing_curves(runs: Sequence[Path], output: Path) -> None:
    """Plot the load entropy (mean over sparse layers) and the idle experts that `RoutingStatistics` logged."""
    labels = {
        ENTROPY: "load entropy, mean of layers\n(1: all experts loaded equally)",
        IDLE: "idle experts, sum of layers",
    }
    _draw(runs, labels, "name a run with the callback RoutingStatistics", output)


def _draw(runs: Sequence[Path], labels: Mapping[str, str], hint: str, output: Path) -> None:
    """Plot columns of runs, one panel each; every run must have logged the first column."""
    required = next(iter(labels))
    curves_of_runs = [read_curves(run) for run in runs]
    for run, curves in zip(runs, curves_of_runs, strict=True):
        if not curves[required][0]:
            raise InputError(str(metrics_path(run)), f"has no {required!r}", hint)
    columns = [column for column in labels if any(curves[column][0] for curves in curves_of_runs)]
    size = (7.5, 0.8 + 2.6 * len(columns) + 0.22 * len(runs))
    figure, axes = pyplot().subplots(len(columns), 1, sharex=True, figsize=size, layout="constrained", squeeze=False)
    for column, axis in zip(columns, axes.flat, strict=True):
        for number, (name, curves) in enumerate(zip(run_names(runs), curves_of_runs, strict=True)):
            steps, values = [steps_made(column, step) for step in curves[column][0]], curves[column][1]
            # A single point would draw no line.
            style = line_style(number) | ({"marker": "o", "markersize": 3.5} if len(steps) <= 40 else {})
            if column == LOSS:
                axis.plot(steps, values, **{**style, "linewidth": 0.8}, alpha=0.35)
                values = [
                    sum(values[max(0, end - WINDOW) : end]) / min(end, WINDOW) for end in range(1, len(steps) + 1)
                ]
            axis.plot(steps, values, **style, label=line_label(name) if column == required else None)
        axis.set_ylabel(labels[column])
    plain_axes(*axes.flat)
    axes[-1, 0].set_xlabel("optimiser step")
    axes[-1, 0].xaxis.get_major_locator().set_params(integer=True)
    figure.legend(loc="outside lower left", frameon=False, ncols=1)
    write_png(figure, output)
