"""Whether the parser takes a value for a type: a parser with that one option is asked, which loads no torch."""

from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin

from jsonargparse import ArgumentError, ArgumentParser, get_loader
from yaml import YAMLError

from embeddings.cli.source_types import Argument


def complaint_of(key: str, argument: Argument, value: Any, is_text: bool) -> str:
    """What the parser says against a value, empty where it says nothing or where that is not certain.

    Args:
        key: The option's name.
        argument: What it takes.
        value: What a config gives, or an option's text.
        is_text: Whether it is the latter.
    """
    if argument.hint is None or _fits(value, argument.hint):
        return ""
    if not (_is_something(value) if is_text else _is_certain(value)):
        return ""
    if isinstance(value, Mapping) and not any(get_origin(member) is dict for member in _members(argument.hint)):
        return ""
    parser = ArgumentParser(exit_on_error=False)
    given_default = {} if argument.default is None else {"default": argument.default}
    parser.add_argument(f"--{key}", type=argument.hint, **given_default)
    try:
        if is_text:
            parser.parse_args([f"--{key}={value}"])
        else:
            parser.parse_object({key: value})
    except ArgumentError as error:
        return str(error)
    return ""


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value is plainly of a type; one that is not may still become one."""
    kinds = _members(hint)
    return type(value) in kinds or any(get_origin(kind) is Literal and value in get_args(kind) for kind in kinds)


def _members(hint: Any) -> tuple[Any, ...]:
    return (hint,) if isinstance(hint, type) or get_origin(hint) in (Literal, list, dict) else get_args(hint)


def _is_certain(value: Any) -> bool:
    """Whether a config's value reads the same to the parser, which has its own way with numbers, and with text too."""
    if isinstance(value, Mapping):
        return all(isinstance(name, str) and "." not in name and _is_certain(part) for name, part in value.items())
    if isinstance(value, list):
        return all(map(_is_certain, value))
    if isinstance(value, str):
        return value.strip() != "" and "${" not in value and isinstance(_read(value), str)
    return type(value) in (bool, float, int)


def _is_something(text: str) -> bool:
    """Whether an option's text gives something: no null, of which more is said later, and nothing to be filled in."""
    return text.strip() != "" and "${" not in text and _read(text) is not None


def _read(text: str) -> Any:
    """What the parser reads in a text, None where it is no YAML either: then messages are the parser's own."""
    try:
        return get_loader("yaml")(text)
    except YAMLError:
        return None
