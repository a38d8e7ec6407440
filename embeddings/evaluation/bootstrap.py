"""Intervals of differences between two systems that were scored on the same queries."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

NUM_RESAMPLES = 10_000
# Queries that are drawn at a time.
_MAX_DRAWN = 1 << 22


class Difference(NamedTuple):
    """A mean difference over queries, and its interval from `low` to `high`."""

    mean: float
    low: float
    high: float

    @property
    def is_significant(self) -> bool:
        """Whether the interval excludes 0."""
        return self.low > 0 or self.high < 0

    def __str__(self) -> str:
        return f"{self.mean:+.4f} ({self.low:+.4f} to {self.high:+.4f})"


def paired_bootstrap(
    score_Q: npt.NDArray[np.float64],
    baseline_Q: npt.NDArray[np.float64],
    num_resamples: int = NUM_RESAMPLES,
    seed: int = 0,
    confidence: float = 0.95,
) -> Difference:
    """The mean of `score_Q` - `baseline_Q` with its percentile interval over resampled queries.

    Each resample draws Q queries with replacement, and takes both scores of a query together. With too few queries for
    a sign test, fewer than 6 at 95 %, the interval is widened to contain 0.

    Args:
        score_Q: The scores of a system, one or more queries, (Q,) float64.
        baseline_Q: The scores of another one on the same queries.
        num_resamples: Number of resamples.
        seed: Seed of the draws.
        confidence: Share of the resampled means that lie within the interval.

    Source: Efron and Tibshirani 1993, section 13.3 (percentile interval).
    """
    difference_Q = score_Q - baseline_Q
    generator, num_queries = np.random.default_rng(seed), len(difference_Q)
    mean_R, step = np.empty(num_resamples), max(1, _MAX_DRAWN // num_queries)
    for start in range(0, num_resamples, step):
        drawn_RQ = generator.integers(num_queries, size=(min(step, num_resamples - start), num_queries))
        mean_R[start : start + step] = difference_Q[drawn_RQ].mean(axis=1)
    return _difference(float(difference_Q.mean()), mean_R, num_queries, confidence)


def bootstrap(
    difference: Callable[[npt.NDArray[np.int64]], float], num_rows: int, num_resamples: int = 1_000, seed: int = 0
) -> Difference:
    """As `paired_bootstrap`, of any statistic over all rows, at 95 %.

    `difference` maps rows, (N,) int64, in which a row may be repeated, to the difference.
    """
    generator = np.random.default_rng(seed)
    value_R = [difference(generator.integers(num_rows, size=num_rows)) for _ in range(num_resamples)]
    return _difference(difference(np.arange(num_rows)), np.array(value_R), num_rows)


def _difference(mean: float, value_R: npt.NDArray[np.float64], num_rows: int, confidence: float = 0.95) -> Difference:
    low, high = np.quantile(value_R, [(1 - confidence) / 2, (1 + confidence) / 2])
    if 2 * 0.5**num_rows > 1 - confidence:
        # Differences of one sign are that likely by chance.
        low, high = min(low, 0.0), max(high, 0.0)
    return Difference(mean, float(low), float(high))
