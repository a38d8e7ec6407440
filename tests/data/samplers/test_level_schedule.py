"""The level of a step: every boundary by hand, and what each order promises."""

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest

from embeddings.data.samplers.curriculum import EQUAL_FRACTIONS, level_of, stages


def levels(total_steps: int, **options: Any) -> list[int]:
    return [level_of(step, total_steps, **options) for step in range(total_steps)]


def test_the_papers_schedule_changes_every_quarter_of_its_1600_steps() -> None:
    boundaries = {0: 4, 399: 4, 400: 3, 799: 3, 800: 2, 1199: 2, 1200: 1, 1599: 1}
    assert {step: level_of(step, 1600) for step in boundaries} == boundaries
    assert Counter(levels(1600)) == {4: 400, 3: 400, 2: 400, 1: 400}


@pytest.mark.parametrize(
    ("total_steps", "expected"),
    [
        (4, [4, 3, 2, 1]),
        (6, [4, 4, 3, 2, 2, 1]),
        (7, [4, 4, 3, 3, 2, 1, 1]),
        (10, [4, 4, 4, 3, 3, 2, 2, 2, 1, 1]),
        (1, [3]),
    ],
)
def test_a_boundary_is_at_the_nearest_step(total_steps: int, expected: list[int]) -> None:
    assert levels(total_steps) == expected


def test_fractions_are_the_decimals_that_they_are_written_as() -> None:
    """0.1 + 0.7 is less than 0.8 in binary, and a third of three parts is no whole."""
    found = levels(10, fractions=(0.1, 0.7, 0.1, 0.1))
    assert found == [4, *[3] * 7, 2, 1]
    third = 1 / 3
    assert [end for _, end in stages(10**6, "coarse_to_fine", (third, third, third, 0.0))] == [
        333333,
        666667,
        10**6,
        10**6,
    ]
    for total in range(1, 400):
        for tenths in ((1, 2, 3, 4), (4, 3, 2, 1), (7, 1, 1, 1)):
            ends = [end for _, end in stages(total, "coarse_to_fine", [part / 10 for part in tenths])]
            assert ends == [(2 * total * sum(tenths[: i + 1]) + 10) // 20 for i in range(4)]


def test_a_level_without_a_share_is_left_out() -> None:
    assert levels(8, fractions=(0.5, 0, 0.5, 0)) == [4, 4, 4, 4, 2, 2, 2, 2]
    assert levels(4, fractions=(0, 0, 0, 1)) == [1, 1, 1, 1]
    assert level_of(99, 8, fractions=(0.5, 0, 0.5, 0)) == 2


def test_reverse_goes_from_hard_to_easy_with_each_levels_own_share() -> None:
    assert levels(8, order="reverse") == [1, 1, 2, 2, 3, 3, 4, 4]
    assert levels(10, order="reverse", fractions=(0.4, 0.3, 0.2, 0.1)) == [1, 2, 2, 3, 3, 3, 4, 4, 4, 4]


def test_cumulative_levels_follow_the_same_steps() -> None:
    assert levels(13, order="cumulative") == levels(13)


@pytest.mark.parametrize("fixed_level", [1, 2, 3, 4])
def test_fixed_is_fixed(fixed_level: int) -> None:
    assert set(levels(9, order="fixed", fixed_level=fixed_level)) == {fixed_level}


@pytest.mark.parametrize("fractions", [EQUAL_FRACTIONS, (0.4, 0.3, 0.2, 0.1), (0.5, 0, 0.5, 0)])
def test_random_gives_each_level_its_very_share_in_another_order(fractions: tuple[float, ...]) -> None:
    found = levels(200, order="random", fractions=fractions, seed=1)
    assert Counter(found) == Counter(levels(200, fractions=fractions))
    assert found == levels(200, order="random", fractions=fractions, seed=1)
    assert found != levels(200, order="random", fractions=fractions, seed=2)
    assert sum(one != other for one, other in pairwise(found)) > 60


@pytest.mark.parametrize(("order", "last"), [("coarse_to_fine", 1), ("cumulative", 1), ("reverse", 4)])
def test_a_longer_run_stays_at_the_last_level(order: Any, last: int) -> None:
    assert {level_of(step, 8, order) for step in (7, 8, 9, 1000)} == {last}


def test_a_longer_random_run_goes_on_evenly() -> None:
    found = Counter(level_of(step, 40, "random") for step in range(40, 80))
    assert found == {4: 10, 3: 10, 2: 10, 1: 10}
