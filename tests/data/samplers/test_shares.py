"""The shares of sources: blended batches, and batches of one source each."""

import random
import time
import tracemalloc
from collections import Counter
from fractions import Fraction
from itertools import accumulate, chain

import numpy as np
import pytest

from embeddings.common import OptionError
from embeddings.data.samplers.base import (
    Apportionment,
    BlendedBatchSampler,
    HomogeneousBatchSampler,
    SourceIdentity,
    source_parts,
)
from tests.data.rows import placed, rows_of
from tests.helpers.refusals import refused

SIZES = [40, 7, 23, 1]


def make(batch_size=4, **options):
    return BlendedBatchSampler(options.pop("sizes", SIZES), batch_size, **options)


def source_of(row, sizes):
    return int(np.searchsorted(np.cumsum(sizes), row, side="right"))


def test_a_one_pass_epoch_leaves_out_less_than_a_batch_and_different_rows_each_time():
    left_out = [frozenset(range(71)) - set(chain(*rows_of(make(4), epoch))) for epoch in range(20)]
    assert {len(rows) for rows in left_out} == {71 - 68}
    assert len(set(left_out)) > 10
    # The slice of a rank is a mix too.
    for rank in range(4):
        batches = rows_of(placed(make(8, sizes=[500, 500]), rank, 4))
        assert abs(np.mean([row >= 500 for batch in batches for row in batch]) - 0.5) < 0.1


@pytest.mark.parametrize(
    ("proportions", "weights", "parts"),
    [
        ("size", None, [800, 60, 139, 1]),
        ("uniform", None, [1, 1, 1, 1]),
        ("given", [3, 1, 0.5, 0.25], [3, 1, 0.5, 0.25]),
        ("cooled", None, [800**0.3, 60**0.3, 139**0.3, 1]),
    ],
)
def test_any_number_of_batches_keeps_the_proportions_within_two_rows(proportions, weights, parts):
    sizes = [800, 60, 139, 1]
    options = {"temperature": 0.3} if proportions == "cooled" else {"proportions": proportions}
    sampler = make(16, sizes=sizes, weights=weights, steps_per_epoch=50, **options)
    drawn = np.zeros(4)
    for epoch in range(2):
        for step, batch in enumerate(rows_of(sampler, epoch)):
            drawn += np.bincount([source_of(row, sizes) for row in batch], minlength=4)
            expected = (epoch * 50 + step + 1) * 16 * np.array(parts) / sum(parts)
            assert np.abs(drawn - expected).max() < 2


@pytest.mark.parametrize(
    ("options", "num_steps", "part"),
    [
        ({"proportions": "uniform", "steps_per_epoch": 7}, 7, 1 / 2),
        # With a temperature, passes continue across epochs too.
        ({"temperature": 0.3}, 110 // 8, 1 / (1 + 10**0.3)),
    ],
)
def test_passes_through_a_source_are_even_and_continue_across_epochs(options, num_steps, part):
    sampler = make(8, sizes=[100, 10], **options)
    assert len(sampler) == num_steps
    drawn = Counter(chain(*(row for epoch in range(9) for row in rows_of(sampler, epoch))))
    large, small = [drawn[row] for row in range(100)], [drawn[row] for row in range(100, 110)]
    assert sum(small) == pytest.approx(9 * num_steps * 8 * part, abs=2)
    assert max(small) - min(small) <= 1
    assert max(large) - min(large) <= 1
    passes = rows_of(make(10, sizes=[10], steps_per_epoch=3))
    assert all(sorted(rows) == list(range(10)) for rows in passes)
    assert passes[0] != passes[1] != passes[2]
    assert make(temperature=0.3).plan_fields() != make(temperature=0.5).plan_fields() != make().plan_fields()
    assert make(temperature=1.0).plan_fields() == make().plan_fields()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 72}, r"data\.batch_size must not exceed the 71 training rows \(batch_size x 1 ranks\), got 72"),
        ({"steps_per_epoch": 0}, "steps_per_epoch must be >= 1"),
    ],
)
def test_invalid_options_are_refused_in_one_line(options, message):
    refused(OptionError, message, lambda: len(make(**options)))


@pytest.mark.parametrize(
    "weights",
    [
        *([1], [1, 1], [3, 1], [5, 7, 11], [1] * 17, [0.7, 0.2, 0.1], [2**k for k in range(12)], [1_000_000, 1, 1]),
        [500, 270, 170, 140, 100, 87, 80, 50, 16, 2.4],
    ],
)
def test_counts_add_up_never_decrease_and_follow_the_proportions(weights):
    split, total = Apportionment(weights), sum(weights)
    last = [0] * len(weights)
    for num_draws in range(1500):
        counts = split.counts(num_draws)
        assert sum(counts) == num_draws
        assert all(now >= before for now, before in zip(counts, last, strict=True))
        assert all(abs(count - num_draws * w / total) < 2 for count, w in zip(counts, weights, strict=True))
        last = counts


def test_integer_weights_are_exact_at_their_total_and_random_ones_within_two_at_any_distance():
    sizes = [3, 1000, 17, 280, 1]
    for times in (0, 1, 2, 10**9):
        assert Apportionment(sizes).counts(times * sum(sizes)) == [times * size for size in sizes]
    generator, worst = random.Random(0), 0.0
    for _ in range(60):
        weights = [generator.paretovariate(0.6) for _ in range(generator.randint(2, 40))]
        split, total = Apportionment(weights), sum(weights)
        for _ in range(60):
            num_draws = generator.randint(0, 10**9)
            counts = split.counts(num_draws)
            worst = max(worst, *(abs(c - num_draws * w / total) for c, w in zip(counts, weights, strict=True)))
    assert 0.5 < worst < 2


UNEVEN = [42, 9, 23, 4]
PLANS = {
    "size": {},
    "cooled": {"temperature": 0.3},
    "uniform": {"proportions": "uniform"},
    "given": {"proportions": "given", "weights": [1, 2, 3, 0.7]},
}


def homogeneous(batch_size=4, **options):
    return HomogeneousBatchSampler(options.pop("sizes", UNEVEN), batch_size, **options)


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


@pytest.mark.parametrize("sizes", [UNEVEN, [4, 4, 4], [400, 30, 10, 5], [7]])
@pytest.mark.parametrize("options", [*PLANS.values(), {"temperature": 0.0}, {"temperature": 0.7}])
def test_the_sources_are_those_of_a_simulation_batch_by_batch(sizes, options):
    if "weights" in options:
        options = {**options, "weights": options["weights"][: len(sizes)]}
    batches = [size // 4 for size in sizes]
    stretches = tick_by_tick(batches, list(source_parts(batches, **options)))
    assert [source for stretch in stretches for source in stretch].count(0) == batches[0]
    sampler = homogeneous(sizes=sizes, **options)
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
    seconds = []
    # The shortest of five, because other processes share the processor's caches.
    for _ in range(5):
        started = time.process_time()
        assert len(next(iter(sampler))) == 64
        seconds.append(time.process_time() - started)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (peak < 500_000, min(seconds) < 0.02) == (True, True)


def test_homogeneous_batches_that_cannot_be_filled_are_refused():
    says = "must not exceed the 42 rows of the largest source, got 43; lower it"
    refused(OptionError, says, lambda: len(homogeneous(batch_size=43)))


def test_a_new_batch_size_is_planned_again():
    sampler = homogeneous(2)
    assert len(rows_of(sampler)) == 38
    sampler.batch_size = 4
    assert rows_of(sampler) == rows_of(homogeneous(4))


@pytest.mark.parametrize("options", PLANS.values(), ids=PLANS)
def test_a_source_smaller_than_a_batch_is_left_out_and_named(options):
    """With sources of 9 and 4 rows and batches of 12, the plan is that of the other two sources."""
    sampler = placed(homogeneous(4, **options), 0, 3)
    sampler.identify([SourceIdentity(name, "key") for name in ("a", "small", "c", "smaller")])
    says = "sources with fewer rows than a batch of 12 are not used: small (9), smaller (4)"
    assert sampler.remarks() == [says]
    found, large = sequence(sampler), {**options, "weights": [1, 3]} if "weights" in options else options
    assert len(found) == 42 // 12 + 23 // 12
    assert sorted(sequence(homogeneous(12, sizes=[42, 23], **large))) == sorted(
        [0, None, 1][source] for source in found
    )
