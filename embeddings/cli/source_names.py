"""What a class takes and a package offers, read from their sources: importing them would load torch for seconds."""

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
    bindings = [statement for statement in _statements(module) if name in _bound(statement)]
    if len(bindings) != 1:
        return None
    (binding,) = bindings
    if isinstance(binding, ast.ClassDef):
        return _parameters(binding)
    if isinstance(binding, ast.ImportFrom) and binding.module and not binding.level:
        (original,) = [alias.name for alias in binding.names if (alias.asname or alias.name) == name]
        path = f"{binding.module}.{original}"
        return parameters_in_source(path) if path != class_path else None
    return None


@cache
def public_names(module: str) -> tuple[str, ...] | None:
    """The names in a module's `__all__`, or None where its source does not list them."""
    for statement in _statements(module):
        if isinstance(statement, ast.Assign) and "__all__" in _bound(statement):
            try:
                return tuple(ast.literal_eval(statement.value))
            except ValueError:
                return None
    return None


def _parameters(node: ast.ClassDef) -> tuple[str, ...] | None:
    methods = [item for item in node.body if isinstance(item, ast.FunctionDef) and item.name in ("__init__", "__new__")]
    if [method.name for method in methods] != ["__init__"] or node.decorator_list or node.keywords:
        return None
    taken = methods[0].args
    if taken.vararg is not None or taken.kwarg is not None:
        return None
    return tuple(argument.arg for argument in [*taken.posonlyargs, *taken.args, *taken.kwonlyargs][1:])


def _bound(statement: ast.stmt) -> list[str]:
    """The names that a statement gives a meaning to."""
    if isinstance(statement, ast.ClassDef | ast.FunctionDef):
        return [statement.name]
    if isinstance(statement, ast.ImportFrom):
        return [alias.asname or alias.name for alias in statement.names]
    if isinstance(statement, ast.Assign):
        return [target.id for target in statement.targets if isinstance(target, ast.Name)]
    return []


def _statements(module: str) -> Iterator[ast.stmt]:
    """The statements of a module, and those under its `if TYPE_CHECKING`."""
    path = _file(module)
    try:
        body = ast.parse(path.read_bytes()).body if path else []
    except (OSError, SyntaxError, ValueError):  # who imports it is told
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
