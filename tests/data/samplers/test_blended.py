"""The proportions of a blend."""

import random
from collections import Counter
from itertools import chain

import numpy as np
import pytest

from embeddings.common import OptionError
from embeddings.data.samplers.base import Apportionment, BlendedBatchSampler
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
        ({"temperature": 1.5}, "must be from 0 to 1"),
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
