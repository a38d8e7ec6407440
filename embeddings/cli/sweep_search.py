"""The points of a search: each is proposed by Optuna's sampler from the results of those before it."""

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from embeddings.cli.sweep_file import Point, Search
from embeddings.common.errors import require

# Optuna's own number: as many points are random before the sampler has enough results to model.
NUM_RANDOM = 10


def next_point(search: Search, mode: Literal["max", "min"], tried: Sequence[tuple[Point, float | None]]) -> Point:
    """The point that the tree-structured Parzen estimator proposes next.

    The first `NUM_RANDOM` points are random, as are further ones until so many have a value.

    Args:
        search: The ranges of the values, and the seed.
        mode: Whether the largest or the smallest value is the best.
        tried: The points so far in their order, each with its value, or None where its run has not finished.

    Determinism: the point follows from the arguments alone with one version of Optuna; numbers have six digits.
    Raises:
        MissingExtraError: If Optuna is not installed.
    Source: Bergstra et al. 2011, Algorithms for Hyper-Parameter Optimization, section 4, by Optuna's `TPESampler`.
    """
    optuna: Any = require("optuna", "optuna")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    ranges = {key: distribution(source) for key, source in search.parameters.items()}
    seed = random.Random(f"{search.seed}/{len(tried)}").getrandbits(31)
    sampler = optuna.samplers.TPESampler(n_startup_trials=NUM_RANDOM, seed=seed)
    study = optuna.create_study(direction={"max": "maximize", "min": "minimize"}[mode], sampler=sampler)
    for point, value in tried:
        if value is not None:
            given = {key: _as_text(content) if _is_choice(search, key) else content for key, content in point.items()}
            study.add_trial(optuna.trial.create_trial(params=given, distributions=ranges, value=value))
    found: Mapping[str, Any] = study.ask(ranges).params
    return {
        key: json.loads(value) if _is_choice(search, key) else _rounded(value, search.parameters[key])
        for key, value in found.items()
    }


def distribution(source: Any) -> Any:
    """Optuna's distribution of a list of values, or of a range that the sweep file's reader has checked."""
    optuna: Any = require("optuna", "optuna")
    if isinstance(source, list):
        return optuna.distributions.CategoricalDistribution([_as_text(value) for value in source])
    log = bool(source.get("log"))
    if source.get("int"):
        return optuna.distributions.IntDistribution(int(source["low"]), int(source["high"]), log=log)
    return optuna.distributions.FloatDistribution(float(source["low"]), float(source["high"]), log=log)


def _is_choice(search: Search, key: str) -> bool:
    return isinstance(search.parameters[key], list)


def _as_text(value: Any) -> str:
    """A value of a list as JSON: Optuna's choices are texts and numbers, a config's may be mappings."""
    return json.dumps(value)


def _rounded(value: float, source: Mapping[str, Any]) -> float:
    """A number of a range in six digits, an integer as it is."""
    if isinstance(value, int):
        return value
    return min(max(float(f"{value:.6g}"), float(source["low"])), float(source["high"]))
