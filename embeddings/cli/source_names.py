"""What a class takes, read from its source: importing it would load torch and Lightning, which takes seconds."""

import ast
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path


@cache
def parameters_in_source(class_path: str) -> tuple[str, ...] | None:
    """The arguments of a class, or None where its source alone does not tell them.

    It does where the class has one `__init__` of its own that takes no names but those it lists.

    Args:
        class_path: Where the class is, or is imported to, as a config names it.
    """
    module, _, name = class_path.rpartition(".")
    for statement in _statements(module):
        if isinstance(statement, ast.ClassDef) and statement.name == name:
            return _parameters(statement)
        if isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
            for alias in statement.names:
                if (alias.asname or alias.name) == name and f"{statement.module}.{alias.name}" != class_path:
                    return parameters_in_source(f"{statement.module}.{alias.name}")
    return None


def _parameters(node: ast.ClassDef) -> tuple[str, ...] | None:
    makers = [item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "__init__"]
    if len(makers) != 1 or makers[0].args.kwarg is not None:
        return None
    taken = makers[0].args
    return tuple(argument.arg for argument in [*taken.posonlyargs, *taken.args, *taken.kwonlyargs][1:])


def _statements(module: str) -> Iterator[ast.stmt]:
    """The statements of a module, and those under its `if TYPE_CHECKING`."""
    path = _file(module)
    try:
        body = ast.parse(path.read_bytes()).body if path else []
    except SyntaxError:  # who imports it is told
        return
    for statement in body:
        yield statement
        if isinstance(statement, ast.If):
            yield from statement.body


def _file(module: str) -> Path | None:
    """Where a module's source is; its parents are not imported, as `find_spec` would do for the whole name."""
    top, *rest = module.split(".")
    spec = find_spec(top) if all(part.isidentifier() for part in (top, *rest)) else None
    for place in (spec.submodule_search_locations or ()) if spec else ():
        inner = Path(place, *rest)
        for path in (inner / "__init__.py", inner.with_suffix(".py")):
            if path.is_file():
                return path
    return None
