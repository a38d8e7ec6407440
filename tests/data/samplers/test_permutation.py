"""A keyed permutation is a bijection, looks random, and costs nothing to enter anywhere."""

import math
import time
from collections import Counter

import numpy as np
import pytest

from embeddings.common.random import derive_seed
from embeddings.data.samplers.base import PLAN_VERSION, KeyedPermutation, mix_bits, sorted_permutation

SIZES = [1, 2, 3, 4, 5, 7, 8, 9, 31, 32, 33, 100, 1000, 1023, 1024, 1025, 4095, 4097, 2**17 - 1, 2**17 + 1]


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("key", [0, 1, 2**63 - 1])
def test_every_value_comes_exactly_once(n: int, key: int) -> None:
    values = KeyedPermutation(n, key)(np.arange(n))
    assert values.dtype == np.int64
    assert np.array_equal(np.sort(values), np.arange(n))


def test_a_position_is_found_without_the_ones_before_it() -> None:
    order = KeyedPermutation(1000, 7)
    whole = order(np.arange(1000))
    positions = np.array([999, 0, 500, 500, 3])
    assert np.array_equal(order(positions), whole[positions])
    assert len(order(np.arange(0))) == 0


def test_keys_decide_the_order_and_nothing_else_does() -> None:
    first, again, other = (KeyedPermutation(1000, key)(np.arange(1000)) for key in (5, 5, 6))
    assert np.array_equal(first, again)
    assert (first == other).sum() < 12  # one agreement is expected of two random orders


def test_the_order_is_the_same_on_every_machine() -> None:
    """Another one is another version of the plan."""
    assert PLAN_VERSION == 2
    assert KeyedPermutation(10, 42)(np.arange(10)).tolist() == [2, 9, 0, 7, 8, 5, 4, 1, 3, 6]


@pytest.mark.parametrize("n", [3, 5, 10, 100])
def test_each_value_is_equally_likely_at_each_position(n: int) -> None:
    num_keys = 400
    seen = np.zeros((n, n))
    for key in range(num_keys):
        seen[np.arange(n), KeyedPermutation(n, key)(np.arange(n))] += 1
    expected = num_keys / n
    # Rows and columns of counts of permutations have fixed sums, which stretches the statistic by n / (n - 1).
    chi_square = ((seen - expected) ** 2 / expected).sum() * (n - 1) / n
    freedom = (n - 1) ** 2
    assert abs(chi_square - freedom) < 5 * np.sqrt(2 * freedom)


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_all_orders_of_a_few_values_are_equally_likely(n: int) -> None:
    num_orders = math.factorial(n)
    seen = Counter(tuple(KeyedPermutation(n, key)(np.arange(n)).tolist()) for key in range(15 * num_orders))
    assert len(seen) == num_orders
    chi_square = sum((count - 15) ** 2 / 15 for count in seen.values())
    assert chi_square < num_orders + 5 * math.sqrt(2 * num_orders)


def test_neighbours_land_a_third_of_the_range_apart() -> None:
    n = 100_003
    values = KeyedPermutation(n, 3)(np.arange(n))
    assert np.abs(np.diff(values)).mean() / n == pytest.approx(1 / 3, abs=0.01)
    assert abs(np.corrcoef(np.arange(n), values)[0, 1]) < 0.02


def test_a_huge_range_is_entered_anywhere_at_once() -> None:
    order = KeyedPermutation(2**40 + 1, 9)
    positions = np.arange(2**39, 2**39 + 4096)
    started = time.perf_counter()
    values = order(positions)
    assert time.perf_counter() - started < 0.5
    assert len(np.unique(values)) == 4096
    assert values.min() >= 0
    assert values.max() <= 2**40


def test_mixing_bits_loses_no_value() -> None:
    values = np.arange(100_000, dtype=np.uint64)
    assert len(np.unique(mix_bits(values))) == len(values)


@pytest.mark.parametrize("n", [1, 2, 5, 1000])
def test_a_sorted_permutation_is_a_random_order_of_its_key(n: int) -> None:
    orders = [sorted_permutation(n, key) for key in (0, 1, 2**63 - 1, 2**63 - 1)]
    assert all(order.dtype == np.int64 and np.array_equal(np.sort(order), np.arange(n)) for order in orders)
    assert np.array_equal(orders[2], orders[3])
    if n == 1000:
        assert (orders[0] == orders[2]).sum() < 12
    assert sorted_permutation(5, 42).tolist() == [3, 1, 2, 0, 4]


def test_all_sorted_orders_of_four_values_are_equally_likely() -> None:
    seen = Counter(tuple(sorted_permutation(4, derive_seed(0, key)).tolist()) for key in range(15 * 24))
    assert len(seen) == 24
    assert sum((count - 15) ** 2 / 15 for count in seen.values()) < 24 + 5 * math.sqrt(2 * 24)
