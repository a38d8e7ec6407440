"""Which negatives a level allows, against cases written out by hand."""

from collections import Counter

import pytest

from embeddings.data.dataset import places_of_level
from embeddings.data.records import Negative
from embeddings.data.samplers.base import LevelRule

ALL = tuple(Negative(f"{level}{name}", level) for level in (1, 2, 3, 4) for name in "ab")


def texts(negatives: tuple[Negative, ...], level: int, cumulative: bool = False, draw: int = 0) -> list[str]:
    return [negatives[place].text for place in places_of_level(negatives, LevelRule(level, cumulative), draw)]


@pytest.mark.parametrize("level", [1, 2, 3, 4])
def test_a_level_allows_its_own_negatives_in_the_rows_order(level: int) -> None:
    assert texts(ALL, level) == [f"{level}a", f"{level}b"]


@pytest.mark.parametrize(
    ("levels", "expected"),
    [
        ((1, 4), ["1", "4", "4", "4"]),
        ((2, 3), ["2", "2", "3", None]),
        ((4,), ["4", "4", "4", "4"]),
        ((1,), ["1", None, None, None]),
        ((), [None, None, None, None]),
    ],
)
def test_the_nearest_coarser_level_stands_in_and_never_a_finer_one(
    levels: tuple[int, ...], expected: list[str | None]
) -> None:
    negatives = tuple(Negative(str(level), level) for level in levels)
    assert [texts(negatives, level) for level in (1, 2, 3, 4)] == [[] if text is None else [text] for text in expected]


@pytest.mark.parametrize("level", [1, 2, 3, 4])
def test_cumulative_levels_are_the_present_and_all_coarser_ones(level: int) -> None:
    found = texts(ALL, level, cumulative=True)
    assert sorted(found) == [f"{coarser}{name}" for coarser in range(level, 5) for name in "ab"]


def test_the_first_of_cumulative_levels_is_drawn_by_the_key_and_evenly() -> None:
    assert texts(ALL, 2, cumulative=True, draw=5) == texts(ALL, 2, cumulative=True, draw=5)
    first = Counter(texts(ALL, 2, cumulative=True, draw=draw)[0] for draw in range(1200))
    assert len(first) == 6
    # Five standard deviations of a binomial count.
    assert all(abs(count - 200) < 5 * (1200 * 1 / 6 * 5 / 6) ** 0.5 for count in first.values())


@pytest.mark.parametrize("cumulative", [False, True])
def test_negatives_without_levels_belong_to_every_level(cumulative: bool) -> None:
    negatives = (Negative("a"), Negative("b"))
    assert sorted(places_of_level(negatives, LevelRule(3, cumulative), 0)) == [0, 1]
