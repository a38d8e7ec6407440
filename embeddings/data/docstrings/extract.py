"""Functions and their docstrings, read from source text with Python's own parser."""

import ast
import io
import textwrap
import tokenize
import warnings
from collections.abc import Iterator
from typing import NamedTuple

from embeddings.data.docstrings.sentences import first_sentence

MAX_DOCUMENT_CHARACTERS = 2000

_Function = ast.FunctionDef | ast.AsyncFunctionDef


class DocumentedFunction(NamedTuple):
    """A function or method, and what its author says it does.

    Attributes:
        id: Qualified name, `module.Class.function`; unique in a corpus.
        package: Package as the user named it.
        module: Module that defines it: the rest of `id` is the class, if any, and the name.
        query: First sentence of the docstring.
        document: Qualified name, signature, and body without the docstring.
    """

    id: str
    package: str
    module: str
    query: str
    document: str


def documented_functions(source: bytes, package: str, module: str) -> Iterator[DocumentedFunction]:
    """The functions of a module and of its classes whose docstring starts with a usable sentence, in source order.

    Functions inside functions are part of the outer one's body. Overloads, and functions whose body does nothing
    (abstract methods, stubs), have no code to find and are left out. A file that Python cannot parse has none.

    Args:
        source: The file's bytes, in the encoding that its first lines declare.
        package: Package as the user named it.
        module: Dotted name of the module.
    """
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(source).readline)
        text = source.decode(encoding)
        with warnings.catch_warnings():
            # Invalid escapes in other people's files are not this user's business.
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return
    # Columns of the parser count UTF-8 bytes, and its lines end at \n, \r\n and \r alone, as those of `bytes` do.
    lines = text.encode().splitlines(keepends=True)
    for scope, function in _functions(tree.body, ()):
        record = _record(function, scope, lines, package, module)
        if record is not None:
            yield record


def _functions(body: list[ast.stmt], scope: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], _Function]]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield scope, node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node.body, (*scope, node.name))
        elif isinstance(node, ast.If | ast.Try | ast.With):
            yield from _functions(node.body, scope)
            yield from _functions(getattr(node, "orelse", []), scope)


def _record(
    function: _Function, scope: tuple[str, ...], lines: list[bytes], package: str, module: str
) -> DocumentedFunction | None:
    docstring = _docstring(function)
    if docstring is None or not _does_something(function.body[1:]) or _is_overload(function):
        return None
    query = first_sentence(docstring)
    if query is None:
        return None
    name = ".".join((module, *scope, function.name))
    document = f"{name}\n{_code(function, lines)}"
    return DocumentedFunction(name, package, module, query, document[:MAX_DOCUMENT_CHARACTERS].rstrip())


def _docstring(function: _Function) -> str | None:
    first = function.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        return first.value.value
    return None


def _does_something(body: list[ast.stmt]) -> bool:
    for node in body:
        if isinstance(node, ast.Pass) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            continue
        if isinstance(node, ast.Raise) and "NotImplemented" in ast.dump(node):
            continue
        return True
    return False


def _is_overload(function: _Function) -> bool:
    names = (getattr(decorator, "attr", getattr(decorator, "id", "")) for decorator in function.decorator_list)
    return "overload" in names


def _code(function: _Function, lines: list[bytes]) -> str:
    """The function's lines from `def` on, without its docstring and blank lines, indented from the margin."""
    statement = function.body[0]
    start, end = statement.lineno - 1, (statement.end_lineno or statement.lineno) - 1
    head = [*lines[function.lineno - 1 : start], lines[start][: statement.col_offset]]
    tail = [lines[end][statement.end_col_offset :].lstrip(b" \t;"), *lines[end + 1 : function.end_lineno]]
    code = b"".join(head).decode() + b"".join(tail).decode()
    kept = [line.rstrip() for line in code.split("\n") if line.strip()]
    return textwrap.dedent("\n".join(kept))
