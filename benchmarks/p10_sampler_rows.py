"""P10: batches of 10M and 100M rows need at most 1 byte a row, 0.1 s to start, 2 ms for 16,384 rows, 10 ms to seek.

The peer is torch's RandomSampler, which draws and stores a permutation of all rows and cannot seek. Our batches also
contain a key for the random choices of each row. The entries of both are Python objects, as a loader needs them.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import islice

import numpy as np
from torch.utils.data import RandomSampler

from benchmarks.harness import compare, options, peak_growth_bytes, record
from embeddings.data import BlendedBatchSampler

BATCH_SIZE, NUM_TIMED = 16_384, 20


def ours(num_rows: int) -> BlendedBatchSampler:
    """A sampler over three sources with this number of rows in total."""
    sizes = [num_rows * 6 // 10, num_rows * 3 // 10]
    return BlendedBatchSampler([*sizes, num_rows - sum(sizes)], min(BATCH_SIZE, num_rows // 8))


def first_batches(num_rows: int, is_ours: bool) -> Iterator[None]:
    """A sampler and two batches in a child process, after a warm-up of the libraries."""
    next(iter(ours(10_000)))
    list(RandomSampler(range(10_000)))
    yield
    if is_ours:
        list(islice(ours(num_rows), 2))
    else:
        list(islice(RandomSampler(range(num_rows)), 2 * BATCH_SIZE))


def seconds(action: Callable[[], object]) -> float:
    """Wall time of one run."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def check_plan(sampler: BlendedBatchSampler, num_rows: int) -> None:
    """Refuse to time a plan unless it contains every row once, except the rows of an incomplete last batch."""
    counts = np.zeros(num_rows, dtype=np.uint8)
    for step in range(sampler.num_steps):
        np.add.at(counts, sampler.global_batch(0, step), 1)
    if counts.max() != 1 or (counts == 0).sum() != num_rows % sampler.global_batch_size:
        raise RuntimeError("the plan is not a permutation: nothing to compare")


def measure(chosen: argparse.Namespace, num_rows: int) -> None:
    """Measure and record memory and times at one number of rows."""
    size = f"{num_rows:,} rows".replace(",", "")
    for name, is_ours, target in (("ours", True, "<=1"), ("RandomSampler", False, "none")):
        growth = peak_growth_bytes(chosen, first_batches, num_rows, is_ours) / num_rows
        record(chosen, f"P10 memory of the order, {name}, {size}", growth, "bytes a row", target, "torch")
    sampler = ours(num_rows)
    batch_size, steps = sampler.batch_size, sampler.num_steps
    start = seconds(lambda: next(iter(ours(num_rows))))
    record(chosen, f"P10 start to the first batch, ours, {size}", start, "s", "<=0.1", "torch")
    start = seconds(lambda: next(iter(RandomSampler(range(num_rows)))))
    record(chosen, f"P10 start to the first row, RandomSampler, {size}", start, "s", "none", "torch")

    timed_steps = np.linspace(0, steps - 1, NUM_TIMED).astype(int).tolist()
    times = [
        seconds(lambda step=step: (sampler.global_batch(0, step), sampler.draw_keys(0, step))) for step in timed_steps
    ]
    record(chosen, f"P10 rows of a batch of {batch_size}, {size}", statistics.median(times) * 1e3, "ms", "<=2", "torch")

    def seek(step: int) -> None:
        fresh = ours(num_rows)
        fresh.resume(0, step)
        next(iter(fresh))

    times = [seconds(lambda step=step: seek(step)) for step in timed_steps]
    record(
        chosen, f"P10 seek to a batch of {batch_size}, {size}", statistics.median(times) * 1e3, "ms", "<=10", "torch"
    )


def main() -> None:
    """Check the plan, measure both sizes, and time one batch of entries against the peer's."""
    chosen = options(__doc__)
    small, large = (20_000, 40_000) if chosen.tiny else (10_000_000, 100_000_000)
    check_plan(ours(small), small)
    for num_rows in (small, large):
        measure(chosen, num_rows)
    sampler, step = ours(small), 0
    batch_size = sampler.batch_size
    rows = iter(RandomSampler(range(small), replacement=False, num_samples=10**12))

    def next_batch() -> object:
        nonlocal step
        step = (step + 1) % sampler.num_steps
        sampler.start = step
        return next(iter(sampler))

    ratio = compare(next_batch, lambda: list(islice(rows, batch_size)), chosen)
    record(
        chosen,
        f"P10 entries of a batch of {batch_size} over RandomSampler's, {small} rows",
        ratio,
        "ratio",
        "none",
        "torch",
    )


if __name__ == "__main__":
    main()
