"""Batches of one source each, the sources drawn by their parts until their rows run out (Nomic Embed)."""

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from embeddings.common.random import KeyedPermutation, derive_seed
from embeddings.data.samplers.base import BatchSampler, Proportions, Rows, first_rows, source_parts


class HomogeneousBatchSampler(BatchSampler):
    """Every global batch holds rows of one source, the same on all ranks; which one is drawn by the sources' parts.

    An epoch is a pass: a source whose rows do not fill another batch leaves until the epoch ends, and the others
    continue in the ratio of their parts. With parts as large as the sources, the default, all last to the end. A source
    with fewer rows than a global batch, as small languages at 16,384 pairs, has no part, and `remarks` names it.

    Determinism: see `BatchSampler`; finding a step costs a few array operations over the sources, whatever the step.
    Guarantees: sources never share a batch. In an epoch no row comes twice, and of each source only the fewer than
    global_batch_size rows that do not fill a batch are left out, others in the next epoch. Where a source leaves, each
    one that stays has had its part of the batches within half a batch. Memory: a few numbers a source, nothing a row.
    Length: the sum over the sources of the global batches that their rows fill.

    Args:
        sizes: Rows of each source, each >= 1; row numbers count through the sources one after another.
        batch_size, seed, num_replicas, rank: As in `BatchSampler`.
        weights: With proportions `given`, the part of each source, > 0; only their ratios matter. Elsewhere None, or
            all equal.
        proportions: `size`: a source's part is the number of its global batches to the power `temperature`;
            `uniform`: equal parts; `given`: `weights`.
        temperature: The exponent, 0 to 1.

    Raises:
        OptionError: If an option is impossible or cannot take effect, or no source fills a global batch.
    Source: Nussbaum and Duderstadt 2025 (Nomic Embed v2), arXiv:2502.07972, §4.3: one data set a batch. Differs: the
        paper does not say how the data set of a batch is drawn; a random order of exact numbers.
    Related: `BlendedBatchSampler` mixes the sources in each batch; `ClusteredBatchSampler` has rows that are alike.
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
        """The source of a step, and how many batches of it came before in the epoch."""
        plan = self._plan
        stretch = bisect_right(plan.ends, step)
        before_S = plan.drawn(stretch - 1)
        last_S = np.cumsum(plan.drawn(stretch) - before_S)
        first = plan.ends[stretch - 1] if stretch else 0
        shuffle = KeyedPermutation(int(last_S[-1]), derive_seed(self.seed, "sources", epoch, stretch))
        place = int(shuffle(np.array([step - first]))[0])
        source = int(np.searchsorted(last_S, place, side="right"))
        return source, int(before_S[source]) + place - (int(last_S[source - 1]) if source else 0)

    @property
    def _plan(self) -> "_Plan":
        """The plan of an epoch; that of the latest global batch size is kept."""
        size = self.global_batch_size
        if self._planned is None or self._planned[0] != size:
            batches = self.whole_batches(self.sizes, size)
            # A source without a batch has its time over at 0, whatever its part.
            parts = source_parts([max(1, count) for count in batches], self.weights, self.proportions, self.temperature)
            self._planned = (size, _Plan.of(batches, parts))
        return self._planned[1]


class _Plan(NamedTuple):
    """How many batches each of S sources has had where one or more of them run out.

    All sources are emptied side by side, each at the speed of its part: by time t source s has given
    floor(part_s t + 1/2) of its batches, and all of them by `time_S`. A stretch ends at each of `times`, when `ends`
    batches of all sources are drawn.
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
        plan.ends.extend(int(plan.drawn(stretch).sum()) for stretch in range(len(plan.times)))
        return plan

    def drawn(self, stretch: int) -> NDArray[np.int64]:
        """Batches of each source drawn by the end of a stretch, (S,) int64; none by the end of stretch -1."""
        if stretch < 0:
            return np.zeros_like(self.batch_S)
        time = self.times[stretch]
        so_far_S = np.floor(self.part_S * time + 0.5).astype(np.int64)
        return np.where(self.time_S <= time, self.batch_S, np.minimum(so_far_S, self.batch_S))
