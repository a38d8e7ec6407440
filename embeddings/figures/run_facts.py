"""What a run's folder says about it, gathered and counted."""

import json
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from embeddings.common.io import steps_made
from embeddings.figures.run_folder import read_run_config, read_run_record, run_parts
from embeddings.figures.run_metrics import Curve, metrics_path, read_curves

THROUGHPUT = "throughput/"


class Summary(NamedTuple):
    """A column of what was logged, in five numbers and their steps; values that are no number are left out.

    Attributes:
        first: Its first value.
        last: Its last one.
        highest: Its largest one.
        median: Its median.
    """

    first: tuple[int, float]
    last: tuple[int, float]
    highest: tuple[int, float]
    median: float


class Part(NamedTuple):
    """One process of a run.

    Attributes:
        folder: Where it wrote.
        record: Its `run.json`, empty where it has none.
        went_on_from: The checkpoint it went on from, or None.
        numeric_errors: What `RunHealth` wrote where numbers went wrong.
    """

    folder: Path
    record: Mapping[str, Any]
    went_on_from: str | None
    numeric_errors: list[Mapping[str, Any]]

    @property
    def end(self) -> Mapping[str, Any]:
        """How it ended; empty where it says nothing of it."""
        return _mapping(self.record.get("end"))

    @property
    def seconds(self) -> float | None:
        """How long it took, where it says so and no clock was set back."""
        started, ended = when(self.record.get("started")), when(self.end.get("time"))
        return None if started is None or ended is None or ended < started else (ended - started).total_seconds()


@dataclass(frozen=True)
class RunFacts:
    """A run, from its folder.

    Attributes:
        folder: Its folder; the last one where it went on from others.
        config: Its merged config.
        config_text: The same as it was written.
        parts: Its processes, the earliest first; the last is its own.
        curves: All that was logged, by column; empty where there is no `metrics.csv`.
    """

    folder: Path
    config: Mapping[str, Any]
    config_text: str
    parts: list[Part]
    curves: Mapping[str, Curve]

    @classmethod
    def read(cls, folder: Path) -> "RunFacts":
        """The facts of a run's folder.

        Raises:
            InputError: If it is no run's, or a file of it is damaged.
        """
        config = read_run_config(folder)
        text = (folder / "config.yaml").read_text(encoding="utf-8", errors="replace")
        parts = run_parts(folder)
        curves = read_curves(folder) if any(metrics_path(part).is_file() for part in parts) else {}
        return cls(folder, config, text, [part for each in parts for part in _read_parts(each)], curves)

    @property
    def record(self) -> Mapping[str, Any]:
        """What the last process noted of itself."""
        return self.parts[-1].record

    @cached_property
    def summaries(self) -> dict[str, Summary]:
        """Each column that holds a number."""
        found = {column: _summary(column, curve) for column, curve in self.curves.items()}
        return {column: summary for column, summary in found.items() if summary is not None}

    @property
    def last_step(self) -> int:
        """The last optimiser step that is known of: noted at the end, or logged."""
        logged = (steps_made(column, steps[-1]) for column, (steps, _) in self.curves.items() if steps)
        noted = self.parts[-1].end.get("step")
        return max(0, *logged, noted if isinstance(noted, int) else 0)

    @property
    def not_finite(self) -> dict[str, int]:
        """How many values of each column are NaN or infinite, for columns with any."""
        counts = {name: sum(not math.isfinite(value) for value in values) for name, (_, values) in self.curves.items()}
        return {name: count for name, count in counts.items() if count}

    def setting(self, path: str) -> Any:
        """A value of the config by its dotted path, or None where there is none."""
        found: Any = self.config
        for key in path.split("."):
            found = found.get(key) if isinstance(found, Mapping) else None
        return found

    def callbacks(self, name: str) -> list[Mapping[str, Any]]:
        """The arguments of the callbacks of a class."""
        found = self.setting("trainer.callbacks")
        listed = [_mapping(callback) for callback in found] if isinstance(found, list) else []
        ours = [each for each in listed if str(each.get("class_path")).rpartition(".")[2] == name]
        return [_mapping(each.get("init_args")) for each in ours]


def _read_parts(folder: Path) -> list[Part]:
    """The processes that wrote into a folder, the earliest first; what went wrong with numbers is the last one's."""
    last = read_run_record(folder) if (folder / "run.json").is_file() else {}
    earlier = last.get("earlier")
    records = [_mapping(record) for record in (earlier if isinstance(earlier, list) else [])]
    found = [Part(folder, record, _resumed_from(record), []) for record in records]
    resumed_from = last.get("resumed_from") or read_run_config(folder).get("ckpt_path")
    errors = []
    for path in sorted(folder.glob("numeric-error-rank-*.json")):
        try:
            errors.append(_mapping(json.loads(path.read_bytes())))
        except (ValueError, RecursionError):
            errors.append({})
    return [*found, Part(folder, last, None if resumed_from is None else str(resumed_from), errors)]


def _resumed_from(record: Mapping[str, Any]) -> str | None:
    path = record.get("resumed_from")
    return None if path is None else str(path)


def _summary(column: str, curve: Curve) -> Summary | None:
    rows = [(steps_made(column, step), value) for step, value in zip(*curve, strict=True) if math.isfinite(value)]
    if not rows:
        return None
    median = statistics.median(value for _, value in rows)
    return Summary(rows[0], rows[-1], max(rows, key=lambda row: row[1]), median)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def when(text: Any) -> datetime | None:
    """A time that a record notes, or None."""
    try:
        return datetime.fromisoformat(text).astimezone(UTC)
    except (ValueError, TypeError, OverflowError):
        return None
