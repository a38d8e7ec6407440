"""The loss and the score of a run over its optimiser steps."""

import csv
from pathlib import Path

from embeddings.common import InputError
from embeddings.common.metrics_file import read_metrics
from embeddings.figures.png import pyplot, write_png

# Steps over which the loss is averaged in the picture: one batch says little.
WINDOW = 8


def read_curve(run: Path, column: str) -> tuple[list[int], list[float]]:
    """One column of a run's `metrics.csv`: the steps at which it was logged, and its values.

    What a kill has cut short, or the run is just writing, is left out.

    Raises:
        InputError: If the run has no such file, or the file is no run's.
    """
    path = run / "metrics.csv"
    if not path.is_file():
        raise InputError(str(path), "no such file", "give the folder of a run, such as checkpoints/runs/NAME/version_0")
    try:
        reader = read_metrics(path)
        missing = [name for name in ("step", "train/loss") if name not in (reader.fieldnames or ())]
        rows = [(int(row["step"]), float(row[column])) for row in reader if row.get(column)] if not missing else []
    except (ValueError, TypeError, csv.Error) as error:
        raise InputError(str(path), f"is damaged ({error})", "give the folder of a run of fit") from error
    if missing:
        raise InputError(str(path), f"has no column {missing[0]!r}", "give the folder of a run of fit")
    return [step for step, _ in rows], [value for _, value in rows]


def draw_curves(run: Path, output: Path) -> None:
    """Draw the loss and the validation nDCG@10 of a run as two panels over one axis of optimiser steps."""
    plt = pyplot()
    steps, losses = read_curve(run, "train/loss")
    figure, (loss_axis, score_axis) = plt.subplots(2, 1, sharex=True, figsize=(7, 6), layout="constrained")
    loss_axis.plot([step + 1 for step in steps], losses, color="tab:blue", linewidth=0.8, alpha=0.4)
    means = [sum(losses[max(0, end - WINDOW) : end]) / min(end, WINDOW) for end in range(1, len(losses) + 1)]
    loss_axis.plot([step + 1 for step in steps], means, color="tab:blue", label=f"mean of {WINDOW} steps")
    loss_axis.legend()
    loss_axis.set_ylabel("training loss")
    loss_axis.set_ylim(bottom=0)
    steps, scores = read_curve(run, "val/ndcg_at_10")
    score_axis.plot(steps, scores, color="tab:green", marker="o")
    for step, score in zip(steps, scores, strict=True):
        score_axis.annotate(
            f"{score:.3f}", (step, score), textcoords="offset points", xytext=(0, 6), ha="center", size=8
        )
    score_axis.set_ylabel("validation nDCG@10")
    score_axis.set_xlabel("optimiser step")
    score_axis.margins(y=0.15)
    for axis in (loss_axis, score_axis):
        axis.grid(alpha=0.3)
    loss_axis.set_title(f"{run.parent.name}/{run.name}")
    write_png(figure, output)
