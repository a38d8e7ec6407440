"""Which of a row's hard negatives belong to a step: those of the curriculum's level, or what stands in for them."""

from collections.abc import Sequence

from embeddings.common.randomness import numpy_generator
from embeddings.data.examples import LevelRule, Negative


def places_of_level(negatives: Sequence[Negative], rule: LevelRule, draw: int) -> list[int]:
    """The places of the negatives that a level allows, in the row's order; where levels add up, in a random order.

    A row that has none of the level gives those of its nearest coarser level, and none at all where it has no coarser
    one: a step never sees what is harder than its level. Negatives without levels belong to every level.

    Determinism: a function of (negatives, rule, draw).

    Args:
        negatives: The row's own, hardest first.
        rule: The level, and whether coarser ones stay.
        draw: Key of the random order, so that few of many levels are drawn evenly from all of them.
    """
    if not any(negative.level for negative in negatives):
        return list(range(len(negatives)))
    allowed = [place for place, negative in enumerate(negatives) if negative.level >= rule.level]
    if not rule.cumulative:
        nearest = min((negatives[place].level for place in allowed), default=0)
        return [place for place in allowed if negatives[place].level == nearest]
    order = numpy_generator(draw, "levels").permutation(len(allowed)).tolist()
    return [allowed[place] for place in order]
