"""A metric against what a sweep varied: one panel a parameter, or one row a point."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from embeddings.figures.png import pyplot, write_png

Dot = tuple[Mapping[str, float | str], float]

_DOT, _MEAN, _BEST = "#8fb3d9", "#1f4e79", "#d1600f"
# From this ratio of the largest value to the smallest the axis is logarithmic.
_LOG_RATIO = 10
# And from this one only powers of ten are labelled.
_WIDE_RATIO = 200
_COLUMNS = 3
_MOST_TICKS = 6
_NAME_COLUMNS, _NAME_LINES = 34, 3


def draw_sweep(dots: Sequence[Dot], label: str, mode: Literal["max", "min"], title: str, output: Path) -> None:
    """Draw a metric against each parameter of a sweep, the best run marked in every panel.

    A parameter of numbers has its panel's horizontal axis, logarithmic where they span decades; any other one has a row
    a value. Runs that share a value, as seeds do, get their mean too.

    Args:
        dots: The finished runs, at least one: the parameters by name, the same of all runs, and the metric.
        label: What the metric is.
        mode: Whether the largest or the smallest is the best.
        title: The line above all.
        output: The PNG file to write.

    Raises:
        MissingExtraError: If matplotlib is not installed.
    """
    plt = pyplot()
    panels = list(dots[0][0])
    best = (max if mode == "max" else min)(dots, key=lambda dot: dot[1])
    columns = min(len(panels), _COLUMNS)
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
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    handles: dict[str, Any] = {}
    for axis in axes.flat[: len(panels)]:
        found, names = axis.get_legend_handles_labels()
        handles |= dict(zip(names, found, strict=True))
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles), frameon=False)
    figure.suptitle(title, size=12, parse_math=False)
    write_png(figure, output)


def is_numeric(dots: Sequence[Dot], name: str) -> bool:
    """Whether all values of a parameter are numbers."""
    return not any(isinstance(values[name], str) for values, _ in dots)


def spans_decades(values: Sequence[float]) -> bool:
    """Whether numbers are better drawn on a logarithmic axis."""
    return min(values) > 0 and max(values) / min(values) >= _LOG_RATIO


def means(dots: Sequence[Dot], name: str) -> dict[float | str, float]:
    """The mean metric of each value of a parameter, values in the order of their numbers, or else of the means."""
    groups: dict[Any, list[float]] = {}
    for values, metric in dots:
        groups.setdefault(values[name], []).append(metric)
    found = {value: sum(metrics) / len(metrics) for value, metrics in groups.items()}
    return dict(sorted(found.items(), key=(lambda item: item[0]) if is_numeric(dots, name) else (lambda item: item[1])))


def _draw_numbers(axis: Any, dots: Sequence[Dot], name: str, best: Dot) -> None:
    numbers = [float(values[name]) for values, _ in dots]
    axis.plot(numbers, [metric for _, metric in dots], "o", color=_DOT, markersize=5, label="run")
    found = means(dots, name)
    if 1 < len(found) < len(dots):
        axis.plot(list(found), list(found.values()), "-", color=_MEAN, linewidth=1.2, marker="D", label="mean")
    axis.plot([float(best[0][name])], [best[1]], "o", color=_BEST, markersize=7, label="best run")
    if spans_decades(numbers):
        from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

        axis.set_xscale("log")
        is_wide = max(numbers) / min(numbers) > _WIDE_RATIO
        axis.xaxis.set_major_locator(LogLocator(subs=(1.0,) if is_wide else (1.0, 2.0, 5.0)))
        axis.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.xaxis.set_minor_formatter(NullFormatter())
    if len(found) <= _MOST_TICKS:
        axis.set_xticks(list(found), [f"{value:g}" for value in found])
        axis.minorticks_off()
    axis.margins(x=0.08, y=0.12)


def _draw_names(axis: Any, dots: Sequence[Dot], name: str, best: Dot, mode: Literal["max", "min"]) -> None:
    found = means(dots, name)
    places = {value: place for place, value in enumerate(found)}
    axis.plot([metric for _, metric in dots], [places[v[name]] for v, _ in dots], "o", color=_DOT, label="run")
    if len(found) < len(dots):
        axis.plot(list(found.values()), [places[value] for value in found], "D", color=_MEAN, label="mean")
    axis.plot([best[1]], [places[best[0][name]]], "o", color=_BEST, markersize=7, label="best run")
    axis.set_yticks(list(places.values()), [_wrapped(str(value)) for value in places], size=9, parse_math=False)
    ends = -0.7, len(places) - 0.3
    axis.set_ylim(ends if mode == "max" else ends[::-1])  # the best on top
    axis.margins(x=0.08)


def _wrapped(name: str) -> str:
    return textwrap.fill(name, _NAME_COLUMNS, max_lines=_NAME_LINES, placeholder=" …")
