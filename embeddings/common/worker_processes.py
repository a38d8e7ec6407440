"""Processes that work for this one: whichever is free gets the next item."""

import os
import pickle
import signal
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue
from threading import Thread
from typing import Any, Generic, TypeVar

from embeddings.common.errors import NumericError, UserError, WorkerError
from embeddings.common.signals import block_signals

Item = TypeVar("Item")
Result = TypeVar("Result")

# Items that a process has: one at work, and the next one at hand.
_MAX_ITEMS = 2
_SECONDS_TO_END = 10.0
_KEPT = "what is finished is kept"


def spread(
    makers: Mapping[str, Callable[[], Callable[[Item], Result]]], items: Iterable[Item]
) -> Generator[Result, None, None]:
    """Have each item worked on by one of several processes; results come in the order in which they are done.

    An item is read once a process has room for it; no process is more than two items ahead of the results that were
    taken. Where one fails, the others finish what they have before the error is raised. The processes end with this
    iterator, or by themselves where this process is killed.

    Args:
        makers: For each process, by its name in messages, what makes its work. It is called in the new process
            (`spawn`); it, items and results are pickled.
        items: What there is to do.

    Raises:
        WorkerError: If a process died, or met an error that no one foresaw. `UserError`, `NumericError` and `OSError`
            are raised as they were there, where they can be pickled.
    """
    with ExitStack() as stack:
        workers = [stack.enter_context(_Worker(name, make)) for name, make in makers.items()]
        # All are told to end before the first is waited for.
        for worker in workers:
            stack.callback(worker.tell_to_end)
        yield from _exchange(workers, iter(items))


def _exchange(workers: "list[_Worker[Item, Result]]", source: Iterator[Item]) -> Iterator[Result]:
    failure: Exception | None = None
    more = True
    while True:
        while more and failure is None:
            free = min(workers, key=lambda worker: worker.num_items)
            if free.num_items == _MAX_ITEMS:
                break
            try:
                free.send(next(source))
            except StopIteration:
                more = False
        busy = {worker.connection: worker for worker in workers if worker.num_items}
        if not busy:
            break
        for connection in wait(list(busy)):
            try:
                result = busy[connection].receive()  # type: ignore[index]
            except Exception as error:
                failure, busy[connection].num_items = failure or error, 0  # type: ignore[index]
            else:
                yield result
    if failure is not None:
        raise failure


class _Worker(Generic[Item, Result]):
    """One process and the line to it; as a context it is ended on leaving."""

    def __init__(self, name: str, make: Callable[[], Callable[[Item], Result]]) -> None:
        self.name, self.num_items = name, 0
        self.connection, remote = (context := get_context("spawn")).Pipe()
        self._process = context.Process(target=_serve, args=(remote, name, make), daemon=True)
        # Ctrl-C reaches all processes of a terminal; this one decides when the others end. Python's tracker, which is
        # started with the first of them, would let it through again.
        resource_tracker.ensure_running()
        with block_signals((signal.SIGINT,)):
            self._process.start()
        # Only the other process holds its end from now on, so its death closes the line.
        remote.close()

    def __enter__(self) -> "_Worker[Item, Result]":
        return self

    def __exit__(self, *_: object) -> None:
        self.tell_to_end()
        self._process.join(_SECONDS_TO_END)
        self._process.kill()
        self._process.join()
        self.connection.close()

    def tell_to_end(self) -> None:
        self._process.terminate()

    def send(self, item: Item) -> None:
        """Hand over an item; `receive` tells if the process is dead."""
        self.num_items += 1
        with suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send_bytes(pickle.dumps(item))

    def receive(self) -> Result:
        """The next result, or what was raised there instead; then nothing more comes."""
        try:
            result, error = pickle.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            raise WorkerError(f"the process of {self.name} {self._end()}; {_KEPT}") from None
        if error is not None:
            raise error
        self.num_items -= 1
        return result  # type: ignore[no-any-return]

    def _end(self) -> str:
        self._process.join(_SECONDS_TO_END)
        code = self._process.exitcode or 0
        return f"was ended by a signal ({signal.Signals(-code).name})" if code < 0 else f"ended with code {code}"


def _serve(connection: Connection, name: str, make: Callable[[], Callable[[Any], Any]]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Files that it was writing are taken away.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    items: SimpleQueue[bytes] = SimpleQueue()
    Thread(target=_read, args=(connection, items), daemon=True).start()
    try:
        work = make()
        while True:
            connection.send_bytes(pickle.dumps((work(pickle.loads(items.get())), None)))
    except (BrokenPipeError, ConnectionResetError):
        return
    except Exception as error:
        told: Exception = error
        if not (isinstance(error, (UserError, NumericError, OSError)) and _travels(error)):
            told = WorkerError(f"the process of {name} met {type(error).__name__}: {error}; {_KEPT}")
        with suppress(BrokenPipeError, ConnectionResetError):
            connection.send_bytes(pickle.dumps((None, told)))


def _travels(error: Exception) -> bool:
    """Whether an error is the same in another process; one with arguments of its own may not be."""
    try:
        return str(pickle.loads(pickle.dumps(error))) == str(error)
    except Exception:
        return False


def _read(connection: Connection, items: "SimpleQueue[bytes]") -> None:
    """Take items off the line as they come, so that neither side waits for the other to read."""
    try:
        while True:
            items.put(connection.recv_bytes())
    except (EOFError, OSError):
        # Whom this process worked for is dead.
        os.kill(os.getpid(), signal.SIGTERM)
