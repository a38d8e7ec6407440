"""What all benchmarks share: interleaved timing with a control, peak memory of child processes, rows of results."""

import argparse
import csv
import datetime
import multiprocessing
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
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
    """One row of `results.csv`."""

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
    """Our time over the peer's: median, minimum and maximum of the pairs; and the control, the peer over itself."""

    median: float
    low: float
    high: float
    control: float


def options(
    description: str | None, threads: int = 1, parser: argparse.ArgumentParser | None = None
) -> argparse.Namespace:
    """Parse the command line that all benchmarks share, and the options of `parser`; set the number of threads."""
    parser = parser or argparse.ArgumentParser(description=description)
    parser.add_argument("--tiny", action="store_true", help="try the script with small sizes; writes no row")
    parser.add_argument("--threads", type=int, default=threads, help="CPU threads")
    parser.add_argument("--pairs", type=int, default=9, help="interleaved pairs to time")
    chosen = parser.parse_args()
    if chosen.tiny:
        chosen.threads = 1
    torch.set_num_threads(chosen.threads)
    return chosen


def compare(ours: Action, peer: Action, chosen: argparse.Namespace, min_seconds: float = 0.2) -> Ratio:
    """Time one action of ours against the peer's; see `compare_all`."""
    return compare_all({"ours": ours}, peer, chosen, min_seconds)["ours"]


def compare_all(
    ours: Mapping[str, Action], peer: Action, chosen: argparse.Namespace, min_seconds: float = 0.2
) -> dict[str, Ratio]:
    """Time several actions of ours against one of the peer's, interleaved, in a different order in each round.

    Each round also runs the peer a second time. The ratio of its two times is the control. If the control is outside
    its limits, all actions are timed again. With one thread the clock is the CPU time of the process, with more
    threads wall-clock time. A progress bar goes to stderr.

    Raises:
        RuntimeError: If the control is outside its limits three times: the times are then not reliable.
    """
    for _ in range(1 if chosen.tiny else ATTEMPTS):
        ratios = _timed(ours, peer, chosen, min_seconds)
        control = next(iter(ratios.values())).control
        if chosen.tiny or CONTROL_LIMITS[0] <= control <= CONTROL_LIMITS[1]:
            return ratios
        medians = ", ".join(f"{name} {ratio.median:.3f}" for name, ratio in ratios.items())
        print(f"void: the control is {control:.3f} ({medians})", flush=True)
    raise RuntimeError(f"void {ATTEMPTS} times; run again on a quiet machine")


def _timed(
    ours: Mapping[str, Action], peer: Action, chosen: argparse.Namespace, min_seconds: float
) -> dict[str, Ratio]:
    clock = time.process_time if chosen.threads == 1 else time.perf_counter
    actions = [*ours.values(), peer, peer]
    repeats = [1 if chosen.tiny else _repeats(action, clock, min_seconds) for action in actions[:-1]]
    repeats.append(repeats[-1])
    seconds: list[list[float]] = [[] for _ in actions]
    rounds, indices = 1 if chosen.tiny else chosen.pairs, list(range(len(actions)))
    for turn in progress(range(rounds), desc=", ".join(ours), disable=chosen.tiny):
        # Every other round is reversed: else the control would nearly always run right after the peer.
        order = indices[turn % len(indices) :] + indices[: turn % len(indices)]
        for index in order[:: 1 if turn % 2 == 0 else -1]:
            start = clock()
            for _ in range(repeats[index]):
                actions[index]()
            seconds[index].append((clock() - start) / repeats[index])
    *of_ours, of_peer, of_control = seconds
    control = _ratios(of_control, of_peer)[0]
    return {name: Ratio(*_ratios(of_one, of_peer), control) for name, of_one in zip(ours, of_ours, strict=True)}


def peak_growth_bytes(chosen: argparse.Namespace, function: Callable[..., Any], *arguments: Any) -> int:
    """Peak memory of a child process in the measured part, minus its memory at the start of that part, in bytes.

    Args:
        chosen: The command line; the child uses its number of threads. In a tiny run the child is a fork of this
            process, which has already loaded the libraries.
        function: A top-level function of a module. It sets up and yields once; the code after that is measured.
        arguments: Arguments of `function`.
    """
    # glibc then returns large freed blocks to the system at once: the peak counts only memory in use.
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


@contextmanager
def separate_process(
    chosen: argparse.Namespace, make: Callable[..., Callable[..., Any]], *arguments: Any
) -> Iterator[Callable[..., Any]]:
    """A function that runs in a separate process, such as one side of a comparison; the caller waits for its result.

    Each side then has its own memory allocator, with the settings of its users.

    Args:
        chosen: The command line; the process uses its number of threads. A tiny run uses this process instead.
        make: A top-level function of a module, which builds the function in the process.
        arguments: Arguments of `make`.

    Raises:
        ValueError: With one thread, because `compare` then counts the CPU time of this process only.
    """
    if chosen.tiny:
        yield make(*arguments)
        return
    if chosen.threads == 1:
        raise ValueError("--threads must be >= 2, since separate processes are compared by wall-clock time")
    context = multiprocessing.get_context("spawn")
    connection, remote = context.Pipe()
    child = context.Process(target=_answer, args=(remote, chosen.threads, make, arguments), daemon=True)
    child.start()
    remote.close()

    def run(*options: Any) -> Any:
        """The result for these arguments."""
        connection.send(options)
        return connection.recv()

    try:
        yield run
    finally:
        connection.close()
        child.join()


def _answer(connection: Any, threads: int, make: Callable[..., Callable[..., Any]], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(threads)
    run = make(*arguments)
    with suppress(EOFError):
        while True:
            connection.send(run(*connection.recv()))


def record(
    chosen: argparse.Namespace,
    claim: str,
    ratio: Ratio | float,
    unit: str,
    target: str,
    peer: str = "none",
    device: str | None = None,
) -> None:
    """Print a result, and append its row unless the run is tiny.

    Args:
        chosen: The command line.
        claim: Number and text of the claim.
        ratio: A ratio of times, or a plain value.
        unit: Unit of the value.
        target: The bound that the claim sets, such as `<=1.05`, or `none`.
        peer: Comma-separated packages whose versions are recorded.
        device: The hardware, if it is not the CPU.
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


def ratio_of(of_ours: list[float], of_peer: list[float]) -> Ratio:
    """The ratio of values that were measured in pairs, without a control."""
    return Ratio(*_ratios(of_ours, of_peer), float("nan"))


def _ratios(of_ours: list[float], of_peer: list[float]) -> tuple[float, float, float]:
    """Median, minimum and maximum of the rounds' ratios."""
    ratios = [a / b for a, b in zip(of_ours, of_peer, strict=True)]
    return statistics.median(ratios), min(ratios), max(ratios)


def _repeats(action: Action, clock: Callable[[], float], min_seconds: float) -> int:
    """Number of runs that take `min_seconds` together; 1 if the first run, a warm-up, takes far longer."""
    start = clock()
    action()
    if clock() - start > 5 * min_seconds:
        return 1
    start = clock()
    action()
    return int(min_seconds / max(clock() - start, 1e-6)) + 1


def _measured(sender: Any, threads: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(threads)
    stages = function(*arguments)
    next(stages)
    # Linux: reset the recorded peak.
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
    """The commit, with `-dirty` if a tracked file other than a CSV file differs from it."""

    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", *arguments], cwd=RESULTS.parent, capture_output=True, text=True, check=False)

    head = git("rev-parse", "--short", "HEAD").stdout.strip()
    changed = git("diff", "--quiet", "HEAD", "--", ":/", ":!*.csv").returncode != 0
    return f"{head or 'unknown'}{'-dirty' if head and changed else ''}"
