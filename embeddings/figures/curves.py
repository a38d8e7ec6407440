"""Plots of runs over optimiser steps."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from embeddings.common import InputError
from embeddings.figures.drawing import line_label, line_style, plain_axes, point_markers, pyplot, run_names, write_png
from embeddings.figures.run_facts import LOSS, SCORE, Curve, metrics_path, read_curves

ENTROPY, IDLE = "routing/load_entropy", "routing/idle_experts"
# Number of logged values in the running mean of the loss.
WINDOW = 8


def draw_curves(runs: Sequence[Path], output: Path) -> None:
    """Plot the loss of runs and, if any run logged it, their validation nDCG@10, over the optimiser steps.

    An `InputError` names a run without `metrics.csv` or without a loss, or a damaged file.
    """
    plt = pyplot()
    curves_of_runs = [read_curves(run) for run in runs]
    for run, curves in zip(runs, curves_of_runs, strict=True):
        if not curves[LOSS][0]:
            raise InputError(str(metrics_path(run)), f"has no {LOSS!r}", "name a run that logged its loss")
    has_scores = any(curves[SCORE][0] for curves in curves_of_runs)
    size = (7.5, (6.0 if has_scores else 3.8) + 0.22 * len(runs))
    figure, axes = plt.subplots(1 + has_scores, 1, sharex=True, figsize=size, layout="constrained", squeeze=False)
    for number, (name, curves) in enumerate(zip(run_names(runs), curves_of_runs, strict=True)):
        _draw_loss(axes[0, 0], curves[LOSS], number, line_label(name))
        if has_scores:
            _draw_scores(axes[1, 0], curves[SCORE], number, is_numbered=len(runs) == 1)
    axes[0, 0].set_ylabel(f"training loss\n(bold: mean of {WINDOW} logged values)")
    axes[0, 0].set_ylim(bottom=0)
    if has_scores:
        axes[1, 0].set_ylabel("validation nDCG@10")
        axes[1, 0].margins(y=0.15)
    plain_axes(*axes.flat)
    axes[-1, 0].set_xlabel("optimiser step")
    axes[-1, 0].xaxis.get_major_locator().set_params(integer=True)
    figure.legend(loc="outside lower left", frameon=False, ncols=1)
    write_png(figure, output)


def _draw_loss(axis: Any, curve: Curve, number: int, label: str) -> None:
    """Draw one run's loss: every value as a pale line, and the running mean."""
    steps, losses = [step + 1 for step in curve[0]], curve[1]
    means = [sum(losses[max(0, end - WINDOW) : end]) / min(end, WINDOW) for end in range(1, len(losses) + 1)]
    style = line_style(number)
    axis.plot(steps, losses, **{**style, "linewidth": 0.8}, alpha=0.35)
    axis.plot(steps, means, **style, **(point_markers(1) if len(steps) == 1 else {}), label=label)


def _draw_scores(axis: Any, curve: Curve, number: int, is_numbered: bool) -> None:
    steps, scores = curve
    axis.plot(steps, scores, **line_style(number), **point_markers(len(steps)))
    # At most twelve numbers fit.
    every = max(1, -(-len(steps) // 12))
    for step, score in zip(steps[::every], scores[::every], strict=True) if is_numbered else ():
        offset = {"textcoords": "offset points", "xytext": (0, 6), "ha": "center"}
        axis.annotate(f"{score:.3f}", (step, score), size=8, **offset)


def draw_routing_curves(runs: Sequence[Path], output: Path) -> None:
    """Plot the load entropy (mean over sparse layers) and the idle experts; an `InputError` if they were not logged."""
    plt = pyplot()
    curves = [(read_routing_curve(run, ENTROPY), read_routing_curve(run, IDLE)) for run in runs]
    lowest, size = min(min(values) for (_, values), _ in curves), (7.5, 6 + 0.22 * len(runs))
    figure, axes = plt.subplots(2, 1, sharex=True, figsize=size, height_ratios=(3, 2), layout="constrained")
    entropy_axis, idle_axis = axes
    for number, (name, (entropy, idle)) in enumerate(zip(run_names(runs), curves, strict=True)):
        style = line_style(number) | point_markers(len(entropy[0]))
        entropy_axis.plot(*entropy, label=line_label(name), **style)
        idle_axis.plot(*idle, **style)
    margin = 0.06 * max(1 - lowest, 0.02)
    entropy_axis.axhline(1, color="#777777", linestyle=":", linewidth=1, zorder=0)
    entropy_axis.set_ylim(lowest - margin, 1 + margin)
    entropy_axis.set_ylabel("load entropy, mean of layers\n(1: all experts loaded equally)")
    idle_axis.set_ylabel("idle experts,\nsum of layers")
    max_idle = max(1.0, *(value for _, (_, values) in curves for value in values))
    idle_axis.set_ylim(-0.05 * max_idle, 1.08 * max_idle)
    idle_axis.yaxis.get_major_locator().set_params(integer=True)
    idle_axis.xaxis.get_major_locator().set_params(integer=True)
    idle_axis.set_xlabel("optimiser step")
    plain_axes(entropy_axis, idle_axis)
    entropy_axis.set_title("How evenly the experts are used", loc="left", fontweight="bold", size=12)
    figure.legend(loc="outside lower left", frameon=False, ncols=1)
    write_png(figure, output)


def read_routing_curve(run: Path, column: str) -> tuple[list[int], list[float]]:
    """The steps and values of one column of `RoutingStatistics`; an `InputError` if it is missing or not finite."""
    steps, values = read_curves(run)[column]
    path, hint = str(metrics_path(run)), "name a run with the callback RoutingStatistics"
    if not steps:
        raise InputError(path, f"has no {column!r}", hint)
    if not all(map(math.isfinite, values)):
        raise InputError(path, f"has a {column!r} that is not finite", hint)
    return steps, values
