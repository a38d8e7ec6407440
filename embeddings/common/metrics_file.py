"""A run's `metrics.csv`, as far as it was written."""

import csv
import io
from pathlib import Path


def read_metrics(path: Path) -> "csv.DictReader[str]":
    """A reader of the whole rows, in which what was not logged is empty or None.

    A kill may cut the last line short, even inside a number: a line without its end is left out.
    """
    text = path.read_bytes().decode("utf-8", "replace")
    return csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1], newline=""))
