"""Runs actions in forked processes, which a test may kill."""

import os
import warnings
from collections.abc import Callable


def fork(action: Callable[[], object]) -> int:
    """Run an action in a forked process and return its id; its exit status is 1 if the action fails."""
    with warnings.catch_warnings():
        # Python 3.12 warns about threads; no thread here holds a lock that the child needs.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        status = 1
        try:
            action()
            status = 0
        finally:
            os._exit(status)
    return child


def in_a_child(action: Callable[[], object]) -> int:
    """Run an action in a forked process; returns its exit status, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(fork(action), 0)[1])
