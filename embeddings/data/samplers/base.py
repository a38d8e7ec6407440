"""Batch samplers, whose batches are pure functions of (seed, epoch, step), and the steps of a run.

The default sampler mixes all sources in every batch (NV-Embed); another one draws each batch from one source (Nomic).
"""

import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from itertools import accumulate, repeat
from math import lcm
from typing import Any, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler

from embeddings.common.distributed import planned_place
from embeddings.common.errors import OptionError, require_minimum
from embeddings.common.protocols import BatchNeeds
from embeddings.common.random import KeyedPermutation, derive_seed, mix_bits

Rows = NDArray[np.int64]
# Increase it whenever the same options produce different batches.
PLAN_VERSION = 2


class SourceIdentity(NamedTuple):
    """Name of a source, and the content key of its converted form (`CachedSource.key`)."""

    name: str
    key: str


class LevelRule(NamedTuple):
    """Hard negatives that a step may use: one level, 1 (hardest) to 4; with `cumulative` also the coarser levels."""

    level: int
    cumulative: bool = False


class PlanEntry(NamedTuple):
    """One entry of a batch plan.

    Attributes:
        row: Row in the mixture (all sources concatenated).
        draw: Seed of all random choices for this entry, a pure function of (seed, epoch, position).
        rule: The hard negatives that the step may use, or None for all.
    """

    row: int
    draw: int
    rule: LevelRule | None = None


@dataclass(frozen=True)
class RunLength:
    """Maps the batches of the plan to the optimiser steps of the run.

    Attributes:
        batches_per_epoch: Batches per rank that the trainer uses in an epoch.
        accumulate_grad_batches: Batches per optimiser step; None if the number changes during the run.
        total_steps: Optimiser steps of the run, None without a limit.
    """

    batches_per_epoch: int
    accumulate_grad_batches: int | None = 1
    total_steps: int | None = None

    @classmethod
    def of(cls, trainer: Any, batches_per_epoch: int) -> "RunLength":
        """The length of a Lightning run over a plan with `batches_per_epoch` batches per rank."""
        accumulated = trainer.accumulate_grad_batches if _accumulation_scheduler(trainer) is None else None
        return cls(
            batches_taken(trainer.limit_train_batches, batches_per_epoch),
            accumulated,
            run_steps(trainer, batches_per_epoch),
        )

    def step_of(self, epoch: int, batch: int) -> int:
        """Index (from 0) of the optimiser step of a batch; a step never spans two epochs."""
        assert self.accumulate_grad_batches is not None
        steps_per_epoch = -(-self.batches_per_epoch // self.accumulate_grad_batches)
        return epoch * steps_per_epoch + batch // self.accumulate_grad_batches


class BatchSampler(Sampler[list[PlanEntry]], ABC):
    """Yields this rank's slice of each batch of an epoch.

    A subclass defines the number of steps per epoch (`num_steps`) and the batch of a step (`global_batch`): a function
    of (seed, epoch, step, global batch size). Rank r of R takes rows r·B … (r+1)·B - 1 of it, so another number of
    ranks gets the same batches if batch_size x ranks stays the same. Every batch is full; `len` is `num_steps`.

    Args:
        batch_size: Queries in the batch of one rank.
        seed: Seed of the run.

    Attributes:
        epoch: The epoch that the next iteration yields; Lightning sets it through `sampler.set_epoch`.
        start: The first step that the next iteration yields; `set_epoch` with a new epoch sets it to 0.
        place: This rank and the number of ranks; None for those of the process group.
        repeats_epoch: Whether every epoch has the batches of the first, for the trainer's `overfit_batches`.
    """

    def __init__(self, batch_size: int, seed: int = 0) -> None:
        require_minimum("data.batch_size", batch_size, 1, "give the number of pairs on one rank")
        self.batch_size, self.seed = batch_size, seed
        self.place: tuple[int, int] | None = None
        self.repeats_epoch = False
        self.epoch, self.start, self._resumed = 0, 0, False
        self._names: tuple[str, ...] = ()

    def identify(self, sources: Sequence[SourceIdentity]) -> None:
        """Set the sources of the rows; the data module calls this once, before the first batch."""
        self._names = tuple(source.name for source in sources)

    def check_sources(self, names: Sequence[str]) -> None:
        """Check, before any source is read, the files that this sampler needs for these sources."""

    def set_needs(self, needs: BatchNeeds) -> None:
        """Set the needs of the trained module, on which the length may depend."""

    def remarks(self) -> list[str]:
        """Warnings about the plan, one line each; the data module logs them once."""
        return []

    def set_run(self, run: RunLength) -> None:
        """Set the length of the run, before the first batch."""

    @property
    @abstractmethod
    def num_steps(self) -> int:
        """Number of global batches per epoch, at least 1."""

    @abstractmethod
    def global_batch(self, epoch: int, step: int) -> Rows:
        """The rows of a step in the mixture, (global_batch_size,) int64."""

    def level_rule(self, epoch: int, step: int) -> LevelRule | None:
        """The hard negatives that a step may use, the same on every rank, or None for all."""
        return None

    @property
    def sampler(self) -> Self:
        """This object: Lightning calls `set_epoch` on `batch_sampler.sampler`, not on the batch sampler."""
        return self

    @property
    def rank_and_size(self) -> tuple[int, int]:
        return self.place or planned_place()

    @property
    def global_batch_size(self) -> int:
        """Queries per step on all ranks together."""
        return self.batch_size * self.rank_and_size[1]

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration; a new epoch starts at its first step.

        After `resume` an earlier epoch is ignored: Lightning's epoch count falls behind when a run resumes at the end
        of an epoch, and the plan must not repeat batches.
        """
        if epoch > self.epoch or (epoch < self.epoch and not self._resumed):
            self.epoch, self.start = epoch, 0

    def resume(self, epoch: int, start: int) -> None:
        self.epoch, self.start, self._resumed = epoch, start, True

    def plan_fields(self) -> dict[str, int | str]:
        """The inputs of the plan, in JSON types; a resumed run must have the same."""
        return {
            "plan_version": PLAN_VERSION,
            "sampler": type(self).__name__,
            "seed": self.seed,
            "global_batch_size": self.global_batch_size,
            "num_steps": self.num_steps,
        }

    def check_same_plan(self, saved: Mapping[str, int | str]) -> None:
        """Raise `OptionError` if the plan differs from the saved one; it names the first different field."""
        fields = self.plan_fields()
        for name in {**fields, **saved}:
            now, before = fields.get(name), saved.get(name)
            if now != before:
                rule = f"must be {before!r} as in the checkpoint to resume in the middle of its plan"
                fix = "resume with the library version that saved it" if name == "plan_version" else "restore it"
                raise OptionError(f"data {name}", now, rule, f"{fix}, or start from the weights only")

    def whole_batches(self, sizes: Sequence[int], batch_size: int) -> list[int]:
        """Number of full batches of each source, for samplers with one source per batch."""
        if max(sizes) < batch_size:
            product = f" (batch_size x {self.rank_and_size[1]} ranks)" if batch_size > self.batch_size else ""
            rule = f"must not exceed the {max(sizes)} rows of the largest source{product}"
            raise OptionError("data.batch_size", self.batch_size, rule, "lower it, or add data")
        return [size // batch_size for size in sizes]

    def left_out(self, sizes: Sequence[int], batch_size: int) -> list[str]:
        """A warning that names the sources too small for one batch, or nothing."""
        small = [f"{name} ({size})" for name, size in zip(self._names, sizes, strict=True) if size < batch_size]
        remark = f"sources with fewer rows than a batch of {batch_size} are not used: {', '.join(small)}"
        return [remark] if small else []

    def draw_keys(self, epoch: int, step: int) -> Rows:
        """The draw keys of a step, (global_batch_size,) int64 >= 0: hashes of (seed, epoch, position)."""
        first = step * self.global_batch_size
        positions = np.arange(first, first + self.global_batch_size, dtype=np.uint64)
        keyed = mix_bits(positions + np.uint64(derive_seed(self.seed, "draw", epoch)))
        return (keyed >> np.uint64(1)).astype(np.int64)

    def __len__(self) -> int:
        return self.num_steps

    def __iter__(self) -> Iterator[list[PlanEntry]]:
        """This rank's batches of the current epoch, from step `start`."""
        rank, _ = self.rank_and_size
        epoch, rank_slice = self.epoch, slice(rank * self.batch_size, (rank + 1) * self.batch_size)
        drawn = 0 if self.repeats_epoch else epoch
        for step in range(self.start, self.num_steps):
            rows, draws = self.global_batch(drawn, step), self.draw_keys(drawn, step)
            rule = self.level_rule(epoch, step)
            # `tuple.__new__` takes half the time of the constructor of a named tuple.
            entries = zip(rows[rank_slice].tolist(), draws[rank_slice].tolist(), repeat(rule))
            yield list(map(partial(tuple.__new__, PlanEntry), entries))


# (rows of each source, batch_size, seed, weight of each source) → the plan.
SamplerFactory = Callable[[Sequence[int], int, int, Sequence[float]], BatchSampler]


def batches_taken(limit: int | float, batches_per_epoch: int) -> int:
    """Batches per epoch under a trainer's `limit_train_batches`."""
    return min(batches_per_epoch, limit) if isinstance(limit, int) else int(batches_per_epoch * limit)


def run_steps(trainer: Any, batches_per_epoch: int | None) -> int | None:
    """Optimiser steps of a run, limited by `max_steps` and `max_epochs`; None without a limit.

    Lightning's estimate is not used: it builds the loader and loses a restored position.
    """
    if batches_per_epoch is not None:
        batches_per_epoch = batches_taken(trainer.limit_train_batches, batches_per_epoch)
    return steps_of_batches(trainer, batches_per_epoch)


def steps_of_batches(trainer: Any, num_batches: int | None) -> int | None:
    """As `run_steps`, from the number of batches that the trainer uses in an epoch."""
    limits = [int(trainer.max_steps)] if trainer.max_steps > 0 else []
    if trainer.max_epochs is not None and trainer.max_epochs > 0 and num_batches is not None:
        epochs = range(trainer.max_epochs)
        limits.append(sum(-(-num_batches // accumulated_batches(trainer, epoch)) for epoch in epochs))
    return min(limits, default=None)


def accumulated_batches(trainer: Any, epoch: int) -> int:
    """Batches per optimiser step in an epoch; a `GradientAccumulationScheduler` may change the number."""
    scheduler = _accumulation_scheduler(trainer)
    return int(trainer.accumulate_grad_batches if scheduler is None else scheduler.get_accumulate_grad_batches(epoch))


def batches_since_step(trainer: Any) -> int:
    """Batches whose gradients are accumulated since the last optimiser step."""
    epoch_loop: Any = trainer.fit_loop.epoch_loop
    progress = epoch_loop.batch_progress.current
    # The last batch of an epoch always completes a step.
    ends_epoch = progress.processed == progress.ready and epoch_loop._num_ready_batches_reached()
    return 0 if ends_epoch else int(progress.processed % trainer.accumulate_grad_batches)


def _accumulation_scheduler(trainer: Any) -> Any:
    """The `GradientAccumulationScheduler` among the trainer's callbacks, found by its method."""
    callbacks = getattr(trainer, "callbacks", [])
    return next((callback for callback in callbacks if hasattr(callback, "get_accumulate_grad_batches")), None)


Proportions = Literal["size", "uniform", "given"]
# Powers may differ in the last bit between machines, so they are rounded: the plan must be the same everywhere.
_DIGITS = 12


def source_parts(
    sizes: Sequence[int],
    weights: Sequence[float] | None = None,
    proportions: Proportions = "size",
    temperature: float = 1.0,
) -> Sequence[float]:
    """The unnormalised share of each source, > 0. Arguments as in `BlendedBatchSampler`.

    Source: Conneau and Lample 2019 (XLM), arXiv:1901.07291, §3.1, which calls the exponent alpha. Differs: sizes are
        counted in rows or batches, not in sentences.
    """
    if not 0 <= temperature <= 1:
        rule = "must be from 0 to 1: it is the exponent of the size of a source"
        raise OptionError("sampler.temperature", temperature, rule, "0.3 is usual for languages")
    if proportions != "size" and temperature != 1:
        rule = f"cannot take effect with proportions {proportions!r}"
        raise OptionError("sampler.temperature", temperature, rule, "leave it out, or set the proportions to size")
    if proportions == "given":
        return [1.0] * len(sizes) if weights is None else weights
    if weights is not None and len(set(weights)) > 1:
        rule = f"cannot take effect with proportions {proportions!r}"
        raise OptionError("data.sources[].weight", list(weights), rule, "set the sampler's proportions to given")
    if proportions == "uniform":
        return [1] * len(sizes)
    return sizes if temperature == 1 else [float(f"{size**temperature:.{_DIGITS}g}") for size in sizes]


class BlendedBatchSampler(BatchSampler):
    """Every batch mixes all sources in fixed proportions: by size, by a power of the size, equal, or given.

    Each source is read in a random order, a new one in each pass. Any step is computed directly (`Apportionment`), and
    nothing is stored per row. The rows of a step are shuffled, so the slice of each rank is a mix too.

    Over any number of steps, the rows of a source differ from its exact share by less than 2. With proportions `size`,
    temperature 1 and no `steps_per_epoch`, an epoch is one pass, which leaves out fewer than global_batch_size rows.
    Otherwise passes continue across epochs: all rows of a source are drawn j times before any is drawn j + 1 times.

    Args:
        sizes: Rows of each source, each >= 1; row indices run through the concatenated sources.
        batch_size, seed: As in `BatchSampler`.
        weights: With proportions `given`, the relative share of each source, > 0. Otherwise None, or all equal.
        proportions: `size`: the share of a source is its number of rows to the power `temperature`; with 1 this is
            NV-Embed's "uniformly sampled"; `uniform`: equal shares; `given`: `weights`.
        steps_per_epoch: Global batches per epoch, or None for one pass over the total number of rows.
        temperature: The exponent of the sizes, 0 to 1; *MoE* and XLM-R draw languages with 0.3.

    Source: Lee et al. 2024 (NV-Embed), arXiv:2405.17428, §2.2 and §4. Differs: the paper does not describe how batches
        are drawn; this uses exact apportionment instead of independent draws.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        batch_size: int,
        seed: int = 0,
        weights: Sequence[float] | None = None,
        proportions: Proportions = "size",
        steps_per_epoch: int | None = None,
        *,
        temperature: float = 1.0,
    ) -> None:
        super().__init__(batch_size, seed)
        *self._offsets, self._num_rows = accumulate(sizes, initial=0)
        require_minimum("steps_per_epoch", steps_per_epoch, 1, "leave it out for one pass", optional=True)
        self.sizes = tuple(sizes)
        self.proportions: Proportions = proportions
        self.temperature = temperature
        self.steps_per_epoch = steps_per_epoch
        self._shares = source_parts(self.sizes, weights, proportions, temperature)
        self._apportionment = Apportionment(self._shares)

    @property
    def num_steps(self) -> int:
        if self._num_rows < self.global_batch_size:
            rule = f"must not exceed the {self._num_rows} training rows (batch_size x {self.rank_and_size[1]} ranks)"
            raise OptionError("data.batch_size", self.batch_size, rule, "lower it or add data")
        return self.steps_per_epoch or self._num_rows // self.global_batch_size

    def plan_fields(self) -> dict[str, int | str]:
        sizes = ",".join(map(str, self.sizes))
        parts = ",".join(f"{part / sum(self._shares):.12g}" for part in self._shares)
        return {**super().plan_fields(), "sizes": sizes, "proportions": self.proportions, "parts": parts}

    def global_batch(self, epoch: int, step: int) -> Rows:
        first = epoch * self._draws_per_epoch() + step * self.global_batch_size
        before = self._apportionment.counts(first)
        after = self._apportionment.counts(first + self.global_batch_size)
        spans = zip(range(len(self.sizes)), before, after, strict=True)
        rows = np.concatenate([self._walk(source, start, stop) for source, start, stop in spans])
        shuffle = KeyedPermutation(len(rows), derive_seed(self.seed, "shuffle", epoch, step))
        return rows[shuffle(np.arange(len(rows)))]

    def _draws_per_epoch(self) -> int:
        """Draws between the starts of two epochs; a one-pass epoch also counts the rows that it leaves out."""
        if self.proportions == "size" and self.temperature == 1 and self.steps_per_epoch is None:
            return self._num_rows
        return self.num_steps * self.global_batch_size

    def _walk(self, source: int, start: int, stop: int) -> Rows:
        """Mixture rows at positions `start` … `stop` - 1 of the repeated passes through a source."""
        size, pieces = self.sizes[source], [np.empty(0, dtype=np.int64)]
        while start < stop:
            number, position = divmod(start, size)
            piece = np.arange(position, min(size, position + stop - start), dtype=np.int64)
            order = KeyedPermutation(size, derive_seed(self.seed, "pass", source, number))
            pieces.append(order(piece) + self._offsets[source])
            start += len(piece)
        return np.concatenate(pieces)


class Apportionment:
    """Splits any number of draws over sources; the split of t + 1 draws adds one draw to the split of t.

    The sources are the leaves of a Huffman tree of their weights. A node with share q of its parent's weight gets
    floor(t·q + 1/2) of the parent's t draws, and its sibling gets the rest. So counts sum to t, never decrease, and
    differ from t·p by less than 2: a node inherits q of its parent's error, and in a Huffman tree q <= 2/3 but for the
    leaves.
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
        """Draws of each source among the first `num_draws` >= 0 draws, in the order of the weights."""
        count = [0] * (2 * self.num_sources - 1)
        count[-1] = num_draws
        for parent, left, right, left_weight, total in self._splits_from_root:
            count[left] = (2 * count[parent] * left_weight + total) // (2 * total)
            count[right] = count[parent] - count[left]
        return count[: self.num_sources]


class HomogeneousBatchSampler(BatchSampler):
    """Every global batch contains rows of one source, the same source on all ranks.

    An epoch is one pass. A source without rows for another batch is finished for the epoch, and the others continue in
    the ratio of their shares. With shares proportional to size (the default), all last until the end. A source with
    fewer rows than a global batch (such as small languages at 16,384 pairs) is not used, and a warning names it.

    In an epoch no row is repeated, and of each source fewer than global_batch_size rows are left out. When a source
    finishes, each remaining source has had its share of the batches within half a batch.

    Args:
        sizes, batch_size, seed, weights: As in `BlendedBatchSampler`.
        proportions: `size`: the share of a source is its number of global batches to the power `temperature`;
            `uniform`: equal shares; `given`: `weights`.
        temperature: The exponent, 0 to 1.

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
    ) -> None:
        super().__init__(batch_size, seed)
        self._first_rows = list(accumulate(sizes, initial=0))
        self.sizes, self.weights = tuple(sizes), weights
        self.proportions: Proportions = proportions
        self.temperature = temperature
        self._drawn_of: dict[int, NDArray[np.int64]] = {}

    def remarks(self) -> list[str]:
        return self.left_out(self.sizes, self.global_batch_size)

    @property
    def num_steps(self) -> int:
        return int(self._drawn[-1].sum())

    def plan_fields(self) -> dict[str, int | str]:
        sizes, part_S = ",".join(map(str, self.sizes)), self._part_S
        shares = ",".join(f"{share:.12g}" for share in part_S / part_S.sum())
        return {**super().plan_fields(), "sizes": sizes, "proportions": self.proportions, "parts": shares}

    def global_batch(self, epoch: int, step: int) -> Rows:
        source, number = self.source_batch(epoch, step)
        order = KeyedPermutation(self.sizes[source], derive_seed(self.seed, "rows", source, epoch))
        size = self.global_batch_size
        return order(np.arange(number * size, (number + 1) * size)) + self._first_rows[source]

    def source_batch(self, epoch: int, step: int) -> tuple[int, int]:
        """The source of a step, and its number of earlier batches in the epoch."""
        ends = self._drawn.sum(axis=1)
        phase = int(np.searchsorted(ends, step, side="right")) - 1
        before_S = self._drawn[phase]
        last_S = np.cumsum(self._drawn[phase + 1] - before_S)
        shuffle = KeyedPermutation(int(last_S[-1]), derive_seed(self.seed, "sources", epoch, phase))
        position = int(shuffle(np.array([step - ends[phase]]))[0])
        source = int(np.searchsorted(last_S, position, side="right"))
        return source, int(before_S[source]) + position - (int(last_S[source - 1]) if source else 0)

    @property
    def _part_S(self) -> NDArray[np.float64]:
        # A source without a full batch finishes at once, so its share has no effect.
        batches = [max(1, count) for count in self.whole_batches(self.sizes, self.global_batch_size)]
        parts = source_parts(batches, self.weights, self.proportions, self.temperature)
        return np.array(parts, dtype=np.float64)

    @property
    def _drawn(self) -> NDArray[np.int64]:
        """Batches of each source drawn before each phase, and in the epoch, (phases + 1, S) int64.

        All sources are read in parallel at the rate of their shares: at time t, floor(part_s t + 1/2) batches of source
        s are drawn. A phase ends when one or more sources run out.
        """
        size = self.global_batch_size
        if size not in self._drawn_of:
            batch_S, part_S = np.array(self.whole_batches(self.sizes, size)), self._part_S
            time_S = batch_S / part_S
            drawn = [np.zeros_like(batch_S)]
            for time in np.unique(time_S):
                so_far_S = np.floor(part_S * time + 0.5).astype(np.int64)
                drawn.append(np.where(time_S <= time, batch_S, np.minimum(so_far_S, batch_S)))
            self._drawn_of[size] = np.stack(drawn)
        return self._drawn_of[size]
