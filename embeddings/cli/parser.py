"""The parser of all commands: jsonargparse with one-line errors, boolean flags and safely read configs."""

import inspect
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from keyword import iskeyword
from pkgutil import resolve_name
from typing import Any, NoReturn

from jsonargparse import ActionConfigFile, ActionYesNo, ArgumentParser, Namespace  # type: ignore[attr-defined]

from embeddings.cli.configs import Config, check_colons, read_configs
from embeddings.cli.errors import ConfigError
from embeddings.common import UserError
from embeddings.common.class_paths import VARIABLE, may_import, named_function, refused_path, trust_hint
from embeddings.common.text import one_line

CONFIG_HELP = "a YAML file of these options; several are merged from left to right"

# A word between braces or commas.
_PAIR = re.compile(r"(?<=[{,])\s*([^\s{}\[\],'\"]+)\s*(?=[,}])")
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
        self.words = list(args or [])
        for previous, word in zip(["", *self.words], self.words, strict=False):
            name, _, value = word.partition("=") if word.startswith("--") else (previous, "", word)
            if name.startswith("--") and value.startswith(("{", "[")):
                check_colons(dict.fromkeys(_PAIR.findall(value)), name)
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

    def _apply_actions(self, cfg: Any, *args: Any, **kwargs: Any) -> Namespace:
        """Replace `{}` under an unknown name by null, which is refused: jsonargparse would drop an empty mapping."""
        cfg = Namespace(cfg) if isinstance(cfg, dict) else cfg  # type: ignore[no-untyped-call]
        for key in _empty_keys(cfg):
            if not self.accepts(key):
                cfg[key] = None
        return super()._apply_actions(cfg, *args, **kwargs)

    def accepts(self, key: str) -> bool:
        """Whether a dotted key is an option, a group of options, or inside an option's value."""
        # An option whose value is a class has a second action, `.help`.
        names = {action.dest for action in self._actions if not action.dest.endswith(".help")}
        groups = {name for name in names if any(other.startswith(f"{name}.") for other in names)}
        parts = any(key.startswith(f"{name}.") for name in names - groups)
        return key in names or parts or any(name.startswith(f"{key}.") for name in names)

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
        """The words with options as they are spelled here, and flags without values; words after `--` stay unchanged.

        `--top_k=3` becomes `--top-k=3`, `--force true` becomes `--force`, and `--force false` becomes `--no-force`.
        """
        spelled = {name.replace("_", "-"): name for name in self._option_string_actions}
        flags = {name for name, action in self._option_string_actions.items() if isinstance(action, ActionYesNo)}
        end = list(argv).index("--") if "--" in argv else len(argv)
        words: list[str] = []
        flag = ""  # the previous word, if it is a boolean flag that a value may follow
        for word in argv[:end]:
            name, equals, value = word.partition("=")
            if name.startswith("--"):
                name = spelled.get(name.replace("_", "-"), name)
            if flag and word in ("true", "false"):
                name, value = words.pop(), word
            flag = name if name in flags and not equals + value else ""
            if name in flags and value in ("true", "false"):
                name, equals, value = (name if value == "true" else f"--no-{name[2:]}"), "", ""
            words.append(f"{name}{equals}{value}")
        return [*words, *argv[end:]]


def _empty_keys(value: Any) -> list[str]:
    """The dotted keys of empty mappings."""
    items = value.__dict__ if isinstance(value, Namespace) else value
    keys = []
    for name, inner in items.items():
        if isinstance(inner, (Namespace, dict)):
            keys += [f"{name}.{key}" for key in _empty_keys(inner)] if inner else [str(name)]
    return keys


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
    unknown = re.search(r"module '([\w.]+)' has no attribute '(\w+)'", line)
    matches = get_close_matches(unknown[2], dir(sys.modules.get(unknown[1])), n=1) if unknown else []
    guess = f"did you mean {matches[0]}? " if matches else ""
    return f"{one_line(line, 220).rstrip('.')}; {guess}--help lists the options"


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
