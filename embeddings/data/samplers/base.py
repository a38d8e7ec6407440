"""What every batch sampler is: a pure function from (seed, epoch, step) to one global batch."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import repeat
from typing import NamedTuple, Self

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from torch.utils.data import Sampler

from embeddings.common.errors import OptionError
from embeddings.common.protocols import BatchNeeds
from embeddings.common.randomness import derive_seed
from embeddings.data.examples import LevelRule, RowDraw
from embeddings.data.run_length import RunLength
from embeddings.data.samplers.permutation import mix_bits

Rows = NDArray[np.int64]

# One more whenever the same options come to mean other batches.
PLAN_VERSION = 2


class SourceIdentity(NamedTuple):
    """Which source it is, for a sampler that keeps files beside the sources.

    Attributes:
        name: Its name in the mixture.
        key: Content key of its converted form (`CachedSource.key`).
    """

    name: str
    key: str


class BatchSampler(Sampler[list[RowDraw]], ABC):
    """Yields this rank's slice of each batch of an epoch.

    A subclass says how many steps an epoch has (`num_steps`) and what a step holds (`global_batch`); ranks, epochs and
    resuming are here. The rank and the number of ranks are read when they are needed, from the process group if there
    is one, so a sampler may be made before it.

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

    def identify(self, sources: Sequence[SourceIdentity]) -> None:
        """Learn which sources the rows are of; the data module says so once, before anything is drawn."""

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
        if self._place is not None:
            return self._place
        if dist.is_available() and dist.is_initialized():
            return dist.get_rank(), dist.get_world_size()
        return 0, 1

    @property
    def global_batch_size(self) -> int:
        """Queries of one step over all ranks."""
        return self.batch_size * self.place[1]

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the next to iterate, from its first step if it is another than the present one.

        After `resume` an earlier epoch than the present one is not taken: Lightning's own count of epochs falls behind
        when runs are resumed at the end of an epoch, and the plan must not be repeated for it.
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
        """Check that a plan whose fields were saved is this one.

        Raises:
            OptionError: If it is not; the message names the first field that differs.
        """
        fields = self.plan_fields()
        for name in {**fields, **saved}:
            now, before = fields.get(name), saved.get(name)
            if now != before:
                rule = f"must be {before!r} as in the checkpoint to resume in the middle of its plan"
                mend = "resume by the library that saved it" if name == "plan_version" else "restore it"
                raise OptionError(f"data {name}", now, rule, f"{mend}, or start from the weights alone")

    def whole_batches(self, sizes: Sequence[int], batch_size: int) -> list[int]:
        """Batches that the rows of each source fill, for a plan whose sources never share a batch; 0 for a small one.

        Args:
            sizes: Rows of each source.
            batch_size: Rows of a batch of one source.

        Raises:
            OptionError: If no source fills one.
        """
        if max(sizes) < batch_size:
            over = f" (batch_size x {self.place[1]} ranks)" if batch_size > self.batch_size else ""
            rule = f"must not exceed the {max(sizes)} rows of the largest source{over}"
            raise OptionError("data.batch_size", self.batch_size, rule, "lower it, or add data")
        return [size // batch_size for size in sizes]

    def left_out(self, sizes: Sequence[int], names: Sequence[str], batch_size: int) -> list[str]:
        """The remark of sources that fill no batch, where there are any."""
        small = [f"{name} ({size})" for name, size in zip(names, sizes, strict=True) if size < batch_size]
        if not small:
            return []
        return [f"sources with fewer rows than a batch of {batch_size} are not trained on: {', '.join(small)}"]

    def draw_keys(self, epoch: int, step: int) -> Rows:
        """The draw keys of one step, (global_batch_size,) int64 >= 0: a hash of (seed, epoch, position)."""
        first = step * self.global_batch_size
        positions = np.arange(first, first + self.global_batch_size, dtype=np.uint64)
        keyed = mix_bits(positions + np.uint64(derive_seed(self.seed, "draw", epoch)))
        return (keyed >> np.uint64(1)).astype(np.int64)

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        return self.num_steps

    def __iter__(self) -> Iterator[list[RowDraw]]:
        """This rank's batches of the present epoch, from `start` on."""
        rank, _ = self.place
        epoch, mine = self.epoch, slice(rank * self.batch_size, (rank + 1) * self.batch_size)
        for step in range(self.start, self.num_steps):
            rows, draws = self.global_batch(epoch, step)
            rule = self.level_rule(epoch, step)
            # The tuples' own constructor takes half the time of a named tuple's.
            entries = zip(rows[mine].tolist(), draws[mine].tolist(), repeat(rule))
            yield list(map(partial(tuple.__new__, RowDraw), entries))


# Makes a plan of the rows of each source, batch_size, the seed and the weight of each source.
SamplerFactory = Callable[[Sequence[int], int, int, Sequence[float]], BatchSampler]
