"""Batches of one source each; each source is drawn by its share until its rows run out (Nomic Embed)."""

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from embeddings.common.random import KeyedPermutation, derive_seed
from embeddings.data.samplers.base import BatchSampler, Proportions, Rows, first_rows, source_parts


class HomogeneousBatchSampler(BatchSampler):
    """Every global batch contains rows of one source, the same source on all ranks.

    An epoch is one pass. A source without rows for another batch is finished for the epoch, and the others continue in
    the ratio of their shares. With shares proportional to size (the default), all last until the end. A source with
    fewer rows than a global batch (such as small languages at 16,384 pairs) is not used, and `remarks` names it.

    In an epoch no row is repeated, and of each source fewer than global_batch_size rows are left out. When a source
    finishes, each remaining source has had its share of the batches within half a batch.

    Args:
        sizes: Rows of each source, each >= 1; row indices run through the concatenated sources.
        batch_size, seed, num_replicas, rank: As in `BatchSampler`.
        weights: With proportions `given`, the relative share of each source, > 0. Otherwise None, or all equal.
        proportions: `size`: the share of a source is its number of global batches to the power `temperature`;
            `uniform`: equal shares; `given`: `weights`.
        temperature: The exponent, 0 to 1.

    Raises:
        OptionError: If an option is invalid or cannot take effect, or no source fills a global batch.
    Source: Nussbaum and Duderstadt 2025 (Nomic Embed v2), arXiv:2502.07972, §4.3: one data set per batch. Differs: the
        paper does not describe how the data set is drawn; this uses exact counts in random order.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        batch_size: int,
        seed: int = 0,
        weights: Sequence[float] | None = None,
        proportions: Proportions = "size",
        temperature: float = 1.0,
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        super().__init__(batch_size, seed, num_replicas, rank)
        self._first_rows = first_rows(sizes)
        self.sizes, self.weights = tuple(sizes), weights
        self.proportions: Proportions = proportions
        self.temperature = temperature
        self._planned: tuple[int, _Plan] | None = None
        _ = self.num_steps

    def remarks(self) -> list[str]:
        return self.left_out(self.sizes, self.global_batch_size)

    @property
    def num_steps(self) -> int:
        return self._plan.ends[-1]

    def plan_fields(self) -> dict[str, int | str]:
        sizes, parts = ",".join(map(str, self.sizes)), self._plan.part_S
        shares = ",".join(f"{share:.12g}" for share in parts / parts.sum())
        return {**super().plan_fields(), "sizes": sizes, "proportions": self.proportions, "parts": shares}

    def global_batch(self, epoch: int, step: int) -> tuple[Rows, Rows]:
        source, number = self.source_batch(epoch, step)
        order = KeyedPermutation(self.sizes[source], derive_seed(self.seed, "rows", source, epoch))
        size = self.global_batch_size
        rows = order(np.arange(number * size, (number + 1) * size))
        return rows + self._first_rows[source], self.draw_keys(epoch, step)

    def source_batch(self, epoch: int, step: int) -> tuple[int, int]:
        """The source of a step, and its number of earlier batches in the epoch."""
        plan = self._plan
        phase = bisect_right(plan.ends, step)
        before_S = plan.drawn(phase - 1)
        last_S = np.cumsum(plan.drawn(phase) - before_S)
        first = plan.ends[phase - 1] if phase else 0
        shuffle = KeyedPermutation(int(last_S[-1]), derive_seed(self.seed, "sources", epoch, phase))
        position = int(shuffle(np.array([step - first]))[0])
        source = int(np.searchsorted(last_S, position, side="right"))
        return source, int(before_S[source]) + position - (int(last_S[source - 1]) if source else 0)

    @property
    def _plan(self) -> "_Plan":
        """The plan of an epoch, cached for the latest global batch size."""
        size = self.global_batch_size
        if self._planned is None or self._planned[0] != size:
            batches = self.whole_batches(self.sizes, size)
            # A source without a full batch finishes at time 0, so its share has no effect.
            parts = source_parts([max(1, count) for count in batches], self.weights, self.proportions, self.temperature)
            self._planned = (size, _Plan.of(batches, parts))
        return self._planned[1]


class _Plan(NamedTuple):
    """Number of batches drawn from each of S sources whenever one or more of them run out.

    All sources are read in parallel at the rate of their shares: at time t, floor(part_s t + 1/2) batches of source s
    are drawn, and at `time_S` all of them. Each of `times` ends a phase, after `ends` batches of all sources.
    """

    batch_S: NDArray[np.int64]
    part_S: NDArray[np.float64]
    time_S: NDArray[np.float64]
    times: list[float]
    ends: list[int]

    @classmethod
    def of(cls, batches: Sequence[int], parts: Sequence[float]) -> "_Plan":
        batch_S, part_S = np.array(batches, dtype=np.int64), np.array(parts, dtype=np.float64)
        time_S = batch_S / part_S
        plan = cls(batch_S, part_S, time_S, sorted(set(time_S.tolist())), [])
        plan.ends.extend(int(plan.drawn(phase).sum()) for phase in range(len(plan.times)))
        return plan

    def drawn(self, phase: int) -> NDArray[np.int64]:
        """Batches of each source drawn by the end of a phase, (S,) int64; zeros for phase -1."""
        if phase < 0:
            return np.zeros_like(self.batch_S)
        time = self.times[phase]
        so_far_S = np.floor(self.part_S * time + 0.5).astype(np.int64)
        return np.where(self.time_S <= time, self.batch_S, np.minimum(so_far_S, self.batch_S))
