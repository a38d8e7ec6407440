"""The arguments that an object was made with, and their form as a config has them: plain types and class paths."""

import inspect
import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from os import PathLike
from typing import Any, NamedTuple, Self

_PLAIN = (bool, int, float, str)
# The packages whose objects have their arguments as attributes.
_OPEN = ("embeddings.", "lightning.", "pytorch_lightning.")


class Given(NamedTuple):
    """Positional and named arguments; a copy of their owner shares them, since a factory may hold a parser."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def __deepcopy__(self, memo: object) -> Self:
        return self


class KeepsArguments:
    """A class whose objects keep the arguments that they were made with, so that a run made in Python records them."""

    given_arguments: Given

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        made = super().__new__(cls)
        # Not by the object's own way, which a module has only once it is made.
        object.__setattr__(made, "given_arguments", Given(args, kwargs))
        return made


def as_config(value: Any) -> Any:
    """A value as a config has it: a class, a `partial` or an object by `class_path` and `init_args`.

    A function, or data in memory, becomes a text in round brackets that says what it is.
    """
    if value is None or isinstance(value, _PLAIN):
        return value
    if isinstance(value, PathLike):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): as_config(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [as_config(item) for item in value]
    if isinstance(value, type):
        return {"class_path": _path(value)}
    if isinstance(value, partial) and isinstance(value.func, type):
        bound = inspect.signature(value.func).bind_partial(*value.args, **value.keywords)
        return _component(value.func, _flat(value.func, bound.arguments))
    if isinstance(value, KeepsArguments):
        return _component(type(value), _arguments(value, value.given_arguments))
    if is_dataclass(value):
        return {field.name: as_config(getattr(value, field.name)) for field in fields(value) if field.init}
    if inspect.isroutine(value) or isinstance(value, partial):
        return f"(function {getattr(value, '__qualname__', 'of parts')})"
    if type(value).__module__.startswith(_OPEN):
        names = inspect.signature(type(value)).parameters
        known = {name: getattr(value, name) for name in names if hasattr(value, name)}
        return _component(type(value), {name: item for name, item in known.items() if _is_plain(item)})
    return f"({type(value).__name__} in memory)"


def _arguments(value: object, given: Given) -> dict[str, Any]:
    """The arguments that were given, and the defaults that are plain, by name."""
    kind = type(value)
    bound = inspect.signature(kind).bind(*given.args, **given.kwargs)
    chosen = set(bound.arguments)
    bound.apply_defaults()
    known = {name: item for name, item in bound.arguments.items() if name in chosen or _is_plain(as_config(item))}
    return _flat(kind, known)


def _flat(kind: type, arguments: Mapping[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(kind).parameters
    found: dict[str, Any] = {}
    for name, item in arguments.items():
        found |= item if parameters[name].kind is inspect.Parameter.VAR_KEYWORD else {name: item}
    return found


def _component(kind: type, arguments: Mapping[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = {"class_path": _path(kind)}
    return config | ({"init_args": as_config(arguments)} if arguments else {})


def _path(kind: type) -> str:
    """The path of a class, by the package that offers it where one does."""
    parts = kind.__module__.split(".")
    for length in range(2, len(parts)):
        package = ".".join(parts[:length])
        if getattr(sys.modules.get(package), kind.__name__, None) is kind:
            return f"{package}.{kind.__name__}"
    return f"{kind.__module__}.{kind.__qualname__}"


def _is_plain(value: Any) -> bool:
    """Whether a value is made of plain types only, and says so in full."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    is_text_of_object = isinstance(value, str) and value.startswith("(function ")
    return (value is None or isinstance(value, _PLAIN)) and not is_text_of_object
