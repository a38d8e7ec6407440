"""The positives and negatives of a query: stored, or drawn anew for each draw key."""

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple, Protocol

from embeddings.common.randomness import numpy_generator
from embeddings.data.class_index import ClassIndex
from embeddings.data.examples import Negative
from embeddings.data.table import StoredRow, Table

_RANDOM_TRIES = 16


class Candidates(NamedTuple):
    """The texts of an example besides its query. `negative_labels` is as long as `negatives`, or empty."""

    positives: tuple[str, ...]
    negatives: tuple[Negative, ...] = ()
    negative_labels: tuple[int, ...] = ()


class CandidateRule(Protocol):
    """Gives the candidates of a stored row; every random choice is a pure function of (index, draw)."""

    def __call__(self, stored: StoredRow, index: int, draw: int) -> Candidates: ...


class StoredCandidates:
    """The candidates that the row itself holds."""

    def __call__(self, stored: StoredRow, index: int, draw: int) -> Candidates:
        """The stored positives and negatives."""
        return Candidates(tuple(stored.positives), tuple(map(Negative, stored.negatives, stored.levels)))


class ClassExamples:
    """A random text of the query's class as the positive, random texts of other classes as negatives.

    Determinism: a function of (row, draw); since the draw key differs each epoch, so do the candidates.
    Guarantees: no candidate has the query's text, and no two candidates are equal. The positive is uniform over the
    class's other texts, negatives are uniform over all rows outside the class. Fewer than `num_negatives` come back
    where the other classes do not have that many different texts.

    Args:
        table: The source's rows.
        classes: The rows of each class; every class has two different texts or more.
        num_negatives: Negatives for each query.

    Source: Lee et al. 2024 (NV-Embed), arXiv:2405.17428, sections 4.2 and 5.2.4.
    """

    def __init__(self, table: Table, classes: ClassIndex, num_negatives: int) -> None:
        self.table, self.classes, self.num_negatives = table, classes, num_negatives

    def __call__(self, stored: StoredRow, index: int, draw: int) -> Candidates:
        """Candidates drawn for this key."""
        label, size = stored.label, self.classes.size(stored.label)
        generator = numpy_generator(draw, "class_by_example", index)
        seen = {stored.query.strip()}
        # A class made almost wholly of one text would be drawn from for ever; in the end it is searched.
        for position in chain(generator.integers(size, size=_RANDOM_TRIES).tolist(), range(size)):
            positive = self.table.query(self.classes.member(label, position))
            if positive.strip() not in seen:
                break
        seen.add(positive.strip())
        num_outside = self.classes.num_outside(label)
        # Twice as many as are needed, to make up for texts that occur more than once.
        drawn = generator.choice(num_outside, size=min(num_outside, 2 * self.num_negatives), replace=False).tolist()
        negatives: list[Negative] = []
        labels: list[int] = []
        for position in drawn:
            if len(negatives) == self.num_negatives:
                break
            text = self.table.query(self.classes.outsider(label, position))
            if text.strip() not in seen:
                seen.add(text.strip())
                negatives.append(Negative(text))
                labels.append(self.classes.label_of_outsider(label, position))
        return Candidates((positive,), tuple(negatives), tuple(labels))


class LabelTexts:
    """The text of the query's label as the positive, texts of other labels as negatives.

    Determinism: a function of (row, draw). Guarantees: the negatives are different labels, all of the others where
    there are no more than `num_negatives`.

    Args:
        texts: Text of each label, by its code, all different.
        num_negatives: Negatives for each query.

    Source: Lee et al. 2024 (NV-Embed), arXiv:2405.17428, sections 4.2 and 5.2.4.
    """

    def __init__(self, texts: Sequence[str], num_negatives: int) -> None:
        self.texts, self.num_negatives = texts, num_negatives

    def __call__(self, stored: StoredRow, index: int, draw: int) -> Candidates:
        """Candidates drawn for this key."""
        num_others = len(self.texts) - 1
        generator = numpy_generator(draw, "class_by_label", index)
        drawn = generator.choice(num_others, size=min(num_others, self.num_negatives), replace=False).tolist()
        others = tuple(code + (code >= stored.label) for code in drawn)
        negatives = tuple(Negative(self.texts[code]) for code in others)
        return Candidates((self.texts[stored.label],), negatives, others)
