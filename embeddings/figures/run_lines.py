"""How the runs of one picture are told apart: their names and their lines."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Lines with more points than this have no markers.
MOST_MARKED = 40
LONGEST_NAME = 70
# In the order of matplotlib's ten colours; the next ten lines are dashed, and so on.
_STYLES = ("-", "--", "-.", ":")


def run_names(runs: Sequence[Path]) -> list[str]:
    """The last two parts of each run's path, or the whole path where two runs share them."""
    short = ["/".join(run.absolute().parts[-2:]) for run in runs]
    return [name if short.count(name) == 1 else str(run) for name, run in zip(short, runs, strict=True)]


def line_label(name: str) -> str:
    """A name as the legend shows it: no formula, no line without a name, and none wider than the picture."""
    short = name if len(name) <= LONGEST_NAME else f"…{name[1 - LONGEST_NAME :]}"
    return " " * short.startswith("_") + short.replace("$", r"\$")


def line_style(number: int) -> dict[str, Any]:
    """Colour and dashes of a run, from 0."""
    return {"color": f"C{number % 10}", "linestyle": _STYLES[number // 10 % len(_STYLES)], "linewidth": 1.6}


def point_markers(num_points: int) -> dict[str, Any]:
    """Dots for a line with few points; one alone would be no line."""
    return {"marker": "o", "markersize": 3.5} if num_points <= MOST_MARKED else {}
