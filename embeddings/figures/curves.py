"""Plots of runs over optimiser steps, and of a sweep's metric against its parameters."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from embeddings.common import InputError
from embeddings.figures.drawing import line_label, line_style, plain_axes, point_markers, pyplot, run_names, write_png
from embeddings.figures.run_facts import LOSS, SCORE, Curve, metrics_path, read_curves

Dot = tuple[Mapping[str, float | str], float]

ENTROPY, IDLE = "routing/load_entropy", "routing/idle_experts"
# Number of logged values in the running mean of the loss.
WINDOW = 8
_DOT, _MEAN, _BEST = "#8fb3d9", "#1f4e79", "#d1600f"


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


def draw_sweep(dots: Sequence[Dot], label: str, mode: Literal["max", "min"], title: str, output: Path) -> None:
    """Plot a metric against each parameter of a sweep, with the best run (by `mode`) marked in every panel.

    `dots` are the finished runs, at least one: their parameters, the same for all, and the metric. Numeric parameters
    are on the horizontal axis, logarithmic if values span decades; others have one row per value. If several runs share
    a value, their mean is also shown.
    """
    plt = pyplot()
    panels = list(dots[0][0])
    best = (max if mode == "max" else min)(dots, key=lambda dot: dot[1])
    columns = min(len(panels), 3)
    rows = math.ceil(len(panels) / columns)
    tallest = max((len(means(dots, name)) for name in panels if not is_numeric(dots, name)), default=0)
    size = (7.0 if columns == 1 else 4.8 * columns), rows * max(3.6, 1.6 + 0.5 * tallest)
    figure, axes = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.08)
    for axis, name in zip(axes.flat, panels, strict=False):
        if is_numeric(dots, name):
            _draw_numbers(axis, dots, name, best)
            axis.set_xlabel(name, parse_math=False)
            axis.set_ylabel(label, parse_math=False)
        else:
            _draw_names(axis, dots, name, best, mode)
            axis.set_title(name, size=10, parse_math=False)
            axis.set_xlabel(label, parse_math=False)
        plain_axes(axis)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    handles: dict[str, Any] = {}
    for axis in axes.flat[: len(panels)]:
        lines, names = axis.get_legend_handles_labels()
        handles |= dict(zip(names, lines, strict=True))
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles), frameon=False)
    figure.suptitle(title, size=12, parse_math=False)
    write_png(figure, output)


def is_numeric(dots: Sequence[Dot], name: str) -> bool:
    return not any(isinstance(values[name], str) for values, _ in dots)


def means(dots: Sequence[Dot], name: str) -> dict[float | str, float]:
    """The mean metric of each value of a parameter, sorted by value if numeric, else by mean."""
    groups: dict[Any, list[float]] = {}
    for values, metric in dots:
        groups.setdefault(values[name], []).append(metric)
    mean_of = {value: sum(metrics) / len(metrics) for value, metrics in groups.items()}
    column = 0 if is_numeric(dots, name) else 1
    return dict(sorted(mean_of.items(), key=lambda item: item[column]))


def _draw_numbers(axis: Any, dots: Sequence[Dot], name: str, best: Dot) -> None:
    numbers = [float(values[name]) for values, _ in dots]
    axis.plot(numbers, [metric for _, metric in dots], "o", color=_DOT, markersize=5, label="run")
    mean_of = means(dots, name)
    if 1 < len(mean_of) < len(dots):
        axis.plot(list(mean_of), list(mean_of.values()), "-", color=_MEAN, linewidth=1.2, marker="D", label="mean")
    axis.plot([float(best[0][name])], [best[1]], "o", color=_BEST, markersize=7, label="best run")
    if min(numbers) > 0 and max(numbers) / min(numbers) >= 10:
        from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

        axis.set_xscale("log")
        # Over many decades only powers of ten are labelled.
        is_wide = max(numbers) / min(numbers) > 200
        axis.xaxis.set_major_locator(LogLocator(subs=(1.0,) if is_wide else (1.0, 2.0, 5.0)))
        axis.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.xaxis.set_minor_formatter(NullFormatter())
    if len(mean_of) <= 6:
        axis.set_xticks(list(mean_of), [f"{value:g}" for value in mean_of])
        axis.minorticks_off()
    axis.margins(x=0.08, y=0.12)


def _draw_names(axis: Any, dots: Sequence[Dot], name: str, best: Dot, mode: Literal["max", "min"]) -> None:
    mean_of = means(dots, name)
    row_of = {value: row for row, value in enumerate(mean_of)}
    axis.plot([metric for _, metric in dots], [row_of[v[name]] for v, _ in dots], "o", color=_DOT, label="run")
    if len(mean_of) < len(dots):
        axis.plot(list(mean_of.values()), list(row_of.values()), "D", color=_MEAN, label="mean")
    axis.plot([best[1]], [row_of[best[0][name]]], "o", color=_BEST, markersize=7, label="best run")
    wrap = partial(textwrap.fill, width=34, max_lines=3, placeholder=" …")
    axis.set_yticks(list(row_of.values()), [wrap(str(value)) for value in row_of], size=9, parse_math=False)
    ends = -0.7, len(row_of) - 0.3
    axis.set_ylim(ends if mode == "max" else ends[::-1])  # the best at the top
    axis.margins(x=0.08)
