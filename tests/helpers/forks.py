"""Actions in forked processes, which a test may kill."""

import os
import warnings
from collections.abc import Callable


def fork(action: Callable[[], object]) -> int:
    """The id of a forked process that runs an action; its exit status is 1 where the action fails."""
    with warnings.catch_warnings():
        # Later Pythons warn of threads; these hold no lock that the child takes.
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
