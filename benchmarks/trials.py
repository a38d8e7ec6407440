"""How quality experiments run: one trial per variant and seed, in parallel, and a table over the seeds.

A finished trial is written to `trials.csv`, one row per metric. Later runs of any experiment reuse it instead of
repeating it. A trial is identified by its seed and its key, a hash of its settings.
"""

import argparse
import csv
import datetime
import hashlib
import json
import multiprocessing
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, astuple, dataclass, fields, replace
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from tqdm import tqdm

from benchmarks.harness import commit, hardware
from embeddings.common import TextSettings
from embeddings.common.text import format_table

TRIALS = Path(__file__).with_name("trials.csv")

Metrics = dict[str, float]


@dataclass(frozen=True)
class Trial:
    """One training run that is scored.

    Attributes:
        experiment: The experiment that it belongs to, such as E1.
        variant: Name of the variant, as in the tables.
        seed: Seed of everything random in it.
        settings: Everything else that determines its result, as JSON types.
    """

    experiment: str
    variant: str
    seed: int
    settings: Mapping[str, object]

    @property
    def key(self) -> str:
        """A hash of the settings."""
        return hashlib.sha256(json.dumps(self.settings, sort_keys=True).encode()).hexdigest()[:8]


@dataclass(frozen=True)
class TrialRow:
    """One row of `trials.csv`: a metric of a trial."""

    experiment: str
    variant: str
    seed: int
    key: str
    metric: str
    value: float
    hardware: str
    commit: str
    date: str


@dataclass(frozen=True)
class Scores:
    """The metrics of a variant's trials, by seed."""

    variant: str
    by_seed: dict[int, Metrics]

    @property
    def metrics(self) -> set[str]:
        """The metrics that all trials have."""
        return set.intersection(*(set(metrics) for metrics in self.by_seed.values()))

    def values(self, metric: str) -> list[float]:
        """The values of a metric in the order of the seeds."""
        return [self.by_seed[seed][metric] for seed in sorted(self.by_seed)]


@dataclass(frozen=True)
class TrainingRecipe:
    """Settings that the recipes of all experiments share; each experiment adds its own.

    Args:
        num_steps: Training steps; 0 scores the model before training.
        batch_size: Pairs per batch.
        max_length: Maximum tokens per text, in training and scoring.
        learning_rate: Peak learning rate.
    """

    num_steps: int = 40
    batch_size: int = 32
    max_length: int = 64
    learning_rate: float = 1e-4

    @property
    def text(self) -> TextSettings:
        """The maximum text lengths as text settings."""
        return TextSettings(query_max_length=self.max_length, document_max_length=self.max_length)

    def tiny(self) -> Self:
        """The recipe with small sizes, for a quick check."""
        return replace(self, num_steps=min(self.num_steps, 4), batch_size=4, max_length=12)


AnyRecipe = TypeVar("AnyRecipe", bound=TrainingRecipe)


def trial_options(description: str | None) -> argparse.Namespace:
    """Parse the command line that all experiments share."""
    return trial_parser(description).parse_args()


def trial_parser(description: str | None) -> argparse.ArgumentParser:
    """The options that all experiments share."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--tiny", action="store_true", help="try the script with a few steps; writes no row")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--workers", type=int, default=2, help="trials to run in parallel, one thread each")
    parser.add_argument(
        "--work", type=Path, default=Path("checkpoints/trials"), help="folder of corpora, vectors, clusters and models"
    )
    return parser


def replaced(chosen: argparse.Namespace, **values: object) -> argparse.Namespace:
    """The command line with some options replaced."""
    return argparse.Namespace(**{**vars(chosen), **values})


def sized(chosen: argparse.Namespace, recipes: Mapping[str, AnyRecipe]) -> Mapping[str, AnyRecipe]:
    """The recipes; with `--tiny`, their tiny versions."""
    return {name: recipe.tiny() for name, recipe in recipes.items()} if chosen.tiny else recipes


def run_recipes(
    chosen: argparse.Namespace,
    experiment: str,
    recipes: Mapping[str, Any],
    function: Callable[[Trial, Path, bool], Metrics],
) -> list[Scores]:
    """The scores of each recipe with each seed; see `run_trials`.

    Args:
        chosen: The command line.
        experiment: Name of the experiment in `trials.csv`.
        recipes: A dataclass of a trial's settings for each variant.
        function: Runs one trial.
    """
    seeds = range(1 if chosen.tiny else chosen.seeds)
    trials = [Trial(experiment, name, seed, asdict(recipe)) for seed in seeds for name, recipe in recipes.items()]
    return run_trials(chosen, trials, function)


def run_trials(
    chosen: argparse.Namespace, trials: Sequence[Trial], function: Callable[[Trial, Path, bool], Metrics]
) -> list[Scores]:
    """Run the trials that are not in `trials.csv`, and return the scores of all trials.

    Args:
        chosen: The command line.
        trials: The trials to run.
        function: A top-level function of a module, called with the trial, the work folder, and whether the run is tiny.
    """
    finished = {} if chosen.tiny else _finished()
    # Variants with the same settings share a result. In a tiny run so do those whose values others have.
    shown = _covering(trials) if chosen.tiny else {_identity(trial): _identity(trial) for trial in trials}
    missing = {_identity(trial): trial for trial in trials if shown[_identity(trial)] == _identity(trial)}
    missing = {identity: trial for identity, trial in missing.items() if identity not in finished}
    # A new process for each trial, except in a tiny run, where starting it takes longer than the trial.
    context: Any = multiprocessing.get_context("fork" if chosen.tiny else "spawn")
    max_tasks = None if chosen.tiny else 1
    with ProcessPoolExecutor(chosen.workers, context, _one_thread, max_tasks_per_child=max_tasks) as pool:
        running = {pool.submit(function, trial, chosen.work, chosen.tiny): trial for trial in missing.values()}
        failure: BaseException | None = None
        for done in tqdm(as_completed(running), total=len(running), desc="trials", disable=chosen.tiny):
            if done.cancelled():
                continue
            if error := done.exception():
                # Running trials finish and are recorded; no new trial starts.
                failure = failure or error
                for other in running:
                    other.cancel()
                continue
            finished[_identity(running[done])] = done.result()
            if not chosen.tiny:
                _append(running[done], done.result())
    if failure is not None:
        raise failure
    variants = list(dict.fromkeys(trial.variant for trial in trials))
    return [
        Scores(variant, {trial.seed: finished[shown[_identity(trial)]] for trial in trials if trial.variant == variant})
        for variant in variants
    ]


def table(scores: Sequence[Scores], metrics: Sequence[str]) -> str:
    """A table of the mean and standard deviation over the seeds, one row per variant."""
    rows = [[score.variant, *(spread(score.values(metric)) for metric in metrics)] for score in scores]
    return format_table([["", *metrics], *rows])


def difference(better: Scores, than: Scores, metric: str) -> str:
    """The difference between two variants, computed per seed: mean and standard deviation."""
    pairs = zip(better.values(metric), than.values(metric), strict=True)
    return f"{better.variant} over {than.variant}, {metric}: {spread([a - b for a, b in pairs], '+')}"


def spread(values: Sequence[float], sign: str = "") -> str:
    """The mean, and the standard deviation of several values; with sign `+`, positive means have a plus sign."""
    deviation = f" ±{statistics.stdev(values):.4f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):{sign}.4f}{deviation}"


def _one_thread() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(1)


def _identity(trial: Trial) -> tuple[str, int]:
    return trial.key, trial.seed


def _covering(trials: Sequence[Trial]) -> dict[tuple[str, int], tuple[str, int]]:
    """For each trial the one whose result it shows: few trials have all values, and all sets of flags, of the trials.

    The next is always the one with the most values that none before has. Numbers count as zero or not. The others show
    the result of the trial with their flags, on which the metrics depend, that has most values in common.
    """
    flags_of, values_of = dict[tuple[str, int], str](), dict[tuple[str, int], set[tuple[str, str]]]()
    for trial in trials:
        flags = {name: value for name, value in trial.settings.items() if isinstance(value, bool)}
        settings = {name: bool(x) if isinstance(x, int | float) else x for name, x in trial.settings.items()}
        flags_of[_identity(trial)] = json.dumps(flags, sort_keys=True)
        values_of[_identity(trial)] = {
            (name, json.dumps(value, sort_keys=True)) for name, value in (*settings.items(), ("flags", flags))
        }
    missing, run = set().union(*values_of.values()), list[tuple[str, int]]()
    while missing:
        run.append(max(values_of, key=lambda trial: len(values_of[trial] & missing)))
        missing -= values_of[run[-1]]
    return {
        trial: max(
            (other for other in run if flags_of[other] == flags_of[trial]),
            key=lambda other: len(values_of[other] & values_of[trial]),
        )
        for trial in values_of
    }


def _finished() -> dict[tuple[str, int], Metrics]:
    """The metrics of the trials in `trials.csv`, by key and seed."""
    finished: dict[tuple[str, int], Metrics] = {}
    if TRIALS.is_file():
        with TRIALS.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                finished.setdefault((row["key"], int(row["seed"])), {})[row["metric"]] = float(row["value"])
    return finished


def _append(trial: Trial, metrics: Metrics) -> None:
    """Append a trial's rows with one write, so that an interrupted run leaves all of them or none."""
    today = datetime.date.today().isoformat()
    rows = [
        TrialRow(
            trial.experiment, trial.variant, trial.seed, trial.key, metric, round(value, 5), hardware(), commit(), today
        )
        for metric, value in metrics.items()
    ]
    is_new = not TRIALS.exists()
    with TRIALS.open("a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        if is_new:
            writer.writerow([field.name for field in fields(TrialRow)])
        writer.writerows(astuple(row) for row in rows)
