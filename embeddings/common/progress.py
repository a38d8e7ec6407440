"""Progress of jobs: a bar on a terminal, lines in a log, and a line every half minute whatever a command is doing."""

import io
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar
from weakref import ref

from tqdm import tqdm

from embeddings.common.process import is_first_process

# A job shorter than this shows no progress bar.
PROGRESS_DELAY_SECONDS = 2.0
# Interval of progress lines if standard error is not a terminal.
LINE_SECONDS = 30.0
# A bar on a terminal is drawn again after this time, so that its clock moves.
_REDRAW_SECONDS = 1.0
# Positions that a bar stores while its time doubles.
_NUM_SAMPLES = 64

Item = TypeVar("Item")


def progress_bar(
    total: float | None,
    title: str,
    unit: str,
    *,
    share: float = 1.0,
    delay: float | None = None,
    every_seconds: float | None = None,
    **options: Any,
) -> "ProgressBar":
    """A bar on standard error; without a terminal, a line every `every_seconds` seconds, None for 30.

    Nothing is shown in the first `delay` seconds; None means 2. Inside an item of another bar (`ProgressBar.item`) it
    is not drawn: it moves the other bar by `share` of that item. Only the first process of a run shows bars.
    """
    options = {"miniters": 0, **options, "total": total, "desc": title, "unit": unit}
    options["delay"] = PROGRESS_DELAY_SECONDS if delay is None else delay
    options["disable"] = options.get("disable") or not is_first_process()
    if _items.open and not options["disable"]:
        return _InnerBar(_items.open[-1], share, **options)
    if sys.stderr is not None and sys.stderr.isatty():
        return _Bar(**options)
    return _LineBar(**{**options, "mininterval": LINE_SECONDS if every_seconds is None else every_seconds})


def tracked(
    items: Iterable[Item], total: float | None, title: str, unit: str, size: Callable[[Item], float], **options: Any
) -> Iterator[Item]:
    """The same items; each moves a bar by its `size` when the next one is asked for."""
    with progress_bar(total, title, unit, **options) as bar:
        for item in items:
            yield item
            bar.update(size(item))


class ProgressBar(tqdm):  # type: ignore[type-arg]
    """A bar whose items may have bars of their own.

    The time left follows from the speed in the second half of the time so far, because starting takes time and speed
    changes; with `smoothing` 0 from the mean speed.
    """

    monitor_interval = 0

    def __init__(self, **options: Any) -> None:
        # Times and positions: the first movement, and the latest ones.
        self._samples = deque[tuple[float, float]]()
        super().__init__(**options)

    def __iter__(self) -> Iterator[Any]:
        """The iterable's elements, each as an item."""
        if self.disable:
            yield from self.iterable
            return
        with self:
            for element in self.iterable:
                with self.item():
                    yield element

    def update(self, n: float | None = 1) -> bool | None:
        return self.move(self.n + (n or 0))

    @contextmanager
    def item(self, size: float = 1) -> Iterator["_OpenItem"]:
        """An item of the work, by whose `size` the bar has moved at the end; bars opened inside move it within."""
        item = _OpenItem(self, self.n, self.n + size)
        if self.disable:
            yield item
            return
        _items.open.append(item)
        try:
            yield item
        finally:
            _items.close(item)
        self.move(item.stop)

    def move(self, position: float) -> bool | None:
        """Move to a position, unless it is behind."""
        if self.disable or position <= self.n:
            return None
        is_drawn = super().update(position - self.n)
        now = time.time()
        if not self._samples or now - self._samples[-1][0] >= (now - self.start_t) / _NUM_SAMPLES:
            self._samples.append((now, self.n))
            # The first of those left is the last one before the middle of the time so far.
            while len(self._samples) > 1 and self._samples[1][0] <= (self.start_t + now) / 2:
                self._samples.popleft()
        return is_drawn

    def repeat(self, pause: float) -> None:
        """Draw the bar again if that is due before the next call, after `pause` seconds."""

    def _rate(self) -> float | None:
        """The speed in the second half of the time so far; None for the mean speed."""
        now, samples = time.time(), list(self._samples)
        if not self.smoothing or not samples:
            return None
        before = [sample for sample in samples if sample[0] <= (self.start_t + now) / 2]
        then, n = before[-1] if before else samples[0]
        return (self.n - n) / (now - then) if self.n > n and now > then else None

    @property
    def format_dict(self) -> Any:
        state = super().format_dict
        if not self.disable:
            state["rate"] = self._rate()
        if isinstance(state["n"], float) and not state.get("unit_scale"):
            is_exact = (self.total or 0) < 100 and not state["n"].is_integer()
            state["n"] = round(state["n"], 1) if is_exact else round(state["n"])
        return state


class _OpenItem:
    """The part of a bar that bars opened now may move."""

    def __init__(self, bar: ProgressBar, start: float, stop: float) -> None:
        self.bar, self.start, self.stop = bar, start, stop

    def cancel(self) -> None:
        self.stop = self.start


class _Items(threading.local):
    def __init__(self) -> None:
        self.open: list[_OpenItem] = []

    def close(self, item: _OpenItem) -> None:
        # An abandoned generator may be closed in another thread.
        if item in self.open:
            self.open.remove(item)


_items = _Items()


class _InnerBar(ProgressBar):
    """A bar that is not drawn, and moves another one within an item."""

    def __init__(self, item: _OpenItem, share: float, **options: Any) -> None:
        # Another bar may have moved the item before.
        self._outer, self._start = item.bar, max(item.start, min(item.bar.n, item.stop))
        self._length = share * (item.stop - self._start)
        super().__init__(**options, file=io.StringIO())

    def move(self, position: float) -> bool | None:
        is_drawn = super().move(position)
        if self.total and not self.disable:
            self._outer.move(self._start + self._length * min(1.0, self.n / self.total))
        elif not self.disable:
            self._outer.set_postfix_str(f"{self.n:,.0f} {self.unit}s", refresh=False)
        return is_drawn

    def close(self) -> None:
        """Remove what this bar shows in the other one."""
        if not self.disable and not self.total:
            self._outer.set_postfix_str("", refresh=False)
        super().close()

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        pass


class _Bar(ProgressBar):
    """A bar on a terminal."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        _reporter.watch(self)

    def repeat(self, pause: float) -> None:
        now = time.time()
        if not self.disable and now >= max(self.start_t + (self.delay or 0), self.last_print_t + _REDRAW_SECONDS):
            self.last_print_t = now
            self.refresh()


class _LineBar(ProgressBar):
    """Prints a line at most once per interval, and one at the end."""

    def __init__(self, **options: Any) -> None:
        self._shown_at = time.time() if options["delay"] > 0 else -math.inf
        self._shown = ""
        super().__init__(**options, file=io.StringIO())
        _reporter.watch(self)

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        now = time.time()
        # tqdm disables a bar that ends before it shows its last state, and may show one state twice.
        is_due = self.disable or now - self._shown_at >= self.mininterval
        if msg is None and is_due:
            self._print(now, only_new=True)

    def repeat(self, pause: float) -> None:
        now = time.time()
        if not self.disable and now + pause > self._shown_at + max(self.mininterval, LINE_SECONDS):
            # tqdm draws the last state only of a bar that was drawn before.
            self.last_print_t = now
            self._print(now)

    def _print(self, now: float, only_new: bool = False) -> None:
        line = str(self)
        state = line.partition("[")[0]
        if sys.stderr is not None and not (only_new and state == self._shown):
            print(line, file=sys.stderr, flush=True)
            self._shown_at, self._shown = now, state
            _reporter.printed_at = now


class _Reporter:
    """A thread that draws the bars again while nothing moves them, and reports a command without a bar."""

    def __init__(self) -> None:
        self._bars: list[ref[ProgressBar]] = []
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        # The title and the start of the command.
        self.command: tuple[str, float] | None = None
        self.printed_at = 0.0

    def watch(self, bar: ProgressBar) -> None:
        if not bar.disable:
            self._bars = [*(known for known in self._bars if _is_open(known())), ref(bar)]
            self.start()

    def start(self) -> None:
        # In a forked child the thread is not alive.
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="progress", daemon=True)
            self._thread.start()
        self._wake.set()

    def _run(self) -> None:
        while True:
            pause, is_idle = min(1.0, LINE_SECONDS / 8), True
            for known in self._bars:
                if (bar := known()) is not None and not bar.disable:
                    bar.repeat(pause)
                    is_idle = False
            bar, command = None, self.command
            if is_idle and command is None:
                self._wake.wait()
                self._wake.clear()
            elif is_idle and command is not None:
                self._report(*command, pause)
            time.sleep(pause)

    def _report(self, title: str, start: float, pause: float) -> None:
        now = time.time()
        if now + pause > max(start, self.printed_at) + LINE_SECONDS and sys.stderr is not None:
            print(f"{title}: running for {timedelta(seconds=round(now - start))}", file=sys.stderr, flush=True)
            self.printed_at = now


def _is_open(bar: ProgressBar | None) -> bool:
    return bar is not None and not bar.disable


_reporter = _Reporter()


@contextmanager
def reported(title: str) -> Iterator[None]:
    """Inside, a line every half minute reports that the command `title` is running, unless a bar is open."""
    before = _reporter.command
    if is_first_process():
        _reporter.command = title, time.time()
        _reporter.start()
    try:
        yield
    finally:
        _reporter.command = before


def stop_reporting() -> None:
    _reporter.command = None
