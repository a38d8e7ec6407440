"""What a sweep's runs reached: a row a point, as a table and as CSV, and the mean over seeds."""

import csv
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embeddings.cli.sweep_points import SEED_KEY, Metric, label
from embeddings.cli.sweep_runs import Run
from embeddings.common import InputError
from embeddings.common.fileio import atomic_path


@dataclass(frozen=True)
class Result:
    """What a run reached.

    Args:
        run: The run.
        status: `done`, `unfinished` or `missing`.
        last: The metric's last value; None where the run is not done, and so the others.
        best: Its best value.
        best_step: The optimiser step of that.
        seconds: How long the run's last process took.
    """

    run: Run
    status: str
    last: float | None = None
    best: float | None = None
    best_step: int | None = None
    seconds: float | None = None

    def value(self, metric: Metric) -> float | None:
        """The one of both that points are compared by."""
        return self.last if metric.value == "last" else self.best


def logged_metric(runs: Sequence[Run], metric: Metric) -> Metric:
    """The metric; the training loss where it is the default, which no run has logged (a run without evaluation)."""
    columns = {column for run in runs for column in (run.record() or {"metrics": {}})["metrics"]}
    is_absent = metric == Metric() and metric.column not in columns
    return Metric("train/loss", "min") if is_absent and "train/loss" in columns else metric


def results_of(runs: Sequence[Run], metric: Metric, file: Path) -> list[Result]:
    """The results of a sweep's runs, the best first and the missing ones last.

    Raises:
        InputError: If no finished run has logged the metric.
    """
    found, columns = [], set()
    for run in runs:
        record = run.record()
        if record is None:
            found.append(Result(run, run.status))
            continue
        columns |= set(record["metrics"])
        summary = record["metrics"].get(metric.column, {})
        best = (summary.get(metric.mode), summary.get(f"{metric.mode}_step"))
        found.append(Result(run, "done", summary.get("last"), *best, record["seconds"]))
    if any(result.status == "done" for result in found) and metric.column not in columns:
        what = f"no run has logged {metric.column!r}"
        raise InputError(f"{file}: metric", what, f"column takes one of {', '.join(sorted(columns)) or 'none'}")
    sign = -1 if metric.mode == "max" else 1

    def order(result: Result) -> tuple[bool, float]:
        value = result.value(metric)
        return value is None, 0.0 if value is None else sign * value

    return sorted(found, key=order)


def result_table(results: Sequence[Result], names: Mapping[str, str], metric: Metric) -> str:
    """The results as text, a row a point."""
    head = ["point", *names.values(), f"{metric.column} last", "best", "at step", "seconds", "status", "folder"]
    rows = [
        [
            str(result.run.index),
            *(label(result.run.point[key]) if key in result.run.point else "-" for key in names),
            _digits(result.last),
            _digits(result.best),
            "-" if result.best_step is None else str(result.best_step),
            "-" if result.seconds is None else f"{result.seconds:.0f}",
            result.status,
            result.run.folder.name if result.status != "missing" else "-",
        ]
        for result in results
    ]
    return _aligned([head, *rows])


def seed_table(results: Sequence[Result], names: Mapping[str, str], metric: Metric) -> str | None:
    """The mean and standard deviation over seeds, as text; None where nothing but the seed, or no seed, is varied."""
    others = {key: name for key, name in names.items() if key != SEED_KEY}
    if SEED_KEY not in names or not others:
        return None
    groups: dict[tuple[str, ...], list[float]] = {}
    for result in results:  # the best first, and so its group
        labels = tuple(label(result.run.point[key]) if key in result.run.point else "-" for key in others)
        value = result.value(metric)
        groups.setdefault(labels, []).extend([] if value is None else [value])
    sign = -1 if metric.mode == "max" else 1
    ordered = sorted(groups.items(), key=lambda item: sign * statistics.mean(item[1]) if item[1] else float("inf"))
    rows = [
        [*labels, _digits(statistics.mean(values)) if values else "-", _spread(values), str(len(values))]
        for labels, values in ordered
    ]
    return _aligned([[*others.values(), f"{metric.column} {metric.value}, mean", "±sd", "seeds"], *rows])


def write_results(results: Sequence[Result], names: Mapping[str, str], path: Path) -> None:
    """Write the results as CSV, whole or not at all; what is not there is empty."""
    with atomic_path(path) as temporary, open(temporary, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["point", *names, "last", "best", "best_step", "seconds", "status", "folder"])
        for result in results:
            values = [label(result.run.point[key]) if key in result.run.point else None for key in names]
            measured: list[Any] = [result.last, result.best, result.best_step, result.seconds]
            writer.writerow([result.run.index, *values, *measured, result.status, result.run.folder])


def _digits(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}" if abs(value) < 100 else f"{value:.1f}"


def _spread(values: Sequence[float]) -> str:
    return f"±{_digits(statistics.stdev(values))}" if len(values) > 1 else "-"


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
