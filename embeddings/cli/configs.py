"""Config files: reading their YAML safely, checking how they combine, and expanding recipes."""

import csv
import os
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from embeddings.cli.errors import ConfigError
from embeddings.common import InputError, UserError
from embeddings.common.class_paths import VARIABLE, named_function
from embeddings.common.errors import CHECKOUT, PACKAGE, shown
from embeddings.common.io import check_regular
from embeddings.common.text import one_line

FOLDER = "lightning_configs"
# The library's configs: in the top folder of a checkout, or inside the installed package.
CONFIGS = (CHECKOUT or PACKAGE) / FOLDER
RECIPES = f"{FOLDER}/recipes.csv"
# Maximum number of values that come from YAML aliases: a few lines of nested aliases can expand to billions.
MAX_ALIASED_VALUES = 10_000

_NO_SPACE = re.compile(r"(\w[\w.]*):(\S+)")
_INVALID_CHARACTER = re.compile("[\0\ud800-\udfff]")
# A value of `--config` that names a file; anything else is the config's text.
_FILE_NAME = re.compile(r"[^{\n]+")


def check_functions(argv: Sequence[str], parsed: Any) -> None:
    """Refuse configs and options that name a function."""
    text = repr([*argv, *(content for path in config_paths(argv) for _, content in configs_of(path))])
    path = named_function(parsed, text)
    if path is not None:
        raise UserError(f"a config may not name the function {path}; name a class, or trust its package by {VARIABLE}")


def located(path: str) -> str:
    """The path of a config: as written, or else inside the library, so that `lightning_configs/…` works anywhere."""
    in_library = CONFIGS.parent / path
    is_library_name = Path(path).parts[:1] == (FOLDER,)
    return str(in_library) if is_library_name and not _is_file(path) and _is_file(str(in_library)) else path


def read_recipes() -> dict[str, dict[str, str]]:
    """The rows of the recipe table by name; an empty value means that it was not measured."""
    with open(located(RECIPES), encoding="utf-8", newline="") as file:
        return {row["recipe"]: row for row in csv.DictReader(file)}


def expand_recipe(argv: Sequence[str]) -> list[str]:
    """Replace `--recipe NAME` by the `--config` options of that row; other arguments keep their order."""
    position = next((index for index, word in enumerate(argv) if re.match("--recipe(=|$)", word)), None)
    if position is None:
        return list(argv)
    name, end = argv[position].partition("=")[2], position + 1
    if not name:
        if end == len(argv):
            raise ConfigError(f"--recipe needs a name; {RECIPES} lists them")
        name, end = argv[end], end + 1
    recipes = read_recipes()
    if name not in recipes:
        near = get_close_matches(name, recipes, n=3)
        guess = f"did you mean {' or '.join(near)}? " if near else ""
        hint = f"{guess}{RECIPES} lists {'all' if near else ', '.join(recipes)}"
        raise ConfigError(f"there is no recipe {shown(name)}; {one_line(hint, 220)}")
    configs = [word for config in recipes[name]["configs"].split() for word in ("--config", config)]
    return [*argv[:position], *configs, *argv[end:]]


def check_configs(argv: Sequence[str]) -> None:
    """Refuse two configs that choose a method, and a config that drops callbacks of an earlier one.

    Without this check the second method would silently inherit nested arguments of the first, and the run would
    silently lose its checkpoints.
    """
    configs = [config for path in config_paths(argv) for config in configs_of(path)]
    chosen = [path for path, content in configs if chooses(content, "model")]
    if len(chosen) > 1:
        raise ConfigError(f"{chosen[0]} and {chosen[1]} both choose model.class_path; give only one method config")
    for part in ("model", "data"):
        if not any(re.match(rf"--{part}(\.class_path)?(=|$)", word) for word in argv):
            _check_order(part, configs)
    callbacks: list[str] = []
    for path, content in configs:
        trainer = content.get("trainer")
        for key, value in trainer.items() if isinstance(trainer, Mapping) else ():
            names = [class_name(each) for each in (value if isinstance(value, list) else [value]) if each is not None]
            if key == "callbacks+":
                callbacks += names
            elif key == "callbacks":
                dropped = [name for name in callbacks if name not in names]
                if names and dropped:
                    hint = "write callbacks+: to add to them, or callbacks: [] above callbacks+: to drop them"
                    what = f"trainer.callbacks drops {', '.join(dropped)} of an earlier config"
                    raise ConfigError(f"{path}: {what}; {hint}")
                callbacks = names


def _check_order(part: str, configs: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    """Refuse a config that sets arguments of a class before any config chooses the class."""
    for position, (path, content) in enumerate(configs):
        if chooses(content, part):
            return
        if isinstance(value := content.get(part), Mapping) and value:
            later = next((path for path, content in configs[position + 1 :] if chooses(content, part)), None)
            other, first = (later, later) if later else ("any config", "one that does")
            what = f"sets {part}.{next(iter(value))} before {other} chooses {part}.class_path"
            raise ConfigError(f"{path}: {what}; give {first} first")


def chooses(content: Mapping[str, Any], part: str) -> bool:
    """Whether a config chooses the class of `model` or `data`."""
    value = content.get(part)
    return isinstance(value, str) or (isinstance(value, Mapping) and "class_path" in value)


def class_name(part: Any) -> str:
    """The class name, without modules, of a callback or logger in a config."""
    path = part.get("class_path") if isinstance(part, Mapping) else part
    return str(path).rpartition(".")[2]


def unfolded(value: Any) -> Any:
    """The value with each dotted key (`a.b`) expanded to nested mappings."""
    if isinstance(value, list):
        return [unfolded(element) for element in value]
    if not isinstance(value, Mapping):
        return value
    nested: dict[str, Any] = {}
    for key, content in value.items():
        first, _, rest = str(key).partition(".")
        inner, other = unfolded({rest: content} if rest else content), nested.get(first)
        nested[first] = {**other, **inner} if isinstance(inner, dict) and isinstance(other, dict) else inner
    return nested


def config_paths(argv: Sequence[str]) -> list[str]:
    """The values of `--config` (or `-c`), in order; `-cFILE` is `-c FILE`."""
    paths = []
    for word, following in zip(argv, [*argv[1:], ""], strict=False):
        if word in ("--config", "-c"):
            paths.append(following)
        elif joined := re.match("--config=|-c=?", word):
            paths.append(word[joined.end() :])
    return [path for path in paths if path]


def configs_of(path: str) -> list[tuple[str, dict[str, Any]]]:
    """A config and the configs that it includes under `config:`, each as (path, `unfolded` content).

    Included paths are relative to the including file. Two of them may not set the same mapping: the parser would drop
    the included one.
    """
    configs: list[tuple[str, dict[str, Any]]] = []
    path = located(path)
    while path not in (earlier for earlier, _ in configs):
        content = unfolded(read_config(path))
        for including, earlier in configs:
            for key, value in content.items():
                if isinstance(value, dict) and isinstance(earlier.get(key), dict):
                    what = f"sets {key}, so the {key} of {path}, which it includes, would be lost"
                    raise InputError(f"--config {including}", what, "give both by --config options, which are merged")
        configs.append((path, content))
        included = content.get("config")
        if included is None:
            return configs
        if not isinstance(included, str):
            raise InputError(f"--config {path}", "config: must be one file", "give more files by --config options")
        is_path = _is_file(path) and _FILE_NAME.fullmatch(included)
        path = os.path.normpath(Path(path).parent / included) if is_path else included
    raise InputError(f"--config {path}", "includes itself", "remove its config: key")


def read_config(path: str) -> dict[str, Any]:
    """The content of a config: a file, or the text itself."""
    where = f"--config {path}"
    if _is_file(path):
        content = read_yaml(path, where)
    elif _FILE_NAME.fullmatch(path):
        if os.path.exists(path):
            check_regular(path)
        raise InputError(where, "no such file", f"the library's configs are in {CONFIGS}")
    else:
        where = "--config"
        content = parse_yaml(path, where)
    if not isinstance(content, dict):
        raise InputError(where, "contains no options", "write them as OPTION: VALUE")
    return content


def _is_file(value: str) -> bool:
    try:
        return Path(value).is_file()
    except OSError:  # a config's text, too long for a file name
        return False


def read_yaml(path: str | Path, where: str) -> Any:
    """The content of a YAML file; `where` names it in an `InputError`."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(where, f"not a YAML file: byte {error.start + 1} is not UTF-8", "save it as UTF-8") from error
    except OSError as error:
        raise InputError(where, f"cannot be read ({error.strerror})", "check the path and its permissions") from error
    return parse_yaml(text, where)


def parse_yaml(text: str, where: str) -> Any:
    """The content of a YAML text: one document without custom tags, duplicate keys or too many aliased values."""
    try:
        return _PlainLoader(text, where).get_single_data()
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise InputError(where, f"not a YAML file: {error.problem}{line}", "correct the line") from error
    except yaml.YAMLError as error:
        raise InputError(where, f"not a YAML file: {str(error).splitlines()[0]}", "correct the line") from error
    except RecursionError:
        raise InputError(where, "is nested too deeply, or an alias contains itself", "flatten it") from None


def check_colon(pair: str, where: str) -> None:
    """Refuse `rank:4` inside braces, which YAML reads as the key `rank:4` without a value."""
    if found := _NO_SPACE.fullmatch(pair):
        raise InputError(where, f"{{{pair}}} has no space after the colon", f"write {{{found[1]}: {found[2]}}}")


class _PlainLoader(yaml.SafeLoader):
    """The safe loader, which also refuses duplicate keys and more than `MAX_ALIASED_VALUES` aliased values."""

    def __init__(self, text: str, where: str) -> None:
        self.where = where
        # The number of values so far, of those from aliases, and of those inside each node.
        self.num_values = self.num_aliased = 0
        self.sizes: dict[yaml.Node | None, int] = {}
        super().__init__(text)

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        is_alias, before = self.check_event(yaml.AliasEvent), self.num_values
        node = super().compose_node(parent, index)
        if is_alias:
            if node not in self.sizes:
                raise RecursionError
            self.num_values += self.sizes[node]
            self.num_aliased += self.sizes[node]
            if self.num_aliased > MAX_ALIASED_VALUES:
                what = f"its aliases expand to more than {MAX_ALIASED_VALUES:,} values"
                raise InputError(self.where, what, "write out their values")
            return node
        self.num_values += 1
        self.sizes[node] = self.num_values - before
        if isinstance(node, yaml.MappingNode):
            if node.flow_style:
                self._check_colons(node)
            lines: dict[tuple[str, str], int] = {}
            for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"):
                name, line = (key.tag, key.value), key.start_mark.line + 1
                if name in lines:
                    what = f"the key {key.value!r} occurs twice, in lines {lines[name]} and {line}"
                    raise InputError(self.where, what, "keep one of them")
                lines[name] = line
        elif isinstance(node, yaml.ScalarNode) and (found := _INVALID_CHARACTER.search(node.value)):
            problem = "a NUL character" if found[0] == "\0" else "an unpaired surrogate"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        return node

    def _check_colons(self, node: yaml.MappingNode) -> None:
        """Refuse `{rank:4}`, which is the key `rank:4` without a value."""
        for key, value in node.value:
            is_alone = isinstance(value, yaml.ScalarNode) and (value.value, value.style) == ("", None)
            if is_alone and isinstance(key, yaml.ScalarNode) and key.style is None:
                check_colon(key.value, f"{self.where}: line {key.start_mark.line + 1}")

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (yaml.YAMLError, RecursionError):
            raise
        except Exception as error:  # an impossible date, or a number with too many digits
            what = f"{shown(node.value, 30)} is not a valid {node.tag.rpartition(':')[2]}"
            detail = f" ({str(error).partition(';')[0]})" if isinstance(error, ValueError) else ""
            raise yaml.MarkedYAMLError(problem=what + detail, problem_mark=node.start_mark) from error
