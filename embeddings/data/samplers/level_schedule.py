"""Which level of hard negatives an optimiser step has: a pure function of the step."""

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate
from typing import Literal, NamedTuple

import numpy as np

from embeddings.common.randomness import derive_seed
from embeddings.data.records import NUM_LEVELS
from embeddings.data.samplers.permutation import KeyedPermutation

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
    fixed_level: int | None = None,
    seed: int = 0,
) -> int:
    """The level of one optimiser step, 1 (hardest) to 4 (easiest).

    Every order but `fixed` gives each level its share of the steps; they differ in which steps these are. Steps at
    `total_steps` or later go on as the last one, and in a random order as another pass of the same length.

    Args:
        step: Optimiser step of the run, from 0: the number of updates made before it.
        total_steps: Optimiser steps of the whole curriculum, >= 1.
        order: `coarse_to_fine` and `cumulative`: from level 4 to level 1; `reverse`: from level 1 to level 4;
            `random`: the steps of `coarse_to_fine` in a random order; `fixed`: always `fixed_level`.
        fractions: Share of the steps of each level, of level 4 first and of level 1 last.
        fixed_level: The level of `fixed`.
        seed: Seed of the random order.

    Determinism: a function of its arguments.
    Source: MGH, §2.1 (N4 to N1, 25 % each) and §4.1 (reverse, random, fixed). Differs: the paper does not say whether a
        random order mixes the levels of a batch; here a step has one level. Cumulative levels are not in the paper.
    """
    if order == "fixed":
        assert fixed_level is not None
        return fixed_level
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
