"""The types of a class's arguments, read from its source: importing it would load torch for seconds."""

import ast
import pathlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Union

from embeddings.cli.source_names import bound, defined_at, imported, statements, written_arguments

_PLAIN: dict[str, Any] = {kind.__name__: kind for kind in (bool, dict, float, int, list, str)}
_KNOWN: dict[str, Any] = {"pathlib.Path": pathlib.Path}
_GENERIC: dict[str, Any] = {
    **{name: kind for kind in (dict, list) for name in (kind.__name__, f"typing.{kind.__name__.title()}")},
    **{f"{module}.Sequence": Sequence for module in ("typing", "collections.abc")},
}
# As a value, for a type that is made at run time.
_UNION: Any = Union
# Packages whose sources are read for what a name stands for; others are large.
READ = ("embeddings", "lightning")
# Most aliases and types in types that are followed.
DEPTH = 8


@dataclass(frozen=True)
class Argument:
    """What an argument takes, as far as the source tells.

    Args:
        hint: Its type: plain ones, literals, paths, lists, mappings and unions of these; None where it has others.
        default: Its default, where that is a plain value.
        record: The path of the dataclass that a mapping stands for, empty where it stands for none.
        records: The same for the mappings in a list.
    """

    hint: Any = None
    default: Any = None
    record: str = ""
    records: str = ""


@dataclass(frozen=True)
class _Record:
    """A dataclass as a member of a type, or the list of one."""

    path: str
    is_listed: bool = False


@cache
def argument_in_source(class_path: str, name: str) -> Argument:
    """What an argument of a class takes, as far as the source tells.

    Args:
        class_path: Where the class is, or is imported to, as a config names it.
        name: The argument's name.
    """
    found = defined_at(class_path)
    written = None if found is None else written_arguments(*found)
    if found is None or written is None:
        return Argument()
    for known, annotation, default in written:
        if known == name:
            return _argument(found[0], annotation, default)
    return Argument()


def _argument(module: str, annotation: ast.expr | None, default: ast.expr | None) -> Argument:
    members = None if annotation is None else _members(module, annotation, DEPTH)
    if members is None:
        return Argument()
    records = [member for member in members if isinstance(member, _Record)]
    if records:
        (record, *others), rest = records, [member for member in members if not isinstance(member, _Record)]
        if others or rest not in ([], [None]):
            return Argument()
        if record.is_listed:
            return Argument(records=record.path)
        return Argument(record=record.path)
    try:
        value = None if default is None or _is_factory(default) else ast.literal_eval(default)
    except ValueError:
        return Argument()
    if default is not None and not _is_factory(default) and value is None:
        members = [*members, None]  # as the parser does
    return Argument(_UNION[tuple(members)], value if isinstance(value, bool | int | float | str) else None)


def _is_factory(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and [option.arg for option in node.keywords] == ["default_factory"]


def _members(module: str, node: ast.expr, depth: int) -> list[Any] | None:
    """The types that a union is made of, or the type itself; None where one is none of the plain ones."""
    if depth == 0:
        return None
    if isinstance(node, ast.Constant) and node.value is None:
        return [None]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _joined(module, [node.left, node.right], depth)
    if isinstance(node, ast.Name):
        return _of_name(module, node.id, depth)
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
        inside = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        return _of_generic(_origin(module, node.value.id), module, inside, depth)
    return None


def _of_generic(origin: str, module: str, inside: list[ast.expr], depth: int) -> list[Any] | None:
    if origin == "typing.Literal":
        values = [value.value for value in inside if isinstance(value, ast.Constant)]
        return [Literal[tuple(values)]] if len(values) == len(inside) else None
    if origin in ("typing.Union", "typing.Optional"):
        joined = _joined(module, inside, depth)
        return [*joined, None] if joined is not None and origin == "typing.Optional" else joined
    kind = _GENERIC.get(origin)
    if kind is None or len(inside) != (2 if kind is dict else 1):
        return None
    hints: list[Any] = []
    for node in inside:
        members = _members(module, node, depth - 1)
        if members is None or pathlib.Path in members:  # for a list of paths the parser takes a file's name too
            return None
        if any(isinstance(member, _Record) for member in members):
            (member, *others) = members
            return None if kind is dict or others or member.is_listed else [_Record(member.path, is_listed=True)]
        hints.append(_UNION[tuple(members)])
    return [kind[tuple(hints)] if kind is dict else kind[hints[0]]]


def _joined(module: str, nodes: Sequence[ast.expr], depth: int) -> list[Any] | None:
    """The members of several types; the first that is none of the plain ones ends it."""
    found: list[Any] = []
    for node in nodes:
        members = _members(module, node, depth - 1)
        if members is None:
            return None
        found += members
    return found


def _of_name(module: str, name: str, depth: int) -> list[Any] | None:
    origin = _origin(module, name)
    if origin in _PLAIN or origin in _KNOWN:
        return [_PLAIN.get(origin) or _KNOWN[origin]]
    found = defined_at(origin) if origin.partition(".")[0] in READ else None
    if found is None:
        return None
    where, statement = found
    if isinstance(statement, ast.ClassDef):
        return (
            [_Record(origin)] if statement.decorator_list and written_arguments(where, statement) is not None else None
        )
    if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
        return _members(where, statement.value, depth - 1)
    return None


def _origin(module: str, name: str) -> str:
    """What a name of a module stands for: the path of what it imports or makes, the name alone of a builtin.

    Empty where that cannot be told.
    """
    bindings = [statement for statement in statements(module, for_types=False) if name in bound(statement)]
    if not bindings:
        is_bound = any(name in bound(statement) for statement in statements(module))
        return "" if is_bound or "." in name else name
    if len(bindings) != 1:
        return ""
    (binding,) = bindings
    return imported(binding, name) or "" if isinstance(binding, ast.ImportFrom) else f"{module}.{name}"
