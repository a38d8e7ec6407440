"""Which classes a config may name: those of this library and of the libraries it trains with, and no others."""

import functools
import inspect
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

from jsonargparse import Namespace, set_parsing_settings

from embeddings.common import UserError

VARIABLE = "EMBED_IMPORTS"
ALLOWED = (
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


def restrict_imports() -> None:
    """Have the parsers import what `ALLOWED` holds alone, and the packages that `$EMBED_IMPORTS` adds, comma-separated.

    A config is data that people hand on, and a class path in it is a call of whatever it names. What is checked is the
    path as it is written and the place where the object was defined, so no module of ours is a way to another's.

    Raises:
        UserError: If the variable holds no package.
    """
    try:
        set_parsing_settings(
            import_path_denylist=["*"],
            import_path_allowlist=[*ALLOWED, *_added()],
            instantiate_subclass_spec_in_any=False,
        )
    except ValueError as error:
        rule = "is no list of packages as one imports them"
        raise UserError(f"{VARIABLE}={os.environ[VARIABLE]} {rule}; write my_package, or unset it") from error


def check_functions(given: Sequence[Any], parsed: Any) -> None:
    """Check that no option names a function: a callback would call it with whatever its hook is given.

    Args:
        given: What the user wrote: words and mappings. Functions that are a class's own defaults are not among it.
        parsed: The arguments that the parser has read; nothing of them is instantiated yet.

    Raises:
        UserError: Naming the function.
    """
    text = repr(given)
    for function in _functions(parsed):
        name = getattr(function, "__qualname__", type(function).__name__)
        path = f"{function.__module__}.{name}"
        is_trusted = any(path.startswith(f"{package}.") for package in _added())
        if not is_trusted and re.search(rf"\.{re.escape(name)}\b", text):
            raise UserError(
                f"a config may not name the function {path}; name a class, or trust its package by {VARIABLE}"
            )


def _functions(value: Any) -> Iterator[Any]:
    """The functions in a value, however deep."""
    if isinstance(value, Namespace):
        value = vars(value)
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for element in value:
            yield from _functions(element)
    elif inspect.isroutine(value) or isinstance(value, functools.partial):
        yield value


def may_name(path: str) -> bool:
    """Whether a config may name the object of this path, as far as the path tells."""
    return any(path == allowed or path.startswith(f"{allowed}.") for allowed in (*ALLOWED, *_added()))


def _added() -> list[str]:
    return [name.strip() for name in os.environ.get(VARIABLE, "").split(",") if name.strip()]
