"""Whether the records of a run have negatives of the levels that its curriculum asks for."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np

from embeddings.common.errors import InputError, OptionError
from embeddings.common.log import logger
from embeddings.data.dataset import SourceDataset
from embeddings.data.records import NUM_LEVELS
from embeddings.data.table import Table


@dataclass
class LevelCoverage:
    """Which levels the records of a source have.

    Attributes:
        num_records: All converted records, those that `max_rows` leaves out too.
        num_ungraded: Records without a negative that has a level.
        num_lacking: Records that have a level, but not this one, by level.
        first_lacking: Number of the first record without this level, graded or not, from 1, by level.
    """

    num_records: int = 0
    num_ungraded: int = 0
    num_lacking: dict[int, int] = field(default_factory=dict)
    first_lacking: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, table: Table) -> Self:
        """Count through a source's records; a batch of them is looked at at a time."""
        coverage = cls(num_lacking=dict.fromkeys(range(1, NUM_LEVELS + 1), 0))
        for levels_N in table.row_levels():
            is_graded_N = levels_N > 1
            for level in coverage.num_lacking:
                lacking_N = (levels_N >> level & 1) == 0
                coverage.num_lacking[level] += int(np.count_nonzero(lacking_N & is_graded_N))
                if lacking_N.any():
                    coverage.first_lacking.setdefault(level, coverage.num_records + int(lacking_N.argmax()) + 1)
            coverage.num_ungraded += int(np.count_nonzero(~is_graded_N))
            coverage.num_records += len(levels_N)
        return coverage


def check_levels(sources: Sequence[SourceDataset], levels: Sequence[int], stand_in: bool) -> None:
    """Check that every record has a negative of every level, or say how many have not.

    Args:
        sources: The sources of the run.
        levels: The levels that the curriculum passes through.
        stand_in: Whether a record may lack levels, for which others then stand in (`places_of_level`).

    Raises:
        InputError: If a record lacks a level and may not; the message names source, record and level.
        OptionError: If no negative of any source has a level, so that the curriculum cannot take effect.
    """
    found = [(source.config.name, LevelCoverage.of(source.cached.table)) for source in sources]
    if all(coverage.num_ungraded == coverage.num_records for _, coverage in found):
        rule = "needs negatives with levels, and no source has any"
        fix = 'write negatives as {"text", "level"}, or use another sampler'
        raise OptionError("data.sampler", "CurriculumBatchSampler", rule, fix)
    for name, coverage in found:
        total = coverage.num_records
        for level in sorted(levels, reverse=True):
            count = coverage.num_lacking[level]
            if level in coverage.first_lacking and not stand_in:
                record, all_lacking = coverage.first_lacking[level], count + coverage.num_ungraded
                what = f"record {record} has no negative of level {level} ({all_lacking} of {total} lack one)"
                raise InputError(f"source {name!r}", what, "add it, or set the sampler's missing_level: coarser")
            if count:
                logger.info("source %s: %d of %d records have no negative of level %d", name, count, total, level)
        if coverage.num_ungraded:
            logger.info("source %s: %d of %d records have no negative with a level", name, coverage.num_ungraded, total)
