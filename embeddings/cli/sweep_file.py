"""What a sweep file says: its configs, its metric, and its points, each a pure function of the file or of results."""

import itertools
import json
import math
import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from embeddings.cli.configs import chooses, configs_of, expand_recipe, located, read_yaml
from embeddings.common import InputError
from embeddings.common.errors import require

Point = dict[str, Any]

SEED_KEY = "seed_everything"
# Each point becomes a folder, and all of them a table; more are a slip, and would not fit in memory.
MAX_POINTS = 100_000
# Each run has its own folder, logger and checkpoint to resume from.
OWN_KEYS = ("config", "ckpt_path", "trainer.default_root_dir", "trainer.logger")
# Optuna's own number: as many points are random before the sampler has enough results to model.
NUM_RANDOM = 10

_KEYS = ("recipe", "configs", "method", "seed", "num_runs", "parameters", "metric")
_CHOICES = {"mode": ("max", "min"), "value": ("last", "best")}
# YAML takes a number without a point before its exponent for text.
_EXPONENT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")
_CLASS_PATH = re.compile(r"(?:\w+\.)+[A-Z]\w*")


@dataclass(frozen=True)
class Metric:
    """What points are compared by; the default is replaced by `train/loss` if it was never logged.

    Args:
        column: A column of a run's `metrics.csv`.
        mode: Whether the largest or the smallest is the best.
        value: The last one that the run logged, or its best.
    """

    column: str = "val/ndcg_at_10"
    mode: Literal["max", "min"] = "max"
    value: Literal["last", "best"] = "last"

    def rank(self, value: float | None) -> float:
        """A number by which points are sorted, the best first and those without a value last."""
        return math.inf if value is None else value if self.mode == "min" else -value


@dataclass(frozen=True)
class Search:
    """What a sampler proposes points of.

    Args:
        parameters: For each config key a list of values, or a range as `method: random` takes it.
        num_runs: How many points.
        seed: Seed of the proposals.
    """

    parameters: Mapping[str, Any]
    num_runs: int
    seed: int


@dataclass(frozen=True)
class Sweep:
    """A sweep file, read and checked.

    A search (`method: tpe`) has as many points as were proposed so far; the others follow from their results.

    Args:
        name: The file's name without its ending.
        recipe: What its runs are called: the recipe's name, or that of the config that chooses the method.
        configs: The config files of every run, in order.
        contents: What these hold, as mappings.
        method: How the points are made.
        points: For each run the config keys that it sets, and their values.
        metric: What points are compared by.
        search: What further points are proposed of; None where all are known.
    """

    name: str
    recipe: str
    configs: tuple[str, ...]
    contents: tuple[Mapping[str, Any], ...]
    method: Literal["grid", "list", "random", "tpe"]
    points: tuple[Point, ...]
    metric: Metric = field(default_factory=Metric)
    search: Search | None = None

    @property
    def num_points(self) -> int:
        """The number of points, those that are not proposed yet among them."""
        return len(self.points) if self.search is None else self.search.num_runs

    @property
    def names(self) -> dict[str, str]:
        """A name for each key that a point sets (see `short_names`)."""
        return short_names(self.points if self.search is None else [dict(self.search.parameters)])


def read_sweep(path: Path) -> Sweep:
    """Read a sweep file: a recipe or configs, and what is to be varied.

    `method: grid` (the default) takes every combination of the lists in `parameters`, the last one varying fastest;
    `list` takes the mappings that `parameters` lists; `random` draws `num_runs` points, from a list each value alike,
    from `{low, high}` evenly (`log: true`: evenly in the logarithm; `int: true`: integers, both ends included). `tpe`
    takes the same keys, and proposes each point by the metric of those before it (see `next_point`).

    Determinism: a point follows from the file alone, and a drawn value from (`seed`, index, key): more runs, or another
    parameter, leave the values that there were.

    Raises:
        InputError: If the file is no sweep, or has more than 100,000 points; the message names the key.
        ConfigError: If the recipe is unknown.
    """
    place = Path(located(str(path)))
    if not place.is_file():
        raise InputError(str(path), "no such file", "give a sweep file, such as lightning_configs/sweeps/pooling.yaml")
    content = _with_numbers(read_yaml(place, str(path)))
    if not isinstance(content, dict):
        raise InputError(str(path), "holds no mapping", f"a sweep file has the keys {', '.join(_KEYS)}")
    _check_keys(str(path), content, _KEYS)
    configs = _configs(path, content)
    of_each = [[content for _, content in configs_of(config)] for config in configs]
    # A recipe's name, or that of the config that chooses the method, directly or through one that it names.
    is_method = [any(chooses(content, "model") for content in found) for found in of_each]
    recipe = content.get("recipe") or Path(configs[is_method.index(True) if any(is_method) else -1]).stem
    method, points = content.get("method", "grid"), tuple(_points(path, content))
    for index, point in enumerate(points):
        _check_point(f"{path}: point {index}", point)
    search = None
    if method == "tpe":
        # A drawn point stood for all of them in the checks.
        search, points = Search(content["parameters"], content["num_runs"], content.get("seed", 0)), ()
    contents, metric = tuple(itertools.chain(*of_each)), _metric(f"{path}: metric", content.get("metric", {}))
    return Sweep(path.stem, recipe, configs, contents, method, points, metric, search)


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
    # Optuna's choices are texts and numbers, a config's may be mappings: they are given as JSON.
    lists = {key for key, source in search.parameters.items() if isinstance(source, list)}
    ranges: dict[str, Any] = {}
    for key, source in search.parameters.items():
        if key in lists:
            ranges[key] = optuna.distributions.CategoricalDistribution([json.dumps(value) for value in source])
            continue
        kind, is_log = (int if source.get("int") else float), bool(source.get("log"))
        made = optuna.distributions.IntDistribution if kind is int else optuna.distributions.FloatDistribution
        ranges[key] = made(kind(source["low"]), kind(source["high"]), log=is_log)
    seed = random.Random(f"{search.seed}/{len(tried)}").getrandbits(31)
    sampler = optuna.samplers.TPESampler(n_startup_trials=NUM_RANDOM, seed=seed)
    study = optuna.create_study(direction={"max": "maximize", "min": "minimize"}[mode], sampler=sampler)
    for point, value in tried:
        if value is not None:
            given = {key: json.dumps(content) if key in lists else content for key, content in point.items()}
            study.add_trial(optuna.trial.create_trial(params=given, distributions=ranges, value=value))
    found: Mapping[str, Any] = study.ask(ranges).params
    return {
        key: json.loads(value) if key in lists else _in_range(value, search.parameters[key])
        for key, value in found.items()
    }


def short_names(points: Sequence[Point]) -> dict[str, str]:
    """A name for each key of the points: as many of its last parts as tell it from the others."""
    keys = list(dict.fromkeys(key for point in points for key in point))
    parts = {key: [part for part in key.split(".") if part not in ("init_args", "class_path")] or [key] for key in keys}
    names = {}
    for key in keys:
        alike = [".".join(parts[other]) for other in keys if other != key]
        candidates = [".".join(parts[key][-count:]) for count in range(1, len(parts[key]) + 1)]
        unlike = [name for name in candidates if not any(f".{other}".endswith(f".{name}") for other in alike)]
        names[key] = unlike[0] if unlike else key
    return names


def label(value: Any) -> str:
    """A value in few letters: a class by its last name, with its arguments."""
    if isinstance(value, str):
        return value.rpartition(".")[2] if _CLASS_PATH.fullmatch(value) else value
    if isinstance(value, Mapping):
        arguments = value.get("init_args") if "class_path" in value else value
        inner = ", ".join(f"{key}={label(content)}" for key, content in (arguments or {}).items())
        return label(value["class_path"]) + (f"({inner})" if inner else "") if "class_path" in value else f"{{{inner}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(label, value))}]"
    return json.dumps(value, default=str)


def is_number(value: Any) -> bool:
    """Whether a value is a number; YAML's true and false are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _with_numbers(value: Any) -> Any:
    """The same with numbers such as 1e-5, which YAML reads as text, as numbers."""
    if isinstance(value, dict):
        return {key: _with_numbers(content) for key, content in value.items()}
    if isinstance(value, list):
        return [_with_numbers(element) for element in value]
    return float(value) if isinstance(value, str) and _EXPONENT.fullmatch(value) else value


def _check_keys(where: str, given: Mapping[Any, Any], known: Sequence[str]) -> None:
    for key in given:
        if key not in known:
            alike = get_close_matches(str(key), known, n=1)
            fix = f"did you mean {alike[0]}?" if alike else f"it takes {', '.join(known)}"
            raise InputError(where, f"unknown key {key!r}", fix)


def _configs(path: Path, content: Mapping[str, Any]) -> tuple[str, ...]:
    """The config files that a sweep file, or its recipe, lists."""
    if ("recipe" in content) == ("configs" in content):
        raise InputError(str(path), "needs either recipe or configs", "name a recipe, or list config files")
    if "recipe" in content:
        if not isinstance(content["recipe"], str):
            raise InputError(f"{path}: recipe", f"must be a name, got {content['recipe']!r}", "see recipes.csv")
        configs = expand_recipe(["--recipe", content["recipe"]])[1::2]
    else:
        configs = content["configs"]
        if not isinstance(configs, list) or not configs or not all(isinstance(config, str) for config in configs):
            fix = "list those of fit --config"
            raise InputError(f"{path}: configs", f"must be a list of files, got {configs!r}", fix)
    for config in configs:
        if not Path(located(config)).is_file():
            fix = "paths are those from the folder that the command runs in"
            raise InputError(f"{path}: config {config}", "no such file", fix)
    return tuple(configs)


def _points(path: Path, content: Mapping[str, Any]) -> list[Point]:
    """The points of a sweep file; those of a search as `method: random` would draw them."""
    method, parameters = content.get("method", "grid"), content.get("parameters")
    if method not in ("grid", "list", "random", "tpe"):
        raise InputError(f"{path}: method", f"must be grid, list, random or tpe, got {method!r}", "choose one")
    is_drawn = method in ("random", "tpe")
    for key in () if is_drawn else ("seed", "num_runs"):
        if key in content:
            raise InputError(f"{path}: {key}", f"has no effect on method {method}", "leave it out")
    where = f"{path}: parameters"
    if method == "list":
        points = parameters if isinstance(parameters, list) else []
        if not points or not all(isinstance(point, dict) and point for point in points):
            rule = f"must be a list of mappings of config keys, got {parameters!r}"
            raise InputError(where, rule, "list at least one point")
        _check_values(where, points)
        return points
    if not isinstance(parameters, dict) or not parameters:
        raise InputError(where, f"must map config keys to values, got {parameters!r}", "name at least one key")
    num_runs, seed = content.get("num_runs"), content.get("seed", 0)
    if is_drawn:
        where = f"{path}: num_runs"
        if not isinstance(num_runs, int) or isinstance(num_runs, bool) or num_runs < 1:
            raise InputError(where, f"must be an integer >= 1, got {num_runs!r}", "say how many to draw")
        if not isinstance(seed, int) or isinstance(seed, bool):
            raise InputError(f"{path}: seed", f"must be an integer, got {seed!r}", "try 0")
    for key, source in parameters.items():
        check = _check_range if is_drawn and isinstance(source, dict) else _check_values
        check(f"{path}: parameters.{key}", source)
    number: int = num_runs if is_drawn else math.prod(map(len, parameters.values()))  # type: ignore[assignment]
    if number > MAX_POINTS:
        fix = "vary less, or draw fewer points with method: random"
        raise InputError(where, f"makes {number} points, more than {MAX_POINTS}", fix)
    if not is_drawn:
        return [dict(zip(parameters, values, strict=True)) for values in itertools.product(*parameters.values())]
    return [
        # A text seeds alike on every machine and Python.
        {key: _draw(source, random.Random(f"{seed}/{index}/{key}").random()) for key, source in parameters.items()}
        for index in range(number)
    ]


def _check_values(where: str, values: Any) -> None:
    """Check a list of values, no two of which may be alike, and which JSON must be able to hold."""
    if not isinstance(values, list) or not values:
        raise InputError(where, f"must be a list of values, got {values!r}", "list at least one")
    texts = Counter[str]()
    for value in values:
        try:
            texts[json.dumps(value, sort_keys=True)] += 1
        except TypeError as error:  # a date, binary data, a set, or a key that is no name
            raise InputError(where, f"{value!r} cannot be given to fit", "put a date or a key in quotes") from error
    ((text, count),) = texts.most_common(1)
    if count > 1:
        raise InputError(where, f"holds {text} twice", "leave one out")


def _check_range(where: str, source: Mapping[str, Any]) -> None:
    _check_keys(where, source, ("low", "high", "log", "int"))
    for name in ("log", "int"):
        if not isinstance(source.get(name, False), bool):
            raise InputError(f"{where}.{name}", f"must be true or false, got {source[name]!r}", "choose one")
    for name in ("low", "high"):
        end: Any = source.get(name)
        if not is_number(end) or not math.isfinite(end):
            raise InputError(f"{where}.{name}", f"must be a number, got {end!r}", "give both low and high, or a list")
        if source.get("int") and end != int(end):
            raise InputError(f"{where}.{name}", f"must be an integer with int: true, got {end!r}", "round it")
    low, high = source["low"], source["high"]
    if low >= high:
        raise InputError(where, f"low must be < high, got {low!r} and {high!r}", "exchange them")
    if source.get("log") and low <= 0:
        raise InputError(f"{where}.low", f"must be > 0 with log: true, got {low!r}", "give the smallest value to try")


def _draw(source: Any, share: float) -> Any:
    """The value at a share, in [0, 1), of a list or a range."""
    if isinstance(source, list):
        return source[int(share * len(source))]
    low, high, width = source["low"], source["high"], int(source.get("int", False))
    if source.get("log"):
        value = math.exp(math.log(low) + share * (math.log(high + width) - math.log(low)))
    else:
        value = low + share * (high + width - low)
    return _in_range(math.floor(value) if width else value, source)


def _in_range(value: float, source: Mapping[str, Any]) -> float:
    """A number within its range, in six digits unless it is an integer."""
    kind = type(value)
    return min(max(kind(value if kind is int else f"{value:.6g}"), kind(source["low"])), kind(source["high"]))


def _check_point(where: str, point: Point) -> None:
    for key in point:
        if not isinstance(key, str) or not re.fullmatch(r"\w+(\.\w+)*\+?", key):
            fix = "write it as model.init_args.loss.init_args.temperature"
            raise InputError(where, f"{key!r} is no config key", fix)
        if any(key == own or key.startswith(f"{own}.") or key == f"{own}+" for own in OWN_KEYS):
            raise InputError(where, f"{key} is what a sweep gives every run itself", "leave it out")


def _metric(where: str, given: Any) -> Metric:
    if not isinstance(given, dict):
        raise InputError(where, f"must be a mapping, got {given!r}", f"it takes column, {', '.join(_CHOICES)}")
    _check_keys(where, given, ("column", *_CHOICES))
    for key, choices in _CHOICES.items():
        if given.get(key, choices[0]) not in choices:
            raise InputError(f"{where}.{key}", f"must be {' or '.join(choices)}, got {given[key]!r}", "choose one")
    if not isinstance(given.get("column", ""), str):
        raise InputError(f"{where}.column", f"must be a name, got {given['column']!r}", "name one of metrics.csv")
    return Metric(**given)
