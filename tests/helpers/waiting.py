"""Waiting for another process."""

import time
from collections.abc import Callable


def wait_for(happened: Callable[[], bool], what: str, timeout_seconds: float = 20) -> None:
    """Poll ten times a second; raises `TimeoutError` after the timeout."""
    deadline = time.monotonic() + timeout_seconds
    while not happened():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout_seconds:.0f} s for {what}")
        time.sleep(0.1)
