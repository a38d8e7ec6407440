"""A process that works for this one, and the signals that this one is sent meanwhile."""

import signal
import subprocess
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Any

from embeddings.common import PreemptedError

# What a cluster or a terminal sends to end a job, or to have it save itself.
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


class Relay:
    """Passes signals on to the process that is at work, and begins no other once one has come.

    It is a context, inside which none of the signals ends this process; nor afterwards where it was left because of
    one, so that none comes between a run's answer and the exit.

    Attributes:
        received: What came so far, in order.
    """

    def __init__(self) -> None:
        self.received: list[signal.Signals] = []
        self._early: list[signal.Signals] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Relay":
        self._previous = {number: signal.signal(number, self._pass_on) for number in FORWARDED}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        ignored = bool(self.received) or isinstance(error, PreemptedError)
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_IGN if ignored else handler)

    def run(self, words: Sequence[str], inherited: Sequence[int]) -> int:
        """Run a line to its end; returns its exit code, 128 and the signal's number where one killed it or came before.

        Args:
            words: The program and its arguments.
            inherited: Numbers of open files that the process is to have too.
        """
        if self.received:
            return 128 + self.received[0]
        # A group of its own: a terminal's Ctrl-C comes once, from here, and does not end a run that is saving itself.
        self._process = subprocess.Popen(words, pass_fds=tuple(inherited), process_group=0)
        while self._early:
            self._process.send_signal(self._early.pop(0))
        code = self._process.wait()
        self._process = None
        return code if code >= 0 else 128 - code

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self.received.append(signal.Signals(number))
        if self._process is None:
            self._early.append(signal.Signals(number))
        else:
            self._process.send_signal(number)
