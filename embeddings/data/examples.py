"""What samplers ask for and what data sets answer with: the contract inside the data floor."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class LevelRule(NamedTuple):
    """Which hard negatives a step may use.

    Attributes:
        level: 1 (hardest) to 4 (easiest).
        cumulative: Whether the coarser levels, those above it, may be used too.
    """

    level: int
    cumulative: bool = False


class RowDraw(NamedTuple):
    """One entry of a batch plan.

    Attributes:
        row: Row in the mixture (all sources one after another).
        draw: Key of every random choice made for this entry, a pure function of (seed, epoch, position), so that the
            choices depend on neither the rank nor the worker that makes them.
        rule: Which of the row's hard negatives the step may use, or None for all.
    """

    row: int
    draw: int
    rule: LevelRule | None = None


class Negative(NamedTuple):
    """A hard negative. `level` is 1 (hardest) to 4 (easiest), or 0 where the source gives none."""

    text: str
    level: int = 0


@dataclass(frozen=True, slots=True)
class Example:
    """One query with its relevant and irrelevant texts, its random choices still open.

    Attributes:
        row: Row in the mixture.
        draw: Key of the random choices (see `RowDraw`).
        source: Index of the source in the mixture.
        query: Query text without its prompt.
        positives: Texts relevant to it, at least one.
        negatives: Texts that are not, hardest first (in random order where a curriculum adds levels up).
        label: Class within the source, -1 where it has none; the positives have the same.
        negative_labels: Class of each negative, as long as `negatives`, or empty where the source has none.
        query_prompt: Text put before the query, "" for none.
        document_prompt: Text put before positives and negatives, "" for none (NV-Embed: set on symmetric tasks only).
        in_batch_negatives: Whether other queries' candidates may serve as negatives.
        surrogate_query: Vector of the query by another model, (S,) float32, or None where the source has none.
        surrogate_positives: The same of each positive, (P, S) float32.
        surrogate_negatives: Gives the same of the first n negatives, (n, S) float32; None where they have none.
        level: Level of hard negatives that the step asks for, 0 where it asks for none.
    """

    row: int
    draw: int
    source: int
    query: str
    positives: tuple[str, ...]
    negatives: tuple[Negative, ...] = ()
    label: int = -1
    negative_labels: tuple[int, ...] = ()
    query_prompt: str = ""
    document_prompt: str = ""
    in_batch_negatives: bool = True
    surrogate_query: npt.NDArray[np.float32] | None = field(default=None, compare=False)
    surrogate_positives: npt.NDArray[np.float32] | None = field(default=None, compare=False)
    surrogate_negatives: Callable[[int], npt.NDArray[np.float32]] | None = field(default=None, compare=False)
    level: int = 0
