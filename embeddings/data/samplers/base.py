"""What every batch sampler is, a pure function of (seed, epoch, step), and the blended one, which is the default.

Blended batches mix all sources in given proportions (NV-Embed). A `RunLength` says what the trainer makes of a plan.
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
# One more whenever the same options come to mean other batches.
PLAN_VERSION = 2


class SourceIdentity(NamedTuple):
    """A source's name in the mixture, and the content key of its converted form (`CachedSource.key`)."""

    name: str
    key: str


class LevelRule(NamedTuple):
    """Which hard negatives a step may use: those of a level, 1 (hardest) to 4, and of coarser ones if `cumulative`."""

    level: int
    cumulative: bool = False


class PlanEntry(NamedTuple):
    """One entry of a batch plan.

    Attributes:
        row: Row in the mixture (all sources one after another).
        draw: Key of every random choice made for this entry, a pure function of (seed, epoch, position): it depends on
            neither the rank nor the worker.
        rule: Which of the row's hard negatives the step may use, or None for all.
    """

    row: int
    draw: int
    rule: LevelRule | None = None


@dataclass(frozen=True)
class RunLength:
    """What turns a batch of the plan into an optimiser step of the run.

    Attributes:
        batches_per_epoch: Batches of one rank that the trainer takes of an epoch.
        accumulate_grad_batches: Batches of one optimiser step; None where the number changes on the way.
        total_steps: Optimiser steps of the whole run, None where the trainer sets no end.
        is_trial: Whether the run is a few batches to see that it runs at all (`fast_dev_run`).
    """

    batches_per_epoch: int
    accumulate_grad_batches: int | None = 1
    total_steps: int | None = None
    is_trial: bool = False

    @classmethod
    def of(cls, trainer: Any, batches_per_epoch: int) -> "RunLength":
        """The length of a Lightning trainer's run over a plan with so many batches of one rank in an epoch."""
        accumulated = trainer.accumulate_grad_batches if _accumulation_scheduler(trainer) is None else None
        taken, total_steps = batches_taken(trainer, batches_per_epoch), run_steps(trainer, batches_per_epoch)
        return cls(taken, accumulated, total_steps, bool(trainer.fast_dev_run))

    def step_of(self, epoch: int, batch: int) -> int:
        """The optimiser step, from 0, that a batch of an epoch is part of; no step has batches of two epochs."""
        assert self.accumulate_grad_batches is not None
        steps_per_epoch = -(-self.batches_per_epoch // self.accumulate_grad_batches)
        return epoch * steps_per_epoch + batch // self.accumulate_grad_batches


class BatchSampler(Sampler[list[PlanEntry]], ABC):
    """Yields this rank's slice of each batch of an epoch.

    A subclass says how many steps an epoch has (`num_steps`) and what a step holds (`global_batch`). The rank and the
    number of ranks are read when they are needed, so a sampler may be made before the process group.

    Determinism: (seed, epoch, step, global batch size) → one global batch; rank r of R takes rows r·B … (r+1)·B - 1 of
    it. The same run on another number of ranks sees the same batches while batch_size x ranks stays the same.
    Guarantees: ranks are disjoint, and every batch is full: rows that do not fill a last batch wait for another epoch.
    Length: `len` is `num_steps`, the batches of a whole epoch, also where iteration starts in its middle.

    Args:
        batch_size: Queries of one rank's batch.
        seed: The run's seed.
        num_replicas: Number of ranks, or None for the process group's (1 without one).
        rank: This rank, or None for the process group's.

    Attributes:
        epoch: The epoch that the next iteration yields; Lightning sets it through `sampler.set_epoch`.
        start: The first step that the next iteration yields; `set_epoch` with another epoch sets it to 0.

    Raises:
        OptionError: If batch_size is not positive.
    """

    def __init__(
        self, batch_size: int, seed: int = 0, num_replicas: int | None = None, rank: int | None = None
    ) -> None:
        if batch_size < 1:
            raise OptionError("data.batch_size", batch_size, "must be >= 1", "give the number of pairs on one rank")
        if (num_replicas is None) != (rank is None):
            raise OptionError("rank", rank, "goes with num_replicas", "give both or neither")
        self.batch_size, self.seed = batch_size, seed
        self._place = None if rank is None or num_replicas is None else (rank, num_replicas)
        self.epoch = 0
        self.start = 0
        self._resumed = False
        self._names: tuple[str, ...] = ()

    def identify(self, sources: Sequence[SourceIdentity]) -> None:
        """Learn which sources the rows are of; the data module says so once, before anything is drawn."""
        self._names = tuple(source.name for source in sources)

    def check_sources(self, names: Sequence[str]) -> None:
        """Check, before any source is read, that what is kept beside these sources is there."""

    def set_needs(self, needs: BatchNeeds) -> None:
        """Learn what the trained module needs; the data module says so before the plan is asked for its length."""

    def kinds(self) -> set[str]:
        """The names of this sampler and of those that it draws from."""
        return {type(self).__name__}

    def remarks(self) -> list[str]:
        """What somebody who starts the run should know of the plan, a line each; the data module logs them once."""
        return []

    def set_run(self, run: RunLength) -> None:
        """Learn how long the run is; the data module says so where a trainer runs it, before anything is drawn."""

    @property
    @abstractmethod
    def num_steps(self) -> int:
        """Global batches in an epoch, at least one."""

    @abstractmethod
    def global_batch(self, epoch: int, step: int) -> tuple[Rows, Rows]:
        """One step's rows in the mixture and their draw keys, each (global_batch_size,) int64."""

    def level_rule(self, epoch: int, step: int) -> LevelRule | None:
        """Which hard negatives a step's rows may use, the same on every rank, or None for all."""
        return None

    @property
    def sampler(self) -> Self:
        """This sampler: Lightning calls `set_epoch` on a batch sampler's `sampler`, not on the batch sampler."""
        return self

    @property
    def place(self) -> tuple[int, int]:
        """This rank and the number of ranks."""
        return planned_place() if self._place is None else self._place

    @property
    def global_batch_size(self) -> int:
        """Queries of one step over all ranks."""
        return self.batch_size * self.place[1]

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the next to iterate, from its first step if it is another than the present one.

        After `resume` an earlier epoch is not taken: Lightning's own count of epochs falls behind when runs are resumed
        at the end of an epoch, and the plan must not be repeated for it.
        """
        if epoch > self.epoch or (epoch < self.epoch and not self._resumed):
            self.epoch, self.start = epoch, 0

    def resume(self, epoch: int, start: int) -> None:
        """Go on with step `start` of `epoch`."""
        self.epoch, self.start, self._resumed = epoch, start, True

    def plan_fields(self) -> dict[str, int | str]:
        """What the plan depends on, in plain types: a resumed run must have the same."""
        return {
            "plan_version": PLAN_VERSION,
            "sampler": type(self).__name__,
            "seed": self.seed,
            "global_batch_size": self.global_batch_size,
            "num_steps": self.num_steps,
        }

    def check_same_plan(self, saved: Mapping[str, int | str]) -> None:
        """Refuse a plan other than the one whose fields were saved; the error names the first field that differs."""
        fields = self.plan_fields()
        for name in {**fields, **saved}:
            now, before = fields.get(name), saved.get(name)
            if now != before:
                rule = f"must be {before!r} as in the checkpoint to resume in the middle of its plan"
                mend = "resume by the library that saved it" if name == "plan_version" else "restore it"
                raise OptionError(f"data {name}", now, rule, f"{mend}, or start from the weights alone")

    def whole_batches(self, sizes: Sequence[int], batch_size: int) -> list[int]:
        """Batches that the rows of each source fill, 0 for a small one, where sources never share a batch."""
        if max(sizes) < batch_size:
            over = f" (batch_size x {self.place[1]} ranks)" if batch_size > self.batch_size else ""
            rule = f"must not exceed the {max(sizes)} rows of the largest source{over}"
            raise OptionError("data.batch_size", self.batch_size, rule, "lower it, or add data")
        return [size // batch_size for size in sizes]

    def left_out(self, sizes: Sequence[int], batch_size: int) -> list[str]:
        """The remark of sources that fill no batch, where there are any."""
        small = [f"{name} ({size})" for name, size in zip(self._names, sizes, strict=True) if size < batch_size]
        remark = f"sources with fewer rows than a batch of {batch_size} are not trained on: {', '.join(small)}"
        return [remark] if small else []

    def draw_keys(self, epoch: int, step: int) -> Rows:
        """The draw keys of one step, (global_batch_size,) int64 >= 0: a hash of (seed, epoch, position)."""
        first = step * self.global_batch_size
        positions = np.arange(first, first + self.global_batch_size, dtype=np.uint64)
        keyed = mix_bits(positions + np.uint64(derive_seed(self.seed, "draw", epoch)))
        return (keyed >> np.uint64(1)).astype(np.int64)

    def __len__(self) -> int:
        return self.num_steps

    def __iter__(self) -> Iterator[list[PlanEntry]]:
        """This rank's batches of the present epoch, from `start` on."""
        rank, _ = self.place
        epoch, mine = self.epoch, slice(rank * self.batch_size, (rank + 1) * self.batch_size)
        for step in range(self.start, self.num_steps):
            rows, draws = self.global_batch(epoch, step)
            rule = self.level_rule(epoch, step)
            # The tuples' own constructor takes half the time of a named tuple's.
            entries = zip(rows[mine].tolist(), draws[mine].tolist(), repeat(rule))
            yield list(map(partial(tuple.__new__, PlanEntry), entries))


def first_rows(sizes: Sequence[int]) -> list[int]:
    """The number of each source's first row in the mixture, and the number of all rows."""
    if not sizes or min(sizes) < 1:
        raise OptionError("data.sources", list(sizes), "must each have rows", "leave out the empty source")
    return [0, *accumulate(sizes)]


# Makes a plan of the rows of each source, batch_size, the seed and the weight of each source.
SamplerFactory = Callable[[Sequence[int], int, int, Sequence[float]], BatchSampler]


def batches_taken(trainer: Any, batches_per_epoch: int) -> int:
    """The batches of an epoch that the trainer's `limit_train_batches` leaves."""
    limit = trainer.limit_train_batches
    return min(batches_per_epoch, limit) if isinstance(limit, int) else int(batches_per_epoch * limit)


def run_steps(trainer: Any, batches_per_epoch: int | None) -> int | None:
    """Optimiser steps of a run, whichever of `max_steps` and `max_epochs` ends it first; None where neither does.

    Lightning's own estimate would build the loader and drop a restored position.
    """
    ends = [int(trainer.max_steps)] if trainer.max_steps > 0 else []
    if trainer.max_epochs is not None and trainer.max_epochs > 0 and batches_per_epoch is not None:
        taken, scheduler = batches_taken(trainer, batches_per_epoch), _accumulation_scheduler(trainer)
        changes = [0] if scheduler is None else [epoch for epoch in scheduler.epochs if epoch < trainer.max_epochs]
        # From one change of the accumulation to the next all epochs have equally many steps.
        stretches = pairwise([*changes, trainer.max_epochs])
        ends.append(sum((end - start) * -(-taken // accumulated_batches(trainer, start)) for start, end in stretches))
    return min(ends, default=None)


def accumulated_batches(trainer: Any, epoch: int) -> int:
    """The batches of one optimiser step in an epoch, which a `GradientAccumulationScheduler` may change."""
    scheduler = _accumulation_scheduler(trainer)
    return int(trainer.accumulate_grad_batches if scheduler is None else scheduler.get_accumulate_grad_batches(epoch))


def batches_since_step(trainer: Any) -> int:
    """The batches whose gradients are accumulated and wait for the optimiser step."""
    epoch_loop: Any = trainer.fit_loop.epoch_loop
    progress = epoch_loop.batch_progress.current
    # An epoch's last batch ends a step, whatever the number of its batches.
    ends_epoch = progress.processed == progress.ready and epoch_loop._num_ready_batches_reached()
    return 0 if ends_epoch else int(progress.processed % trainer.accumulate_grad_batches)


def _accumulation_scheduler(trainer: Any) -> Any:
    """Lightning's `GradientAccumulationScheduler` among the trainer's callbacks, by its method."""
    callbacks = getattr(trainer, "callbacks", [])
    return next((one for one in callbacks if hasattr(one, "get_accumulate_grad_batches")), None)


Proportions = Literal["size", "uniform", "given"]
# Powers of whole numbers may differ in the last bit between machines; the plan must not.
_DIGITS = 12


def source_parts(
    sizes: Sequence[int],
    weights: Sequence[float] | None = None,
    proportions: Proportions = "size",
    temperature: float = 1.0,
) -> Sequence[float]:
    """The part of each source, > 0; only their ratios matter. Arguments are those of the samplers.

    With temperature 0.3, XLM-R's for languages, a source a hundredth as large as another has a quarter of its part.
    Source: Conneau and Lample 2019 (XLM), arXiv:1901.07291, §3.1, which calls the exponent alpha. Differs: sizes are
        counted in whatever the sampler draws, not in sentences.
    """
    given = [1.0] * len(sizes) if weights is None else list(weights)
    if len(given) != len(sizes):
        raise OptionError("weights", given, f"must be one for each of the {len(sizes)} sources", "give as many")
    if not 0 <= temperature <= 1:
        rule = "must be from 0 to 1: it is the exponent of a source's size"
        raise OptionError("sampler.temperature", temperature, rule, "for a root of 3.3 give 0.3")
    if temperature != 1 and proportions != "size":
        rule = f"cannot take effect with proportions {proportions!r}"
        raise OptionError("sampler.temperature", temperature, rule, "set the sampler's proportions to size")
    if proportions == "given":
        if not all(0 < weight < float("inf") for weight in given):
            rule = "must be > 0 and finite"
            raise OptionError("data.sources[].weight", given, rule, "leave out a source without part")
        return given
    if len(set(given)) > 1:
        rule = f"cannot take effect with proportions {proportions!r}"
        raise OptionError("data.sources[].weight", given, rule, "set the sampler's proportions to given")
    if proportions == "uniform":
        return [1] * len(sizes)
    return sizes if temperature == 1 else [float(f"{size**temperature:.{_DIGITS}g}") for size in sizes]


class BlendedBatchSampler(BatchSampler):
    """Every batch mixes all sources, in proportion to their sizes or a power of them, in equal or in given parts.

    Each source is walked through in a random order of its own, another in each pass. Any step is found at once
    (`Apportionment`), and nothing is stored per row. Within a step rows are shuffled: each rank's slice is a blend too.

    Determinism: see `BatchSampler`.
    Guarantees: over any number of steps a source's share of the draws is less than 2 rows off its proportion. With
    proportions `size`, temperature 1 and no `steps_per_epoch`, an epoch is one pass: no row comes twice in it, and only
    the fewer than global_batch_size rows that do not fill a batch are left out, others in the next epoch. Else the
    walks run on from epoch to epoch: a source has all its rows drawn j times before any is drawn j + 1 times.
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
        OptionError: If an option is impossible or cannot take effect, or there are fewer rows than one global batch.
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
        if self._num_rows < self.global_batch_size:
            rule = f"must not exceed the {self._num_rows} training rows (batch_size x {self.place[1]} ranks)"
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
