"""Whether the records of a run have negatives at all, and of the levels that its curriculum asks for."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np

from embeddings.common.errors import InputError, OptionError
from embeddings.common.process import logger
from embeddings.common.protocols import BatchNeeds
from embeddings.common.text import TextSettings
from embeddings.data.dataset import SourceDataset
from embeddings.data.records import NUM_LEVELS
from embeddings.data.sources import SourceConfig
from embeddings.data.table import Table
from embeddings.data.tokenize import TextTokenizer


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


def check_negatives_asked_for(sources: Sequence[SourceConfig], needs: BatchNeeds, num_negatives: int) -> None:
    """Check, before a source is read, that its queries may have negatives.

    A query whose positive is its only candidate has the loss 0 and no gradient.

    Args:
        sources: The sources of the run.
        needs: What the trained module says of its batches.
        num_negatives: Most hard negatives of a query.

    Raises:
        InputError: If a source has neither in-batch nor hard negatives; the message names it and what to do.
    """
    for source in sources:
        if not _has_in_batch(source, needs):
            if num_negatives == 0:
                raise _without_negatives(source, needs, "set data.num_negatives to 1 or more")
            if source.conversion == "sts":
                fix = "mine negatives for it (`mine --conversion sts`) and train on what that writes, as pairs"
                raise _without_negatives(source, needs, fix)


def check_negatives_found(sources: Sequence[SourceDataset], needs: BatchNeeds) -> None:
    """Check that sources without in-batch negatives have hard ones, and say how many of their records have none.

    Args:
        sources: The sources of the run, converted.
        needs: What the trained module says of its batches.

    Raises:
        InputError: If no record of such a source has one.
    """
    for source in sources:
        if source.config.conversion != "pairs" or _has_in_batch(source.config, needs):
            continue
        total, count = len(source.cached.table), source.cached.table.num_without_negatives()
        if count == total:
            alike = [name for name, field in source.cached.unused_columns.items() if field == "negatives"]
            mapped = f"map them with columns: {{negatives: {alike[0]}}}" if alike else ""
            raise _without_negatives(source.config, needs, mapped or "give its records `negatives`, which `mine` finds")
        if count:
            logger.warning(
                "source %s: %d of %d records have no negative, and without in-batch negatives train nothing",
                source.config.name,
                count,
                total,
            )


def _has_in_batch(source: SourceConfig, needs: BatchNeeds) -> bool:
    return source.in_batch_negatives if needs.in_batch_negatives == "source" else needs.in_batch_negatives == "on"


def _without_negatives(source: SourceConfig, needs: BatchNeeds, fix: str) -> InputError:
    what = "has neither in-batch nor hard negatives, so its loss is 0 and trains nothing"
    forced = needs.in_batch_negatives == "off"
    switch = "model.loss.in_batch_negatives: source" if forced else "in_batch_negatives: true"
    return InputError(f"source {source.name!r}", what, f"{fix}, or set {switch}")


_ROLES = ("query", "document")


def with_source_prompts(text: TextSettings, sources: Sequence[SourceConfig]) -> TextSettings:
    """The text settings with the prompts of the sources, so that a saved model encodes as it was trained.

    A source's query prompt is kept under the source's name, the first of several alternates. Where all sources put one
    and the same prompt before their queries, or before their documents, it also becomes `query` or `document`, which
    encoding uses when no prompt is named. Prompts that the settings give themselves stay as they are.

    Args:
        text: The settings as they were given.
        sources: All sources of the run.
    """
    named = {source.name: source.query_prompts(text)[0] for source in sources if source.name not in _ROLES}
    shared = {
        "query": {source.query_prompts(text) for source in sources},
        "document": {_document_prompts(source, text) for source in sources},
    }
    for role, prompts in shared.items():
        if len(prompts) == 1:
            # Where even the alternates are the same, the first of them stands for all.
            named[role] = next(iter(prompts))[0]
    return replace(text, prompts={name: prompt for name, prompt in named.items() if prompt} | text.prompts)


def warn_of_unnamed_prompts(text: TextSettings, sources: Sequence[SourceConfig]) -> None:
    """Say so where queries are trained with prompts of which none is the one that encoding uses by itself."""
    if "query" not in text.prompts and any(any(source.query_prompts(text)) for source in sources):
        logger.warning(
            "the sources put different prompts before their queries: encoding uses none unless one is named "
            "(prompt_name: a source's name), or data.text.prompts gives one as `query`"
        )


def check_instruction(tokenizer: TextTokenizer, where: str, instruction: str) -> None:
    """Check that an instruction of a record's own leaves room for its query.

    Raises:
        InputError: If it does not; the message names file and row.
    """
    try:
        tokenizer.check_prompt(tokenizer.settings.instruction_prompt(instruction), "query")
    except OptionError as error:
        limit = tokenizer.settings.max_length("query")
        what = f"the instruction leaves no room for the query in {limit} tokens"
        raise InputError(where, what, "shorten it, or raise data.text.query_max_length") from error


def check_prompts(tokenizer: TextTokenizer, sources: Sequence[SourceConfig]) -> None:
    """Check that the prompts of all sources leave room for their texts.

    What a record brings as an instruction of its own is known only when it is read (see `check_instruction`).

    Raises:
        OptionError: If one does not; the message names the limit that it fills.
    """
    text = tokenizer.settings
    for source in sources:
        for prompt in source.query_prompts(text):
            tokenizer.check_prompt(prompt or text.prompts.get("query", ""), "query")
        for prompt in _document_prompts(source, text):
            tokenizer.check_prompt(prompt or text.prompts.get("document", ""), "document")


def _document_prompts(source: SourceConfig, text: TextSettings) -> tuple[str, ...]:
    return source.query_prompts(text) if source.symmetric else (source.document_prompt,)
