"""Curriculum of hard negatives from easy to hard over a run, on the batches of any other sampler (MGH)."""

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate
from typing import Literal, NamedTuple, get_args

import numpy as np

from embeddings.common.errors import OptionError
from embeddings.common.protocols import BatchNeeds
from embeddings.common.random import KeyedPermutation, derive_seed
from embeddings.data.records import NUM_LEVELS
from embeddings.data.samplers.base import (
    BatchSampler,
    BlendedBatchSampler,
    LevelRule,
    Rows,
    RunLength,
    SamplerFactory,
    SourceIdentity,
)

MissingLevel = Literal["refuse", "coarser"]
LevelOrder = Literal["coarse_to_fine", "cumulative", "reverse", "random", "fixed"]
EQUAL_FRACTIONS = (1 / NUM_LEVELS,) * NUM_LEVELS


class Stage(NamedTuple):
    """Consecutive optimiser steps of one level: from the end of the previous stage to `end` (exclusive)."""

    level: int
    end: int


def level_of(
    step: int,
    total_steps: int,
    order: LevelOrder = "coarse_to_fine",
    fractions: Sequence[float] = EQUAL_FRACTIONS,
    seed: int = 0,
) -> int:
    """The level of an optimiser step (from 0): 1 (hardest) to 4 (easiest).

    Each level gets its fraction of the steps; the order determines which steps these are (`fixed` is not valid here).
    Steps from `total_steps` on have the level of the last step; the random order repeats with that period.

    Source: MGH, §2.1 (N4 to N1, 25 % each) and §4.1 (reverse, random, fixed). Differs: the paper does not say whether
        the random order mixes the levels of a batch; here a step has one level. The paper has no cumulative levels.
    """
    if order == "random":
        shuffle = KeyedPermutation(total_steps, derive_seed(seed, "levels"))
        step = int(shuffle(np.array([step % total_steps]))[0])
    step = min(step, total_steps - 1)
    return next(stage.level for stage in stages(total_steps, order, fractions) if step < stage.end)


def stages(total_steps: int, order: LevelOrder, fractions: Sequence[float]) -> tuple[Stage, ...]:
    """The stages of a curriculum, one per level; for `random`, as for `coarse_to_fine` (`level_of` shuffles the steps).

    A stage ends at `total_steps` times the cumulated fractions, rounded to the nearest step (halves up). Fractions are
    converted from their decimal notation, so that binary rounding does not move a boundary.
    """
    parts = [(NUM_LEVELS - index, Fraction(str(fraction))) for index, fraction in enumerate(fractions)]
    if order == "reverse":
        parts.reverse()
    total, half = sum(part for _, part in parts), Fraction(1, 2)
    ends = [math.floor(total_steps * done / total + half) for done in accumulate(part for _, part in parts)]
    return tuple(Stage(level, end) for (level, _), end in zip(parts, ends, strict=True))


class CurriculumBatchSampler(BatchSampler):
    """The batches of another sampler, with hard negatives of one level at each optimiser step.

    The inner sampler selects the rows of a batch; this one selects the negatives that a step may use (`level_of`,
    `positions_of_level`), none harder than the level of the step. The level is the same on all ranks and for all
    batches accumulated into one update.

    Args:
        sizes, batch_size, seed: As in `BlendedBatchSampler`.
        weights: Weight of each source, or None for equal weights.
        inner: Creates the sampler of the rows from the four arguments above. In a config: its class and its other
            arguments.
        order: `coarse_to_fine`: from level 4 (easiest) to level 1, one after another; `cumulative`: the same, but each
            step draws `num_negatives` from its level and the coarser ones; `reverse`: from level 1 to level 4;
            `random`: each level for its fraction of the steps, in random order; `fixed`: `level` at every step.
        fractions: Fraction of the optimiser steps of each level, from level 4 to level 1; they sum to 1, and 0 skips a
            level. None for equal fractions, as in the paper.
        level: The level for the order `fixed`; otherwise None.
        missing_level: For rows that lack a level: `refuse` ends the run before its first step. `coarser` uses the
            nearest coarser level of the row, or no hard negatives if it has none. Negatives without levels are used at
            every step.
        total_steps: Optimiser steps over which the levels are spread, or None for the steps of the run. A longer run
            stays at the last level.

    Source: MGH, §2.1 and §4.1. Differs: see `level_of`.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        batch_size: int,
        seed: int = 0,
        weights: Sequence[float] | None = None,
        *,
        inner: SamplerFactory = BlendedBatchSampler,
        order: LevelOrder = "coarse_to_fine",
        fractions: Sequence[float] | None = None,
        level: int | None = None,
        missing_level: MissingLevel = "refuse",
        total_steps: int | None = None,
    ) -> None:
        super().__init__(batch_size, seed)
        if order not in get_args(LevelOrder):
            raise OptionError("sampler.order", order, f"must be one of {list(get_args(LevelOrder))}", "choose one")
        if order != "fixed" and level is not None:
            raise OptionError("sampler.level", level, f"cannot take effect with order {order}", "set order: fixed")
        if order == "fixed" and (level is None or not 1 <= level <= NUM_LEVELS):
            rule = f"must be from 1 (hardest) to {NUM_LEVELS} (easiest) with order fixed"
            raise OptionError("sampler.level", level, rule, "give one, or choose another order")
        self.order: LevelOrder = order
        self.fractions = EQUAL_FRACTIONS if fractions is None else _checked(fractions)
        unequal = fractions if self.fractions != EQUAL_FRACTIONS else None
        for name, given in (("fractions", unequal), ("total_steps", total_steps)):
            if order == "fixed" and given is not None:
                fix = "leave it out, or choose another order"
                raise OptionError(f"sampler.{name}", given, "cannot take effect with order fixed", fix)
        self.level = level
        self.missing_level: MissingLevel = missing_level
        self.total_steps = total_steps
        self.inner = inner(sizes, batch_size, seed, [1.0] * len(sizes) if weights is None else weights)
        self._run = RunLength(batches_per_epoch=1)

    def identify(self, sources: Sequence[SourceIdentity]) -> None:
        self.inner.identify(sources)

    def check_sources(self, names: Sequence[str]) -> None:
        self.inner.check_sources(names)

    def set_needs(self, needs: BatchNeeds) -> None:
        self.inner.set_needs(needs)

    def remarks(self) -> list[str]:
        return self.inner.remarks()

    def set_run(self, run: RunLength) -> None:
        """Set the length of the run; it must be known, and accumulate evenly."""
        self.inner.set_run(run)
        self._run = run
        if self.level is None and run.accumulate_grad_batches is None:
            rule = "makes the optimiser step of a batch, and so its level, unknown"
            fix = "set trainer.accumulate_grad_batches to one number"
            raise OptionError("trainer.callbacks", "GradientAccumulationScheduler", rule, fix)
        if self.level is None:
            _ = self._total_steps

    @property
    def levels(self) -> tuple[int, ...]:
        """The levels that the curriculum uses, hardest first."""
        if self.level is not None:
            return (self.level,)
        return tuple(level for level in range(1, NUM_LEVELS + 1) if self.fractions[NUM_LEVELS - level] > 0)

    @property
    def num_steps(self) -> int:
        return self.inner.num_steps

    def global_batch(self, epoch: int, step: int) -> Rows:
        return self.inner.global_batch(epoch, step)

    def level_rule(self, epoch: int, step: int) -> LevelRule:
        if self.level is not None:
            return LevelRule(self.level)
        total_steps = self._total_steps
        level = level_of(self._run.step_of(epoch, step), total_steps, self.order, self.fractions, seed=self.seed)
        return LevelRule(level, cumulative=self.order == "cumulative")

    def plan_fields(self) -> dict[str, int | str]:
        inner = self.inner.plan_fields()
        kind = f"{type(self).__name__} of {inner['sampler']}"
        fields = {**inner, "sampler": kind, "level_order": self.order, "missing_level": self.missing_level}
        if self.level is not None:
            return {**fields, "level": self.level}
        return {
            **fields,
            "fractions": ",".join(map(str, self.fractions)),
            "total_steps": self._total_steps,
            "accumulate_grad_batches": self._run.accumulate_grad_batches or 1,
            "batches_per_epoch": self._run.batches_per_epoch,
        }

    @property
    def _total_steps(self) -> int:
        """Optimiser steps over which the levels are spread."""
        total_steps = self.total_steps or self._run.total_steps
        if total_steps is None:
            raise OptionError("trainer.max_steps", None, "must be known to spread the levels", "set it, or max_epochs")
        return total_steps


def _checked(fractions: Sequence[float]) -> tuple[float, ...]:
    fix = f"give {NUM_LEVELS}, from level {NUM_LEVELS} to level 1"
    if len(fractions) != NUM_LEVELS or not all(0 <= fraction <= 1 for fraction in fractions):
        rule = f"must be {NUM_LEVELS} numbers from 0 to 1, one for each level"
        raise OptionError("sampler.fractions", list(fractions), rule, fix)
    if not math.isclose(sum(fractions), 1, abs_tol=1e-6):
        raise OptionError("sampler.fractions", list(fractions), f"must sum to 1, not {sum(fractions):g}", fix)
    return tuple(fractions)
