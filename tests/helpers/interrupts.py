"""Functions that are interrupted at one of their calls."""

import os
import signal
from collections.abc import Callable
from typing import Any


def interrupted_at(function: Callable[..., Any], call: int = 1, killed: bool = False) -> Callable[..., Any]:
    """The function, but its `call`-th call (from 1) raises KeyboardInterrupt, or kills the process."""
    calls: list[None] = []

    def interrupted(*args: Any, **options: Any) -> Any:
        calls.append(None)
        if len(calls) == call:
            if killed:
                os.kill(os.getpid(), signal.SIGKILL)
            raise KeyboardInterrupt
        return function(*args, **options)

    return interrupted
