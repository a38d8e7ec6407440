"""YAML that people hand on, read before the parser reads it: what is no plain config is refused in one line."""

import re
from pathlib import Path
from typing import Any

import yaml

from embeddings.common import InputError
from embeddings.common.errors import shown

# Values that aliases may stand for beyond those that are written out: a few lines of them can stand for billions.
MOST_ALIASED_VALUES = 10_000
_NO_TEXT = re.compile("[\0\ud800-\udfff]")


def read_yaml(path: str | Path, where: str) -> Any:
    """What a YAML file holds.

    Args:
        path: The file.
        where: What messages call it.

    Raises:
        InputError: If it is no file, or as `parse_yaml`.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(where, f"not a YAML file: byte {error.start + 1} is not UTF-8", "save it as UTF-8") from error
    except OSError as error:
        raise InputError(where, f"cannot be read ({error.strerror})", "check the path and its permissions") from error
    return parse_yaml(text, where)


def parse_yaml(text: str, where: str) -> Any:
    """What a YAML text holds.

    Raises:
        InputError: If it is no YAML or not one document, has a tag of its own or a key twice, is nested too deep, or
            its aliases hold themselves or stand for too much; the message names the line.
    """
    try:
        loader = _PlainLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        extra = _size(node, {}) - len(loader.written)
        if extra > MOST_ALIASED_VALUES:
            raise InputError(where, f"its aliases stand for {extra:,} values", "write out what they stand for")
        return loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise InputError(where, f"not a YAML file: {error.problem}{line}", "mend the line") from error
    except yaml.YAMLError as error:
        raise InputError(where, f"not a YAML file: {str(error).splitlines()[0]}", "mend the line") from error
    except _TwiceError as error:
        raise InputError(where, str(error), "keep one of them") from None
    except RecursionError:
        raise InputError(where, "it is nested too deep, or an alias holds itself", "write it flat") from None


class _TwiceError(Exception):
    """A key that stands twice in one mapping."""


class _PlainLoader(yaml.SafeLoader):
    """The safe loader, which counts what is written and refuses a key that stands twice: the later would win.

    Attributes:
        written: The nodes that are written out.
    """

    def __init__(self, text: str) -> None:
        self.written: list[yaml.Node] = []
        super().__init__(text)

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """A node; an alias gives one that was written before."""
        is_alias = self.check_event(yaml.AliasEvent)
        node = super().compose_node(parent, index)
        if node is not None and not is_alias:
            self.written.append(node)
            if isinstance(node, yaml.MappingNode):
                _check_keys(node)
            elif isinstance(node, yaml.ScalarNode) and (found := _NO_TEXT.search(node.value)):
                problem = "a NUL character" if found[0] == "\0" else "half of a character"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """What a node stands for."""
        try:
            return super().construct_object(node, deep)
        except (yaml.YAMLError, RecursionError):
            raise
        except Exception as error:
            # What looks like a number or a date, or is tagged as one, and has too many digits or is none.
            raise yaml.MarkedYAMLError(problem=_problem(node, error), problem_mark=node.start_mark) from error


def _problem(node: yaml.Node, error: Exception) -> str:
    what = f"{shown(node.value, 30)} is no {node.tag.rpartition(':')[2]}"
    return f"{what} ({str(error).partition(';')[0]})" if isinstance(error, ValueError) else what


def _check_keys(node: yaml.MappingNode) -> None:
    lines: dict[tuple[str, str], int] = {}
    for key, _ in node.value:
        name = (key.tag, key.value) if isinstance(key, yaml.ScalarNode) else None
        if name is not None and name in lines and key.value != "<<":
            places = f"lines {lines[name]} and {key.start_mark.line + 1}"
            raise _TwiceError(f"the key {key.value!r} stands twice, in {places}")
        if name is not None:
            lines[name] = key.start_mark.line + 1


def _size(node: yaml.Node, known: dict[int, int]) -> int:
    """The values that a node stands for, those of aliases written out; a node that holds itself has no end.

    Raises:
        RecursionError: Where it has none.
    """
    if id(node) not in known:
        known[id(node)] = -1
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        inner = [part for pair in pairs for part in pair] or (node.value if isinstance(node, yaml.SequenceNode) else [])
        known[id(node)] = 1 + sum(_size(part, known) for part in inner)
    elif known[id(node)] < 0:
        raise RecursionError
    return known[id(node)]
