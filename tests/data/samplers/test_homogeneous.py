"""The source of each batch."""

import time
import tracemalloc
from fractions import Fraction
from itertools import accumulate

import pytest

from embeddings.common import OptionError
from embeddings.data.samplers.base import HomogeneousBatchSampler, SourceIdentity, source_parts
from tests.data.rows import placed, rows_of
from tests.helpers.refusals import refused

SIZES = [42, 9, 23, 4]
PLANS = {
    "size": {},
    "cooled": {"temperature": 0.3},
    "uniform": {"proportions": "uniform"},
    "given": {"proportions": "given", "weights": [1, 2, 3, 0.7]},
}


def make(batch_size=4, **options):
    return HomogeneousBatchSampler(options.pop("sizes", SIZES), batch_size, **options)


def sequence(sampler, epoch=0):
    """The source of each step."""
    return [sampler.source_batch(epoch, step)[0] for step in range(len(sampler))]


def tick_by_tick(batches, parts):
    """The phases of an epoch by simulation: all sources are read in parallel, each at the rate of its share.

    Batch k of a source is due at time (k + 1/2) / share; a phase ends when a source has no more batches.
    """
    due = sorted(
        (Fraction(2 * k + 1, 2) / Fraction(part), source)
        for source, (count, part) in enumerate(zip(batches, parts, strict=True))
        for k in range(count)
    )
    ends = sorted({Fraction(count) / Fraction(part) for count, part in zip(batches, parts, strict=True)})
    starts = [Fraction(0), *ends[:-1]]
    return [[source for time, source in due if start < time <= end] for start, end in zip(starts, ends, strict=True)]


@pytest.mark.parametrize("sizes", [SIZES, [4, 4, 4], [400, 30, 10, 5], [7]])
@pytest.mark.parametrize("options", [*PLANS.values(), {"temperature": 0.0}, {"temperature": 0.7}])
def test_the_sources_are_those_of_a_simulation_batch_by_batch(sizes, options):
    if "weights" in options:
        options = {**options, "weights": options["weights"][: len(sizes)]}
    batches = [size // 4 for size in sizes]
    stretches = tick_by_tick(batches, list(source_parts(batches, **options)))
    assert [source for stretch in stretches for source in stretch].count(0) == batches[0]
    sampler = make(sizes=sizes, **options)
    found, ends = sequence(sampler), list(accumulate(map(len, stretches)))
    assert sampler.num_steps == ends[-1]
    for start, end, stretch in zip([0, *ends], ends, stretches, strict=False):
        assert sorted(found[start:end]) == sorted(stretch)
    numbers = [sampler.source_batch(0, step) for step in range(len(sampler))]
    assert sorted(numbers) == [(source, number) for source, count in enumerate(batches) for number in range(count)]


def test_a_far_step_of_a_large_plan_is_found_within_twenty_milliseconds_without_memory_per_row():
    sizes = [6_000_000_000, 3_000_000_000, 1_000_000_000, *range(10_000, 20_000, 100)]
    tracemalloc.start()
    sampler = HomogeneousBatchSampler(sizes, 64, temperature=0.3)
    sampler.resume(0, 1_000_000)
    started = time.process_time()
    assert len(next(iter(sampler))) == 64
    seconds = time.process_time() - started
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (peak < 500_000, seconds < 0.02) == (True, True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 43}, r"must not exceed the 42 rows of the largest source, got 43; lower it"),
        ({"weights": [1, 2, 3, 4]}, "cannot take effect with proportions 'size'"),
    ],
)
def test_invalid_options_are_refused_in_one_line(options, message):
    refused(OptionError, message, lambda: len(make(**options)))


def test_a_new_batch_size_is_planned_again():
    sampler = make(2)
    assert len(rows_of(sampler)) == 38
    sampler.batch_size = 4
    assert rows_of(sampler) == rows_of(make(4))


@pytest.mark.parametrize("options", PLANS.values(), ids=PLANS)
def test_a_source_smaller_than_a_batch_is_left_out_and_named(options):
    """With sources of 9 and 4 rows and batches of 12, the plan is that of the other two sources."""
    sampler = placed(make(4, **options), 0, 3)
    sampler.identify([SourceIdentity(name, "key") for name in ("a", "small", "c", "smaller")])
    says = "sources with fewer rows than a batch of 12 are not used: small (9), smaller (4)"
    assert sampler.remarks() == [says]
    found, large = sequence(sampler), {**options, "weights": [1, 3]} if "weights" in options else options
    assert len(found) == 42 // 12 + 23 // 12
    assert sorted(sequence(make(12, sizes=[42, 23], **large))) == sorted([0, None, 1][source] for source in found)
