"""Source code as documents: functions of Python by their qualified names, parts of other languages by their layout."""

import ast
import posixpath
import re
import warnings
from collections.abc import Iterator
from typing import Any

from embeddings.adaptation.markup import Block, Document, Kind


def read_python(source: str, name: str) -> Document:
    """A Python module: its functions and methods, and what stands between them, under their qualified names.

    Imports are left out. A module that Python cannot parse is read as other code.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return read_code(source, name)
    stem = posixpath.splitext(name)[0]
    parts = [part for part in stem.split("/") if part != "__init__"] or [stem]
    # The parser's lines end with \n alone after universal newlines.
    lines = source.split("\n")
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line) + 1)
    blocks = []
    for first, last, kind, trail in _definitions(tree.body, (".".join(parts),), lines, 1, len(lines)):
        start, end = starts[first - 1], min(starts[last] - 1, len(source))
        end = start + len(source[start:end].rstrip())
        if end > start:
            blocks.append(Block(start, end, kind, trail))
    return Document(source, blocks, ".")


_Range = tuple[int, int, Kind, tuple[str, ...]]
# Statements of at most so many lines directly above a definition belong to it.
_ATTACHED_LINES = 3


def _definitions(
    body: list[ast.stmt], trail: tuple[str, ...], lines: list[str], first: int, last: int, head: int | None = None
) -> Iterator[_Range]:
    """The line ranges of the functions in a body, and of the statements between them, imports excepted.

    `head` is the first line of the class whose body it is, if that line belongs to the first method.
    """
    run: list[int] = []
    for number, node in enumerate(body):
        start, end = max(first, _first_line(node, lines)), node.end_lineno or node.lineno
        first = end + 1
        if number == 0 and head is not None:
            start = head
        is_docstring = number == 0 and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        is_left_out = isinstance(node, ast.Import | ast.ImportFrom) or _is_list_of_names(node)
        is_module_docstring = is_docstring and len(trail) == 1
        if not (_is_definition(node) or is_left_out or is_module_docstring):
            run = [run[0] if run else start, end]
            continue
        is_short = bool(run) and run[1] - run[0] < _ATTACHED_LINES
        if is_short and _is_definition(node) and not any(line.strip() for line in lines[run[1] : start - 1]):
            start, run = run[0], []
        if run:
            yield run[0], run[1], "lines", trail
            run = []
        if isinstance(node, ast.ClassDef):
            yield from _class(node, (*trail, node.name), lines, start, end)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield start, end, "lines", (*trail, node.name)
        elif is_module_docstring:
            yield start, end, "prose", trail
    if run:
        yield run[0], run[1], "lines", trail


def _class(node: ast.ClassDef, trail: tuple[str, ...], lines: list[str], start: int, end: int) -> Iterator[_Range]:
    """The lines of a class up to its first method, and its methods; alone, its first line belongs to a method."""
    methods = [child for child in node.body if _is_definition(child)]
    if not methods:
        yield start, end, "lines", trail
        return
    first = _first_line(methods[0], lines)
    if methods[0] is node.body[0]:
        yield from _definitions(node.body, trail, lines, first, end, head=start)
        return
    yield start, first - 1, "lines", trail
    rest = node.body[node.body.index(methods[0]) :]
    yield from _definitions(rest, trail, lines, first, end)


def _is_list_of_names(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign) and any(getattr(target, "id", "") == "__all__" for target in node.targets)


def _is_definition(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)


def _first_line(node: ast.stmt, lines: list[str]) -> int:
    """The first line of a statement with its decorators, and the comment directly above."""
    decorators: list[Any] = getattr(node, "decorator_list", [])
    line: int = min([node.lineno, *(decorator.lineno for decorator in decorators)])
    while line > 1 and lines[line - 2].lstrip().startswith("#"):
        line -= 1
    return line


_COMMENT = re.compile(r"\s*(//|/\*|\*|#(?!\w)|#!|--|;|%|@|\"\"\"|<!--|\(\*)")
_BLOCK_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
_LINES_WITH_HEADER = 4


def read_code(source: str, name: str) -> Document:
    """Code of any language: parts that begin without indentation after a blank line.

    The trail of a longer part is the file and its first line of code.
    """
    blocks, start = [], 0
    for gap in [*re.finditer(r"\n[ \t]*\n\s*", source), None]:
        # The next line is indented, or closes a bracket.
        if gap is not None and (source[gap.end() - 1] != "\n" or source.startswith((")", "]", "}"), gap.end())):
            continue
        end = len(source) if gap is None else gap.start()
        part = source[start:end]
        if part.strip():
            lines = [line for line in part.split("\n") if line.strip()]
            code = _BLOCK_COMMENT.sub("", part).split("\n")
            header = next((line.strip() for line in code if line.strip() and not _COMMENT.match(line)), "")
            header = header.rstrip("{(:= ")[:80]
            is_long = len(lines) >= _LINES_WITH_HEADER and bool(header)
            first = start + len(part) - len(part.lstrip("\n"))
            trail = (name, header) if is_long else (name,)
            blocks.append(Block(first, start + len(part.rstrip()), "lines", trail))
        start = end if gap is None else gap.end()
    return Document(source, blocks)
