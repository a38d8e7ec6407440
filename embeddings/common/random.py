"""Seeds: one number for each (seed, stream, …) that never depends on ranks, workers or what ran before."""

import hashlib
import os
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch


def derive_seed(seed: int, *stream: int | str) -> int:
    """A 63-bit seed that is a pure function of the run's seed and of a stream, such as `("epoch", 3)`.

    Determinism: the same arguments give the same number on every machine and Python; different ones are independent.
    """
    text = "\x1f".join(str(part) for part in (seed, *stream))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def run_seed(seed: int | None) -> int:
    """A seed as it was given, or else the run's: what Lightning's `seed_everything` was last called with, 0 if never.

    Distributed: ranks that Lightning starts are told the number by the first.
    """
    return int(os.environ.get("PL_GLOBAL_SEED", "0")) if seed is None else seed


def numpy_generator(seed: int, *stream: int | str) -> np.random.Generator:
    """A numpy generator for one stream of `seed`."""
    return np.random.default_rng(derive_seed(seed, *stream))


def fork_rng(device: torch.device) -> AbstractContextManager[None]:
    """A context that restores the random state of the CPU, and of `device` where it is a CUDA device."""
    if device.type == "cuda":
        return torch.random.fork_rng(devices=[device])
    if device.type == "cpu":
        return torch.random.fork_rng(devices=[])
    return nullcontext()
