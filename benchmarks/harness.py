"""How every benchmark measures: interleaved pairs, a control, peaks of child processes, one row a result."""

import argparse
import csv
import datetime
import multiprocessing
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm as progress

from embeddings.common.process import cpu_name as hardware

RESULTS = Path(__file__).with_name("results.csv")
CONTROL_LIMITS = (0.97, 1.03)
ATTEMPTS = 3

Action = Callable[[], object]


@dataclass(frozen=True)
class Row:
    """One result as `results.csv` holds it."""

    claim: str
    value: float
    unit: str
    low: float
    high: float
    control: float
    target: str
    peer: str
    hardware: str
    threads: int
    commit: str
    date: str


@dataclass(frozen=True)
class Ratio:
    """Time of ours over time of the peer's: median, least and greatest of the pairs, and the peer against itself."""

    median: float
    low: float
    high: float
    control: float


def options(description: str | None, threads: int = 1) -> argparse.Namespace:
    """The command line that all benchmarks share; sets the number of threads."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--tiny", action="store_true", help="see that it works: small sizes, no row, no verdict")
    parser.add_argument("--threads", type=int, default=threads)
    parser.add_argument("--pairs", type=int, default=9, help="interleaved pairs")
    chosen = parser.parse_args()
    if chosen.tiny:
        chosen.threads = 1
    torch.set_num_threads(chosen.threads)
    return chosen


def compare(ours: Action, peer: Action, chosen: argparse.Namespace, least_seconds: float = 0.2) -> Ratio:
    """Time one action of ours against the peer's; see `compare_all`."""
    return compare_all({"ours": ours}, peer, chosen, least_seconds)["ours"]


def compare_all(
    ours: Mapping[str, Action], peer: Action, chosen: argparse.Namespace, least_seconds: float = 0.2
) -> dict[str, Ratio]:
    """Time several actions of ours against one of the peer's, interleaved, the order another in each round.

    Every round also runs the peer a second time: the ratio of its two times is the control, and where it lies outside
    its limits all is timed again. On one thread the clock
    counts the process's own seconds, on more it is the wall's. The rounds and the time left go to stderr.

    Raises:
        RuntimeError: If the control lies outside its limits three times; such a run proves nothing.
    """
    for _ in range(1 if chosen.tiny else ATTEMPTS):
        found = _timed(ours, peer, chosen, least_seconds)
        control = next(iter(found.values())).control
        if chosen.tiny or CONTROL_LIMITS[0] <= control <= CONTROL_LIMITS[1]:
            return found
        read = ", ".join(f"{name} {ratio.median:.3f}" for name, ratio in found.items())
        print(f"void: the peer against itself read {control:.3f} ({read})", flush=True)
    raise RuntimeError(f"void {ATTEMPTS} times; run again on a quiet machine")


def _timed(
    ours: Mapping[str, Action], peer: Action, chosen: argparse.Namespace, least_seconds: float
) -> dict[str, Ratio]:
    clock = time.process_time if chosen.threads == 1 else time.perf_counter
    actions = [*ours.values(), peer, peer]
    repeats = [1 if chosen.tiny else _repeats(action, clock, least_seconds) for action in actions[:-1]]
    repeats.append(repeats[-1])
    seconds: list[list[float]] = [[] for _ in actions]
    rounds, places = 1 if chosen.tiny else chosen.pairs, list(range(len(actions)))
    for turn in progress(range(rounds), desc=", ".join(ours), disable=chosen.tiny):
        # Turned round every other time, or the control would nearly always come right after the peer.
        order = places[turn % len(places) :] + places[: turn % len(places)]
        for place in order[:: 1 if turn % 2 == 0 else -1]:
            start = clock()
            for _ in range(repeats[place]):
                actions[place]()
            seconds[place].append((clock() - start) / repeats[place])
    *of_ours, of_peer, of_control = seconds
    control = _ratios(of_control, of_peer)[0]
    return {name: Ratio(*_ratios(taken, of_peer), control) for name, taken in zip(ours, of_ours, strict=True)}


def peak_growth_bytes(chosen: argparse.Namespace, function: Callable[..., Any], *arguments: Any) -> int:
    """Bytes by which a child process's memory peaks above where it was when the measured part began.

    Args:
        chosen: The command line; the child has its threads. At tiny sizes it is a copy of this process, which has
            loaded everything already.
        function: A module's top-level function; it sets up, then yields once; what follows is measured.
        arguments: Its arguments.
    """
    # glibc then gives every large block back at once: the peak counts what is in use, not what is held in reserve.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(2**16)
    context: Any = multiprocessing.get_context("fork" if chosen.tiny else "spawn")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_measured, args=(sender, chosen.threads, function, arguments))
    child.start()
    sender.close()
    try:
        return int(receiver.recv())
    finally:
        child.join()


def record(
    chosen: argparse.Namespace,
    claim: str,
    ratio: Ratio | float,
    unit: str,
    target: str,
    peer: str = "none",
    device: str | None = None,
) -> None:
    """Print a result, and append its row unless the sizes were tiny.

    Args:
        chosen: The command line.
        claim: Number and what is claimed.
        ratio: A ratio of times, or a plain value.
        unit: Unit of the value.
        target: What was promised.
        peer: Package names whose versions belong beside the result, comma-separated.
        device: What ran it, where that is not the CPU.
    """
    if not isinstance(ratio, Ratio):
        ratio = Ratio(ratio, ratio, ratio, float("nan"))
    row = Row(
        claim, round(ratio.median, 4), unit, round(ratio.low, 4), round(ratio.high, 4), round(ratio.control, 4), target,
        _versions(peer), device or hardware(), chosen.threads, commit(), datetime.date.today().isoformat(),
    )  # fmt: skip
    print(f"{claim}: {row.value} {unit} ({row.low} to {row.high}), target {target}, control {row.control}")
    if chosen.tiny:
        return
    is_new = not RESULTS.exists()
    with RESULTS.open("a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        if is_new:
            writer.writerow([field.name for field in fields(Row)])
        writer.writerow(astuple(row))


def _ratios(taken: list[float], of_peer: list[float]) -> tuple[float, float, float]:
    """Median, least and greatest of the rounds' ratios."""
    ratios = [a / b for a, b in zip(taken, of_peer, strict=True)]
    return statistics.median(ratios), min(ratios), max(ratios)


def _repeats(action: Action, clock: Callable[[], float], least_seconds: float) -> int:
    """Runs that together take `least_seconds`; the first run warms up, and counts only if it took far longer."""
    start = clock()
    action()
    if clock() - start > 5 * least_seconds:
        return 1
    start = clock()
    action()
    return int(least_seconds / max(clock() - start, 1e-6)) + 1


def _measured(sender: Any, threads: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(threads)
    stages = function(*arguments)
    next(stages)
    # Linux: forget the peak so far.
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = _status_bytes("VmHWM")
    for _ in stages:
        pass
    sender.send(_status_bytes("VmHWM") - before)


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}: memory is measured on Linux only")


def _versions(packages: str) -> str:
    names = [name.strip() for name in packages.split(",") if name.strip() != "none"]
    return " ".join(f"{name} {version(name)}" for name in names) or "none"


def commit() -> str:
    """The commit, marked where anything but the rows of results differs from it."""

    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", *arguments], cwd=RESULTS.parent, capture_output=True, text=True, check=False)

    head = git("rev-parse", "--short", "HEAD").stdout.strip()
    changed = git("diff", "--quiet", "HEAD", "--", ":/", ":!*.csv").returncode != 0
    return f"{head or 'unknown'}{'-dirty' if head and changed else ''}"
