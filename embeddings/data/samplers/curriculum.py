"""Hard negatives from easy to hard over the steps of a run, on the batches of any other sampler (MGH's curriculum)."""

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
    """A stretch of optimiser steps of one level: those before `end`, from the end of the stage before it on."""

    level: int
    end: int


def level_of(
    step: int,
    total_steps: int,
    order: LevelOrder = "coarse_to_fine",
    fractions: Sequence[float] = EQUAL_FRACTIONS,
    seed: int = 0,
) -> int:
    """The level of one optimiser step (from 0), 1 (hardest) to 4 (easiest), a function of its arguments.

    Each level has its share of the steps; the orders, of which `fixed` is none here, differ in which steps these are.
    Steps at `total_steps` or later have the level of the last one; a random order starts another pass of that length.

    Source: MGH, §2.1 (N4 to N1, 25 % each) and §4.1 (reverse, random, fixed). Differs: the paper does not say whether a
        random order mixes the levels of a batch; here a step has one level. Cumulative levels are not in the paper.
    """
    if order == "random":
        shuffle = KeyedPermutation(total_steps, derive_seed(seed, "levels"))
        step = int(shuffle(np.array([step % total_steps]))[0])
    step = min(step, total_steps - 1)
    return next(stage.level for stage in stages(total_steps, order, fractions) if step < stage.end)


def stages(total_steps: int, order: LevelOrder, fractions: Sequence[float]) -> tuple[Stage, ...]:
    """The stages of a curriculum, one a level; a random order is that of `coarse_to_fine`, shuffled step by step.

    A stage ends at `total_steps` times the fractions up to it, rounded to the nearest step, halves upwards. Fractions
    are taken as the decimals that they are written as, so that rounding of binary numbers moves no boundary.
    """
    assert order != "fixed"
    parts = [(NUM_LEVELS - place, Fraction(str(fraction))) for place, fraction in enumerate(fractions)]
    if order == "reverse":
        parts.reverse()
    whole, half = sum(part for _, part in parts), Fraction(1, 2)
    ends = [math.floor(total_steps * done / whole + half) for done in accumulate(part for _, part in parts)]
    return tuple(Stage(level, end) for (level, _), end in zip(parts, ends, strict=True))


class CurriculumBatchSampler(BatchSampler):
    """The batches of another sampler, whose hard negatives are of one level at each optimiser step.

    The other sampler says which rows make a batch, this one which of their negatives the step may use (`level_of`,
    `positions_of_level`). All batches that are accumulated into one update have one level, and so have all ranks.

    Determinism: the rows as the other sampler's; the level is a function of (seed, optimiser step), the step one of
    (epoch, batch, the run's length). A run that is resumed at any step has the level of that step.
    Guarantees and length: those of the other sampler. No negative is harder than the step's level.

    Args:
        sizes: Rows of each source, each >= 1; row numbers count through the sources one after another.
        batch_size, seed, num_replicas, rank: As in `BatchSampler`.
        weights: Weight of each source, or None for equal ones.
        inner: Makes the sampler of the rows from the four arguments above. In a config: its class and its other
            arguments.
        order: `coarse_to_fine`: from level 4, the easiest, to level 1, one after another; `cumulative`: the same, with
            the coarser levels kept, of which `num_negatives` are drawn; `reverse`: from level 1 to level 4; `random`:
            each level for its share of the steps, in random order; `fixed`: `level` at every step.
        fractions: Share of the optimiser steps of each level, of level 4 first and level 1 last; they sum to 1, and 0
            leaves a level out. None for equal shares, as in the paper.
        level: The level of the order `fixed`; elsewhere None.
        missing_level: What happens to rows that lack a level: `refuse` ends the run before its first step; `coarser`
            gives such a row its nearest coarser level, or no hard negative where it has none, and a row whose negatives
            have no levels all of them at every step.
        total_steps: Optimiser steps over which the levels are spread, or None for those of the run. A longer run stays
            at the last level.

    Raises:
        OptionError: If an option is impossible or cannot take effect.
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
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        super().__init__(batch_size, seed, num_replicas, rank)
        if order not in get_args(LevelOrder):
            raise OptionError("sampler.order", order, f"must be one of {list(get_args(LevelOrder))}", "choose one")
        if missing_level not in get_args(MissingLevel):
            raise OptionError("sampler.missing_level", missing_level, "must be refuse or coarser", "choose one")
        if total_steps is not None and (total_steps < 1 or order == "fixed"):
            rule = "cannot take effect with order fixed" if order == "fixed" else "must be >= 1"
            raise OptionError("sampler.total_steps", total_steps, rule, "leave it out")
        self.order: LevelOrder = order
        self.fractions = _fractions(order, fractions)
        self.level = _fixed_level(order, level)
        self.missing_level: MissingLevel = missing_level
        self.total_steps = total_steps
        self.inner = inner(sizes, batch_size, seed, [1.0] * len(sizes) if weights is None else weights)
        self.inner._place = self._place
        self._run: RunLength | None = None
        _ = self.num_steps

    def identify(self, sources: Sequence[SourceIdentity]) -> None:
        self.inner.identify(sources)

    def check_sources(self, names: Sequence[str]) -> None:
        self.inner.check_sources(names)

    def set_needs(self, needs: BatchNeeds) -> None:
        self.inner.set_needs(needs)

    def kinds(self) -> set[str]:
        return super().kinds() | self.inner.kinds()

    def remarks(self) -> list[str]:
        return self.inner.remarks()

    def set_run(self, run: RunLength) -> None:
        """Learn how long the run is: it must have a known end, accumulate evenly, and give each level a step."""
        self.inner.set_run(run)
        self._run = run
        if self.order == "fixed":
            return
        if run.accumulate_grad_batches is None:
            rule = "leaves the optimiser step of a batch unknown, and its level with it"
            fix = "set trainer.accumulate_grad_batches to one number"
            raise OptionError("trainer.callbacks", "GradientAccumulationScheduler", rule, fix)
        total_steps = self._curriculum_steps(run)
        if run.is_trial:
            return
        start = 0
        for level, end in stages(total_steps, self.order, self.fractions):
            if start == end and level in self.levels:
                rule = f"gives level {level} none of the {total_steps} optimiser steps"
                raise OptionError("sampler.fractions", list(self.fractions), rule, "train longer, or set it to 0")
            start = end

    @property
    def levels(self) -> tuple[int, ...]:
        """The levels that the curriculum passes through, hardest first."""
        if self.level is not None:
            return (self.level,)
        return tuple(level for level in range(1, NUM_LEVELS + 1) if self.fractions[NUM_LEVELS - level] > 0)

    @property
    def num_steps(self) -> int:
        return self.inner.num_steps

    def global_batch(self, epoch: int, step: int) -> tuple[Rows, Rows]:
        return self.inner.global_batch(epoch, step)

    def level_rule(self, epoch: int, step: int) -> LevelRule:
        """Which hard negatives the batch at `step` of an epoch may use."""
        if self.level is not None:
            return LevelRule(self.level)
        run = self._run or RunLength(self.num_steps)
        optimiser_step, total_steps = run.step_of(epoch, step), self._curriculum_steps(run)
        level = level_of(optimiser_step, total_steps, self.order, self.fractions, seed=self.seed)
        return LevelRule(level, cumulative=self.order == "cumulative")

    def plan_fields(self) -> dict[str, int | str]:
        inner = self.inner.plan_fields()
        kind = f"{type(self).__name__} of {inner['sampler']}"
        fields = {**inner, "sampler": kind, "level_order": self.order, "missing_level": self.missing_level}
        if self.level is not None:
            return {**fields, "level": self.level}
        run = self._run or RunLength(self.num_steps)
        return {
            **fields,
            "fractions": ",".join(map(str, self.fractions)),
            "total_steps": self._curriculum_steps(run),
            "accumulate_grad_batches": run.accumulate_grad_batches or 1,
            "batches_per_epoch": run.batches_per_epoch,
        }

    def _curriculum_steps(self, run: RunLength) -> int:
        """Optimiser steps over which the levels are spread."""
        total_steps = self.total_steps or run.total_steps
        if total_steps is None:
            rule = "must be known to spread the levels over it"
            raise OptionError("sampler.total_steps", None, rule, "set trainer.max_steps or max_epochs")
        return total_steps


def _fractions(order: str, given: Sequence[float] | None) -> tuple[float, ...]:
    """The share of each level, checked."""
    if given is None:
        return EQUAL_FRACTIONS
    if order == "fixed":
        raise OptionError("sampler.fractions", list(given), "cannot take effect with order fixed", "leave them out")
    fix = f"give {NUM_LEVELS}, of level {NUM_LEVELS} first"
    if len(given) != NUM_LEVELS or not all(0 <= fraction <= 1 for fraction in given):
        rule = f"must be {NUM_LEVELS} numbers from 0 to 1, one for each level"
        raise OptionError("sampler.fractions", list(given), rule, fix)
    if not math.isclose(sum(given), 1, abs_tol=1e-6):
        raise OptionError("sampler.fractions", list(given), f"must sum to 1, not {sum(given):g}", fix)
    return tuple(given)


def _fixed_level(order: str, level: int | None) -> int | None:
    """The level of the order `fixed`, checked; None for the others."""
    if order != "fixed":
        if level is not None:
            raise OptionError("sampler.level", level, f"cannot take effect with order {order}", "set order: fixed")
        return None
    if level is None or not 1 <= level <= NUM_LEVELS:
        rule = f"must be from 1 (hardest) to {NUM_LEVELS} (easiest) with order fixed"
        raise OptionError("sampler.level", level, rule, "give one, or choose another order")
    return level
