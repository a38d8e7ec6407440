"""The data of a run, read from its folder: config, record, logged values, and its processes."""

import csv
import json
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from embeddings.common import InputError
from embeddings.common.io import METRICS_FILE, read_json_or_empty, read_metrics, steps_made

# The steps at which a value was logged, and the values.
Curve = tuple[list[int], list[float]]

LOSS, SCORE = "train/loss", "val/ndcg_at_10"
_HINT = "give a run's folder, such as checkpoints/runs/NAME/version_0"


class Curves(dict[str, Curve]):
    """The logged values of a run, by column; missing columns are empty."""

    def __missing__(self, column: str) -> Curve:
        return [], []


def read_run_config(run: Path) -> dict[str, Any]:
    return _read(run / "config.yaml", yaml.safe_load)


def read_run_record(run: Path) -> dict[str, Any]:
    return _read(run / "run.json", json.loads)


def is_finished(record: Mapping[str, Any]) -> bool:
    """Whether the process of a `run.json` trained to its last step."""
    return (record.get("end") or {}).get("how") == "finished"


def _read(path: Path, parse: Callable[[bytes], Any]) -> dict[str, Any]:
    if not path.is_file():
        raise InputError(str(path), "no such file", _HINT)
    try:
        content = parse(path.read_bytes())
    except (yaml.YAMLError, ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise InputError(str(path), "is damaged", _HINT)
    return content


def run_parts(run: Path) -> list[Path]:
    """The folders of a run's processes, the earliest first: a run that continues another one has its own `version_N`.

    `run.json` has the id of the run that it continues, so both may be moved.
    """
    continued = _record(run).get("continued_id")
    if continued is not None:
        for path in sorted(run.absolute().parent.glob("version_*/run.json")):
            if read_json_or_empty(path).get("id") == continued:
                return [*run_parts(path.parent), run]
    return [run]


def _record(run: Path) -> dict[str, Any]:
    return read_run_record(run) if (run / "run.json").is_file() else {}


def read_curves(run: Path) -> Curves:
    """The columns of a run's `metrics.csv`: the steps at which each was logged, and its values.

    In a resumed run, the values of an earlier process end at the first step that the next one logged, because the steps
    after the last checkpoint were repeated.
    """
    parts = [part for part in run_parts(run) if metrics_path(part).is_file()]
    if not parts:
        raise InputError(str(metrics_path(run)), "no such file", _HINT)
    curves = Curves()
    for part in parts:
        new = _read_part(part)
        first = min((steps_made(column, steps[0]) for column, (steps, _) in new.items() if steps), default=None)
        for column in {**curves, **new}:
            steps, values = curves[column] if first is None else _before(column, curves[column], first)
            new_steps, new_values = new[column]
            curves[column] = steps + new_steps, values + new_values
    return curves


def validation_scores(run: Path, num_steps: int) -> list[tuple[int, float]]:
    """The validation nDCG@10 of a run by optimiser step, up to `num_steps`; empty if nothing readable was logged."""
    with suppress(InputError, OSError):
        return [(step, value) for step, value in zip(*read_curves(run)[SCORE], strict=True) if step <= num_steps]
    return []


def _before(column: str, curve: Curve, first: int) -> Curve:
    """The part of a curve before a number of completed steps."""
    count = sum(steps_made(column, step) < first for step in curve[0])
    return curve[0][:count], curve[1][:count]


def metrics_path(run: Path) -> Path:
    return run / METRICS_FILE


def _read_part(run: Path) -> Curves:
    path = metrics_path(run)
    try:
        reader = read_metrics(path)
        names = reader.fieldnames or ()
        curves = Curves({name: ([], []) for name in names if name not in ("step", "epoch")})
        for row in reader if "step" in names else ():
            for column, (steps, values) in curves.items():
                if row.get(column):
                    value = float(row[column])
                    steps.append(int(row["step"]))
                    values.append(value)
    except (ValueError, TypeError, csv.Error) as error:
        raise InputError(str(path), f"is damaged ({error})", _HINT) from error
    if names and "step" not in names:
        raise InputError(str(path), "has no column 'step'", _HINT)
    return curves


class Summary(NamedTuple):
    """First, last and highest finite value of a logged column, with steps."""

    first: tuple[int, float]
    last: tuple[int, float]
    highest: tuple[int, float]


class Part(NamedTuple):
    """One process of a run: folder, `run.json` (empty for none), and `RunHealth`'s numeric errors."""

    folder: Path
    record: Mapping[str, Any]
    resumed_from: Any
    numeric_errors: list[Mapping[str, Any]]

    @property
    def end(self) -> Mapping[str, Any]:
        return _mapping(self.record.get("end"))

    @property
    def seconds(self) -> float | None:
        """Duration; None if unknown or if a clock was set back."""
        started, ended = when(self.record.get("started")), when(self.end.get("time"))
        return None if started is None or ended is None or ended < started else (ended - started).total_seconds()


@dataclass(frozen=True)
class RunFacts:
    """A run, from the folder of its last process: merged config, processes (earliest first), logged values."""

    folder: Path
    config: Mapping[str, Any]
    config_text: str
    parts: list[Part]
    curves: Curves

    @classmethod
    def read(cls, folder: Path) -> "RunFacts":
        config = read_run_config(folder)
        text = (folder / "config.yaml").read_text(encoding="utf-8", errors="replace")
        parts = run_parts(folder)
        curves = read_curves(folder) if any(metrics_path(part).is_file() for part in parts) else Curves()
        return cls(folder, config, text, [part for path in parts for part in _read_parts(path)], curves)

    @property
    def record(self) -> Mapping[str, Any]:
        return self.parts[-1].record

    @cached_property
    def summaries(self) -> dict[str, Summary]:
        summaries = {column: _summary(column, curve) for column, curve in self.curves.items()}
        return {column: summary for column, summary in summaries.items() if summary is not None}

    @property
    def last_step(self) -> int:
        """The last known optimiser step, recorded at the end or logged."""
        logged = (steps_made(column, steps[-1]) for column, (steps, _) in self.curves.items() if steps)
        recorded = self.parts[-1].end.get("step")
        return max(0, *logged, recorded if isinstance(recorded, int) else 0)

    @property
    def not_finite(self) -> dict[str, int]:
        counts = {name: sum(not math.isfinite(value) for value in values) for name, (_, values) in self.curves.items()}
        return {name: count for name, count in counts.items() if count}

    def setting(self, path: str) -> Any:
        """A value of the config by its dotted path, or None."""
        value: Any = self.config
        for key in path.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    def callbacks(self, name: str) -> list[Mapping[str, Any]]:
        configs = self.setting("trainer.callbacks")
        callbacks = [_mapping(config) for config in configs] if isinstance(configs, list) else []
        matching = [config for config in callbacks if str(config.get("class_path")).rpartition(".")[2] == name]
        return [_mapping(config.get("init_args")) for config in matching]


def _read_parts(folder: Path) -> list[Part]:
    """The processes that wrote to a folder, the earliest first; numeric errors belong to the last one."""
    last = _record(folder)
    earlier = last.get("earlier")
    records = [_mapping(record) for record in (earlier if isinstance(earlier, list) else [])]
    resumed_from = last.get("resumed_from") or read_run_config(folder).get("ckpt_path")
    errors = []
    for path in sorted(folder.glob("numeric-error-rank-*.json")):
        try:
            errors.append(_mapping(json.loads(path.read_bytes())))
        except (ValueError, RecursionError):
            errors.append({})
    earlier_parts = [Part(folder, record, record.get("resumed_from"), []) for record in records]
    return [*earlier_parts, Part(folder, last, resumed_from, errors)]


def _summary(column: str, curve: Curve) -> Summary | None:
    rows = [(steps_made(column, step), value) for step, value in zip(*curve, strict=True) if math.isfinite(value)]
    if not rows:
        return None
    return Summary(rows[0], rows[-1], max(rows, key=lambda row: row[1]))


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def when(text: Any) -> datetime | None:
    try:
        return datetime.fromisoformat(text).astimezone(UTC)
    except (ValueError, TypeError, OverflowError):
        return None
