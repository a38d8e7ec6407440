"""Plots of runs over optimiser steps."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from embeddings.common import InputError
from embeddings.common.io import steps_made
from embeddings.figures.drawing import line_label, line_style, plain_axes, pyplot, run_names, write_png
from embeddings.figures.run_facts import LOSS, SCORE, metrics_path, read_curves

ENTROPY, IDLE = "routing/load_entropy", "routing/idle_experts"
# Number of logged values in the running mean of the loss.
WINDOW = 8


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
