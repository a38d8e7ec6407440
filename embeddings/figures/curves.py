"""The loss and the score of some runs over their optimiser steps."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from embeddings.common import InputError
from embeddings.figures.png import pyplot, write_png
from embeddings.figures.run_lines import line_label, line_style, point_markers, run_names
from embeddings.figures.run_metrics import LOSS, SCORE, Curve, metrics_path, read_curves

# Logged values over which the loss is averaged in the picture: one batch says little.
WINDOW = 8
# More runs than this have no numbers at their scores.
_MOST_NUMBERED = 1


def draw_curves(runs: Sequence[Path], output: Path) -> None:
    """Draw the loss of some runs and, where one logged it, their validation nDCG@10, over one axis of optimiser steps.

    Args:
        runs: Folders of runs, at least one.
        output: The PNG file to write.

    Raises:
        InputError: If a run has no `metrics.csv` or logged no loss, or the file is no run's.
        MissingExtraError: If matplotlib is not installed.
    """
    plt = pyplot()
    found = [read_curves(run, [LOSS, SCORE]) for run in runs]
    for run, curves in zip(runs, found, strict=True):
        if not curves[LOSS][0]:
            raise InputError(str(metrics_path(run)), f"has no {LOSS!r}", "give a run that logged its loss")
    has_scores = any(curves[SCORE][0] for curves in found)
    size = (7.5, (6.0 if has_scores else 3.8) + 0.22 * len(runs))
    figure, axes = plt.subplots(1 + has_scores, 1, sharex=True, figsize=size, layout="constrained", squeeze=False)
    for number, (name, curves) in enumerate(zip(run_names(runs), found, strict=True)):
        _draw_loss(axes[0, 0], curves[LOSS], number, line_label(name))
        if has_scores:
            _draw_scores(axes[1, 0], curves[SCORE], number, is_numbered=len(runs) <= _MOST_NUMBERED)
    axes[0, 0].set_ylabel(f"training loss\n(bold: mean of {WINDOW} logged values)")
    axes[0, 0].set_ylim(bottom=0)
    if has_scores:
        axes[1, 0].set_ylabel("validation nDCG@10")
        axes[1, 0].margins(y=0.15)
    for axis in axes.flat:
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1, 0].set_xlabel("optimiser step")
    axes[-1, 0].xaxis.get_major_locator().set_params(integer=True)
    figure.legend(loc="outside lower left", frameon=False, ncols=1)
    write_png(figure, output)


def _draw_loss(axis: Any, curve: Curve, number: int, label: str) -> None:
    """One run's loss, every value pale and the running mean over it."""
    steps, losses = [step + 1 for step in curve[0]], curve[1]
    means = [sum(losses[max(0, end - WINDOW) : end]) / min(end, WINDOW) for end in range(1, len(losses) + 1)]
    style = line_style(number)
    axis.plot(steps, losses, **{**style, "linewidth": 0.8}, alpha=0.35)
    axis.plot(steps, means, **style, **(point_markers(1) if len(steps) == 1 else {}), label=label)


def _draw_scores(axis: Any, curve: Curve, number: int, is_numbered: bool) -> None:
    steps, scores = curve
    axis.plot(steps, scores, **line_style(number), **point_markers(len(steps)))
    # So many numbers have room.
    every = max(1, -(-len(steps) // 12))
    for step, score in zip(steps[::every], scores[::every], strict=True) if is_numbered else ():
        place = {"textcoords": "offset points", "xytext": (0, 6), "ha": "center"}
        axis.annotate(f"{score:.3f}", (step, score), size=8, **place)
