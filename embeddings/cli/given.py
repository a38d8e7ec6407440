"""What a person gave, against the signatures that it is for: null and empty mappings, which the parser lets pass."""

import importlib
import inspect
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Optional, TypeVar, Union, get_args, get_origin, get_type_hints

from embeddings.cli.errors import ConfigError
from embeddings.cli.imports import may_name
from embeddings.cli.yaml_files import parse_yaml, read_yaml
from embeddings.common import InputError

_OF_CLASSES = ("class_path", "init_args", "dict_kwargs")
# Where types come from that are no class of a person's arguments (`Any` is a class).
_PLAIN = ("builtins", "typing", "collections.abc", "pathlib")
# What names a config, and is none.
_NO_TEXT = re.compile(r"[^{\n]+")


@dataclass(frozen=True)
class Signature:
    """What a class or function takes.

    Args:
        name: Its name.
        types: The type of each parameter.
        is_open: Whether it takes other names too.
    """

    name: str
    types: Mapping[str, Any]
    is_open: bool = False


def signature_of(target: Any) -> Signature | None:
    """The signature of a class or function, None where it cannot be told; a default of null makes a type nullable."""
    try:
        parameters = inspect.signature(target).parameters.values()
        hints = get_type_hints(target.__init__ if isinstance(target, type) else target)  # type: ignore[misc]
    except (AttributeError, NameError, TypeError, ValueError):
        return None
    types = {
        parameter.name: Optional[hint] if parameter.default is None else hint  # noqa: UP045 - made at run time
        for parameter in parameters
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        for hint in (hints.get(parameter.name, Any),)
    }
    return Signature(target.__name__, types, any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters))


def config_paths(argv: Sequence[str]) -> list[str]:
    """The files that `--config` (or `-c`) names, in order."""
    paths = (_config_path(word, following) for word, following in zip(argv, [*argv[1:], ""], strict=True))
    return [path for path in paths if path]


def _config_path(word: str, following: str) -> str:
    """The config that a word and maybe the following one name, empty for none: `-cFILE` is `-c FILE`."""
    if word in ("--config", "-c"):
        return following
    if word.startswith("-c"):
        return word[2:].removeprefix("=")
    return word.removeprefix("--config=") if word.startswith("--config=") else ""


def configs_of(path: str) -> list[tuple[str, dict[str, Any]]]:
    """A config and those that it names under `config`, each with what it holds.

    A path in a config begins at that config's folder, as the parser takes it. Of a mapping that two of them give the
    parser drops the one of the config that is named, without a word.

    Raises:
        InputError: If one is missing, no YAML or no mapping, names others in another way, is named inside itself, or
            two give a mapping of one name.
    """
    found: list[tuple[str, dict[str, Any]]] = []
    seen: set[str] = set()
    while path not in seen:
        seen.add(path)
        content = read_config(path)
        for naming, earlier in found:
            for key in (
                key for key in content if isinstance(content[key], dict) and isinstance(earlier.get(key), dict)
            ):
                what = f"gives {key} beside {path}, which it names and whose {key} would be lost"
                raise InputError(f"--config {naming}", what, "name both by --config options, which are merged")
        found.append((path, content))
        further = content.get("config")
        if further is None:
            return found
        if not isinstance(further, str):
            raise InputError(f"--config {path}", "config: must be one file", "name more by further --config options")
        is_place = is_file(path) and _NO_TEXT.fullmatch(further)
        path = os.path.normpath(Path(path).parent / further) if is_place else further
    raise InputError(f"--config {path}", "names itself", "take its config: away")


def is_file(value: object) -> bool:
    """Whether a value names a file; a config may be given as text too."""
    try:
        return Path(str(value)).is_file()
    except OSError:  # text that is too long for a name
        return False


def read_config(path: str) -> dict[str, Any]:
    """What a config holds: a file, or the text itself.

    Raises:
        InputError: If there is no such file, it is no YAML, or no mapping.
    """
    where = f"--config {path}"
    if is_file(path):
        content = read_yaml(path, where)
    elif _NO_TEXT.fullmatch(path):
        raise InputError(where, "no such file", "lightning_configs/ holds the ones that come with the library")
    else:
        where = "--config"
        content = parse_yaml(path, where)
    if not isinstance(content, dict):
        raise InputError(where, "holds no options", "write them as OPTION: VALUE")
    return content


@dataclass(frozen=True)
class Given:
    """A config, or an option with its value.

    Args:
        option: The option's name, empty for a config.
        words: The words that it is made of.
        value: A config's mapping; an option's mapping or list, or else its text.
    """

    option: str
    words: tuple[str, ...]
    value: Any

    @property
    def content(self) -> dict[str, Any]:
        """The same as a mapping, written as in a config."""
        content: dict[str, Any] = {self.option: self.value} if self.option else self.value
        return content

    @property
    def mapping(self) -> dict[str, Any]:
        """The same with each key of several parts (`a.b`) as a mapping in a mapping."""
        content: dict[str, Any] = unfolded(self.content)
        return content

    @property
    def text(self) -> str:
        """An option's value as it is written."""
        return self.words[1] if len(self.words) == 2 else self.words[0].partition("=")[2]


def given_in_order(argv: Sequence[str]) -> Iterator[Given]:
    """What a line of arguments gives, from left to right, as the parser takes it.

    A config that names another under `config` is what stands before that key, the other one, and what stands after it.

    Raises:
        InputError: If a config, or one that it names, cannot be read (see `configs_of`).
    """
    line = argv[: list(argv).index("--")] if "--" in argv else argv
    for word, following in zip(line, [*line, ""][1:], strict=True):
        name, equals, value = word.partition("=")
        words = (word,) if equals or not following or following.startswith("--") else (word, following)
        if len(words) == 2:
            value = following
        path = _config_path(word, following if len(words) == 2 else "")
        if path:
            yield from (Given("", words, content) for content in _in_order(configs_of(path)))
        elif name.startswith("--") and " " not in name:
            yield Given(name.removeprefix("--"), words, _read_value(value, name))


def _in_order(configs: Sequence[tuple[str, dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    """A config and those that it names, each in two where it names one."""
    if len(configs) == 1:
        yield configs[0][1]
        return
    content = configs[0][1]
    place = list(content).index("config")
    parts = [dict(part) for part in (list(content.items())[:place], list(content.items())[place + 1 :])]
    yield from filter(None, (parts[0], *_in_order(configs[1:]), parts[1]))


def given_mappings(argv: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The mappings that a line of arguments gives: its configs, and its options whose value is a mapping.

    Raises:
        InputError: If a config, or one that it names, cannot be read (see `configs_of`).
    """
    for given in given_in_order(argv):
        if isinstance(given.value, dict):
            yield given.mapping


def _read_value(value: str, name: str) -> Any:
    """An option's value: a mapping or a list, or else the text as it is."""
    if value.lstrip().startswith(("{", "[")):
        with suppress(InputError):  # a text that only begins like one
            return parse_yaml(value, name)
    return value


def check_nulls(given: Mapping[str, Any], signature: Signature, where: str = "") -> None:
    """Check that null stands only where a type has it.

    Args:
        given: Parsed arguments by name, as plain mappings and lists.
        signature: What they are for.
        where: The option that they belong to.

    Raises:
        ConfigError: Naming the first option that has no null.
    """
    for name, value in given.items():
        if name not in signature.types:
            continue
        hint, key = signature.types[name], f"{where}.{name}".removeprefix(".")
        if value is None and not takes_null(hint):
            raise ConfigError(
                f"{key}: expected {_type_name(hint)}, got null; give one, or leave the option out for its default"
            )
        for inner, _, owner in _nested(value, None, _members(hint)):
            check_nulls(inner, owner, key)


def check_names(given: Mapping[str, Any], parsed: Mapping[str, Any], signature: Signature, where: str = "") -> None:
    """Check that an empty mapping stands under a name that there is; the parser refuses other unknown names itself.

    Args:
        given: Arguments by name as a person wrote them.
        parsed: The same after all configs are merged, which says what classes were chosen.
        signature: What they are for.
        where: The option that they belong to.

    Raises:
        ConfigError: Naming the unknown option, and the known one that is written most like it.
    """
    for written, value in given.items():
        name = written.removesuffix("+")
        if name in signature.types:
            key = f"{where}.{name}".removeprefix(".")
            for inner, chosen, owner in _nested(value, parsed.get(name), _members(signature.types[name])):
                check_names(inner, chosen, owner, key)
        elif value == {} and not signature.is_open:
            alike = get_close_matches(name, signature.types, n=1)
            guess = f"did you mean {alike[0]}? " if alike else ""
            place = f"{where}: " if where else ""
            raise ConfigError(
                f"{place}Option {name!r} is not accepted by {signature.name}; {guess}--help lists the options"
            )


def takes_null(hint: Any) -> bool:
    """Whether a type has null among its values."""
    if hint in (Any, object, None, type(None)) or isinstance(hint, TypeVar):
        return True
    if get_origin(hint) is Literal:
        return None in get_args(hint)
    return get_origin(hint) in (Union, UnionType) and any(map(takes_null, get_args(hint)))


def unfolded(value: Any) -> Any:
    """The same with each key of several parts (`a.b`) as a mapping in a mapping."""
    if isinstance(value, list):
        return [unfolded(element) for element in value]
    if not isinstance(value, dict):
        return value
    return {name: unfolded(content) for name, content in unfolded_once(value).items()}


def unfolded_once(value: Mapping[Any, Any]) -> dict[str, Any]:
    """A mapping with the first part of each key alone, the rest as the key of a mapping in it."""
    found: dict[str, Any] = {}
    for key, content in value.items():
        first, _, rest = str(key).partition(".")
        inner, other = {rest: content} if rest else content, found.get(first)
        found[first] = {**other, **inner} if isinstance(inner, dict) and isinstance(other, dict) else inner
    return found


def _nested(
    value: Any, parsed: Any, hints: Sequence[Any]
) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any], Signature]]:
    """The arguments of each class or record inside a value, as given and as parsed, and what takes them."""
    if isinstance(value, list):
        others = parsed if isinstance(parsed, list) and len(parsed) == len(value) else [None] * len(value)
        inner = [member for hint in hints for argument in get_args(hint) for member in _members(argument)]
        for element, other in zip(value, others, strict=True):
            yield from _nested(element, other, inner)
    elif isinstance(value, Mapping):
        chosen = parsed if isinstance(parsed, Mapping) else {}
        owner = _owner(value.get("class_path"), chosen.get("class_path"), hints)
        signature = None if owner is None else signature_of(owner)
        if signature is not None:
            yield arguments_of(value), arguments_of(chosen), signature


def _owner(given: Any, parsed: Any, hints: Sequence[Any]) -> Any:
    """The class whose arguments a mapping holds: the one it names, the one chosen before, or the one of its type."""
    path = parsed if given is None or "." not in str(given) else given
    if path is None:
        return next((hint for hint in hints if isinstance(hint, type) and hint.__module__ not in _PLAIN), None)
    module, _, name = str(path).rpartition(".")
    if not may_name(str(path)):  # what the parser takes for plain text is not imported here either
        return None
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError):
        return None


def arguments_of(value: Mapping[str, Any]) -> Mapping[str, Any]:
    """The arguments of a class, which may stand without `init_args` where it was chosen before, or of a record."""
    found = value.get("init_args", {name: inner for name, inner in value.items() if name not in _OF_CLASSES})
    return found if isinstance(found, Mapping) else {}


def _members(hint: Any) -> list[Any]:
    """The types that a union is made of, or the type itself."""
    if get_origin(hint) in (Union, UnionType):
        return [member for argument in get_args(hint) for member in _members(argument)]
    return [hint]


def _type_name(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) else re.sub(r"(?:\w+\.)+(\w+)", r"\1", str(hint))
