"""The classes that a file may name: one closed list for configs, checkpoints, sweeps and jobs, on every way in."""

import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pkgutil import resolve_name
from typing import Any

from jsonargparse import Namespace, set_parsing_settings
from jsonargparse._common import parsing_settings

import embeddings
from embeddings.common.errors import UserError

# The packages in this environment variable are allowed too.
VARIABLE = "EMBED_IMPORTS"
ALLOWED = (
    *(f"embeddings.{name}" for name in embeddings.__all__),
    "embeddings.callbacks",
    "embeddings.common.TextSettings",
    "embeddings.common.text",
    "embeddings.data",
    "embeddings.losses",
    "embeddings.models",
    "embeddings.modules",
    "embeddings.strategies",
    "embeddings.training",
    "lightning.fabric.plugins",
    "lightning.pytorch.accelerators",
    "lightning.pytorch.callbacks",
    "lightning.pytorch.loggers",
    "lightning.pytorch.plugins",
    "lightning.pytorch.profilers",
    "lightning.pytorch.strategies",
    "torch.nn",
    "torch.optim",
)
RULE = "name a class of embeddings, lightning, torch.nn or torch.optim"

_DOTTED = re.compile(r"\b[^\W\d]\w*(?:\.\w+)+")


@contextmanager
def restricted_imports() -> Iterator[None]:
    """Inside, jsonargparse imports only `ALLOWED` and the packages in `$EMBED_IMPORTS`, separated by commas.

    It checks a path as written, and then the path where the object is defined.
    """
    before = dict(parsing_settings)
    try:
        set_parsing_settings(
            import_path_denylist=["*"],
            import_path_allowlist=[*ALLOWED, *_trusted()],
            instantiate_subclass_spec_in_any=False,
        )
    except ValueError as error:
        rule = "is not a comma-separated list of package names"
        raise UserError(f"{VARIABLE}={os.environ[VARIABLE]} {rule}; write my_package, or unset it") from error
    try:
        yield
    finally:
        parsing_settings.update(before)


def may_import(path: str) -> bool:
    return _is_below(path, (*ALLOWED, *_trusted()))


def refused_path(message: str) -> str | None:
    """The import path that a message of jsonargparse refuses, or None."""
    found = re.search(r"Importing '([^']+)' is not allowed", message)
    return found and found[1]


def trust_hint(path: str) -> str:
    """What to do about a refused import path; it may be trusted unless it is in Python's own library."""
    package = path.partition(".")[0]
    if package in sys.stdlib_module_names:
        return RULE
    return f"{RULE}, or set {VARIABLE}={package} to trust all of that package"


def named_function(parsed: Any, text: str) -> str | None:
    """The import path of a function in a parsed configuration or in its text, or None; trusted packages may have them.

    A class path may name a class only: jsonargparse would call a function.
    """
    paths: list[str] = [*_class_paths(parsed), *_DOTTED.findall(text)]
    for path in dict.fromkeys(paths):
        # The parser has imported an allowed path; any other is plain data.
        if may_import(path) and not _is_below(path, _trusted()):
            with suppress(ImportError, AttributeError, ValueError):
                found = resolve_name(path)
                if callable(found) and not isinstance(found, type):
                    return path
    return None


def _class_paths(value: Any) -> list[str]:
    """All `class_path` values at any depth."""
    if isinstance(value, Namespace):
        value = vars(value)
    if isinstance(value, Mapping):
        paths = [value["class_path"]] if isinstance(value.get("class_path"), str) else []
        return paths + [path for element in value.values() for path in _class_paths(element)]
    if isinstance(value, list | tuple):
        return [path for element in value for path in _class_paths(element)]
    return []


def _is_below(path: str, packages: Iterable[str]) -> bool:
    return any(path == package or path.startswith(f"{package}.") for package in packages)


def _trusted() -> list[str]:
    return [name.strip() for name in os.environ.get(VARIABLE, "").split(",") if name.strip()]
