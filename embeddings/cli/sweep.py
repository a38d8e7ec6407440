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
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import numpy as np

from embeddings.cli.errors import ConfigError
from embeddings.cli.parser import OneLineParser, expand_recipe, located, plain_key, read_configs, read_yaml
from embeddings.common import InputError, OptionError, PreemptedError, UserError
from embeddings.common.errors import CHECKOUT, program, refuse_given, require
from embeddings.common.io import atomic_path, file_lock, read_json_or_empty, require_own_output
from embeddings.common.process import EXIT_RESUMABLE, is_first_process, num_processes
from embeddings.common.text import format_table
from embeddings.figures.run_facts import is_finished, metrics_path, read_curves

SEED_KEY = "seed_everything"
# Options that the sweep gives to each run.
OWN_KEYS = ("ckpt_path", "run_dir", "trainer.default_root_dir")
# Python's arguments that start the command line; -P keeps the current folder out of the import path.
COMMAND = ["-P", "-m", "embeddings"] if CHECKOUT is None else [str(CHECKOUT / "main.py")]
# The last columns of the CSV file of results.
RESULT_COLUMNS = ("last", "best", "best_step", "status", "folder")


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
    point: dict[str, Any]
    folder: Path
    words: list[str]

    @property
    def part(self) -> Path:
        """The folder of the newest process, with its `run.json`."""
        found = self.folder.rglob("run.json")
        return max(found, key=lambda path: path.stat().st_mtime_ns, default=self.folder / "run.json").parent

    @property
    def status(self) -> str:
        record = read_json_or_empty(self.part / "run.json")
        return "done" if is_finished(record) else "unfinished" if record else "missing"

    def result(self, metric: Metric) -> "Result":
        """The result of a finished run; an `InputError` if it has not logged the metric."""
        curves = read_curves(self.part) if metrics_path(self.part).is_file() else {}
        if metric.column not in curves:
            what = f"point {self.index} has not logged {metric.column!r}"
            raise InputError("metric.column", what, f"it must be one of {', '.join(curves) or 'none'}")
        values = {step: value for step, value in zip(*curves[metric.column], strict=True) if math.isfinite(value)}
        if not values:
            return Result(math.nan, math.nan, 0, math.nan)
        best_step = (max if metric.mode == "max" else min)(values, key=lambda step: values[step])
        last, best = values[max(values)], values[best_step]
        return Result(last, best, best_step, last if metric.value == "last" else best)


@dataclass(frozen=True)
class Result:
    """The last and the best value of a run's metric, the step of the best, and the one that counts."""

    last: float
    best: float
    best_step: int
    value: float


class Sweep:
    """A sweep file, read and checked. A run's folder is `output/SWEEP/RECIPE-HASH`, with a hash of its settings.

    `method: grid` (the default) combines all values of the lists in `parameters`; the last one varies fastest. `random`
    and `tpe` draw `num_runs` points by Optuna's samplers, from lists or ranges. A point of `random` depends on `seed`
    and its index only. `tpe` proposes each point from the metrics of earlier runs, and keeps the points in a journal in
    the sweep's folder.

    Source: Bergstra et al. 2011, Algorithms for Hyper-Parameter Optimization, section 4, by Optuna's `TPESampler`.
    """

    def __init__(self, path: Path, output: Path) -> None:
        self.path, self.folder = path, output.expanduser() / path.stem
        self.file = _read(path)
        self.names = short_names(list(self.file.parameters))
        configs = self.file.configs or expand_recipe(["--recipe", str(self.file.recipe)])[1::2]
        self.config_words = [word for config in configs for word in ("--config", config)]
        self.contents = [content for config in configs for _, content in read_configs(config)]
        self.recipe = self.file.recipe or Path(configs[-1]).stem
        # Optuna's distribution of each parameter; empty for a grid.
        self.distributions = {}
        if self.file.method == "grid":
            self.num_points = math.prod(len(values) for values in self.file.parameters.values())
        else:
            kinds: Any = require("optuna", "optuna").distributions
            for key, source in self.file.parameters.items():
                self.distributions[key] = _distribution(kinds, f"{path}: parameters.{key}", source)
            self.num_points = self.file.num_runs or 0

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
            trials = self._trials(study)
            for earlier, trial in trials.items():
                run = self._run_of(earlier, trial)
                if not trial.state.is_finished() and run.status == "done":
                    study.tell(trial.number, run.result(self.file.metric).value)
            trial = trials.get(index)
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

    def title(self, run: Run) -> str:
        values = ", ".join(f"{self.names[key]}={label(value)}" for key, value in run.point.items())
        return f"point {run.index} of {self.num_points}: {values}"

    def _run_of(self, index: int, trial: Any) -> Run:
        is_list = {key: isinstance(source, list) for key, source in self.file.parameters.items()}
        values = {key: json.loads(value) if is_list[key] else value for key, value in trial.params.items()}
        return self._run(index, values)

    def _run(self, index: int, point: dict[str, Any]) -> Run:
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
        file: The sweep file; lightning_configs/sweeps/ has examples.
        index: The only point to run, from 0, such as `$SLURM_ARRAY_TASK_ID`; default all, one after another.
        count: Whether to print only the number of points.
        dry_run: Whether to print only each point's folder and `fit` command.
        results: Whether to write the results as a table and a CSV file: `true` for `results.csv`, or the file.
        output: The folder of all sweeps.
    """
    plan = Sweep(file, output)
    if index is not None and not 0 <= index < plan.num_points:
        raise OptionError("index", index, f"must be from 0 to {plan.num_points - 1}", "choose another point")
    if count or dry_run or results:
        refuse_given({"index": index}, "has no effect on --count, --dry-run and --results")
    if count:
        print(plan.num_points)
    elif results:
        collect(plan, plan.folder / "results.csv" if isinstance(results, bool) else results)
    elif dry_run:
        runs = plan.runs()
        check_runs(plan, runs, set())
        for run in runs:
            line = f"{program()} {shlex.join(run.words)}"
            print(f"{plan.title(run)} ({run.status})\n  {run.folder}\n  {line}")
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
        new = {
            (key, type(value).__name__ if type(value) in (int, float) else label(value))
            for key, value in run.point.items()
        }
        if new <= seen:
            continue
        seen |= new
        try:
            check_arguments(run.words)
        except UserError as error:
            raise ConfigError(f"{plan.path}: point {run.index}: {error}") from error


def become(plan: Sweep, run: Run) -> None:
    """Replace this process by the `fit` of a point, so that signals, requeueing and exit codes are those of `fit`."""
    if run.status == "done":
        print(f"{plan.title(run)}: done already")
        return
    if is_first_process():
        print(f"{plan.title(run)}\n  {run.folder}", flush=True)
    os.execv(sys.executable, [sys.executable, *COMMAND, *run.words])


def train_missing(plan: Sweep) -> None:
    """Train the unfinished runs one after another; failed runs raise an error after the others are done.

    All points are checked before the first starts; those of `tpe` as they are proposed. The sweep ends after a signal,
    and after a run that ends with code 75, because that run has requeued the job.
    """
    seen, codes = set[tuple[str, str]](), dict[int, int]()
    with forwarding() as children:
        if plan.file.method != "tpe":
            check_runs(plan, [run for run in plan.runs() if run.status != "done"], seen)
        for index in range(plan.num_points):
            run = plan.run(index)
            if run.status == "done":
                continue
            check_runs(plan, [run], seen)
            print(f"{plan.title(run)}\n  {run.folder}", flush=True)
            code = codes[index] = children.run([sys.executable, *COMMAND, *run.words])
            if code == EXIT_RESUMABLE or (code and children.received):
                raise PreemptedError(f"stopped at point {index}; run the same command again to resume", code)
    if len(codes) < plan.num_points:
        print(f"{plan.num_points - len(codes)} of {plan.num_points} were done before")
    failed = {index: code for index, code in codes.items() if code}
    if failed:
        which = ", ".join(f"point {index} with exit code {code}" for index, code in failed.items())
        fix = "see the lines above, then run the same command to train them again"
        error = UserError(f"{len(failed)} of {len(codes)} runs failed: {which}; {fix}")
        error.exit_code = next(iter(failed.values()))
        raise error


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

    def forward(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)
        if self._process is not None:
            self._process.send_signal(number)


def _end_with(parent: int) -> None:
    """Let the kernel kill this new process when its parent is killed; no other process would end it."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def forwarding() -> Iterator[Children]:
    """Inside, signals do not end this process, but are passed on."""
    children = Children()
    previous = {number: signal.signal(number, children.forward) for number in FORWARDED}
    try:
        yield children
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def collect(plan: Sweep, path: Path) -> None:
    """Print the results of the finished runs, from best to worst, and write them as CSV."""
    metric, sign = plan.file.metric, 1 if plan.file.metric.mode == "min" else -1

    def place(value: float | None) -> float:
        return math.inf if value is None or math.isnan(value) else sign * value

    # Draws from lists may be equal: such points have one run.
    points = plan.runs()
    by_folder = {run.folder: run for run in reversed(points)}
    num_runs = plan.num_points - len(points) + len(by_folder)
    runs = [(run, run.result(metric) if run.status == "done" else None) for run in by_folder.values()]
    runs.sort(key=lambda pair: (place(None if pair[1] is None else pair[1].value), pair[0].index))
    num_done = sum(result is not None for _, result in runs)
    if not num_done:
        raise InputError(str(plan.path), f"none of its {plan.num_points} runs is done", "run the sweep first")
    rows: list[list[Any]] = [["point", *plan.names.values(), *RESULT_COLUMNS]]
    groups: dict[tuple[str, ...], list[float]] = {}
    others = [key for key in plan.names if key != SEED_KEY]
    for run, result in runs:
        measured = [None] * 3 if result is None else [result.last, result.best, result.best_step]
        rows.append([run.index, *map(label, run.point.values()), *measured, run.status, str(run.folder)])
        if result is not None:
            groups.setdefault(tuple(_json(run.point[key]) for key in others), []).append(result.value)
    _print_table(rows)
    if SEED_KEY in plan.names and others:
        means: list[list[Any]] = [
            [*map(label, map(json.loads, point)), float(np.mean(values)), _deviation(values), len(values)]
            for point, values in groups.items()
        ]
        means.sort(key=lambda row: place(row[-3]))
        _print_table([[*(plan.names[key] for key in others), "mean", "standard deviation", "seeds"], *means])
    print(f"{num_done} of {num_runs} runs done, by {metric.column} ({metric.value})")
    require_own_output(path, ",".join(RESULT_COLUMNS))
    with atomic_path(path) as temporary, open(temporary, "w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows(rows)
    print(f"wrote {path}")


def _deviation(values: Sequence[float]) -> float | None:
    return float(np.std(values, ddof=1)) if len(values) > 1 else None


def _print_table(rows: Sequence[Sequence[Any]]) -> None:
    def text(value: Any) -> str:
        return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)

    print(format_table([[text(value) for value in row] for row in rows], "<"), end="\n\n")


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """A short name for each key: as few of its last parts as make it unique."""
    parts = {key: plain_key(key).split(".") for key in keys}
    names = {}
    for key, path in parts.items():
        others = [parts[other] for other in keys if other != key]
        counts = range(1, len(path) + 1)
        unique = [count for count in counts if all(path[-count:] != other[-count:] for other in others)]
        names[key] = ".".join(path[-unique[0] :]) if unique else key
    return names


def label(value: Any) -> str:
    """A value as text; a class is shown by its name, without modules."""
    text = value if isinstance(value, str) else json.dumps(value)
    return re.sub(r"(?<![\w./-])(?:\w+\.)+(?=[A-Z]\w*(?![\w./-]))", "", text)


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


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
    if (file.method == "grid") != (file.num_runs is None):
        raise InputError(f"{path}: num_runs", "is for method random or tpe, which need it", "change one of the two")
    if file.num_runs is not None and file.num_runs < 1:
        raise InputError(f"{path}: num_runs", f"must be >= 1, got {file.num_runs}", "leave it out for a grid")
    spelled: dict[str, str] = {}
    for key, source in parameters.items():
        if not isinstance(key, str) or plain_key(key) in OWN_KEYS:
            own = ", ".join(OWN_KEYS)
            raise InputError(f"{path}: parameters.{key}", f"must be a config key other than {own}", "name another")
        if (other := spelled.setdefault(plain_key(key), key)) != key:
            raise InputError(f"{path}: parameters.{key}", f"is the same key as {other}", "keep one of the two")
        is_range = isinstance(source, dict) and file.method != "grid"
        if not is_range and (not isinstance(source, list) or not source):
            what = f"must be a list of values, got {source!r}"
            raise InputError(f"{path}: parameters.{key}", what, "list at least one")
        if isinstance(source, list) and len(set(map(_json, source))) < len(source):
            raise InputError(f"{path}: parameters.{key}", "lists a value twice", "list each value once")
    return file


def _distribution(kinds: Any, where: str, source: Any) -> Any:
    """Optuna's distribution of a list's values, as JSON, or of a range, both ends included."""
    if isinstance(source, list):
        return kinds.CategoricalDistribution(list(map(_json, source)))
    try:
        options = dict(source)
        kind = kinds.IntDistribution if options.pop("int", False) else kinds.FloatDistribution
        return kind(**options)
    except (TypeError, ValueError) as error:
        rule = "a range is {low: NUMBER, high: NUMBER}, with log: true or int: true"
        raise InputError(where, f"is not a range of numbers ({error})", rule) from error


def _hash(contents: Any, settings: Any) -> str:
    """Ten digits of a hash of the configs, in order, and further settings."""
    text = json.dumps([contents, settings], sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:10]
