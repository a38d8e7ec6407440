"""The facts of a run, read from its folder: config, record, logged values, and the processes that it consists of."""

import csv
import json
import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from embeddings.common import InputError
from embeddings.common.io import METRICS_FILE, read_metrics, steps_made

# The steps at which something was logged, and its values.
Curve = tuple[list[int], list[float]]

LOSS, SCORE = "train/loss", "val/ndcg_at_10"
THROUGHPUT = "throughput/"
_HINT = "give the folder of a run of fit, such as checkpoints/runs/NAME/version_0"


class Curves(dict[str, Curve]):
    """What a run logged, by column; one that it did not log is empty."""

    def __missing__(self, column: str) -> Curve:
        return [], []


def read_run_config(run: Path) -> dict[str, Any]:
    """The merged config of a run; an `InputError` where there is none or it is damaged, as in all of this file."""
    return _read(run / "config.yaml", yaml.safe_load)


def read_run_record(run: Path) -> dict[str, Any]:
    return _read(run / "run.json", json.loads)


def _read(path: Path, parse: Callable[[bytes], Any]) -> dict[str, Any]:
    if not path.is_file():
        raise InputError(str(path), "no such file", _HINT)
    try:
        found = parse(path.read_bytes())
    except (yaml.YAMLError, ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise InputError(str(path), "is damaged", _HINT)
    return found


def run_parts(run: Path) -> list[Path]:
    """The folders of a run's processes, the earliest first: a resumed run has a `version_N` for each.

    Paths are compared by their last parts, so that runs may be moved. A folder without a config is one part.
    """
    before = _part_before(run)
    return [run] if before is None else [*run_parts(before), run]


def _part_before(run: Path) -> Path | None:
    """The last folder before a run's own whose process wrote to the place of the checkpoint that it resumed from."""
    number, checkpoint = _number(run), _checkpoint(run)
    if number is None or checkpoint is None:
        return None
    beside = {found: path for path in run.absolute().parent.glob("version_*") if (found := _number(path)) is not None}
    for found in sorted((found for found in beside if found < number), reverse=True):
        if (beside[found] / "config.yaml").is_file() and _wrote(beside[found], checkpoint):
            return run.parent / beside[found].name
    return None


def _wrote(part: Path, checkpoint: Path) -> bool:
    """Whether a process may have written a checkpoint: into its folder, into its config's, or where it resumed from."""
    own = (part.parent.name, part.name)
    if own in zip(checkpoint.parts, checkpoint.parts[1:], strict=False):
        return True
    callbacks = (read_run_config(part).get("trainer") or {}).get("callbacks") or []
    arguments = [callback.get("init_args") or {} for callback in callbacks if isinstance(callback, dict)]
    places = [Path(str(argument["dirpath"])) for argument in arguments if argument.get("dirpath")]
    earlier = _checkpoint(part)
    if earlier is not None and not any(part.rglob("*.ckpt")):
        places.append(earlier.parent)
    return checkpoint.parent in places


def _checkpoint(run: Path) -> Path | None:
    """The checkpoint that a folder's first process resumed from: later ones resumed from its own."""
    path = read_run_config(run).get("ckpt_path") if (run / "config.yaml").is_file() else None
    earlier = read_run_record(run).get("earlier") if (run / "run.json").is_file() else None
    if isinstance(earlier, list) and earlier and isinstance(earlier[0], dict):
        path = earlier[0].get("resumed_from")
    return Path(str(path)) if path else None


def _number(run: Path) -> int | None:
    digits = run.absolute().name.removeprefix("version_")
    return int(digits) if digits.isdecimal() else None


def read_curves(run: Path) -> Curves:
    """The columns of a run's `metrics.csv`: the steps at which each was logged, and its values.

    A resumed run has the values of all its processes (see `run_parts`), those of an earlier one up to the first step
    that the next one logged: what it logged after its last checkpoint was lost. An incomplete last line, and a
    process that was killed before it wrote anything, are ignored.
    """
    written = [part for part in run_parts(run) if metrics_path(part).is_file()]
    if not written:
        raise InputError(str(metrics_path(run)), "no such file", _HINT)
    found = Curves()
    for part in written:
        own = _read_part(part)
        first = min((steps_made(column, steps[0]) for column, (steps, _) in own.items() if steps), default=None)
        for column in {**found, **own}:
            steps, values = found[column] if first is None else _cut(column, found[column], first)
            own_steps, own_values = own[column]
            found[column] = steps + own_steps, values + own_values
    return found


def _cut(column: str, curve: Curve, first: int) -> Curve:
    """What a curve has of the steps before one, counted as steps made."""
    kept = sum(steps_made(column, step) < first for step in curve[0])
    return curve[0][:kept], curve[1][:kept]


def metrics_path(run: Path) -> Path:
    return run / METRICS_FILE


def _read_part(run: Path) -> Curves:
    path = metrics_path(run)
    try:
        reader = read_metrics(path)
        names = reader.fieldnames or ()
        found = Curves({name: ([], []) for name in names if name not in ("step", "epoch")})
        for row in reader if "step" in names else ():
            for column, (steps, values) in found.items():
                if row.get(column):
                    value = float(row[column])
                    steps.append(int(row["step"]))
                    values.append(value)
    except (ValueError, TypeError, csv.Error) as error:
        raise InputError(str(path), f"is damaged ({error})", _HINT) from error
    if names and "step" not in names:
        raise InputError(str(path), "has no column 'step'", _HINT)
    return found


class Summary(NamedTuple):
    """A column of what was logged, in four numbers and their steps, without values that are not finite."""

    first: tuple[int, float]
    last: tuple[int, float]
    highest: tuple[int, float]
    median: float


class Part(NamedTuple):
    """One process of a run: folder, `run.json` (empty for none), and `RunHealth`'s numeric errors."""

    folder: Path
    record: Mapping[str, Any]
    resumed_from: Any
    numeric_errors: list[Mapping[str, Any]]

    @property
    def end(self) -> Mapping[str, Any]:
        """How it ended; empty where it did not record it."""
        return _mapping(self.record.get("end"))

    @property
    def seconds(self) -> float | None:
        """How long it took; None if unknown or if a clock was set back."""
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
        """The facts of a run's folder."""
        config = read_run_config(folder)
        text = (folder / "config.yaml").read_text(encoding="utf-8", errors="replace")
        parts = run_parts(folder)
        curves = read_curves(folder) if any(metrics_path(part).is_file() for part in parts) else Curves()
        return cls(folder, config, text, [part for each in parts for part in _read_parts(each)], curves)

    @property
    def record(self) -> Mapping[str, Any]:
        return self.parts[-1].record

    @cached_property
    def summaries(self) -> dict[str, Summary]:
        """Each column that holds a number."""
        found = {column: _summary(column, curve) for column, curve in self.curves.items()}
        return {column: summary for column, summary in found.items() if summary is not None}

    @property
    def last_step(self) -> int:
        """The last known optimiser step, recorded at the end or logged."""
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
        found = self.setting("trainer.callbacks")
        listed = [_mapping(callback) for callback in found] if isinstance(found, list) else []
        ours = [each for each in listed if str(each.get("class_path")).rpartition(".")[2] == name]
        return [_mapping(each.get("init_args")) for each in ours]


def _read_parts(folder: Path) -> list[Part]:
    """The processes that wrote into a folder, the earliest first; numeric errors are the last one's."""
    last = read_run_record(folder) if (folder / "run.json").is_file() else {}
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
    median = statistics.median(value for _, value in rows)
    return Summary(rows[0], rows[-1], max(rows, key=lambda row: row[1]), median)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def when(text: Any) -> datetime | None:
    """A time in a record, or None."""
    try:
        return datetime.fromisoformat(text).astimezone(UTC)
    except (ValueError, TypeError, OverflowError):
        return None
