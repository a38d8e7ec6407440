import math
from collections import Counter

import numpy as np
import pytest

from embeddings.common.random import (
    KeyedPermutation,
    derive_seed,
    mix_bits,
    numpy_generator,
    sorted_permutation,
)
from embeddings.data.samplers.base import PLAN_VERSION


def test_a_seed_is_the_same_on_every_machine_and_different_for_each_stream():
    assert derive_seed(0, "step", 1, 2) == 6917871978523944128
    seeds = {derive_seed(seed, stream, n) for seed in range(3) for stream in ("a", "a1") for n in (*range(50), 11)}
    assert len(seeds) == 300
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert numpy_generator(1, "x").integers(1 << 60) == numpy_generator(1, "x").integers(1 << 60)
    values = np.arange(100_000, dtype=np.uint64)
    assert len(np.unique(mix_bits(values))) == len(values)


def test_every_value_occurs_exactly_once():
    for n in (*range(1, 34), 100, 1023, 1024, 1025, 2**17 - 1, 2**17 + 1):
        for key in (0, 1, 2**63 - 1):
            values = KeyedPermutation(n, key)(np.arange(n))
            assert values.dtype == np.int64
            assert np.array_equal(np.sort(values), np.arange(n))


def test_the_order_is_the_same_on_every_machine():
    """A different order needs a new `PLAN_VERSION`."""
    assert PLAN_VERSION == 2
    assert KeyedPermutation(10, 42)(np.arange(10)).tolist() == [2, 9, 0, 7, 8, 5, 4, 1, 3, 6]


@pytest.mark.parametrize("n", [3, 100])
def test_each_value_is_equally_likely_at_each_position(n):
    num_keys = 400
    seen = np.zeros((n, n))
    for key in range(num_keys):
        seen[np.arange(n), KeyedPermutation(n, key)(np.arange(n))] += 1
    expected = num_keys / n
    # Rows and columns of counts of permutations have fixed sums, which stretches the statistic by n / (n - 1).
    chi_square = ((seen - expected) ** 2 / expected).sum() * (n - 1) / n
    freedom = (n - 1) ** 2
    assert abs(chi_square - freedom) < 5 * np.sqrt(2 * freedom)


@pytest.mark.parametrize("n", [3, 5])
def test_all_orders_of_a_few_values_are_equally_likely(n):
    num_orders = math.factorial(n)
    seen = Counter(tuple(KeyedPermutation(n, key)(np.arange(n)).tolist()) for key in range(15 * num_orders))
    assert len(seen) == num_orders
    chi_square = sum((count - 15) ** 2 / 15 for count in seen.values())
    assert chi_square < num_orders + 5 * math.sqrt(2 * num_orders)


@pytest.mark.parametrize("n", [1, 2, 5, 1000])
def test_a_sorted_permutation_is_a_random_order_of_its_key(n):
    orders = [sorted_permutation(n, key) for key in (0, 1, 2**63 - 1)]
    assert all(order.dtype == np.int64 and np.array_equal(np.sort(order), np.arange(n)) for order in orders)
    if n == 1000:
        assert (orders[0] == orders[2]).sum() < 12
    assert sorted_permutation(5, 42).tolist() == [3, 1, 2, 0, 4]
