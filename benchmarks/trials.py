"""How an experiment on quality is run: a trial for each variant and seed, two side by side, and a table over the seeds.

A finished trial is a few rows of `trials.csv`, one a metric; the next run that needs it finds it there and does not
repeat it, whatever experiment it was for. A trial of other settings is another trial: its key is a hash of them.
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
    """One training run with its scores.

    Attributes:
        experiment: Which experiment it belongs to.
        variant: What is compared.
        seed: Seed of everything random in it.
        settings: All else that decides its result, as JSON types.
    """

    experiment: str
    variant: str
    seed: int
    settings: Mapping[str, object]

    @property
    def key(self) -> str:
        """Tells trials of one name with other settings apart."""
        return hashlib.sha256(json.dumps(self.settings, sort_keys=True).encode()).hexdigest()[:8]


@dataclass(frozen=True)
class TrialRow:
    """One metric of a trial as `trials.csv` holds it."""

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
        return set.intersection(*(set(found) for found in self.by_seed.values()))

    def values(self, metric: str) -> list[float]:
        """The metric in the order of the seeds."""
        return [self.by_seed[seed][metric] for seed in sorted(self.by_seed)]


@dataclass(frozen=True)
class TrainingRecipe:
    """What the recipes of all experiments say, each beside what it varies.

    Args:
        num_steps: Steps; 0 scores what training starts from.
        batch_size: Pairs of a batch.
        max_length: Most tokens of a text, in training and scoring.
        learning_rate: Its peak.
    """

    num_steps: int = 40
    batch_size: int = 32
    max_length: int = 64
    learning_rate: float = 1e-4

    @property
    def text(self) -> TextSettings:
        """Lengths of the texts."""
        return TextSettings(query_max_length=self.max_length, document_max_length=self.max_length)

    def tiny(self) -> Self:
        """The recipe with small sizes, for a quick check."""
        return replace(self, num_steps=min(self.num_steps, 4), batch_size=4, max_length=12)


AnyRecipe = TypeVar("AnyRecipe", bound=TrainingRecipe)


def trial_options(description: str | None) -> argparse.Namespace:
    """The command line that all experiments share."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--tiny", action="store_true", help="see that it works: a step or two, no row, no verdict")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2, help="trials side by side, one thread each")
    parser.add_argument("--work", type=Path, default=Path("checkpoints/trials"), help="corpora, vectors, clusters")
    return parser.parse_args()


def replaced(chosen: argparse.Namespace, **values: object) -> argparse.Namespace:
    """The command line with other values for some options."""
    return argparse.Namespace(**{**vars(chosen), **values})


def sized(chosen: argparse.Namespace, recipes: Mapping[str, AnyRecipe]) -> Mapping[str, AnyRecipe]:
    """The recipes, tiny ones where the command line says so."""
    return {name: recipe.tiny() for name, recipe in recipes.items()} if chosen.tiny else recipes


def run_recipes(
    chosen: argparse.Namespace,
    experiment: str,
    recipes: Mapping[str, Any],
    function: Callable[[Trial, Path, bool], Metrics],
) -> list[Scores]:
    """The scores of each recipe with each seed; arguments as of `run_trials`.

    Args:
        chosen: The command line.
        experiment: Its name in the rows.
        recipes: A dataclass of a trial's settings, by the name of the variant.
        function: Runs one trial.
    """
    seeds = range(1 if chosen.tiny else chosen.seeds)
    trials = [Trial(experiment, name, seed, asdict(recipe)) for seed in seeds for name, recipe in recipes.items()]
    return run_trials(chosen, trials, function)


def run_trials(
    chosen: argparse.Namespace, trials: Sequence[Trial], function: Callable[[Trial, Path, bool], Metrics]
) -> list[Scores]:
    """The scores of all trials, those of earlier runs among them.

    Args:
        chosen: The command line.
        trials: What is to be run.
        function: A module's top-level function; gets the trial, the folder of work, and whether sizes are tiny.
    """
    found = {} if chosen.tiny else _finished()
    missing = [trial for trial in trials if _name(trial) not in found]
    # A fresh process for each trial, but for those that are tried out: starting one takes longer than they do.
    context: Any = multiprocessing.get_context("fork" if chosen.tiny else "spawn")
    tasks_of_a_process = None if chosen.tiny else 1
    with ProcessPoolExecutor(chosen.workers, context, _one_thread, max_tasks_per_child=tasks_of_a_process) as pool:
        running = {pool.submit(function, trial, chosen.work, chosen.tiny): trial for trial in missing}
        failure: BaseException | None = None
        for done in tqdm(as_completed(running), total=len(running), desc="trials", disable=chosen.tiny):
            if done.cancelled():
                continue
            if error := done.exception():
                # What runs beside it ends and is kept; nothing more begins.
                failure = failure or error
                for other in running:
                    other.cancel()
                continue
            found[_name(running[done])] = done.result()
            if not chosen.tiny:
                _append(running[done], done.result())
    if failure is not None:
        raise failure
    variants = list(dict.fromkeys(trial.variant for trial in trials))
    return [
        Scores(name, {trial.seed: found[_name(trial)] for trial in trials if trial.variant == name})
        for name in variants
    ]


def table(scores: Sequence[Scores], metrics: Sequence[str]) -> str:
    """Mean and standard deviation over the seeds, a row a variant."""
    rows = [[score.variant, *(spread(score.values(metric)) for metric in metrics)] for score in scores]
    return format_table([["", *metrics], *rows])


def difference(better: Scores, than: Scores, metric: str) -> str:
    """How far one variant lies above another, seed by seed."""
    pairs = zip(better.values(metric), than.values(metric), strict=True)
    return f"{better.variant} over {than.variant}, {metric}: {spread([a - b for a, b in pairs], '+')}"


def spread(values: Sequence[float], sign: str = "") -> str:
    """Mean, and standard deviation where there are several; with `+` as sign, an increase shows one."""
    deviation = f" ±{statistics.stdev(values):.4f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):{sign}.4f}{deviation}"


def _one_thread() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(1)


def _name(trial: Trial) -> tuple[str, int]:
    return trial.key, trial.seed


def _finished() -> dict[tuple[str, int], Metrics]:
    """The metrics of the trials that `trials.csv` holds."""
    found: dict[tuple[str, int], Metrics] = {}
    if TRIALS.is_file():
        with TRIALS.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                found.setdefault((row["key"], int(row["seed"])), {})[row["metric"]] = float(row["value"])
    return found


def _append(trial: Trial, metrics: Metrics) -> None:
    """Write a trial's rows with one call, so that a kill leaves all of them or none."""
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
