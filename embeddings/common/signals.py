"""The signals that ask a run to stop: noted when they come, answered once when the run can."""

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from embeddings.common.errors import PreemptedError
from embeddings.common.process import is_first_process, job_id, num_processes, requeue

# SLURM's usual warning before the time limit (`--signal`), what pre-emption and most other schedulers send, and Ctrl-C.
STOP_SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)

EXIT_RESUMABLE = 75
EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_TERMINATED = 128 + signal.SIGTERM


class StopRequest:
    """The first stop signal (`first`, 0 for none) that this process got while `listening`.

    Before training the handler ends the run where it is. Once `deferred` is set it only notes the signal, and training
    looks here between two steps. One of several ranks notes it from the beginning: the others would wait for it, and
    the first may be ended while it asks for a place in the queue.

    A second Ctrl-C ends the process at once. A process that ignored Ctrl-C before, as a shell's background jobs do,
    keeps ignoring it.
    """

    def __init__(self) -> None:
        self.first, self.deferred, self.listening = 0, False, False
        self._process, self._num_interrupts = 0, 0
        self._previous: dict[signal.Signals, Any] = {}

    def listen(self) -> None:
        """Begin anew: no signal so far, and neither is deferred. Off the main thread nothing is heard."""
        self.first, self.deferred, self._process, self._num_interrupts = 0, False, os.getpid(), 0
        self._previous = {number: signal.getsignal(number) or signal.SIG_DFL for number in STOP_SIGNALS}
        if self._previous[signal.SIGINT] == signal.SIG_IGN:
            del self._previous[signal.SIGINT]
        self.listening = True
        if threading.current_thread() is threading.main_thread():
            for number in self._previous:
                signal.signal(number, self._note)

    def leave(self, ignored: bool = False) -> None:
        """Give the signals back to who had them; or ignore them, until the exit that follows a run's answer."""
        if self.listening and threading.current_thread() is threading.main_thread():
            for number, handler in self._previous.items():
                signal.signal(number, signal.SIG_IGN if ignored else handler)
        self.listening = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            # A forked child is not the run: it ends as it would have without us.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self._num_interrupts += number == signal.SIGINT
        if self._num_interrupts > 1:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            raise KeyboardInterrupt
        if not self.first:
            self.first = number
            self.deferred = self.deferred or num_processes() > 1
            if not self.deferred:
                raise PreemptedError("", exit_code(number, requeued=False))
            if number == signal.SIGINT and is_first_process():
                os.write(2, b"\nstopping after this step; Ctrl-C again stops at once\n")


stop_request = StopRequest()


@contextmanager
def handle_preemption() -> Iterator[None]:
    """Listen to the stop signals while a run lasts; one before training is a `PreemptedError`, after a requeue."""
    stop_request.listen()
    ignored = False
    try:
        yield
    except BaseException as error:
        # Whatever the end of an unfinished import or file was turned into, the signal is what it is about.
        is_early = stop_request.first and not stop_request.deferred
        ignored = bool(is_early) or isinstance(error, PreemptedError)
        if not is_early:
            raise
        stop_request.deferred = True
        raise answer(stop_request.first, "stopped before its first step", None, is_first_process()) from None
    finally:
        stop_request.leave(ignored)


def ignore_stop_signals() -> None:
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def block_signals(signals: Sequence[signal.Signals] = STOP_SIGNALS) -> Iterator[None]:
    """Keep signals from what is started meanwhile, for good; this process hears them afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def answer(number: int, where: str, checkpoint: Any, is_first: bool) -> PreemptedError:
    """Have the run's first process ask SLURM to queue the job again, and say how the run ends.

    `where` says in words at which point signal `number` stopped the run, and `checkpoint` what it resumes from.
    """
    # Who presses Ctrl-C does not want the job in the queue again.
    job = None if number == signal.SIGINT else job_id()
    if not is_first:
        return PreemptedError("", exit_code(number, requeued=job is not None))
    refusal = requeue(job) if job else ""
    parts = [f"{signal.Signals(number).name}: {where}"]
    if job:
        parts.append(f"scontrol requeue {job} failed ({refusal})" if refusal else f"job {job} is queued again")
    if checkpoint is not None:
        parts.append(f"resume with --ckpt_path {checkpoint}")
    return PreemptedError("; ".join(parts), exit_code(number, requeued=bool(job) and not refusal))


def exit_code(number: int, requeued: bool) -> int:
    """75 for a job that is queued again and for a warning that it will be, 130 for Ctrl-C, else 143."""
    if number == signal.SIGINT:
        return EXIT_INTERRUPTED
    return EXIT_RESUMABLE if requeued or number == signal.SIGUSR1 else EXIT_TERMINATED
