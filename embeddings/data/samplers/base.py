"""The base class of batch samplers, which are pure functions of (seed, epoch, step), and the default sampler.

The default sampler mixes all sources in every batch (NV-Embed). `RunLength` relates a plan to the trainer's steps.
"""

import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from itertools import accumulate, pairwise, repeat
from math import lcm
from typing import Any, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler

from embeddings.common.distributed import planned_place
from embeddings.common.errors import OptionError
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
        draw: Seed of all random choices for this entry, a pure function of (seed, epoch, position): independent of rank
            and worker.
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
        is_trial: Whether the run is a short test (`fast_dev_run`).
    """

    batches_per_epoch: int
    accumulate_grad_batches: int | None = 1
    total_steps: int | None = None
    is_trial: bool = False

    @classmethod
    def of(cls, trainer: Any, batches_per_epoch: int) -> "RunLength":
        """The length of a Lightning run over a plan with `batches_per_epoch` batches per rank."""
        accumulated = trainer.accumulate_grad_batches if _accumulation_scheduler(trainer) is None else None
        num_batches, total_steps = batches_taken(trainer, batches_per_epoch), run_steps(trainer, batches_per_epoch)
        return cls(num_batches, accumulated, total_steps, bool(trainer.fast_dev_run))

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
        num_replicas: Number of ranks, or None to ask the process group (1 without one).
        rank: This rank, or None to ask the process group.

    Attributes:
        epoch: The epoch that the next iteration yields; Lightning sets it through `sampler.set_epoch`.
        start: The first step that the next iteration yields; `set_epoch` with a new epoch sets it to 0.

    Raises:
        OptionError: If batch_size is not positive.
    """

    def __init__(
        self, batch_size: int, seed: int = 0, num_replicas: int | None = None, rank: int | None = None
    ) -> None:
        if batch_size < 1:
            raise OptionError("data.batch_size", batch_size, "must be >= 1", "give the number of pairs on one rank")
        if (num_replicas is None) != (rank is None):
            raise OptionError("rank", rank, "must be given together with num_replicas", "give both or neither")
        self.batch_size, self.seed = batch_size, seed
        self._rank_and_size = None if rank is None or num_replicas is None else (rank, num_replicas)
        self.epoch = 0
        self.start = 0
        self._resumed = False
        self._names: tuple[str, ...] = ()

    def identify(self, sources: Sequence[SourceIdentity]) -> None:
        """Set the sources of the rows; the data module calls this once, before the first batch."""
        self._names = tuple(source.name for source in sources)

    def check_sources(self, names: Sequence[str]) -> None:
        """Check, before any source is read, the files that this sampler needs for these sources."""

    def set_needs(self, needs: BatchNeeds) -> None:
        """Set the needs of the trained module; the data module calls this before it asks for the length."""

    def kinds(self) -> set[str]:
        """The class names of this sampler and of its inner samplers."""
        return {type(self).__name__}

    def remarks(self) -> list[str]:
        """Warnings about the plan, one line each; the data module logs them once."""
        return []

    def set_run(self, run: RunLength) -> None:
        """Set the length of the run; with a trainer, the data module calls this before the first batch."""

    @property
    @abstractmethod
    def num_steps(self) -> int:
        """Number of global batches per epoch, at least 1."""

    @abstractmethod
    def global_batch(self, epoch: int, step: int) -> tuple[Rows, Rows]:
        """The rows of a step in the mixture and their draw keys, each (global_batch_size,) int64."""

    def level_rule(self, epoch: int, step: int) -> LevelRule | None:
        """The hard negatives that a step may use, the same on every rank, or None for all."""
        return None

    @property
    def sampler(self) -> Self:
        """This object: Lightning calls `set_epoch` on `batch_sampler.sampler`, not on the batch sampler."""
        return self

    @property
    def rank_and_size(self) -> tuple[int, int]:
        """This rank and the number of ranks."""
        return planned_place() if self._rank_and_size is None else self._rank_and_size

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
        """Continue with step `start` of `epoch`."""
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
        for step in range(self.start, self.num_steps):
            rows, draws = self.global_batch(epoch, step)
            rule = self.level_rule(epoch, step)
            # `tuple.__new__` takes half the time of the constructor of a named tuple.
            entries = zip(rows[rank_slice].tolist(), draws[rank_slice].tolist(), repeat(rule))
            yield list(map(partial(tuple.__new__, PlanEntry), entries))


def first_rows(sizes: Sequence[int]) -> list[int]:
    """Index in the mixture of the first row of each source, then the total number of rows."""
    if not sizes or min(sizes) < 1:
        raise OptionError("data.sources", list(sizes), "must each have rows", "leave out the empty source")
    return [0, *accumulate(sizes)]


# (rows of each source, batch_size, seed, weight of each source) → the plan.
SamplerFactory = Callable[[Sequence[int], int, int, Sequence[float]], BatchSampler]


def batches_taken(trainer: Any, batches_per_epoch: int) -> int:
    """Batches per epoch under the trainer's `limit_train_batches`."""
    limit = trainer.limit_train_batches
    return min(batches_per_epoch, limit) if isinstance(limit, int) else int(batches_per_epoch * limit)


def run_steps(trainer: Any, batches_per_epoch: int | None) -> int | None:
    """Optimiser steps of a run, limited by `max_steps` and `max_epochs`; None without a limit.

    Lightning's estimate is not used: it builds the loader and loses a restored position.
    """
    limits = [int(trainer.max_steps)] if trainer.max_steps > 0 else []
    if trainer.max_epochs is not None and trainer.max_epochs > 0 and batches_per_epoch is not None:
        num_batches, scheduler = batches_taken(trainer, batches_per_epoch), _accumulation_scheduler(trainer)
        changes = [0] if scheduler is None else [epoch for epoch in scheduler.epochs if epoch < trainer.max_epochs]
        # Between two changes of the accumulation, all epochs have the same number of steps.
        intervals = pairwise([*changes, trainer.max_epochs])
        steps = ((end - start) * -(-num_batches // accumulated_batches(trainer, start)) for start, end in intervals)
        limits.append(sum(steps))
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
    """The unnormalised share of each source, > 0. Arguments as in the samplers.

    With temperature 0.3 (XLM-R for languages), a source with 1 % of the size of another has a quarter of its share.
    Source: Conneau and Lample 2019 (XLM), arXiv:1901.07291, §3.1, which calls the exponent alpha. Differs: sizes are
        counted in rows or batches, not in sentences.
    """
    source_weights = [1.0] * len(sizes) if weights is None else list(weights)
    if len(source_weights) != len(sizes):
        rule = f"must have one entry for each of the {len(sizes)} sources"
        raise OptionError("weights", source_weights, rule, "give as many")
    if not 0 <= temperature <= 1:
        rule = "must be from 0 to 1: it is the exponent of the size of a source"
        raise OptionError("sampler.temperature", temperature, rule, "0.3 is usual for languages")
    if temperature != 1 and proportions != "size":
        rule = f"cannot take effect with proportions {proportions!r}"
        raise OptionError("sampler.temperature", temperature, rule, "set the sampler's proportions to size")
    if proportions == "given":
        if not all(0 < weight < float("inf") for weight in source_weights):
            rule = "must be > 0 and finite"
            raise OptionError("data.sources[].weight", source_weights, rule, "leave out the source to skip it")
        return source_weights
    if len(set(source_weights)) > 1:
        rule = f"cannot take effect with proportions {proportions!r}"
        raise OptionError("data.sources[].weight", source_weights, rule, "set the sampler's proportions to given")
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
        batch_size, seed, num_replicas, rank: As in `BatchSampler`.
        weights: With proportions `given`, the relative share of each source, > 0. Otherwise None, or all equal.
        proportions: `size`: the share of a source is its number of rows to the power `temperature`; with 1 this is
            NV-Embed's "uniformly sampled"; `uniform`: equal shares; `given`: `weights`.
        steps_per_epoch: Global batches per epoch, or None for one pass over the total number of rows.
        temperature: The exponent of the sizes, 0 to 1. Below 1, rows of small sources are drawn more often than rows of
            large ones; *MoE* and XLM-R draw languages with 0.3.

    Raises:
        OptionError: If an option is invalid or cannot take effect, or there are fewer rows than one global batch.
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
        if self._num_rows < self.global_batch_size:
            rule = f"must not exceed the {self._num_rows} training rows (batch_size x {self.rank_and_size[1]} ranks)"
            raise OptionError("data.batch_size", self.batch_size, rule, "lower it or add data")
        return self.steps_per_epoch or self._num_rows // self.global_batch_size

    def plan_fields(self) -> dict[str, int | str]:
        sizes = ",".join(map(str, self.sizes))
        parts = ",".join(f"{part / sum(self._shares):.12g}" for part in self._shares)
        return {**super().plan_fields(), "sizes": sizes, "proportions": self.proportions, "parts": parts}

    def global_batch(self, epoch: int, step: int) -> tuple[Rows, Rows]:
        first = epoch * self._draws_per_epoch() + step * self.global_batch_size
        before = self._apportionment.counts(first)
        after = self._apportionment.counts(first + self.global_batch_size)
        spans = zip(range(len(self.sizes)), before, after, strict=True)
        rows = np.concatenate([self._walk(source, start, stop) for source, start, stop in spans])
        shuffle = KeyedPermutation(len(rows), derive_seed(self.seed, "shuffle", epoch, step))
        return rows[shuffle(np.arange(len(rows)))], self.draw_keys(epoch, step)

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
            pieces.append(self._order(source, number)(piece) + self._offsets[source])
            start += len(piece)
        return np.concatenate(pieces)

    def _order(self, source: int, number: int) -> KeyedPermutation:
        """The row order of pass `number` through a source; the latest one of each source is cached."""
        cached = self._walks.get(source)
        if cached is None or cached[0] != number:
            key = derive_seed(self.seed, "pass", source, number)
            cached = self._walks[source] = (number, KeyedPermutation(self.sizes[source], key))
        return cached[1]


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
