"""Whether similarity to the query really falls from level to level, by a model that had no part in writing."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from embeddings.common.directions import require_directions
from embeddings.common.errors import InputError
from embeddings.common.text import TextRole
from embeddings.data.readers import open_reader
from embeddings.data.records import NUM_LEVELS, Record, parse_record

_FIELDS = ("query", "positive", "negatives")


class TextEncoder(Protocol):
    """What turns texts into vectors."""

    def encode(self, texts: Sequence[str], *, role: TextRole | None = None) -> npt.NDArray[np.float32]: ...


class LevelCheck(NamedTuple):
    """Similarity to the query, over records with one negative of each level.

    Attributes:
        num_records: Records looked at.
        positive: Mean cosine of query and positive.
        levels: Mean cosine of query and negative, from level 1 (hardest) to 4.
        falling_fraction: Share of records in which no level is less similar than the one after it.
    """

    num_records: int
    positive: float
    levels: tuple[float, ...]
    falling_fraction: float

    @property
    def is_falling(self) -> bool:
        """Whether the means fall from level to level."""
        return all(hard > easy for hard, easy in zip(self.levels, self.levels[1:], strict=False))


def check_levels(paths: Sequence[Path], encoder: TextEncoder, max_records: int = 1000) -> LevelCheck:
    """The mean similarity of each level, as the paper reports it for its data (.881, .857, .845, .793 for N1 to N4).

    Args:
        paths: Files of records with levels.
        encoder: The judge, best one that was not trained on such data.
        max_records: Most records looked at, spread evenly over all.

    Raises:
        InputError: If a file cannot be read, or no record has a negative of every level.

    Source: Pan et al. 2025 (MGH), section 5.1, Table 4.
    """
    num_records = sum(1 for _ in _graded_records(paths))
    if not num_records:
        raise InputError(str(paths[0]) if paths else "levels", "no record has four levels", "check another file")
    count = min(max_records, num_records)
    places = {place * num_records // count for place in range(count)}
    chosen = [record for place, record in enumerate(_graded_records(paths)) if place in places]
    query_ND = _unit(encoder.encode([record.query for record in chosen], role="query"))
    similarity = [_unit(encoder.encode([record.positives[0] for record in chosen]))]
    for level in range(NUM_LEVELS):
        similarity.append(_unit(encoder.encode([record.negatives[level].text for record in chosen])))
    cosine_SN = np.stack([np.einsum("nd,nd->n", query_ND, vector_ND) for vector_ND in similarity])
    falling_N = (np.diff(cosine_SN[1:], axis=0) <= 0).all(axis=0)
    means = [float(mean) for mean in cosine_SN.mean(axis=1)]
    return LevelCheck(count, means[0], tuple(means[1:]), float(falling_N.mean()))


def _graded_records(paths: Sequence[Path]) -> Iterator[Record]:
    for path in paths:
        for where, fields in open_reader(path, _FIELDS, _FIELDS):
            record = parse_record(fields, {}, where)
            if [negative.level for negative in record.negatives] == list(range(1, NUM_LEVELS + 1)):
                yield record


def _unit(vector_ND: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    require_directions(vector_ND, "the judge's vectors")
    wide_ND = vector_ND.astype(np.float64)
    unit_ND: npt.NDArray[np.float64] = wide_ND / np.linalg.norm(wide_ND, axis=1, keepdims=True)
    return unit_ND
