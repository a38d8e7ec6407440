"""Functions that are interrupted at one of their calls."""

from collections.abc import Callable
from typing import Any


def interrupted_at(function: Callable[..., Any], call: int = 1) -> Callable[..., Any]:
    """The function, interrupted as by Ctrl-C in place of its `call`-th call, counted from 1."""
    calls: list[None] = []

    def interrupted(*args: Any, **options: Any) -> Any:
        calls.append(None)
        if len(calls) == call:
            raise KeyboardInterrupt
        return function(*args, **options)

    return interrupted
