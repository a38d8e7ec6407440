"""What a run logged over its optimiser steps."""

import csv
from collections.abc import Sequence
from pathlib import Path

from embeddings.common import InputError
from embeddings.common.io import METRICS_FILE, read_metrics, steps_made
from embeddings.figures.run_folder import run_parts

# The steps at which something was logged, and its values.
Curve = tuple[list[int], list[float]]

LOSS, SCORE = "train/loss", "val/ndcg_at_10"
_NOTHING: Curve = ([], [])
_FIX = "give the folder of a run of fit"
_NO_METRICS = ("step", "epoch")


def read_curve(run: Path, column: str) -> Curve:
    """One column of what a run logged (see `read_curves`); empty where it was not."""
    return read_curves(run, [column])[column]


def read_curves(run: Path, columns: Sequence[str] | None = None) -> dict[str, Curve]:
    """Columns of a run's `metrics.csv`: the steps at which each was logged, and its values.

    A run that went on from a checkpoint has all its parts' values (see `run_parts`), an earlier one's up to the first
    step that the next one logged anything of: what it logged after its last checkpoint came to nothing. What a kill has
    cut short, or the run is just writing, is left out; a part that was killed before it wrote any is passed over.

    Args:
        run: The folder of a run.
        columns: Which ones; None for all.

    Raises:
        InputError: If no part of the run has such a file, or a file is no run's.
    """
    written = [part for part in run_parts(run) if metrics_path(part).is_file()]
    if not written:
        raise InputError(str(metrics_path(run)), "no such file", f"{_FIX}, such as checkpoints/runs/NAME/version_0")
    found: dict[str, Curve] = {}
    for part in written:
        own = _read_part(part)
        first = min((steps_made(column, steps[0]) for column, (steps, _) in own.items() if steps), default=None)
        for column in {**found, **own}:
            before = found.get(column, _NOTHING)
            steps, values = before if first is None else _cut(column, before, first)
            own_steps, own_values = own.get(column, _NOTHING)
            found[column] = steps + own_steps, values + own_values
    return found if columns is None else {column: found.get(column, _NOTHING) for column in columns}


def _cut(column: str, curve: Curve, first: int) -> Curve:
    """What a curve has of the steps before one, counted as steps made."""
    kept = sum(steps_made(column, step) < first for step in curve[0])
    return curve[0][:kept], curve[1][:kept]


def metrics_path(run: Path) -> Path:
    """Where a process writes what it logs."""
    return run / METRICS_FILE


def _read_part(run: Path) -> dict[str, Curve]:
    path = metrics_path(run)
    try:
        reader = read_metrics(path)
        names = reader.fieldnames or ()
        found: dict[str, Curve] = {name: ([], []) for name in names if name not in _NO_METRICS}
        for row in reader if "step" in names else ():
            for column, (steps, values) in found.items():
                if row.get(column):
                    value = float(row[column])
                    steps.append(int(row["step"]))
                    values.append(value)
    except (ValueError, TypeError, csv.Error) as error:
        raise InputError(str(path), f"is damaged ({error})", _FIX) from error
    if names and "step" not in names:
        raise InputError(str(path), "has no column 'step'", _FIX)
    return found
