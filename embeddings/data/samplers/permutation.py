"""Random orders that are computed, not stored: a keyed bijection of 0 … n-1."""

import numpy as np
from numpy.typing import NDArray

from embeddings.common.randomness import derive_seed

NUM_ROUNDS = 6
_MULTIPLIER = np.uint64(0xD6E8FEB86659FD93)
_HALF = np.uint64(32)


def mix_bits(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Scramble each 64-bit value by a fixed bijection (two xor-shift-multiply rounds), so that neighbours part ways."""
    mixed = (values ^ (values >> _HALF)) * _MULTIPLIER
    mixed = (mixed ^ (mixed >> _HALF)) * _MULTIPLIER
    return mixed ^ (mixed >> _HALF)


def sorted_permutation(n: int, key: int) -> NDArray[np.int64]:
    """A random order of 0 … n-1 by sorting keyed hashes, (n,) int64: the quicker one where all of few are wanted.

    Determinism: (n, key) → the whole order, on every machine and numpy.
    """
    return np.argsort(mix_bits(np.arange(n, dtype=np.uint64) + np.uint64(key)), kind="stable")


def _keyed_hash(halves: NDArray[np.uint64], key: np.uint64, mask: np.uint64) -> NDArray[np.uint64]:
    """A hash of each value below 2^32 under the key, cut to the mask's bits (at most 32)."""
    hashed = (halves ^ key) * _MULTIPLIER
    hashed ^= hashed >> _HALF
    hashed *= _MULTIPLIER
    hashed >>= _HALF
    hashed &= mask
    return hashed


class KeyedPermutation:
    """A permutation of 0 … n-1 that is a pure function of (n, key) and takes no memory.

    A Feistel network over the fewest bits that hold n-1: the high and the low half are in turn xor-ed with a keyed hash
    of the other. The halves need not be equal, so an odd number of bits costs nothing. A value that lands at n or above
    goes through again until it falls below (cycle walking): fewer than two passes a value on average.

    Args:
        n: Number of values, >= 1.
        key: Any integer; different keys give independent orders.

    Determinism: (n, key) → the whole order, on every machine and numpy; position i is found without the ones before it.
    """

    def __init__(self, n: int, key: int) -> None:
        assert 1 <= n <= 2**62
        self.n = n
        bits = max(1, (n - 1).bit_length())
        self._low_bits = np.uint64((bits + 1) // 2)
        self._low_mask = np.uint64((1 << ((bits + 1) // 2)) - 1)
        self._high_mask = np.uint64((1 << (bits // 2)) - 1)
        # Hashes of few bits are few, so a small range needs more rounds to reach all its orders evenly.
        num_rounds = max(NUM_ROUNDS, 20 - bits)
        self._round_keys = [np.uint64(derive_seed(key, "round", index)) for index in range(num_rounds)]

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The values at some positions of the order.

        Args:
            positions: Each in 0 … n-1, (k,) int64.

        Returns:
            Their values in 0 … n-1, (k,) int64, different for different positions.
        """
        values = self._encipher(positions.astype(np.uint64))
        limit = np.uint64(self.n)
        outside = values >= limit
        while outside.any():
            values[outside] = self._encipher(values[outside])
            outside = values >= limit
        return values.astype(np.int64)

    def _encipher(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        high, low = values >> self._low_bits, values & self._low_mask
        for index, key in enumerate(self._round_keys):
            if index % 2 == 0:
                high ^= _keyed_hash(low, key, self._high_mask)
            else:
                low ^= _keyed_hash(high, key, self._low_mask)
        return (high << self._low_bits) | low
