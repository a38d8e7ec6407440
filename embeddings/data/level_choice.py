"""Which of a row's hard negatives belong to a step: those of the curriculum's level, or what stands in for them."""

from embeddings.common.randomness import numpy_generator
from embeddings.data.examples import LevelRule, Negative


def negatives_of_level(negatives: tuple[Negative, ...], rule: LevelRule, draw: int) -> tuple[Negative, ...]:
    """The negatives that a level allows, in the row's order; where levels add up, in a random order.

    A row that has none of the level gives those of its nearest coarser level, and none at all where it has no coarser
    one: a step never sees what is harder than its level. Negatives without levels belong to every level.

    Determinism: a function of (negatives, rule, draw).

    Args:
        negatives: The row's own, hardest first.
        rule: The level, and whether coarser ones stay.
        draw: Key of the random order, so that few of many levels are drawn evenly from all of them.
    """
    if not any(negative.level for negative in negatives):
        return negatives
    allowed = tuple(negative for negative in negatives if negative.level >= rule.level)
    if not rule.cumulative:
        nearest = min((negative.level for negative in allowed), default=0)
        return tuple(negative for negative in allowed if negative.level == nearest)
    order = numpy_generator(draw, "levels").permutation(len(allowed)).tolist()
    return tuple(allowed[place] for place in order)
