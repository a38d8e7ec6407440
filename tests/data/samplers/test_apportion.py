"""Counts of draws add up, never shrink, and stay within two of the proportion."""

import random

import pytest

from embeddings.data.samplers.blended import Apportionment

CASES = [
    [1],
    [1, 1],
    [3, 1],
    [5, 7, 11],
    [1] * 17,
    [500, 270, 170, 140, 100, 87, 80, 50, 16, 2.4],
    [0.7, 0.2, 0.1],
    [2**k for k in range(12)],
    [1_000_000, 1, 1],
]


@pytest.mark.parametrize("weights", CASES)
def test_counts_add_up_and_never_shrink_and_follow_the_proportions(weights: list[float]) -> None:
    split, total = Apportionment(weights), sum(weights)
    last = [0] * len(weights)
    for num_draws in range(1500):
        counts = split.counts(num_draws)
        assert sum(counts) == num_draws
        assert all(now >= before for now, before in zip(counts, last, strict=True))
        assert all(abs(count - num_draws * w / total) < 2 for count, w in zip(counts, weights, strict=True))
        last = counts


def test_whole_weights_are_exact_at_their_total_however_far_away() -> None:
    sizes = [3, 1000, 17, 280, 1]
    for times in (0, 1, 2, 10**9):
        assert Apportionment(sizes).counts(times * sum(sizes)) == [times * size for size in sizes]


def test_random_weights_stay_within_two_far_from_the_start() -> None:
    generator, worst = random.Random(0), 0.0
    for _ in range(60):
        weights = [generator.paretovariate(0.6) for _ in range(generator.randint(2, 40))]
        split, total = Apportionment(weights), sum(weights)
        for _ in range(60):
            num_draws = generator.randint(0, 10**9)
            counts = split.counts(num_draws)
            worst = max(worst, *(abs(c - num_draws * w / total) for c, w in zip(counts, weights, strict=True)))
    assert 0.5 < worst < 2


def test_equal_sources_take_turns() -> None:
    split = Apportionment([1, 1])
    assert [split.counts(n) for n in range(5)] == [[0, 0], [1, 0], [1, 1], [2, 1], [2, 2]]
