"""`sweep`: runs of one recipe with different values of config keys, one after another or as an array of tasks."""

import csv
import json
import signal
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embeddings.cli.errors import ConfigError
from embeddings.cli.sweep_file import SEED_KEY, Metric, Point, Sweep, is_number, label, next_point, read_sweep
from embeddings.cli.sweep_runs import Run, SignalForwarder, exclusive, holder, runs_of, settings_hash, train
from embeddings.common import InputError, OptionError, PreemptedError, UserError
from embeddings.common.errors import refuse_given, require
from embeddings.common.io import atomic_path, file_lock, require_own_output, write_json
from embeddings.common.process import (
    EXIT_RESUMABLE,
    STOP_SIGNALS,
    answer,
    handle_preemption,
    is_first_process,
    num_processes,
)
from embeddings.common.text import format_table

if TYPE_CHECKING:
    from embeddings.figures.curves import Dot


class RunFailed(UserError):
    """Failed runs, with the exit code of the first."""

    def __init__(self, line: str, exit_code: int) -> None:
        super().__init__(line)
        self.exit_code = exit_code


def sweep(
    file: Path,
    index: int | None = None,
    count: bool = False,
    dry_run: bool = False,
    results: bool | Path = False,
    output: Path = Path("checkpoints/sweeps"),
) -> None:
    """Train the unfinished runs of a sweep; to resume, run the same command again.

    A run's folder is `output/SWEEP/RECIPE-HASH` with a hash of its settings, so an edited config makes new runs. A
    finished run has a `done.json`. An interrupted run resumes from its newest checkpoint.

    Args:
        file: The sweep file: `recipe` or `configs`, `method` (grid, list, random or tpe), `parameters`, `metric`, and
            for random and tpe `num_runs` and `seed`. lightning_configs/sweeps/ has examples.
        index: The only point to run, from 0, such as `$SLURM_ARRAY_TASK_ID`; default all, one after another.
        count: Whether to print only the number of points.
        dry_run: Whether to print only each point's folder and `fit` command.
        results: Whether to write the results of the finished runs as a table, a CSV file and a plot beside it: `true`
            for `results.csv` in the sweep's folder, or the CSV file to write.
        output: The folder of all sweeps.
    """
    if sum(map(bool, (count, dry_run, results))) > 1:
        raise OptionError("sweep", "several", "accepts one of --count, --dry-run and --results", "leave the others out")
    plan = read_sweep(file)
    if count or results:
        refuse_given({"index": index}, "has no effect on --count and --results")
    if index is not None and not 0 <= index < plan.num_points:
        raise OptionError("index", index, f"must be from 0 to {plan.num_points - 1}", "choose another point")
    if count:
        print(plan.num_points)
        return
    if plan.search is not None:
        is_read = dry_run or results or index is None
        plan = with_proposed(plan, file, output, None if is_read else index + 1)  # type: ignore[operator]
    runs = runs_of(plan, output)
    if plan.search is not None and index is not None and index >= len(runs):
        rule = f"must be below {len(runs)}, the number of points proposed so far"
        raise OptionError("index", index, rule, "run the sweep first")
    if results:
        path = output / plan.name / "results.csv" if isinstance(results, bool) else results
        if path.suffix.lower() == ".png":
            raise OptionError("results", str(path), "must be the CSV file", "end it in .csv; the plot is beside it")
        collect(plan, runs, path, file)
        return
    if dry_run:
        chosen = runs if index is None else [runs[index]]
        check_runs(plan, file, chosen)
        for run in chosen:
            print(f"{title(plan, run)} ({run.status})\n  {run.folder}\n  {run.line()}")
        if plan.search is not None and index is None and len(runs) < plan.num_points:
            print(f"{plan.num_points - len(runs)} more points depend on the results of earlier ones")
        return
    if index is None and num_processes() > 1:
        rule = f"must be given if {num_processes()} processes train together"
        raise OptionError("index", None, rule, "start one process, or one job for each point")
    train_missing(plan, file, output, index)


def with_proposed(plan: Sweep, file: Path, output: Path, count: int | None = None) -> Sweep:
    """A search with the points proposed so far, or with `count` points; missing ones are proposed.

    Proposals are saved in `points-HASH.json`, so that later calls and other processes have the same points.
    """
    assert plan.search is not None
    about = [asdict(plan.metric), plan.search.seed, plan.search.parameters]
    path = output / plan.name / f"points-{settings_hash(plan.contents, {'search': about})}.json"

    def proposed() -> list[Point]:
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []

    if count is None:
        return replace(plan, points=tuple(proposed()))
    require("optuna", "optuna")
    path.parent.mkdir(parents=True, exist_ok=True)
    with file_lock(path.with_suffix(".lock")):
        points = proposed()
        while len(points) < count:
            runs = runs_of(replace(plan, points=tuple(points)), output)
            metric = logged_metric(runs, plan.metric)
            values = {result.run.index: result.value(metric) for result in results_of(runs, metric, file)}
            tried = [(point, values[position]) for position, point in enumerate(points)]
            points.append(next_point(plan.search, metric.mode, tried))
            write_json(path, points)
    return replace(plan, points=tuple(points))


def check_runs(plan: Sweep, file: Path, runs: Sequence[Run]) -> None:
    """Check the arguments of runs as `fit` does; runs that differ from earlier ones only in numbers are skipped."""
    from embeddings.cli.fit import check_arguments

    seen: set[tuple[str, str]] = set()
    for run in runs:
        # In a list, each point may combine its keys differently.
        new = {(key, type(value).__name__ if is_number(value) else label(value)) for key, value in run.point.items()}
        if new <= seen and plan.method != "list":
            continue
        seen |= new
        try:
            check_arguments(run.words)
        except UserError as error:
            raise ConfigError(f"{file}: point {run.index}: {error}") from error


def train_missing(plan: Sweep, file: Path, output: Path, index: int | None) -> None:
    """Train the unfinished runs, or the one of `index`; all are checked before the first starts.

    The points of a search depend on earlier results, so each is checked when it is proposed. A failed run gives the
    search no value; the same command trains it again.
    """
    runs = runs_of(plan, output)
    runs = runs if index is None else [runs[index]]
    missing = [run for run in runs if run.status != "done"]
    if len(missing) < len(runs):
        print(f"{len(runs) - len(missing)} of {plan.num_points if index is None else 1} done already")

    def following() -> Iterator[Run]:
        """Each unfinished run, as soon as its point is proposed."""
        for position in range(plan.num_points):
            run = runs_of(with_proposed(plan, file, output, position + 1), output)[position]
            if run.status != "done":
                check_runs(plan, file, [run])
                yield run

    if plan.search is not None and index is None:
        train_each(plan, following())
        return
    with handle_preemption():
        check_runs(plan, file, missing)
    train_each(plan, missing)


def train_each(plan: Sweep, runs: Iterable[Run]) -> None:
    """Train checked runs one after another; failed runs raise an error after the others are done.

    The sweep ends when a run ends with code 75: that run has requeued the job. If a signal arrives while no run can
    handle it, the sweep handles it.
    """
    codes: dict[int, int] = {}
    busy: list[Run] = []
    with SignalForwarder() as forwarder:
        for run in runs:
            code = train_alone(plan, run, forwarder)
            if code is None:
                busy.append(run)
                continue
            codes[run.index] = code
            if code == EXIT_RESUMABLE:
                line = f"point {run.index} was stopped; run the same command again to resume"
                raise PreemptedError(line if is_first_process() else "", code)
            if code and forwarder.received:
                raise stopped(run, forwarder.received[0], code)
    failed = {index: code for index, code in codes.items() if code}
    if failed:
        which = ", ".join(f"point {index} with exit code {code}" for index, code in failed.items())
        fix = "see the lines above, then run the same command to train them again"
        raise RunFailed(f"{len(failed)} of {len(codes)} runs failed: {which}; {fix}", next(iter(failed.values())))
    if busy:
        what = f"{holder(busy[0].folder)} trains point {busy[0].index}"
        raise InputError(str(busy[0].folder), what, "wait for it, then run the same command again")


def train_alone(plan: Sweep, run: Run, forwarder: SignalForwarder) -> int | None:
    """Train a run unless another process trains it or has finished it; returns its exit code, or None.

    The first rank decides, while the other ranks already start. If it skips the run it fails, so that the launcher ends
    the waiting ranks: torchrun always, srun with `--kill-on-bad-exit=1`.
    """
    if not is_first_process():
        return train(run, None, forwarder)
    with exclusive(run.folder) as lock:
        if lock is None:
            print(f"{title(plan, run)}: {holder(run.folder)} trains it", flush=True)
            return None
        if run.status == "done":
            if num_processes() > 1:
                what = f"another process has just finished point {run.index}"
                raise InputError(str(run.folder), what, "nothing is left to do")
            return 0
        print(f"{title(plan, run)}\n  {run.folder}", flush=True)
        return train(run, lock, forwarder)


def stopped(run: Run, number: signal.Signals, code: int) -> BaseException:
    """The exception that ends the sweep after a signal; `code` is the run's exit code."""
    point, hint = f"point {run.index}", "run the same command again to resume"
    if number in STOP_SIGNALS and code == 128 + number:
        return answer(number, f"stopped at {point}; {hint}", None, is_first_process())
    how = "was stopped by" if code == 128 + number else f"ended with exit code {code} after"
    return RunFailed(f"{point} {how} {number.name}; {hint}", code)


def collect(plan: Sweep, runs: Sequence[Run], path: Path, file: Path) -> None:
    """Print the results of the finished runs, write them as CSV, and draw them beside it."""
    from embeddings.figures import check_output, draw_sweep

    plan = replace(plan, metric=logged_metric(runs, plan.metric))
    results, metric = results_of(runs, plan.metric, file), plan.metric
    print(result_table(results, plan.names, metric))
    num_done = sum(result.status == "done" for result in results)
    if not num_done:
        raise InputError(str(file), f"none of its {plan.num_points} runs is done", "run the sweep first")
    means = seed_table(results, plan.names, metric)
    print(f"\n{means}" if means else "", f"\n{num_done} of {plan.num_points} done", sep="")
    picture = path.with_suffix(".png")
    require_own_output(path, ",".join(RESULT_COLUMNS))
    check_output(picture)
    write_results(results, plan.names, path)
    heading = f"{plan.name}: {num_done} of {plan.num_points} runs"
    draw_sweep(dots(plan, results), f"{metric.column} ({metric.value})", metric.mode, heading, picture)
    print(f"wrote {path} and {picture}")


def dots(plan: Sweep, results: Sequence["Result"]) -> list["Dot"]:
    """The finished runs for the plot: the value of each varied key, and the metric."""
    varied = {key: name for key, name in plan.names.items() if key != SEED_KEY} or plan.names
    finished: list[Dot] = []
    for result in results:
        value, point = result.value(plan.metric), result.run.point
        settings = {name: point[key] for key, name in varied.items() if key in point}
        values = {name: content if is_number(content) else label(content) for name, content in settings.items()}
        if plan.method == "list":  # its keys vary together
            values = {"point": ", ".join(f"{name}={label(content)}" for name, content in values.items())}
        if value is not None:
            finished.append((values, value))
    return finished


def title(plan: Sweep, run: Run) -> str:
    values = ", ".join(f"{plan.names[key]}={label(value)}" for key, value in run.point.items())
    return f"point {run.index} of {plan.num_points}: {values}"


@dataclass(frozen=True)
class Result:
    """The result of a run: the metric's last and best value, the step of the best, and the last process's duration."""

    run: Run
    status: str
    last: float | None
    best: float | None
    best_step: int | None
    seconds: float | None

    def value(self, metric: Metric) -> float | None:
        return self.last if metric.value == "last" else self.best

    def labels(self, keys: Iterable[str]) -> list[str]:
        return [label(self.run.point[key]) if key in self.run.point else "-" for key in keys]


def logged_metric(runs: Sequence[Run], metric: Metric) -> Metric:
    """The metric; the training loss if the metric is the default and no run has logged it (no evaluation)."""
    columns = {column for run in runs for column in (run.record() or {"metrics": {}})["metrics"]}
    is_absent = metric == Metric() and metric.column not in columns
    return Metric("train/loss", "min") if is_absent and "train/loss" in columns else metric


def results_of(runs: Sequence[Run], metric: Metric, file: Path) -> list[Result]:
    """The results of a sweep's runs, from best to worst, then those without a value; the metric must be logged."""
    results, columns = [], set()
    for run in runs:
        record = run.record() or {"metrics": {}, "seconds": None}
        columns |= set(record["metrics"])
        summary = record["metrics"].get(metric.column, {})
        last, best, step = (summary.get(name) for name in ("last", metric.mode, f"{metric.mode}_step"))
        results.append(Result(run, run.status, last, best, step, record["seconds"]))
    if any(result.status == "done" for result in results) and metric.column not in columns:
        what = f"no run has logged {metric.column!r}"
        raise InputError(f"{file}: metric", what, f"column must be one of {', '.join(sorted(columns)) or 'none'}")
    return sorted(results, key=lambda result: metric.rank(result.value(metric)))


def result_table(results: Sequence[Result], names: Mapping[str, str], metric: Metric) -> str:
    """The results as a table, a row for each point."""
    rows = [["point", *names.values(), f"{metric.column} last", "best", "at step", "seconds", "status", "folder"]]
    for result in results:
        step, seconds = (None if value is None else f"{value:.0f}" for value in (result.best_step, result.seconds))
        folder = None if result.status == "missing" else result.run.folder.name
        measured = [_digits(result.last), _digits(result.best), step or "-", seconds or "-"]
        rows.append([str(result.run.index), *result.labels(names), *measured, result.status, folder or "-"])
    return format_table(rows, "<")


def seed_table(results: Sequence[Result], names: Mapping[str, str], metric: Metric) -> str | None:
    """The mean and standard deviation over seeds, as a table; None if only the seed, or no seed, is varied."""
    others = {key: name for key, name in names.items() if key != SEED_KEY}
    if SEED_KEY not in names or not others:
        return None
    groups: dict[tuple[str, ...], list[float]] = {}
    for result in results:
        value = result.value(metric)
        groups.setdefault(tuple(result.labels(others)), []).extend([] if value is None else [value])
    means = {labels: statistics.mean(values) if values else None for labels, values in groups.items()}
    rows = [[*others.values(), f"{metric.column} {metric.value}, mean", "±sd", "seeds"]]
    for labels in sorted(means, key=lambda labels: metric.rank(means[labels])):
        values = groups[labels]
        deviation = f"±{_digits(statistics.stdev(values))}" if len(values) > 1 else "-"
        rows.append([*labels, _digits(means[labels]), deviation, str(len(values))])
    return format_table(rows, "<")


# The last columns of the CSV file of results.
RESULT_COLUMNS = ("last", "best", "best_step", "seconds", "status", "folder")


def write_results(results: Sequence[Result], names: Mapping[str, str], path: Path) -> None:
    """Write the results as CSV, atomically; missing values are empty."""
    with atomic_path(path) as temporary, open(temporary, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["point", *names, *RESULT_COLUMNS])
        for result in results:
            values = [label(result.run.point[key]) if key in result.run.point else None for key in names]
            measured: list[Any] = [result.last, result.best, result.best_step, result.seconds]
            writer.writerow([result.run.index, *values, *measured, result.status, result.run.folder])


def _digits(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}" if abs(value) < 100 else f"{value:.1f}"
