"""Configs and the parser of all commands: jsonargparse with one-line errors, boolean flags and configs read once."""

import csv
import inspect
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from keyword import iskeyword
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NoReturn, TypeVar

import yaml
from jsonargparse import (  # type: ignore[attr-defined]
    ActionConfigFile,
    ActionYesNo,
    ArgumentParser,
    Namespace,
    get_loader,
)

from embeddings.cli.errors import ConfigError
from embeddings.common import InputError, UserError
from embeddings.common.class_paths import VARIABLE, may_import, named_function, refused_path, trust_hint
from embeddings.common.errors import CHECKOUT, PACKAGE, shown
from embeddings.common.io import check_regular
from embeddings.common.text import one_line

FOLDER = "lightning_configs"
# The library's configs: in the top folder of a checkout, or inside the installed package.
CONFIGS = (CHECKOUT or PACKAGE) / FOLDER
RECIPES = f"{FOLDER}/recipes.csv"

# A value of `--config` that names a file; anything else is the config's text.
_FILE_NAME = re.compile(r"[^{\n]+")

# A config as written: its path, or its text, and its content.
Config = tuple[str, dict[str, Any]]
Item = TypeVar("Item")


def listed(value: Item | list[Item] | None) -> list[Item]:
    """The values of an option that takes one or several."""
    return [] if value is None else value if isinstance(value, list) else [value]


def located(path: str) -> str:
    """The path of a config: as written, or else inside the library, so that `lightning_configs/…` works anywhere."""
    in_library = CONFIGS.parent / path
    is_library_name = Path(path).parts[:1] == (FOLDER,) and not _is_file(path)
    return str(in_library) if is_library_name and in_library.is_file() else path


def read_recipes() -> dict[str, dict[str, str]]:
    """The rows of the recipe table by name; an empty value means that it was not measured."""
    with open(located(RECIPES), encoding="utf-8", newline="") as file:
        return {row["recipe"]: row for row in csv.DictReader(file)}


def expand_recipe(argv: Sequence[str]) -> list[str]:
    """Replace `--recipe NAME` by the `--config` options of that row; other arguments keep their order."""
    position = next((index for index, word in enumerate(argv) if re.match("--recipe(=|$)", word)), None)
    if position is None:
        return list(argv)
    name, *rest = [*argv[position].split("=", 1)[1:], *argv[position + 1 :]] or [""]
    recipes = read_recipes()
    if name not in recipes:
        near = get_close_matches(name, recipes, n=3)
        guess = f"did you mean {' or '.join(near)}? " if near else ""
        hint = f"{guess}{RECIPES} lists {'all' if near else ', '.join(recipes)}"
        raise ConfigError(f"there is no recipe {shown(name)}; {one_line(hint, 220)}")
    configs = [word for config in recipes[name]["configs"].split() for word in ("--config", config)]
    return [*argv[:position], *configs, *rest]


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
    """The class name, without modules, of a callback or logger in a config, parsed or not."""
    path = part.get("class_path") if isinstance(part, Mapping | Namespace) else part
    return str(path).rpartition(".")[2]


def plain_key(key: str) -> str:
    """A key without the parts that the command line does not need, so that all its spellings are equal."""
    return re.sub(r"\.(init_args|class_path)\b", "", key).replace("-", "_")


def unfolded(value: Any) -> Any:
    """The value with each dotted key (`a.b`) expanded to nested mappings."""
    if isinstance(value, list):
        return [unfolded(element) for element in value]
    if not isinstance(value, Mapping):
        return value
    nested: dict[str, Any] = {}
    for key, content in value.items():
        first, _, rest = str(key).partition(".")
        nested[first] = _merged(nested.get(first), unfolded({rest: content} if rest else content))
    return nested


def _merged(earlier: Any, later: Any) -> Any:
    if not (isinstance(earlier, dict) and isinstance(later, dict)):
        return later
    return {**earlier, **{key: _merged(earlier.get(key), value) for key, value in later.items()}}


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
        json.dumps(content)
        repeated = next(_repeated_keys(yaml.compose(text, Loader=yaml.SafeLoader)), None)
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise InputError(where, f"not a YAML file: {error.problem}{line}", "correct the line") from error
    except (yaml.YAMLError, KeyError, RecursionError, TypeError, ValueError) as error:
        # A value that JSON does not have, an alias that contains itself, or a number of too many digits.
        raise InputError(where, f"not a YAML file: {one_line(str(error), 200)}", "correct the line") from error
    if repeated is not None:
        what = f"has the key {repeated.value} a second time in line {repeated.start_mark.line + 1}"
        raise InputError(where, what, "merge the two, because YAML keeps only the last")
    return content


def _repeated_keys(node: Any) -> Iterator[yaml.Node]:
    """The keys that equal an earlier key of their mapping."""
    if isinstance(node, yaml.MappingNode):
        keys = [key for key, _ in node.value]
        names = [key.value for key in keys]
        yield from (key for index, key in enumerate(keys) if key.value in names[:index])
    for child in node.value if isinstance(node, yaml.CollectionNode) else ():
        for part in child if isinstance(child, tuple) else (child,):
            yield from _repeated_keys(part)


CONFIG_HELP = "a YAML file of these options; several are merged from left to right"

_KEY = re.compile(r'Parser key "([^"]+)":\s*')
_EXPECTED = re.compile(r"Expected an? (.+)", re.DOTALL)
_CALLABLE = re.compile(r"^\s*Type .*? expects a function or a callable class: (.*?)\. Got value: .*", re.DOTALL)
_CLASS = re.compile(r"Problem with given class_path '([^']+)':\s*")
_UNKNOWN = re.compile(r"unrecognized arguments: (--[^\s=]+)|(?:Option|accept option) '([^']+)'")


# Names of keys in other tools, and our names for them.
_OTHER_NAMES = {"learning_rate": "lr", "epochs": "max_epochs", "per_device_train_batch_size": "batch_size"}
# Options of Lightning and jsonargparse, whose names their users know.
_LIBRARY_NAMES = ("ckpt_path", "print_config", "print_shtab", "seed_everything", "weights_only")


class ReplacingConfigFile(ActionConfigFile):
    """A config whose lists replace earlier ones; `name+:` still appends.

    jsonargparse merges the elements of two lists of equal length one by one: a second `sources` would inherit the
    instructions of the first.
    """

    def __call__(self, parser: Any, cfg: Any, values: Any, option_string: str | None = None) -> None:
        for path, content in read_configs(str(values)):
            parser.add_config(path, content)
            forget_lists(cfg, content)
            super().__call__(parser, cfg, json.dumps(content), option_string)  # type: ignore[no-untyped-call]


def forget_lists(earlier: Namespace, later: Mapping[str, Any]) -> None:
    """Empty each list of `earlier` that `later` sets too."""
    for key, value in later.items():
        owner = earlier
        if key not in owner and isinstance(owner.get("init_args"), Namespace):
            owner = owner["init_args"]  # `later` has only arguments of a class that `earlier` chose
        previous = owner.get(key)
        if isinstance(value, list | str) and isinstance(previous, list):
            owner[key] = []
        elif isinstance(value, dict) and isinstance(previous, Namespace):
            forget_lists(previous, value)


class OneLineParser(ArgumentParser):
    """A parser with one-line errors, boolean flags, no abbreviations, and null only where the type allows it.

    Options are spelled with hyphens (`--vector-format`), and accepted with underscores too.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # The arguments that are parsed, and the configs that were read so far.
        self.words: list[str] = []
        self.configs: list[Config] = []
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def parse_args(self, args: Sequence[str] | None = None, *rest: Any, **kwargs: Any) -> Namespace:  # type: ignore[override]
        if args is not None and "namespace" in kwargs:
            # One option of a nested class: jsonargparse writes its null as the text `None`.
            args = [f"{word.removesuffix('=None')}=null" if word.endswith("=None") else word for word in args]
        self.words = list(args or [])
        return super().parse_args(args, *rest, **kwargs)

    def add_config(self, path: str, content: dict[str, Any]) -> None:
        """Note a config before it is merged; a subclass may refuse it."""
        self.configs.append((path, content))

    def check_functions(self, parsed: Any) -> None:
        """Refuse configs and options that name a function."""
        path = named_function(parsed, repr([self.words, self.configs]))
        if path is not None:
            hint = f"name a class, or trust its package by {VARIABLE}"
            raise UserError(f"a config may not name the function {path}; {hint}")

    def add_argument(self, *args: Any, **kwargs: Any) -> Any:
        """Add an argument; a boolean of a command becomes `--name` and `--no-name`."""
        name = args[0].removeprefix("--").rstrip("_")
        if kwargs.get("action") in (ActionConfigFile, "config"):
            kwargs |= {"action": ReplacingConfigFile, "help": CONFIG_HELP}
        elif iskeyword(name):  # an option may have this name, but a Python parameter may not
            args, kwargs = (f"--{name}",), {**kwargs, "dest": args[0].removeprefix("--"), "metavar": name.upper()}
        elif args[0].startswith("--") and "." not in name:
            args = (args[0] if name in _LIBRARY_NAMES else args[0].replace("_", "-"), *args[1:])
            if kwargs.get("type") is bool:
                kwargs = {**kwargs, "action": ActionYesNo(no_prefix="no-")}
                del kwargs["type"]
        return super().add_argument(*args, **kwargs)

    def validate(self, namespace: Namespace, skip_unset: bool = True, **kwargs: Any) -> None:
        """Check null values too, which jsonargparse skips, except positional arguments that are left out."""
        checked = namespace.clone()
        for action in self._actions:
            if action.nargs == "?" and not action.option_strings and checked.get(action.dest) is None:
                del checked[action.dest]
        try:
            super().validate(checked, skip_unset=False, **kwargs)
        except Exception:
            # This names a missing option, if any. Checking it first would double the checks at each level of classes.
            super().validate(namespace, **kwargs)
            raise

    def _apply_actions(self, cfg: Any, parent_key: str = "", *args: Any, **kwargs: Any) -> Namespace:
        """Replace `{}` under an unknown name by null, which is refused: jsonargparse would drop an empty mapping."""
        parsed = super()._apply_actions(cfg, parent_key, *args, **kwargs)
        for key, value in list(parsed.items(branches=True)):
            name = f"{parent_key}.{key}".lstrip(".")
            if isinstance(value, Namespace) and not vars(value) and not self._accepts(name):
                parsed[key] = None
        return parsed

    def _is_path(self, option: str) -> bool:
        """Whether an option is a path: an empty one, as of an unset variable, would be the working folder."""
        return "pathlib.Path" in str(getattr(self._option_string_actions.get(option), "_typehint", ""))

    def _accepts(self, key: str) -> bool:
        """Whether a dotted key is an option, a group of options, or inside an option's value."""
        # An option whose value is a class has a second action, `.help`.
        names = {action.dest for action in self._actions if not action.dest.endswith(".help")}
        groups = {name for name in names if any(other.startswith(f"{name}.") for other in names)}
        is_inside = any(key.startswith(f"{name}.") for name in names - groups)
        return is_inside or any(f"{name}.".startswith(f"{key}.") for name in names)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise a one-line `ConfigError`; parsers nested inside types keep jsonargparse's exception."""
        if not self.exit_on_error:
            super().error(message, ex)
        cause: BaseException | None = ex
        while cause is not None:
            if isinstance(cause, UserError):
                raise cause
            cause = cause.__cause__
        options = re.findall(r"--[\w.-]+", self.format_help())
        keys = dict.fromkeys(key for _, content in self.configs for key in keys_of(content))
        raise ConfigError(explain(message, [option for option in options if option != "--help"], keys)) from ex

    def normalised(self, argv: Sequence[str]) -> list[str]:
        """The words with options as they are spelled here; words after `--` stay unchanged.

        `--top_k=3` becomes `--top-k=3`, and `--force=false` or `--force false` becomes `--no-force`.
        """
        spelled = {name.replace("_", "-"): name for name in self._option_string_actions}
        flags = {name for name, action in self._option_string_actions.items() if isinstance(action, ActionYesNo)}
        end = list(argv).index("--") if "--" in argv else len(argv)
        words: list[str] = []
        for word in argv[:end]:
            if word in ("true", "false") and words and words[-1] in flags:
                word = f"{words.pop()}={word}"
            name, equals, value = word.partition("=")
            if name.startswith("--"):
                name = spelled.get(name.replace("_", "-"), name)
            option = words[-1] if not word and words else name
            if not value and (equals or not word) and self._is_path(option):
                raise ConfigError(f"{option}: must not be empty; name a file or folder, or leave it out")
            if value in ("true", "false") and name in flags:
                words.append(name if value == "true" else f"--no-{name[2:]}")
            else:
                words.append(f"{name}{equals}{value}")
        return [*words, *argv[end:]]


def keys_of(content: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The full keys that a config (`unfolded`) sets, and all arguments of the classes that it chooses."""
    for name, value in content.items():
        key = f"{prefix}{name.removesuffix('+')}"
        if not isinstance(value, Mapping):
            yield key
            continue
        yield from keys_of(value, f"{key}.")
        if isinstance(value.get("class_path"), str):
            yield from (f"{key}.init_args.{argument}" for argument in _parameters(value["class_path"]))


def explain(message: str, options: Iterable[str], keys: Iterable[str] = ()) -> str:
    """A parser's message as one line with a hint; for an unknown option, the hint names similar `options` or `keys`."""
    line = reason(message)
    owner = _CLASS.search(line)
    if owner is not None:
        options, line = _parameters(owner[1]), _CLASS.sub("", line)
    unknown = _UNKNOWN.search(line)
    if unknown is None:
        return with_hint(line)
    name = unknown[1] or unknown[2]
    prefix = "" if unknown[1] or owner else "--"
    last = _OTHER_NAMES.get(name.strip("-").rpartition(".")[2], name.strip("-").rpartition(".")[2])
    # The keys include an unknown key of a config itself, so they are used for command-line options only.
    candidates = [*(f"--{key}" for key in keys), *options] if unknown[1] else []
    same_last = [option for option in dict.fromkeys(candidates) if option.rpartition(".")[2] == last]
    longer = [option for option in dict.fromkeys(options) if option.startswith(prefix + name)]
    matches = (longer or same_last)[:4] or get_close_matches(prefix + name, list(options), n=1)
    where = f" by {owner[1].rpartition('.')[2]}" if owner else ""
    if prefix:  # a key of a config, which has underscores
        matches = [option.removeprefix(prefix).replace("-", "_") for option in matches]
    guess = f"did you mean {' or '.join(matches)}? " if matches else ""
    return f"{line}{where}; {guess}--help lists the options"


def with_hint(line: str) -> str:
    """A library's message, with a hint added if it has none."""
    if "expected " in line[:200]:
        return f"{one_line(line, 220)}; --help describes each option"
    if "; " in line:
        return line
    return f"{one_line(line, 220).rstrip('.')}; --help lists the options"


def reason(message: str) -> str:
    """The reason inside a parser's message, after the full key of the option.

    For a value that matches none of several types it is the list of types if each complaint only names a type, or else
    the first type's complaint.
    """
    keys: list[str] = []
    refused = refused_path(message)
    while "Errors:" in message:
        head, _, tail = message.partition("Errors:")
        complaints = _complaints(tail)
        if not complaints:
            break
        keys += _KEY.findall(head)
        if all(_EXPECTED.match(complaint) for complaint in complaints):
            given = re.search(r"Given value: (.*?)(?:\. Got value: Namespace.*)?$", tail, re.MULTILINE)
            message = f"expected {_types(complaints)}" + (f", got {given[1]}" if given else "")
            break
        message = complaints[0]
    keys = [key for key in [*keys, *_KEY.findall(message)] if key != "config"]
    message = _CALLABLE.sub(r"\1", _KEY.split(message)[-1])
    single = re.match(r"\s*Expected an? (.*?)\. Got value: (.*?)(?:\. Got value: .*)?$", message, re.DOTALL)
    if single is not None:
        message = f"expected {_types([f'Expected a {single[1]}'])}, got {'null' if single[2] == 'None' else single[2]}"
    if refused is not None:
        message = f"a config may not name {refused}; {trust_hint(refused)}"
    return f"{'.'.join(keys)}: {message.strip()}" if keys else message


def _complaints(tail: str) -> list[str]:
    indent = re.match(r"\n(\s*)- ", tail)
    if indent is None:
        return []
    body = re.split(rf"\n{indent[1][:-2]}Given value", tail)[0]
    return [part.strip() for part in body.split(f"\n{indent[1]}- ")[1:]]


def _types(complaints: Iterable[str]) -> str:
    names = []
    for complaint in complaints:
        name = re.sub(r"^Expected an? |\. Got value: .*", "", complaint)
        name = re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", name)
        name = re.sub(r"typing\.Literal\[(.*)\]", r"\1", name)
        if not name.startswith("dot import path"):
            names.append("null" if name == "NoneType" else name)
    # Only null or an import path fits: the option's value is a class.
    return one_line(" or ".join(names), 100) if set(names) - {"null"} else "the name of a class"


def _parameters(class_path: str) -> list[str]:
    """The arguments of the class at an import path; empty if it cannot or may not be imported."""
    try:
        return list(inspect.signature(resolve_name(class_path)).parameters) if may_import(class_path) else []
    except (ImportError, AttributeError, TypeError, ValueError):
        return []
