"""A run's `metrics.csv`, as far as it was written."""

import csv
import io
from collections.abc import Mapping
from pathlib import Path

METRICS_FILE = "metrics.csv"
# Logged under the number of the step that is being made, from 0; all else under the number of steps made.
_OF_A_STEP = ("train/", "lr-")


def read_metrics(path: Path) -> "csv.DictReader[str]":
    """A reader of the whole rows, in which what was not logged is empty or None.

    A kill may cut the last line short, even inside a number: a line without its end is left out.
    """
    text = path.read_bytes().decode("utf-8", "replace")
    return csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1], newline=""))


def steps_made(column: str, step: int) -> int:
    """How many optimiser steps were made when a value was measured, by its column and the step it was logged under."""
    return step + column.startswith(_OF_A_STEP)


def row_steps_made(row: Mapping[str, str | None]) -> int:
    """The same of a row; 0 for one without its step."""
    step = row.get("step") or ""
    if not step.isdecimal():
        return 0
    return max(steps_made(column, int(step)) for column, value in row.items() if value and column is not None)
