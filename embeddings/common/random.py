"""Seeds and random orders that depend only on (seed, stream, …), not on the rank or the worker; torch's own state."""

import hashlib
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray

NUM_ROUNDS = 6
_MULTIPLIER = np.uint64(0xD6E8FEB86659FD93)
_HALF = np.uint64(32)


def derive_seed(seed: int, *stream: int | str) -> int:
    """A 63-bit seed, a pure function of the run's seed and a stream, such as `("epoch", 3)`, on every machine."""
    text = "\x1f".join(str(part) for part in (seed, *stream))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def run_seed(seed: int | None) -> int:
    """The seed; if None, that of Lightning's `seed_everything`, else 0. Equal on all ranks."""
    return int(os.environ.get("PL_GLOBAL_SEED", "0")) if seed is None else seed


def numpy_generator(seed: int, *stream: int | str) -> np.random.Generator:
    return np.random.default_rng(derive_seed(seed, *stream))


def mix_bits(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Scramble each 64-bit value by a fixed bijection."""
    mixed = (values ^ (values >> _HALF)) * _MULTIPLIER
    mixed = (mixed ^ (mixed >> _HALF)) * _MULTIPLIER
    return mixed ^ (mixed >> _HALF)


def sorted_permutation(n: int, key: int) -> NDArray[np.int64]:
    """A random order of 0 … n-1 by sorting keyed hashes, (n,) int64; fast for a complete order of few values."""
    return np.argsort(mix_bits(np.arange(n, dtype=np.uint64) + np.uint64(key)), kind="stable")


def _keyed_shift(values: NDArray[np.uint64], key: np.uint64, size: np.uint64) -> NDArray[np.uint64]:
    """A number below `size` (at most 2^31) for each value below 2^32, by a hash of it under the key."""
    hashed = (values ^ key) * _MULTIPLIER
    hashed ^= hashed >> _HALF
    hashed *= _MULTIPLIER
    hashed >>= _HALF
    hashed *= size
    hashed >>= _HALF
    return hashed


class KeyedPermutation:
    """A permutation of n >= 1 values, 0 … n-1, in constant memory: a pure function of (n, key).

    A Feistel network over a nearly square grid of at least n cells alternately shifts a cell's row and column by a
    keyed hash of the other. A value >= n is permuted again until it is below n (cycle walking).
    """

    def __init__(self, n: int, key: int) -> None:
        assert 1 <= n <= 2**62
        self.n = n
        num_rows = math.isqrt(n - 1) + 1
        self._num_rows, self._num_columns = np.uint64(num_rows), np.uint64(-(-n // num_rows))
        # A small range has few distinct hashes, so it needs more rounds to reach all orders evenly.
        num_rounds = max(NUM_ROUNDS, 20 - (n - 1).bit_length())
        self._round_keys = [np.uint64(derive_seed(key, "round", index)) for index in range(num_rounds)]

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The values at the given positions of the order, both (k,) int64 in 0 … n-1."""
        values = self._encipher(positions.astype(np.uint64))
        limit = np.uint64(self.n)
        outside = values >= limit
        while outside.any():
            values[outside] = self._encipher(values[outside])
            outside = values >= limit
        return values.astype(np.int64)

    def _encipher(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        row = values // self._num_columns
        column = values - row * self._num_columns
        for index, key in enumerate(self._round_keys):
            if index % 2 == 0:
                row = _shifted(row, _keyed_shift(column, key, self._num_rows), self._num_rows)
            else:
                column = _shifted(column, _keyed_shift(row, key, self._num_columns), self._num_columns)
        return row * self._num_columns + column


def _shifted(values: NDArray[np.uint64], shift: NDArray[np.uint64], size: np.uint64) -> NDArray[np.uint64]:
    """(values + shift) mod size, for both below size; overwrites `shift`."""
    shift += values
    # If the sum is below size, the unsigned difference wraps around to a huge number.
    shifted: NDArray[np.uint64] = np.minimum(shift, shift - size)
    return shifted


class RandomState:
    """The current random states of the CPU and of one device, saved to replay dropout."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.cpu_state = device, torch.get_rng_state()
        self.device_state = None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)

    @contextmanager
    def replayed(self) -> Iterator[None]:
        devices = [] if self.device_state is None else [self.device]
        with torch.random.fork_rng(devices, device_type=self.device.type):
            torch.set_rng_state(self.cpu_state)
            if self.device_state is not None:
                torch.get_device_module(self.device).set_rng_state(self.device_state, self.device)
            yield
