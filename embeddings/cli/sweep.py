"""`sweep`: runs of one recipe with different values of config keys, one after another or as an array of tasks."""

import csv
import ctypes
import hashlib
import itertools
import json
import math
import os
import random
import re
import shlex
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from embeddings.cli.configs import Config, chooses, expand_recipe, located, read_configs, read_yaml
from embeddings.cli.errors import ConfigError
from embeddings.cli.parser import OneLineParser
from embeddings.common import InputError, OptionError, PreemptedError, UserError
from embeddings.common.errors import CHECKOUT, program, refuse_given, require
from embeddings.common.io import atomic_path, file_lock, read_json_or_empty, require_own_output
from embeddings.common.process import EXIT_RESUMABLE, is_first_process, num_processes
from embeddings.common.text import format_table
from embeddings.figures.run_facts import metrics_path, read_curves

Point = dict[str, Any]

SEED_KEY = "seed_everything"
# Each point becomes a folder and a table row; more are a mistake, and would not fit in memory.
MAX_POINTS = 100_000
# Python's arguments that start the command line; -P keeps the current folder out of the import path.
COMMAND = ["-P", "-m", "embeddings"] if CHECKOUT is None else [str(CHECKOUT / "main.py")]
# The last columns of the CSV file of results.
RESULT_COLUMNS = ("last", "best", "best_step", "seconds", "status", "folder")

_CLASS_PATH = re.compile(r"(?:\w+\.)+[A-Z]\w*")
_RANGE = "a range is {low: NUMBER, high: NUMBER}, with log: true or int: true"


@dataclass(frozen=True)
class Metric:
    """The metric that compares points: a column of `metrics.csv`, its direction, and which value of a run counts."""

    column: str = "val/ndcg_at_10"
    mode: Literal["max", "min"] = "max"
    value: Literal["last", "best"] = "last"


@dataclass(frozen=True)
class SweepFile:
    """The keys of a sweep file; the content of `parameters` is checked separately."""

    parameters: dict[str, Any]
    recipe: str | None = None
    configs: list[str] | None = None
    method: Literal["grid", "random", "tpe"] = "grid"
    num_runs: int | None = None
    seed: int = 0
    metric: Metric = Metric()


@dataclass(frozen=True)
class Run:
    """The run of a point: its index from 0, the config keys that it sets, its folder, and its arguments of `fit`."""

    index: int
    point: Point
    folder: Path
    words: list[str]

    @property
    def part(self) -> Path:
        """The folder of the newest process, with its `run.json`."""
        found = self.folder.rglob("run.json")
        return max(found, key=lambda path: path.stat().st_mtime_ns, default=self.folder / "run.json").parent

    @property
    def record(self) -> dict[str, Any]:
        return read_json_or_empty(self.part / "run.json")

    @property
    def is_done(self) -> bool:
        return (self.record.get("end") or {}).get("how") == "finished"

    def curves(self) -> dict[str, dict[int, float]]:
        """The finite values of each logged column, by step."""
        curves = read_curves(self.part) if metrics_path(self.part).is_file() else {}
        steps = {name: zip(*curve, strict=True) for name, curve in curves.items()}
        finite = {name: {step: value for step, value in pairs if math.isfinite(value)} for name, pairs in steps.items()}
        return {name: curve for name, curve in finite.items() if curve}


class Sweep:
    """A sweep file, read and checked. A run's folder is `output/SWEEP/RECIPE-HASH`, with a hash of its settings.

    `method: grid` (the default) combines all values of the lists in `parameters`; the last one varies fastest. `random`
    and `tpe` draw `num_runs` points by Optuna's samplers, from lists or ranges. A point of `random` depends on `seed`
    and its index only. `tpe` proposes each point from the metrics of earlier runs, and keeps the points in a journal in
    the sweep's folder.

    Source: Bergstra et al. 2011, Algorithms for Hyper-Parameter Optimization, section 4, by Optuna's `TPESampler`.
    """

    def __init__(self, path: Path, output: Path) -> None:
        self.path, self.folder = path, output / path.stem
        self.file = _read(path)
        self.names = short_names(list(self.file.parameters))
        configs = self.file.configs or expand_recipe(["--recipe", str(self.file.recipe)])[1::2]
        self.config_words = [word for config in configs for word in ("--config", config)]
        contents = [read_configs(config) for config in configs]
        self.contents = [content for _, content in itertools.chain(*contents)]
        self.recipe = self.file.recipe or _method_config(configs, contents)
        self.distributions = self._distributions()
        self.num_points = self.file.num_runs or math.prod(map(len, self.file.parameters.values()))
        if self.num_points > MAX_POINTS:
            raise InputError(str(path), f"makes {self.num_points} points, more than {MAX_POINTS}", "vary fewer values")

    def _distributions(self) -> dict[str, Any]:
        """Optuna's distribution of each parameter; empty for a grid. Checks the values."""
        is_grid = self.file.method == "grid"
        number = self.file.num_runs
        if is_grid != (number is None) or (number is not None and number < 1):
            rule = "has no effect on method grid" if is_grid else f"must be >= 1, got {number}"
            raise InputError(f"{self.path}: num_runs", rule, "leave it out" if is_grid else "give the number of points")
        kinds: Any = None if is_grid else require("optuna", "optuna").distributions
        drawn: dict[str, Any] = {}
        for key, source in self.file.parameters.items():
            where = f"{self.path}: parameters.{key}"
            if isinstance(source, dict) and not is_grid:
                drawn[key] = _range(kinds, where, **source)
                continue
            if not isinstance(source, list) or not source:
                raise InputError(where, f"must be a list of values, got {source!r}", "list at least one")
            # Optuna's choices must be texts or numbers, but values may be mappings.
            texts = [json.dumps(value, sort_keys=True) for value in source]
            if len(set(texts)) < len(texts):
                raise InputError(where, f"contains a value twice: {', '.join(texts)}", "leave one out")
            if not is_grid:
                drawn[key] = kinds.CategoricalDistribution(texts)
        return drawn

    def run(self, index: int) -> Run:
        """The run of a point; a missing point of `tpe` is proposed."""
        parameters, seed = self.file.parameters, random.Random(f"{self.file.seed}/{index}").getrandbits(31)
        if self.file.method == "grid":
            values = next(itertools.islice(itertools.product(*parameters.values()), index, None))
            return self._run(index, dict(zip(parameters, values, strict=True)))
        samplers: Any = require("optuna", "optuna").samplers
        if self.file.method == "random":
            return self._run_of(index, self._study(samplers.RandomSampler(seed=seed)).ask(self.distributions))
        self.folder.mkdir(parents=True, exist_ok=True)
        # The ranks of one task, and all tasks, must see the same point of an index.
        with file_lock(self._journal.with_suffix(".lock")):
            study = self._study(samplers.TPESampler(seed=seed), is_stored=True)
            self._tell_results(study)
            trial = self._trials(study).get(index)
            if trial is None:
                trial = study.ask(self.distributions)
                trial.set_user_attr("index", index)
        return self._run_of(index, trial)

    def runs(self) -> list[Run]:
        """The runs of all points; for `tpe` of those proposed so far."""
        if self.file.method != "tpe":
            return [self.run(index) for index in range(self.num_points)]
        trials = self._trials(self._study(None, is_stored=True)) if self._journal.exists() else {}
        return [self._run_of(index, trial) for index, trial in sorted(trials.items())]

    def _run_of(self, index: int, trial: Any) -> Run:
        is_list = {key: isinstance(source, list) for key, source in self.file.parameters.items()}
        values = {key: json.loads(value) if is_list[key] else value for key, value in trial.params.items()}
        return self._run(index, values)

    def _run(self, index: int, point: Point) -> Run:
        folder = self.folder / f"{self.recipe}-{_hash(self.contents, point)}"
        words = [f"--{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in point.items()]
        return Run(index, point, folder, ["fit", *self.config_words, *words, f"--run-dir={folder}", "--ckpt_path=auto"])

    @property
    def _journal(self) -> Path:
        about = [self.file.parameters, self.file.seed, asdict(self.file.metric)]
        return self.folder / f"{_hash(self.contents, about)}.journal"

    def _study(self, sampler: Any, is_stored: bool = False) -> Any:
        optuna: Any = require("optuna", "optuna")
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        storage = None
        if is_stored:
            journal = optuna.storages.journal.JournalFileBackend(str(self._journal))
            storage = optuna.storages.JournalStorage(journal)
        direction = f"{self.file.metric.mode}imize"
        return optuna.create_study(
            storage=storage, sampler=sampler, study_name="sweep", direction=direction, load_if_exists=True
        )

    @staticmethod
    def _trials(study: Any) -> dict[int, Any]:
        return {trial.user_attrs["index"]: trial for trial in study.trials if "index" in trial.user_attrs}

    def _tell_results(self, study: Any) -> None:
        """Tell the study the metrics of runs that have finished since the last proposal."""
        for index, trial in self._trials(study).items():
            run = self._run_of(index, trial)
            if not trial.state.is_finished() and run.is_done:
                study.tell(trial.number, Result(run, self.file.metric).value)

    def title(self, run: Run) -> str:
        values = ", ".join(f"{self.names[key]}={label(value)}" for key, value in run.point.items())
        return f"point {run.index} of {self.num_points}: {values}"


def sweep(
    file: Path,
    index: int | None = None,
    count: bool = False,
    dry_run: bool = False,
    results: bool | Path = False,
    output: Path = Path("checkpoints/sweeps"),
) -> None:
    """Train the unfinished runs of a sweep; to resume, run the same command again.

    A run's folder is `output/SWEEP/RECIPE-HASH` with a hash of its settings, so an edited config makes new runs. An
    interrupted run resumes from its newest checkpoint.

    Args:
        file: The sweep file: `recipe` or `configs`, `method` (grid, random or tpe), `parameters`, `metric`, and
            for random and tpe `num_runs` and `seed`. lightning_configs/sweeps/ has examples.
        index: The only point to run, from 0, such as `$SLURM_ARRAY_TASK_ID`; default all, one after another.
        count: Whether to print only the number of points.
        dry_run: Whether to print only each point's folder and `fit` command.
        results: Whether to write the results of the finished runs as a table and a CSV file: `true` for `results.csv`
            in the sweep's folder, or the CSV file to write.
        output: The folder of all sweeps.
    """
    if sum(map(bool, (count, dry_run, results))) > 1:
        raise OptionError("sweep", "several", "accepts one of --count, --dry-run and --results", "leave the others out")
    plan = Sweep(file, output)
    if count or dry_run or results:
        refuse_given({"index": index}, "has no effect on --count, --dry-run and --results")
    if index is not None and not 0 <= index < plan.num_points:
        raise OptionError("index", index, f"must be from 0 to {plan.num_points - 1}", "choose another point")
    if count:
        print(plan.num_points)
    elif results:
        collect(plan, plan.folder / "results.csv" if isinstance(results, bool) else results)
    elif dry_run:
        runs = plan.runs()
        check_runs(plan, runs, set())
        for run in runs:
            line = f"{program()} {shlex.join(run.words)}"
            print(f"{plan.title(run)} ({Result(run, plan.file.metric).status})\n  {run.folder}\n  {line}")
        if len(runs) < plan.num_points:
            print(f"{plan.num_points - len(runs)} more points depend on the results of earlier ones")
    elif index is not None:
        become(plan, plan.run(index))
    elif num_processes() > 1:
        rule = f"must be given if {num_processes()} processes train together"
        raise OptionError("index", None, rule, "start one process, or one job for each point")
    else:
        train_missing(plan)


def check_runs(plan: Sweep, runs: Sequence[Run], seen: set[tuple[str, str]]) -> None:
    """Check the arguments of runs as `fit` does; runs that differ from those `seen` only in numbers are skipped."""
    from embeddings.cli.fit import check_arguments

    for run in runs:
        new = {(key, type(value).__name__ if _is_number(value) else label(value)) for key, value in run.point.items()}
        if new <= seen:
            continue
        seen |= new
        try:
            check_arguments(run.words)
        except UserError as error:
            raise ConfigError(f"{plan.path}: point {run.index}: {error}") from error


def become(plan: Sweep, run: Run) -> None:
    """Replace this process by the `fit` of a point, so that signals, requeueing and exit codes are those of `fit`."""
    title = plan.title(run)
    if run.is_done:
        print(f"{title}: done already")
        return
    if is_first_process():
        print(f"{title}\n  {run.folder}", flush=True)
    os.execv(sys.executable, fit_command(run))


def fit_command(run: Run) -> list[str]:
    """The command of a run, started by the installed command if this process is one."""
    called = Path(sys.argv[0])
    is_installed = called.name == "embeddings" and called.is_file()
    return [sys.executable, *([str(called)] if is_installed else COMMAND), *run.words]


class RunFailed(UserError):
    """Failed runs, with the exit code of the first."""

    def __init__(self, line: str, exit_code: int) -> None:
        super().__init__(line)
        self.exit_code = exit_code


def train_missing(plan: Sweep) -> None:
    """Train the unfinished runs one after another; failed runs raise an error after the others are done.

    All points are checked before the first starts; those of `tpe` as they are proposed. The sweep ends after a signal,
    and after a run that ends with code 75, because that run has requeued the job.
    """
    seen, codes = set[tuple[str, str]](), dict[int, int]()
    with Children.forwarding() as children:
        if plan.file.method != "tpe":
            check_runs(plan, [run for run in plan.runs() if not run.is_done], seen)
        for index in range(plan.num_points):
            run = plan.run(index)
            if run.is_done:
                continue
            check_runs(plan, [run], seen)
            print(f"{plan.title(run)}\n  {run.folder}", flush=True)
            code = codes[index] = children.run(fit_command(run))
            if code == EXIT_RESUMABLE or (code and children.received):
                raise PreemptedError(f"stopped at point {index}; run the same command again to resume", code)
    if len(codes) < plan.num_points:
        print(f"{plan.num_points - len(codes)} of {plan.num_points} were done before")
    failed = {index: code for index, code in codes.items() if code}
    if failed:
        which = ", ".join(f"point {index} with exit code {code}" for index, code in failed.items())
        fix = "see the lines above, then run the same command to train them again"
        raise RunFailed(f"{len(failed)} of {len(codes)} runs failed: {which}; {fix}", next(iter(failed.values())))


# Signals that a cluster or terminal sends to end a job, or to make it save a checkpoint.
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_LIBC = ctypes.CDLL(None)
# The option's number in Linux's sys/prctl.h.
_PR_SET_PDEATHSIG = 1


class Children:
    """Runs commands one after another, passes signals on to the running one, and starts none after a signal."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self._process: subprocess.Popen[bytes] | None = None

    @classmethod
    @contextmanager
    def forwarding(cls) -> Iterator["Children"]:
        """Inside, signals do not end this process."""
        children = cls()
        previous = {number: signal.signal(number, children._forward) for number in FORWARDED}
        try:
            yield children
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def run(self, words: Sequence[str]) -> int:
        """Run a command; returns its exit code, or 128 plus the signal's number if one killed it or came before."""
        if self.received:
            return 128 + self.received[0]
        # A separate process group: Ctrl-C reaches the run only once, from here, and does not kill a run that is saving.
        ends = partial(_end_with, os.getpid()) if sys.platform == "linux" else None
        self._process = subprocess.Popen(words, process_group=0, preexec_fn=ends)
        for number in self.received:  # those that came while the process started
            self._process.send_signal(number)
        code = self._process.wait()
        self._process = None
        return code if code >= 0 else 128 - code

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)
        if self._process is not None:
            self._process.send_signal(number)


def _end_with(parent: int) -> None:
    """Let the kernel kill this new process when its parent is killed; no other process would end it."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


class Result:
    """The result of a run: status, last and best value of the metric, the step of the best, and the last duration."""

    def __init__(self, run: Run, metric: Metric) -> None:
        self.run, record = run, run.record
        self.status = "done" if run.is_done else "unfinished" if record else "missing"
        self.last: float | None = None
        self.best: float | None = None
        self.best_step: int | None = None
        self.seconds: float | None = None
        if self.status == "done":
            start, end = (datetime.fromisoformat(time) for time in (record["started"], record["end"]["time"]))
            self.seconds = (end - start).total_seconds()
            curves = run.curves()
            if metric.column not in curves:
                what = f"point {run.index} has not logged {metric.column!r}"
                raise InputError("metric.column", what, f"it must be one of {', '.join(curves) or 'none'}")
            values = curves[metric.column]
            choose = max if metric.mode == "max" else min
            self.best_step = choose(values, key=lambda step: values[step])
            self.best, self.last = values[self.best_step], values[max(values)]
        self.value = self.last if metric.value == "last" else self.best

    def labels(self, keys: Sequence[str]) -> list[str]:
        return [label(self.run.point[key]) for key in keys]


def collect(plan: Sweep, path: Path) -> None:
    """Print the results of the finished runs, from best to worst, and write them as CSV; missing values are empty."""
    runs, metric = plan.runs(), plan.file.metric
    columns = {column for run in runs if run.is_done for column in run.curves()}
    if metric == Metric() and metric.column not in columns:  # no evaluation
        metric = Metric("train/loss", "min")
    sign = 1 if metric.mode == "min" else -1
    results = [Result(run, metric) for run in runs]
    results.sort(key=lambda result: math.inf if result.value is None else sign * result.value)
    num_done = sum(result.status == "done" for result in results)
    if not num_done:
        raise InputError(str(plan.path), f"none of its {plan.num_points} runs is done", "run the sweep first")
    keys, names = list(plan.names), list(plan.names.values())
    rows: list[list[Any]] = [["point", *names, *RESULT_COLUMNS]]
    for each in results:
        measured = [each.last, each.best, each.best_step, each.seconds, each.status, str(each.run.folder)]
        rows.append([each.run.index, *each.labels(keys), *measured])
    _print_table(rows)
    others = [key for key in keys if key != SEED_KEY]
    if SEED_KEY in keys and others:
        groups: dict[tuple[str, ...], list[float]] = {}
        for each in results:
            if each.value is not None:
                groups.setdefault(tuple(each.labels(others)), []).append(each.value)
        deviations = [statistics.stdev(values) if len(values) > 1 else None for values in groups.values()]
        means: list[list[Any]] = [
            [*labels, statistics.mean(values), deviation, len(values)]
            for (labels, values), deviation in zip(groups.items(), deviations, strict=True)
        ]
        means.sort(key=lambda row: sign * row[-3])
        _print_table([[*(plan.names[key] for key in others), "mean", "standard deviation", "seeds"], *means])
    print(f"{num_done} of {plan.num_points} done, by {metric.column} ({metric.value})")
    require_own_output(path, ",".join(RESULT_COLUMNS))
    with atomic_path(path) as temporary, open(temporary, "w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows(rows)
    print(f"wrote {path}")


def _print_table(rows: Sequence[Sequence[Any]]) -> None:
    def text(value: Any) -> str:
        return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)

    print(format_table([[text(value) for value in row] for row in rows], "<"), end="\n\n")


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """A short name for each key: as few of its last parts as make it unique."""
    parts = {key: [part for part in key.split(".") if part not in ("init_args", "class_path")] or [key] for key in keys}
    names = {}
    for key in keys:
        others = [".".join(parts[other]) for other in keys if other != key]
        candidates = [".".join(parts[key][-count:]) for count in range(1, len(parts[key]) + 1)]
        unique = [name for name in candidates if not any(f".{other}".endswith(f".{name}") for other in others)]
        names[key] = unique[0] if unique else key
    return names


def label(value: Any) -> str:
    """A short text for a value; a class is shown by its name, without modules, and its arguments."""
    if isinstance(value, str):
        return value.rpartition(".")[2] if _CLASS_PATH.fullmatch(value) else value
    if isinstance(value, Mapping):
        arguments = value.get("init_args") if "class_path" in value else value
        inner = ", ".join(f"{key}={label(content)}" for key, content in (arguments or {}).items())
        return label(value["class_path"]) + (f"({inner})" if inner else "") if "class_path" in value else f"{{{inner}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(label, value))}]"
    return json.dumps(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _read(path: Path) -> SweepFile:
    place = Path(located(str(path)))
    if not place.is_file():
        fix = "give a sweep file, such as lightning_configs/sweeps/pooling.yaml"
        raise InputError(str(path), "no such file", fix)
    content = read_yaml(place, str(path))
    if not isinstance(content, dict):
        raise InputError(str(path), f"must be a mapping, got {content!r}", "write it as KEY: VALUE")
    parser = OneLineParser()
    parser.add_class_arguments(SweepFile, None)
    try:
        parsed = parser.parse_object({**content, "parameters": {}})
    except ConfigError as error:
        # Replace the parser's hint, which is about the options of a command.
        keys = ", ".join(SweepFile.__dataclass_fields__)
        raise ConfigError(f"{path}: {re.sub('--help .*', f'the keys are {keys}', str(error))}") from error
    parameters = content.get("parameters")
    if not isinstance(parameters, dict) or not parameters:
        rule = f"must map config keys to values, got {parameters!r}"
        raise InputError(f"{path}: parameters", rule, "give at least one key")
    file = SweepFile(**{**vars(parsed), "parameters": parameters, "metric": Metric(**vars(parsed.metric))})
    if bool(file.recipe) == bool(file.configs):
        raise InputError(str(path), "needs either recipe or configs", "give a recipe, or a list of config files")
    return file


def _method_config(configs: Sequence[str], contents: Sequence[Sequence[Config]]) -> str:
    """The name of the config that chooses the method, directly or through one that it includes; else of the last."""
    for config, included in zip(configs, contents, strict=True):
        if any(chooses(content, "model") for _, content in included):
            return Path(config).stem
    return Path(configs[-1]).stem


def _range(kinds: Any, where: str, low: Any = None, high: Any = None, **options: bool) -> Any:
    """Optuna's distribution of a range, both ends included."""
    is_int = options.pop("int", False)
    expected = int if is_int else (int, float)
    is_valid = isinstance(low, expected) and isinstance(high, expected) and -math.inf < low < high < math.inf
    try:
        if not is_valid:
            raise ValueError(f"low: {low}, high: {high}")
        return kinds.IntDistribution(low, high, **options) if is_int else kinds.FloatDistribution(low, high, **options)
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(where, f"is not a range of numbers ({error})", _RANGE) from error


def _hash(contents: Any, settings: Any) -> str:
    """Ten digits of a hash of the configs, in order, and further settings."""
    text = json.dumps([contents, settings], sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:10]
