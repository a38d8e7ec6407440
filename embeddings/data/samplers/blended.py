"""Batches that mix all sources in given proportions (NV-Embed's blended batches)."""

import heapq
from collections.abc import Sequence
from fractions import Fraction
from math import lcm

import numpy as np

from embeddings.common.errors import OptionError
from embeddings.common.random import derive_seed
from embeddings.data.samplers.base import BatchSampler, KeyedPermutation, Proportions, Rows, first_rows, source_parts


class BlendedBatchSampler(BatchSampler):
    """Every batch mixes all sources, in proportion to their sizes or a power of them, in equal or in given parts.

    Each source is walked through in a random order of its own; when it ends, the next pass has another order. How many
    rows of a source the first t draws hold is computed (`Apportionment`), so any step is found at once, and nothing is
    stored per row. Within a step the rows of all sources are shuffled, so each rank's slice is a blend too.

    Determinism: see `BatchSampler`.
    Guarantees: over any number of steps a source's share of the draws is less than 2 rows off its proportion. With
    proportions `size`, temperature 1 and no `steps_per_epoch`, an epoch is one pass: no row comes twice in it, and only
    the fewer than global_batch_size rows that do not fill a batch are left out, others in the next epoch. Else the
    walks run on from epoch to epoch: a source has all its rows drawn j times before any is drawn j + 1 times,
    and one batch can hold a row twice only where it crosses the end of that source's pass.
    Length: `steps_per_epoch`, or as many whole global batches as the rows of all sources fill.

    Args:
        sizes: Rows of each source, each >= 1; row numbers count through the sources one after another.
        batch_size, seed, num_replicas, rank: As in `BatchSampler`.
        weights: With proportions `given`, the part of each source, > 0; only their ratios matter. Elsewhere None, or
            all equal.
        proportions: `size`: a source's part is the number of its rows to the power `temperature`; with 1 that is its
            share of all rows, NV-Embed's "uniformly sampled"; `uniform`: equal parts; `given`: `weights`.
        steps_per_epoch: Global batches that count as an epoch, or None for one pass over as many rows as there are.
        temperature: The exponent of the sizes, 0 to 1. Below 1 the rows of a small source come more often than
            those of a large one; *MoE* and XLM-R draw languages with 0.3.

    Raises:
        OptionError: If a size, weight, the temperature or steps_per_epoch is impossible, weights or temperature cannot
            take effect, or there are fewer rows than one global batch.
    Source: Lee et al. 2024 (NV-Embed), arXiv:2405.17428, §2.2 and §4. Differs: the paper does not say how batches are
        drawn; exact apportionment instead of independent draws.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        batch_size: int,
        seed: int = 0,
        weights: Sequence[float] | None = None,
        proportions: Proportions = "size",
        steps_per_epoch: int | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        *,
        temperature: float = 1.0,
    ) -> None:
        super().__init__(batch_size, seed, num_replicas, rank)
        *self._offsets, self._num_rows = first_rows(sizes)
        if steps_per_epoch is not None and steps_per_epoch < 1:
            raise OptionError("steps_per_epoch", steps_per_epoch, "must be >= 1", "leave it out for one pass")
        self.sizes = tuple(sizes)
        self.proportions: Proportions = proportions
        self.temperature = temperature
        self.steps_per_epoch = steps_per_epoch
        self._shares = source_parts(self.sizes, weights, proportions, temperature)
        self._apportionment = Apportionment(self._shares)
        self._walks: dict[int, tuple[int, KeyedPermutation]] = {}
        _ = self.num_steps

    @property
    def num_steps(self) -> int:
        """Global batches in an epoch."""
        if self._num_rows < self.global_batch_size:
            rule = f"must not exceed the {self._num_rows} training rows (batch_size x {self.place[1]} ranks)"
            raise OptionError("data.batch_size", self.batch_size, rule, "lower it or add data")
        return self.steps_per_epoch or self._num_rows // self.global_batch_size

    def plan_fields(self) -> dict[str, int | str]:
        """What the plan depends on, in plain types."""
        sizes = ",".join(map(str, self.sizes))
        parts = ",".join(f"{part / sum(self._shares):.12g}" for part in self._shares)
        return {**super().plan_fields(), "sizes": sizes, "proportions": self.proportions, "parts": parts}

    def global_batch(self, epoch: int, step: int) -> tuple[Rows, Rows]:
        """One step's rows in the mixture and their draw keys, each (global_batch_size,) int64."""
        first = epoch * self._draws_per_epoch() + step * self.global_batch_size
        before = self._apportionment.counts(first)
        after = self._apportionment.counts(first + self.global_batch_size)
        spans = zip(range(len(self.sizes)), before, after, strict=True)
        rows = np.concatenate([self._walk(source, start, stop) for source, start, stop in spans])
        shuffle = KeyedPermutation(len(rows), derive_seed(self.seed, "shuffle", epoch, step))
        return rows[shuffle(np.arange(len(rows)))], self.draw_keys(epoch, step)

    def _draws_per_epoch(self) -> int:
        """Draws between the starts of two epochs; a natural one counts the rows left out, so that each is one pass."""
        if self.proportions == "size" and self.temperature == 1 and self.steps_per_epoch is None:
            return self._num_rows
        return self.num_steps * self.global_batch_size

    def _walk(self, source: int, start: int, stop: int) -> Rows:
        """Rows of the mixture at positions `start` … `stop` - 1 of a source's endless walk."""
        size, pieces = self.sizes[source], [np.empty(0, dtype=np.int64)]
        while start < stop:
            number, position = divmod(start, size)
            piece = np.arange(position, min(size, position + stop - start), dtype=np.int64)
            pieces.append(self._order(source, number)(piece) + self._offsets[source])
            start += len(piece)
        return np.concatenate(pieces)

    def _order(self, source: int, number: int) -> KeyedPermutation:
        """The order of one pass through a source; the latest of each source is kept."""
        known = self._walks.get(source)
        if known is None or known[0] != number:
            key = derive_seed(self.seed, "pass", source, number)
            known = self._walks[source] = (number, KeyedPermutation(self.sizes[source], key))
        return known[1]


class Apportionment:
    """Splits any number of draws over sources, so that the split of t + 1 draws adds one draw to the split of t.

    The sources are the leaves of a Huffman tree of their weights. A node with share q of its parent's weight gets
    floor(t·q + 1/2) of the parent's t draws and its sibling the rest. Both never shrink as t grows, all are exact
    where t is a multiple of the total of whole-number weights, and the cost is one step a source, whatever t.

    Guarantees: counts add up to t; none shrinks as t grows; a count is less than 2 away from t·p at every t (a node
    inherits q of its parent's error and adds at most 1/2; in a Huffman tree q <= 2/3 for every node but the leaves).

    Args:
        weights: One positive number a source; only their ratios matter, and those are kept exactly.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        assert min(weights, default=0) > 0
        ratios = [Fraction(weight) for weight in weights]
        scale = lcm(*(ratio.denominator for ratio in ratios))
        self.num_sources = len(weights)
        heap = [(int(ratio * scale), source) for source, ratio in enumerate(ratios)]
        heapq.heapify(heap)
        splits: list[tuple[int, int, int, int, int]] = []
        while len(heap) > 1:
            (left_weight, left), (right_weight, right) = heapq.heappop(heap), heapq.heappop(heap)
            parent, total = self.num_sources + len(splits), left_weight + right_weight
            splits.append((parent, left, right, left_weight, total))
            heapq.heappush(heap, (total, parent))
        self._splits_from_root = splits[::-1]

    def counts(self, num_draws: int) -> list[int]:
        """Draws of each source among the first `num_draws` >= 0 of all, in the order of the weights."""
        count = [0] * (2 * self.num_sources - 1)
        count[-1] = num_draws
        for parent, left, right, left_weight, total in self._splits_from_root:
            count[left] = (2 * count[parent] * left_weight + total) // (2 * total)
            count[right] = count[parent] - count[left]
        return count[: self.num_sources]
