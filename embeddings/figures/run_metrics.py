"""What a run logged over its optimiser steps."""

import csv
from collections.abc import Sequence
from pathlib import Path

from embeddings.common import InputError
from embeddings.common.metrics_file import read_metrics
from embeddings.figures.run_folder import run_parts

# The steps at which something was logged, and its values.
Curve = tuple[list[int], list[float]]

LOSS, SCORE = "train/loss", "val/ndcg_at_10"
_NO_METRICS = ("step", "epoch")


def read_curve(run: Path, column: str) -> Curve:
    """One column of what a run logged (see `read_curves`); empty where it was not."""
    return read_curves(run, [column])[column]


def read_curves(run: Path, columns: Sequence[str] | None = None) -> dict[str, Curve]:
    """Columns of a run's `metrics.csv`: the steps at which each was logged, and its values.

    A run that went on from a checkpoint has all its parts' values (see `run_parts`): where two have the same steps, the
    later one's. What a kill has cut short, or the run is just writing, is left out.

    Args:
        run: The folder of a run.
        columns: Which ones; None for all.

    Raises:
        InputError: If the run has no such file, or the file is no run's.
    """
    found: dict[str, Curve] = {column: ([], []) for column in columns or ()}
    for part in run_parts(run):
        for column, (steps, values) in _read_part(part, columns).items():
            before_steps, before_values = found.get(column, ([], []))
            kept = sum(step < steps[0] for step in before_steps) if steps else len(before_steps)
            found[column] = before_steps[:kept] + steps, before_values[:kept] + values
    return found


def _read_part(run: Path, columns: Sequence[str] | None) -> dict[str, Curve]:
    path = run / "metrics.csv"
    if not path.is_file():
        raise InputError(str(path), "no such file", "give the folder of a run, such as checkpoints/runs/NAME/version_0")
    try:
        reader = read_metrics(path)
        names = reader.fieldnames or ()
        missing = [name for name in ("step", LOSS) if name not in names]
        chosen = [name for name in names if name not in _NO_METRICS] if columns is None else columns
        found: dict[str, Curve] = {column: ([], []) for column in chosen}
        for row in reader if not missing else ():
            for column in chosen:
                if row.get(column):
                    value = float(row[column])
                    found[column][0].append(int(row["step"]))
                    found[column][1].append(value)
    except (ValueError, TypeError, csv.Error) as error:
        raise InputError(str(path), f"is damaged ({error})", "give the folder of a run of fit") from error
    if missing:
        raise InputError(str(path), f"has no column {missing[0]!r}", "give the folder of a run of fit")
    return found
