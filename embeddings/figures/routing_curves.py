"""How evenly the experts of some runs were used, over their optimiser steps."""

import math
from collections.abc import Sequence
from pathlib import Path

from embeddings.common import InputError
from embeddings.figures.png import pyplot, write_png
from embeddings.figures.run_lines import line_label, line_style, point_markers, run_names
from embeddings.figures.run_metrics import metrics_path, read_curve

ENTROPY, IDLE = "routing/load_entropy", "routing/idle_experts"


def draw_routing_curves(runs: Sequence[Path], output: Path) -> None:
    """Draw the load entropy, the mean over sparse layers, and the number of idle experts, a line a run.

    Args:
        runs: Folders of runs whose `metrics.csv` has what `RoutingStatistics` logs.
        output: The PNG file to write.

    Raises:
        InputError: If a run has no such file, or its file no such rows.
        MissingExtraError: If matplotlib is not installed.
    """
    plt = pyplot()
    curves = [(read_routing_curve(run, ENTROPY), read_routing_curve(run, IDLE)) for run in runs]
    lowest = min(min(values) for (_, values), _ in curves)
    names = run_names(runs)
    figure, (entropy_axis, idle_axis) = plt.subplots(
        2, 1, sharex=True, figsize=(7.5, 6 + 0.22 * len(runs)), height_ratios=(3, 2), layout="constrained"
    )
    for number, (name, (entropy, idle)) in enumerate(zip(names, curves, strict=True)):
        style = line_style(number) | point_markers(len(entropy[0]))
        entropy_axis.plot(*entropy, label=line_label(name), **style)
        idle_axis.plot(*idle, **style)
    room = 0.06 * max(1 - lowest, 0.02)
    entropy_axis.axhline(1, color="#777777", linestyle=":", linewidth=1, zorder=0)
    entropy_axis.set_ylim(lowest - room, 1 + room)
    entropy_axis.set_ylabel("load entropy, mean of layers\n(1: all experts loaded alike)")
    idle_axis.set_ylabel("idle experts,\nsum of layers")
    most = max(1.0, *(value for _, (_, values) in curves for value in values))
    idle_axis.set_ylim(-0.05 * most, 1.08 * most)
    idle_axis.yaxis.get_major_locator().set_params(integer=True)
    idle_axis.xaxis.get_major_locator().set_params(integer=True)
    idle_axis.set_xlabel("optimiser step")
    for axis in (entropy_axis, idle_axis):
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    entropy_axis.set_title("How evenly the experts are used", loc="left", fontweight="bold", size=12)
    figure.legend(loc="outside lower left", frameon=False, ncols=1)
    write_png(figure, output)


def read_routing_curve(run: Path, column: str) -> tuple[list[int], list[float]]:
    """One column of what `RoutingStatistics` logged: the steps and the values.

    Raises:
        InputError: If there is none, or one is no number.
    """
    steps, values = read_curve(run, column)
    path, fix = str(metrics_path(run)), "give a run with the callback RoutingStatistics"
    if not steps:
        raise InputError(path, f"has no {column!r}", fix)
    if not all(map(math.isfinite, values)):
        raise InputError(path, f"has a {column!r} that is no number", fix)
    return steps, values
