"""What a sweep file says: its configs, its metric, and its points, each a pure function of the file."""

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

from embeddings.cli.configs import chooses_method, configs_of, expand_recipe, located, read_yaml, unfolded
from embeddings.common import InputError

Point = dict[str, Any]

SEED_KEY = "seed_everything"
# Each point becomes a folder, and all of them a table; more are a slip, and would not fit in memory.
MAX_POINTS = 100_000
# Each run has its own folder, logger and checkpoint to resume from.
OWN_KEYS = ("config", "ckpt_path", "trainer.default_root_dir", "trainer.logger")

_KEYS = ("recipe", "configs", "method", "seed", "num_runs", "parameters", "metric")
_RANGE_KEYS = ("low", "high", "log", "int")
_METRIC_KEYS = ("column", "mode", "value")
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
    takes the same keys, and proposes each point by the metric of those before it (see `sweep_search`).

    Determinism: a point follows from the file alone, and a drawn value from (`seed`, index, key): more runs, or another
    parameter, leave the values that there were.

    Raises:
        InputError: If the file is no sweep, or has more than 100,000 points; the message names the key.
        ConfigError: If the recipe is unknown.
    """
    content = _mapping(path)
    _check_keys(str(path), content, _KEYS)
    if ("recipe" in content) == ("configs" in content):
        raise InputError(str(path), "needs either recipe or configs", "name a recipe, or list config files")
    configs = _configs(path, content)
    of_each = [_contents(path, config) for config in configs]
    contents = tuple(content for of_one in of_each for content in of_one)
    recipe = content.get("recipe") or _method_name(configs, of_each)
    method, points = content.get("method", "grid"), tuple(_points(path, content))
    search = None
    if method == "tpe":
        # A drawn point stands for all of them in the checks below.
        search, points = Search(content["parameters"], content["num_runs"], content.get("seed", 0)), points[:1]
    for index, point in enumerate(points):
        _check_point(f"{path}: point {index}", point)
    points = () if search is not None else points
    return Sweep(path.stem, recipe, configs, contents, method, points, _metric(path, content.get("metric", {})), search)


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


def _mapping(path: Path) -> Mapping[str, Any]:
    place = Path(located(str(path)))
    if not place.is_file():
        raise InputError(str(path), "no such file", "give a sweep file, such as lightning_configs/sweeps/pooling.yaml")
    content = read_yaml(place, str(path))
    if not isinstance(content, dict):
        raise InputError(str(path), "holds no mapping", f"a sweep file has the keys {', '.join(_KEYS)}")
    found: Mapping[str, Any] = _with_numbers(content)
    return found


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
    if "recipe" in content:
        if not isinstance(content["recipe"], str):
            raise InputError(f"{path}: recipe", f"must be a name, got {content['recipe']!r}", "see recipes.csv")
        return tuple(expand_recipe(["--recipe", content["recipe"]])[1::2])
    configs = content["configs"]
    if not isinstance(configs, list) or not configs or not all(isinstance(config, str) for config in configs):
        raise InputError(f"{path}: configs", f"must be a list of files, got {configs!r}", "list those of fit --config")
    return tuple(configs)


def _contents(path: Path, config: str) -> tuple[Mapping[str, Any], ...]:
    """What a config and those that it names hold."""
    if not Path(located(config)).is_file():
        fix = "paths are those from the folder that the command runs in"
        raise InputError(f"{path}: config {config}", "no such file", fix)
    return tuple(unfolded(content) for _, content in configs_of(config))


def _method_name(configs: Sequence[str], contents: Sequence[Sequence[Mapping[str, Any]]]) -> str:
    """The name of the config that chooses the method, directly or through one that it names, or else of the last."""
    for config, of_one in zip(configs, contents, strict=True):
        if any(map(chooses_method, of_one)):
            return Path(config).stem
    return Path(configs[-1]).stem


def _points(path: Path, content: Mapping[str, Any]) -> list[Point]:
    method, parameters = content.get("method", "grid"), content.get("parameters")
    if method not in ("grid", "list", "random", "tpe"):
        raise InputError(f"{path}: method", f"must be grid, list, random or tpe, got {method!r}", "choose one")
    if method not in ("random", "tpe"):
        for key in ("seed", "num_runs"):
            if key in content:
                raise InputError(f"{path}: {key}", f"has no effect on method {method}", "leave it out")
    where = f"{path}: parameters"
    if method == "list":
        points = parameters if isinstance(parameters, list) else []
        if not points or not all(isinstance(point, dict) and point for point in points):
            rule = f"must be a list of mappings of config keys, got {parameters!r}"
            raise InputError(where, rule, "list at least one point")
        return _unlike(where, points)
    if not isinstance(parameters, dict) or not parameters:
        raise InputError(where, f"must map config keys to values, got {parameters!r}", "name at least one key")
    if method == "grid":
        lists = [_values(f"{where}.{key}", values) for key, values in parameters.items()]
        _check_number(where, math.prod(map(len, lists)))
        return [dict(zip(parameters, values, strict=True)) for values in itertools.product(*lists)]
    return _drawn(path, content, parameters)


def _values(where: str, values: Any) -> list[Any]:
    if not isinstance(values, list) or not values:
        raise InputError(where, f"must be a list of values, got {values!r}", "list at least one")
    return _unlike(where, values)


def _unlike(where: str, values: list[Any]) -> list[Any]:
    """The values, once it is known that no two are alike."""
    texts = [_plain_text(where, value) for value in values]
    twice = [text for text, count in Counter(texts).items() if count > 1]
    if twice:
        raise InputError(where, f"holds {twice[0]} twice", "leave one out")
    return values


def _plain_text(where: str, value: Any) -> str:
    """A value as JSON, which has no dates, binary data or sets, and no keys but names."""
    try:
        return json.dumps(value, sort_keys=True)
    except TypeError as error:
        raise InputError(where, f"{value!r} cannot be given to fit", "put a date or a key in quotes") from error


def _drawn(path: Path, content: Mapping[str, Any], parameters: Mapping[str, Any]) -> list[Point]:
    num_runs, seed = content.get("num_runs"), content.get("seed", 0)
    if not isinstance(num_runs, int) or isinstance(num_runs, bool) or num_runs < 1:
        raise InputError(f"{path}: num_runs", f"must be an integer >= 1, got {num_runs!r}", "say how many to draw")
    _check_number(f"{path}: num_runs", num_runs)
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise InputError(f"{path}: seed", f"must be an integer, got {seed!r}", "try 0")
    for key, source in parameters.items():
        where = f"{path}: parameters.{key}"
        if isinstance(source, dict):
            _check_range(where, source)
        else:
            _values(where, source)
    return [
        # A text seeds alike on every machine and Python.
        {key: _draw(source, random.Random(f"{seed}/{index}/{key}").random()) for key, source in parameters.items()}
        for index in range(num_runs)
    ]


def _check_number(where: str, num_points: int) -> None:
    if num_points > MAX_POINTS:
        what = f"makes {num_points} points, more than {MAX_POINTS}"
        raise InputError(where, what, "vary less, or draw fewer points with method: random")


def _check_range(where: str, source: Mapping[str, Any]) -> None:
    _check_keys(where, source, _RANGE_KEYS)
    low, high, whole = source.get("low"), source.get("high"), source.get("int", False)
    for name, end in (("low", low), ("high", high)):
        if not is_number(end) or not math.isfinite(end):  # type: ignore[arg-type]
            raise InputError(f"{where}.{name}", f"must be a number, got {end!r}", "give both low and high, or a list")
        if whole is True and end != int(end):  # type: ignore[arg-type]
            raise InputError(f"{where}.{name}", f"must be an integer with int: true, got {end!r}", "round it")
    for name in ("log", "int"):
        if not isinstance(source.get(name, False), bool):
            raise InputError(f"{where}.{name}", f"must be true or false, got {source[name]!r}", "choose one")
    if low >= high:  # type: ignore[operator]
        raise InputError(where, f"low must be < high, got {low!r} and {high!r}", "exchange them")
    if source.get("log") and low <= 0:  # type: ignore[operator]
        raise InputError(f"{where}.low", f"must be > 0 with log: true, got {low!r}", "give the smallest value to try")


def _draw(source: Any, share: float) -> Any:
    """The value at a share, in [0, 1), of a list or a range; numbers have six digits."""
    if isinstance(source, list):
        return source[int(share * len(source))]
    low, high, width = source["low"], source["high"], int(source.get("int", False))
    if source.get("log"):
        value = math.exp(math.log(low) + share * (math.log(high + width) - math.log(low)))
    else:
        value = low + share * (high + width - low)
    if width:
        return min(max(math.floor(value), int(low)), int(high))
    return min(max(float(f"{value:.6g}"), float(low)), float(high))


def _check_point(where: str, point: Point) -> None:
    for key in point:
        if not isinstance(key, str) or not re.fullmatch(r"\w+(\.\w+)*\+?", key):
            raise InputError(
                where, f"{key!r} is no config key", "write it as model.init_args.loss.init_args.temperature"
            )
        if any(key == own or key.startswith(f"{own}.") or key == f"{own}+" for own in OWN_KEYS):
            raise InputError(where, f"{key} is what a sweep gives every run itself", "leave it out")


def _metric(path: Path, given: Any) -> Metric:
    where = f"{path}: metric"
    if not isinstance(given, dict):
        raise InputError(where, f"must be a mapping, got {given!r}", f"it takes {', '.join(_METRIC_KEYS)}")
    _check_keys(where, given, _METRIC_KEYS)
    for key, choices in (("mode", ("max", "min")), ("value", ("last", "best"))):
        if given.get(key, choices[0]) not in choices:
            raise InputError(f"{where}.{key}", f"must be {' or '.join(choices)}, got {given[key]!r}", "choose one")
    if not isinstance(given.get("column", ""), str):
        raise InputError(f"{where}.column", f"must be a name, got {given['column']!r}", "name one of metrics.csv")
    return Metric(**given)
