"""Reading of a sweep file: its configs, its metric, and its points, which depend only on the file and on results."""

import itertools
import json
import math
import random
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from embeddings.cli.configs import chooses, configs_of, expand_recipe, located, read_yaml
from embeddings.cli.errors import ConfigError
from embeddings.cli.parser import OneLineParser
from embeddings.common import InputError
from embeddings.common.errors import require

Point = dict[str, Any]
Method = Literal["grid", "list", "random", "tpe"]
Kind = TypeVar("Kind")

SEED_KEY = "seed_everything"
# Each point becomes a folder and a table row; more are a mistake, and would not fit in memory.
MAX_POINTS = 100_000
# Keys that the sweep sets for each run.
OWN_KEYS = ("config", "ckpt_path", "trainer.default_root_dir", "trainer.logger")
# Optuna's default number of random points, before the sampler has enough results to model.
NUM_RANDOM = 10

# YAML reads a number without a decimal point before its exponent as text.
_EXPONENT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")
_CLASS_PATH = re.compile(r"(?:\w+\.)+[A-Z]\w*")


@dataclass(frozen=True)
class SweepFile:
    """The keys of a sweep file; `parameters` and `metric` are checked separately."""

    recipe: str | None = None
    configs: list[str] | None = None
    method: Method = "grid"
    parameters: Any = None
    num_runs: int | None = None
    seed: int | None = None
    metric: Any = None


@dataclass(frozen=True)
class Metric:
    """The metric that compares points: a column of `metrics.csv`, its direction, and which value of a run counts.

    The default is replaced by `train/loss` if no run has logged it.
    """

    column: str = "val/ndcg_at_10"
    mode: Literal["max", "min"] = "max"
    value: Literal["last", "best"] = "last"

    def rank(self, value: float | None) -> float:
        """A sort key: points from best to worst, then those without a value."""
        return math.inf if value is None else value if self.mode == "min" else -value


@dataclass(frozen=True)
class Range:
    """The range of a drawn value, both ends included."""

    low: float
    high: float
    log: bool = False
    int: bool = False


@dataclass(frozen=True)
class Search:
    """The search space of a sampler: for each config key a list of values or a range."""

    parameters: Mapping[str, Any]
    num_runs: int
    seed: int


@dataclass(frozen=True)
class Sweep:
    """A sweep file, read and checked.

    `recipe` names the runs' folders: the recipe, or the config that chooses the method. `contents` are the configs as
    mappings. In a search (`method: tpe`), `points` are those proposed so far; later ones depend on their results.
    """

    name: str
    recipe: str
    configs: tuple[str, ...]
    contents: tuple[Mapping[str, Any], ...]
    method: Method
    points: tuple[Point, ...]
    metric: Metric = field(default_factory=Metric)
    search: Search | None = None

    @property
    def num_points(self) -> int:
        """The number of points, including those that are not proposed yet."""
        return len(self.points) if self.search is None else self.search.num_runs

    @property
    def names(self) -> dict[str, str]:
        return short_names(self.points if self.search is None else [dict(self.search.parameters)])


def read_sweep(path: Path) -> Sweep:
    """Read a sweep file: a recipe or configs, and the parameters to vary.

    `method: grid` (the default) combines all values of the lists in `parameters`; the last one varies fastest. `list`
    uses the mappings that `parameters` lists. `random` draws `num_runs` points: uniformly from a list or from
    `{low, high}` (`log: true`: uniformly in the logarithm; `int: true`: integers, both ends included). `tpe` has the
    same keys, and proposes each point from the metric of earlier points (see `next_point`).

    Points depend on the file only, and a drawn value on (`seed`, index, key) only: more runs, or another parameter, do
    not change the other values.
    """
    file_path = Path(located(str(path)))
    if not file_path.is_file():
        raise InputError(str(path), "no such file", "give a sweep file, such as lightning_configs/sweeps/pooling.yaml")
    content = _with_numbers(read_yaml(file_path, str(path)))
    file = _parsed(SweepFile, content, str(path), ("parameters", "metric"))
    parameters, metric = content.get("parameters"), _parsed(Metric, content.get("metric", {}), f"{path}: metric")
    configs = _configs(path, file)
    config_contents = [[content for _, content in configs_of(config)] for config in configs]
    # The config that chooses the method, directly or through one that it includes.
    is_method = [any(chooses(content, "model") for content in included) for included in config_contents]
    recipe = file.recipe or Path(configs[is_method.index(True) if any(is_method) else -1]).stem
    points = tuple(_points(path, file, parameters))
    for index, point in enumerate(points):
        _check_point(f"{path}: point {index}", point)
    search = None
    if file.method == "tpe":
        # The random points were only for the checks.
        search, points = Search(parameters, file.num_runs or 0, file.seed or 0), ()
    contents = tuple(itertools.chain(*config_contents))
    return Sweep(path.stem, recipe, configs, contents, file.method, points, metric, search)


def _parsed(kind: type[Kind], content: Any, where: str, unread: Sequence[str] = ()) -> Kind:
    """A mapping of the file as a dataclass, parsed like a command line; the values of keys in `unread` are ignored."""
    if not isinstance(content, dict):
        raise InputError(where, f"must be a mapping, got {content!r}", "write it as KEY: VALUE")
    parser = OneLineParser()
    parser.add_class_arguments(kind, None)
    try:
        parsed = parser.parse_object({key: None if key in unread else value for key, value in content.items()})
        return kind(**vars(parsed))
    except (ConfigError, OverflowError) as error:
        # Replace the parser's hint, which is about the options of a command.
        keys = ", ".join(kind.__dataclass_fields__)  # type: ignore[attr-defined]
        raise ConfigError(f"{where}: {re.sub('--help .*', f'the keys are {keys}', str(error))}") from error


def next_point(search: Search, mode: Literal["max", "min"], tried: Sequence[tuple[Point, float | None]]) -> Point:
    """The next point of the tree-structured Parzen estimator, given the points tried so far with their values.

    Points are random until `NUM_RANDOM` have a value. With the same version of Optuna, the point depends only on the
    arguments. Numbers have six digits.

    Source: Bergstra et al. 2011, Algorithms for Hyper-Parameter Optimization, section 4, by Optuna's `TPESampler`.
    """
    optuna: Any = require("optuna", "optuna")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    # Optuna's choices must be texts or numbers, but values may be mappings, so they are passed as JSON.
    lists = {key for key, source in search.parameters.items() if isinstance(source, list)}
    ranges: dict[str, Any] = {}
    for key, source in search.parameters.items():
        if key in lists:
            ranges[key] = optuna.distributions.CategoricalDistribution([json.dumps(value) for value in source])
            continue
        kind = int if source.get("int") else float
        made = optuna.distributions.IntDistribution if kind is int else optuna.distributions.FloatDistribution
        ranges[key] = made(kind(source["low"]), kind(source["high"]), log=bool(source.get("log")))
    seed = random.Random(f"{search.seed}/{len(tried)}").getrandbits(31)
    sampler = optuna.samplers.TPESampler(n_startup_trials=NUM_RANDOM, seed=seed)
    study = optuna.create_study(direction=f"{mode}imize", sampler=sampler)
    for point, value in tried:
        if value is not None:
            params = {key: json.dumps(content) if key in lists else content for key, content in point.items()}
            study.add_trial(optuna.trial.create_trial(params=params, distributions=ranges, value=value))
    return {
        key: json.loads(value) if key in lists else _in_range(value, search.parameters[key])
        for key, value in study.ask(ranges).params.items()
    }


def short_names(points: Sequence[Point]) -> dict[str, str]:
    """A short name for each key: as few of its last parts as make it unique."""
    keys = list(dict.fromkeys(key for point in points for key in point))
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
    return json.dumps(value, default=str)


def is_number(value: Any) -> bool:
    """Whether a value is a number; YAML's true and false are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _with_numbers(value: Any) -> Any:
    """The value with texts such as 1e-5, which YAML does not read as numbers, as numbers."""
    if isinstance(value, dict):
        return {key: _with_numbers(content) for key, content in value.items()}
    if isinstance(value, list):
        return [_with_numbers(element) for element in value]
    return float(value) if isinstance(value, str) and _EXPONENT.fullmatch(value) else value


def _configs(path: Path, file: SweepFile) -> tuple[str, ...]:
    """The config files that a sweep file, or its recipe, lists."""
    if bool(file.recipe) == bool(file.configs):
        raise InputError(str(path), "needs either recipe or configs", "give a recipe, or a list of config files")
    configs = file.configs or expand_recipe(["--recipe", str(file.recipe)])[1::2]
    for config in configs:
        if not Path(located(config)).is_file():
            fix = "write the path relative to the current folder"
            raise InputError(f"{path}: config {config}", "no such file", fix)
    return tuple(configs)


def _points(path: Path, file: SweepFile, parameters: Any) -> Iterable[Point]:
    """The points of a sweep file; for a search those of `method: random`."""
    where, is_drawn = f"{path}: parameters", file.method in ("random", "tpe")
    for key, value in {"seed": file.seed, "num_runs": file.num_runs}.items():
        if value is not None and not is_drawn:
            raise InputError(f"{path}: {key}", f"has no effect on method {file.method}", "leave it out")
    if file.method == "list":
        points: list[Point] = parameters if isinstance(parameters, list) else []
        if not points or not all(isinstance(point, dict) and point for point in points):
            rule = f"must be a list of mappings of config keys, got {parameters!r}"
            raise InputError(where, rule, "list at least one point")
        _check_values(where, points)
        return points
    if not isinstance(parameters, dict) or not parameters:
        raise InputError(where, f"must map config keys to values, got {parameters!r}", "give at least one key")
    for key, source in parameters.items():
        check = _check_range if is_drawn and isinstance(source, dict) else _check_values
        check(f"{where}.{key}", source)
    number = math.prod(map(len, parameters.values()))
    if is_drawn:
        where, number = f"{path}: num_runs", file.num_runs or 0
        if number < 1:
            raise InputError(where, f"must be an integer >= 1, got {file.num_runs!r}", "give the number of points")
    if number > MAX_POINTS:
        fix = "vary fewer values, or draw fewer points with method: random"
        raise InputError(where, f"makes {number} points, more than {MAX_POINTS}", fix)
    if not is_drawn:
        return (dict(zip(parameters, values, strict=True)) for values in itertools.product(*parameters.values()))
    seed = file.seed or 0
    return [
        # Seeds that are texts give the same numbers on all machines and Python versions.
        {key: _draw(source, random.Random(f"{seed}/{index}/{key}").random()) for key, source in parameters.items()}
        for index in range(number)
    ]


def _check_values(where: str, values: Any) -> None:
    """Check that a list of values has no duplicates and can be written as JSON."""
    if not isinstance(values, list) or not values:
        raise InputError(where, f"must be a list of values, got {values!r}", "list at least one")
    texts = Counter[str]()
    for value in values:
        try:
            texts[json.dumps(value, sort_keys=True)] += 1
        except TypeError as error:  # a date, binary data, a set, or a key that is not text
            raise InputError(where, f"{value!r} cannot be passed to fit", "put a date or a key in quotes") from error
    ((text, count),) = texts.most_common(1)
    if count > 1:
        raise InputError(where, f"contains {text} twice", "leave one out")


def _check_range(where: str, source: dict[str, Any]) -> None:
    drawn = _parsed(Range, source, where)
    if vars(drawn) | source != vars(drawn):
        raise InputError(where, f"must contain numbers, true or false, got {source}", "leave the quotes out")
    if not -math.inf < drawn.low < drawn.high < math.inf:
        raise InputError(where, f"low must be < high, and both finite, got {drawn.low} and {drawn.high}", "change them")
    if drawn.int and not (drawn.low.is_integer() and drawn.high.is_integer()):
        raise InputError(where, f"int: true needs integers, got {drawn.low} and {drawn.high}", "round them")
    if drawn.log and drawn.low <= 0:
        raise InputError(f"{where}.low", f"must be > 0 with log: true, got {drawn.low}", "give a positive value")


def _draw(source: Any, share: float) -> Any:
    if isinstance(source, list):
        return source[int(share * len(source))]
    low, high, width = source["low"], source["high"], int(source.get("int", False))
    if source.get("log"):
        value = math.exp(math.log(low) + share * (math.log(high + width) - math.log(low)))
    else:
        value = low + share * (high + width - low)
    return _in_range(math.floor(value) if width else value, source)


def _in_range(value: float, source: Mapping[str, Any]) -> float:
    """A number clipped to its range; six digits unless it is an integer."""
    kind = type(value)
    return min(max(kind(value if kind is int else f"{value:.6g}"), kind(source["low"])), kind(source["high"]))


def _check_point(where: str, point: Point) -> None:
    for key in point:
        if not isinstance(key, str) or not re.fullmatch(r"\w+(\.\w+)*\+?", key):
            fix = "write it as model.init_args.loss.init_args.temperature"
            raise InputError(where, f"{key!r} is not a config key", fix)
        if any(key == own or key.startswith(f"{own}.") or key == f"{own}+" for own in OWN_KEYS):
            raise InputError(where, f"{key} is set by the sweep for each run", "leave it out")
