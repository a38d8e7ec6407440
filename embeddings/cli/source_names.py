"""What a class takes and a package offers, read from their sources: importing them would load torch for seconds."""

import ast
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

# Name, annotation and default of an argument.
Written = tuple[str, ast.expr | None, ast.expr | None]


def parameters_in_source(class_path: str) -> tuple[str, ...] | None:
    """The arguments of a class, or None where its source alone does not tell them.

    It does where the class has one `__init__` of its own that takes no names but those it lists, or is a plain
    dataclass.

    Args:
        class_path: Where the class is, or is imported to, as a config names it.
    """
    found = defined_at(class_path)
    written = written_arguments(*found) if found is not None and isinstance(found[1], ast.ClassDef) else None
    return None if written is None else tuple(name for name, _, _ in written)


@cache
def defined_at(path: str) -> tuple[str, ast.stmt] | None:
    """The module and the statement that give a name its meaning: None where there are several, or none.

    Args:
        path: Where the name is, or is imported to.
    """
    module, _, name = path.rpartition(".")
    bindings = [statement for statement in statements(module) if name in bound(statement)]
    if len(bindings) != 1:
        return None
    (binding,) = bindings
    if not isinstance(binding, ast.ImportFrom):
        return module, binding
    original = imported(binding, name)
    return defined_at(original) if original and original != path else None


def written_arguments(module: str, node: ast.stmt) -> list[Written] | None:
    """What a class takes: name, annotation and default of each, or None where its source alone does not tell."""
    if not isinstance(node, ast.ClassDef) or node.keywords:
        return None
    methods = [item for item in node.body if isinstance(item, ast.FunctionDef) and item.name in ("__init__", "__new__")]
    if node.decorator_list:
        return None if methods or node.bases else _fields(module, node)
    if [method.name for method in methods] != ["__init__"]:
        return None
    taken = methods[0].args
    if taken.vararg is not None or taken.kwarg is not None:
        return None
    ordered = [*taken.posonlyargs, *taken.args]
    defaults = [*[None] * (len(ordered) - len(taken.defaults)), *taken.defaults]
    pairs = [*zip(ordered, defaults, strict=True), *zip(taken.kwonlyargs, taken.kw_defaults, strict=True)][1:]
    return [(argument.arg, argument.annotation, default) for argument, default in pairs]


def imported(statement: ast.ImportFrom, name: str) -> str | None:
    """Where a name that a statement imports comes from, None for an import that is relative."""
    (original,) = [alias.name for alias in statement.names if (alias.asname or alias.name) == name]
    return f"{statement.module}.{original}" if statement.module and not statement.level else None


@cache
def public_names(module: str) -> tuple[str, ...] | None:
    """The names in a module's `__all__`, or None where its source does not list them."""
    for statement in statements(module):
        if isinstance(statement, ast.Assign) and "__all__" in bound(statement):
            try:
                return tuple(ast.literal_eval(statement.value))
            except ValueError:
                return None
    return None


def _fields(module: str, node: ast.ClassDef) -> list[Written] | None:
    """The arguments of a dataclass, None where the class is decorated by something else or a field is no argument."""
    (decorator, *others) = node.decorator_list
    name = decorator.func if isinstance(decorator, ast.Call) else decorator
    options = decorator.keywords if isinstance(decorator, ast.Call) else []
    if others or not isinstance(name, ast.Name) or {option.arg for option in options} & {None, "init"}:
        return None
    origin = [imported(s, name.id) for s in statements(module) if isinstance(s, ast.ImportFrom) and name.id in bound(s)]
    written = [item for item in node.body if isinstance(item, ast.AnnAssign)]
    words = {getattr(word, "id", getattr(word, "attr", "")) for item in written for word in ast.walk(item.annotation)}
    made = [option.arg for item in written if isinstance(item.value, ast.Call) for option in item.value.keywords]
    if origin != ["dataclasses.dataclass"] or words & {"ClassVar", "InitVar", "KW_ONLY"} or "init" in made:
        return None
    return [(item.target.id, item.annotation, item.value) for item in written if isinstance(item.target, ast.Name)]


def bound(statement: ast.stmt) -> list[str]:
    """The names that a statement gives a meaning to."""
    if isinstance(statement, ast.ClassDef | ast.FunctionDef):
        return [statement.name]
    if isinstance(statement, ast.AnnAssign):
        return [statement.target.id] if isinstance(statement.target, ast.Name) else []
    if isinstance(statement, ast.ImportFrom):
        return [alias.asname or alias.name for alias in statement.names]
    if isinstance(statement, ast.Assign):
        return [target.id for target in statement.targets if isinstance(target, ast.Name)]
    return []


def statements(module: str, for_types: bool = True) -> Iterator[ast.stmt]:
    """The statements of a module, and those under its `if TYPE_CHECKING`.

    Args:
        module: Its name.
        for_types: Whether to give the latter too.
    """
    for statement in body_of(module):
        yield statement
        if for_types and isinstance(statement, ast.If):
            yield from statement.body


@cache
def body_of(module: str) -> list[ast.stmt]:
    """The statements of a module's source, none where it cannot be read."""
    path = _file(module)
    try:
        return ast.parse(path.read_bytes()).body if path else []
    except (OSError, SyntaxError, ValueError):  # who imports it is told
        return []


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
