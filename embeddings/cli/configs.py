"""Config files: reading them, checking how they combine, and expanding recipes."""

import csv
import json
import os
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import get_loader

from embeddings.cli.errors import ConfigError
from embeddings.common import InputError
from embeddings.common.errors import CHECKOUT, PACKAGE, shown
from embeddings.common.io import check_regular
from embeddings.common.text import one_line

FOLDER = "lightning_configs"
# The library's configs: in the top folder of a checkout, or inside the installed package.
CONFIGS = (CHECKOUT or PACKAGE) / FOLDER
RECIPES = f"{FOLDER}/recipes.csv"

# A value of `--config` that names a file; anything else is the config's text.
_FILE_NAME = re.compile(r"[^{\n]+")
_INVALID_CHARACTER = re.compile(r"\\u0000|[\ud800-\udfff]")
_NO_SPACE = re.compile(r"([\w.]+):(\S+)")

# A config as written: its path, or its text, and its content.
Config = tuple[str, dict[str, Any]]


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


def check_configs(configs: Sequence[Config], argv: Sequence[str]) -> None:
    """Refuse a second config that chooses a method, and a config that drops callbacks of an earlier one.

    Without this check the second method would silently inherit nested arguments of the first, and the run would
    silently lose its checkpoints.
    """
    chosen = [path for path, content in configs if chooses(content, "model")]
    if len(chosen) > 1:
        raise ConfigError(f"{chosen[0]} and {chosen[1]} both choose model.class_path; give only one method config")
    for part in ("model", "data"):
        if any(re.match(rf"--{part}(\.class_path)?(=|$)", word) for word in argv):
            continue
        first = next((config for config in configs if config[1].get(part)), None)
        if first is not None and not chooses(first[1], part):
            what = f"sets {part}.{next(iter(first[1][part]))} before any config chooses {part}.class_path"
            raise ConfigError(f"{first[0]}: {what}; give the config that chooses it first")
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


def read_configs(path: str, including: Sequence[str] = ()) -> list[Config]:
    """A config, `unfolded`, after the one that it includes under `config:`, relative to its own folder."""
    path = located(path)
    if path in including:
        raise InputError(f"--config {path}", "includes itself", "remove its config: key")
    content = unfolded(read_config(path))
    included = content.pop("config", None)
    if included is None:
        return [(path, content)]
    if not isinstance(included, str):
        raise InputError(f"--config {path}", "config: must be one file", "give more files by --config options")
    is_path = _is_file(path) and _FILE_NAME.fullmatch(included)
    other = os.path.normpath(Path(path).parent / included) if is_path else included
    return [*read_configs(other, [*including, path]), (path, content)]


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
    """The content of a YAML text, read as by the parser: `1e-5` is a number, and a date is text."""
    try:
        content = get_loader("yaml")(text)
        plain = json.dumps(content, ensure_ascii=False)
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise InputError(where, f"not a YAML file: {error.problem}{line}", "correct the line") from error
    except (yaml.YAMLError, KeyError, TypeError, ValueError) as error:
        # A value that JSON does not have, an alias that contains itself, or a number of too many digits.
        raise InputError(where, f"not a YAML file: {one_line(str(error), 200)}", "correct the line") from error
    except RecursionError:
        raise InputError(where, "is nested too deeply", "flatten it") from None
    if _INVALID_CHARACTER.search(plain):
        raise InputError(where, "contains a NUL character or an unpaired surrogate", "remove it")
    check_colons(content, where)
    return content


def check_colons(value: Any, where: str) -> None:
    """Refuse `{rank:4}`, which YAML reads as the key `rank:4` without a value."""
    if isinstance(value, list):
        for element in value:
            check_colons(element, where)
    elif isinstance(value, dict):
        for key, content in value.items():
            found = _NO_SPACE.fullmatch(str(key))
            if found and content is None:
                what = f"{{{key}}} has no space after the colon"
                raise InputError(where, what, f"write {{{found[1]}: {found[2]}}}")
            check_colons(content, where)
