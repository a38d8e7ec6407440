"""What is checked and logged before a run: negatives and their levels, prompts, and columns that nothing uses."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from embeddings.common.errors import InputError, OptionError
from embeddings.common.process import logger
from embeddings.common.protocols import BatchNeeds
from embeddings.common.text import TextSettings
from embeddings.data.dataset import SourceDataset
from embeddings.data.records import NUM_LEVELS
from embeddings.data.sources import SourceConfig
from embeddings.data.tokenize import TextTokenizer


def check_negatives_asked_for(sources: Sequence[SourceConfig], needs: BatchNeeds, num_negatives: int) -> None:
    """Refuse, before a source is read, one whose queries can have no negative: their loss is 0 and has no gradient."""
    for source in sources:
        if _has_in_batch(source, needs):
            continue
        if num_negatives == 0:
            raise _without_negatives(source, needs, "set data.num_negatives to 1 or more")
        if source.conversion == "sts":
            fix = "mine negatives for it (`mine --conversion sts`) and train on what that writes, as pairs"
            raise _without_negatives(source, needs, fix)


def check_negatives_found(sources: Sequence[SourceDataset], needs: BatchNeeds) -> None:
    """Refuse a converted source without in-batch negatives and without hard ones; log how many records have none."""
    for source in sources:
        if source.config.conversion != "pairs" or _has_in_batch(source.config, needs):
            continue
        total = len(source.cached.table)
        count = sum(int(np.count_nonzero(levels_N == 0)) for levels_N in source.cached.table.row_levels())
        if count == total:
            alike = [name for name, field in source.cached.unused_columns.items() if field == "negatives"]
            mapped = f"map them with columns: {{negatives: {alike[0]}}}" if alike else ""
            raise _without_negatives(source.config, needs, mapped or "give its records `negatives`, which `mine` finds")
        if count:
            why = "have no negative, and without in-batch negatives train nothing"
            logger.warning("source %s: %d of %d records %s", source.config.name, count, total, why)


def check_levels(sources: Sequence[SourceDataset], levels: Sequence[int], allow_missing: bool) -> None:
    """Check that every record has a negative of every level; with `allow_missing` log how many lack one.

    A source without any level is refused: the curriculum cannot take effect.
    """
    # By source: how many records have each set of levels (bit l of the key: level l).
    counts = [_count_level_sets(source) for source in sources]
    if all(level_set <= 1 for count in counts for level_set in count):
        rule = "needs negatives with levels, and no source has any"
        fix = 'write negatives as {"text", "level"}, or use another sampler'
        raise OptionError("data.sampler", "CurriculumBatchSampler", rule, fix)
    for source, count in zip(sources, counts, strict=True):
        name, total = source.config.name, len(source.cached.table)
        num_ungraded = sum(number for level_set, number in count.items() if level_set <= 1)
        for level in sorted(levels, reverse=True):
            num_lacking = sum(number for level_set, number in count.items() if not level_set >> level & 1)
            if num_lacking and not allow_missing:
                what = f"record {_first_without(source, level)} has no negative of level {level}"
                fix = "add it, or set the sampler's missing_level: coarser"
                raise InputError(f"source {name!r}", f"{what} ({num_lacking} of {total} lack one)", fix)
            if num_lacking > num_ungraded:
                number = num_lacking - num_ungraded
                logger.info("source %s: %d of %d records have no negative of level %d", name, number, total, level)
        if num_ungraded:
            logger.info("source %s: %d of %d records have no negative with a level", name, num_ungraded, total)


def _count_level_sets(source: SourceDataset) -> Counter[int]:
    found: Counter[int] = Counter()
    for levels_N in source.cached.table.row_levels():
        found.update(dict(enumerate(np.bincount(levels_N, minlength=2 << NUM_LEVELS).tolist())))
    return +found


def _first_without(source: SourceDataset, level: int) -> int:
    """The first record without a negative of a level, counted from 1."""
    lacking = (levels_N >> level & 1 == 0 for levels_N in source.cached.table.row_levels())
    return int(np.concatenate(list(lacking)).argmax()) + 1


def _has_in_batch(source: SourceConfig, needs: BatchNeeds) -> bool:
    return source.in_batch_negatives if needs.in_batch_negatives == "source" else needs.in_batch_negatives == "on"


def _without_negatives(source: SourceConfig, needs: BatchNeeds, fix: str) -> InputError:
    what = "has neither in-batch nor hard negatives, so its loss is 0 and trains nothing"
    forced = needs.in_batch_negatives == "off"
    switch = "model.loss.in_batch_negatives: source" if forced else "in_batch_negatives: true"
    return InputError(f"source {source.name!r}", what, f"{fix}, or set {switch}")


def warn_of_unused_columns(source: SourceDataset, num_negatives: int) -> None:
    """Log, in one line, columns that look like a field and are not used; `negatives` only where they are wanted."""
    columns = source.cached.unused_columns.items()
    found = {name: field for name, field in columns if num_negatives > 0 or field != "negatives"}
    if not found:
        return
    # The first column that looks like each field; a score stands for no field of a pair.
    first = {field: name for name, field in reversed(found.items()) if field}
    mapping = ", ".join(f"{field}: {first[field]}" for field in dict.fromkeys(found.values()) if field)
    fixes = [f"to use one, map it: columns: {{{mapping}}}"] if mapping else []
    if "" in found.values():
        fixes.append("a score counts with conversion: sts alone")
    logger.warning("source %s: columns not used: %s; %s", source.config.name, ", ".join(found), "; ".join(fixes))


def warn_of_unscored_negatives(source: SourceDataset) -> None:
    """Log where hard negatives have no vectors by the surrogate, so that a filter cannot remove them."""
    surrogates = source.surrogates
    if surrogates is None or surrogates.has_negatives:
        return
    if any(levels_N.any() for levels_N in source.cached.table.row_levels()):
        why = "so a filter of false negatives leaves those of other queries in"
        fix = "encode them too (`cluster --negatives true`)"
        where = surrogates.folder
        logger.warning(
            "source %s: its hard negatives have no vectors in %s, %s; %s", source.config.name, where, why, fix
        )


def with_source_prompts(text: TextSettings, sources: Sequence[SourceConfig]) -> TextSettings:
    """The text settings with the prompts of the sources, so that a saved model encodes as it was trained.

    A source's first query prompt is kept under the source's name. A prompt that all sources share also becomes `query`
    or `document`, the default of encoding. Prompts that the settings already have stay.
    """
    named = {
        source.name: source.query_prompts(text)[0] for source in sources if source.name not in ("query", "document")
    }
    shared = {
        "query": {source.query_prompts(text) for source in sources},
        "document": {_document_prompts(source, text) for source in sources},
    }
    for role, prompts in shared.items():
        if len(prompts) == 1:
            named[role] = next(iter(prompts))[0]
    return replace(text, prompts={name: prompt for name, prompt in named.items() if prompt} | text.prompts)


def warn_of_unnamed_prompts(text: TextSettings, sources: Sequence[SourceConfig]) -> None:
    """Log where queries are trained with prompts, and encoding has none by default."""
    if "query" not in text.prompts and any(any(source.query_prompts(text)) for source in sources):
        what = "the sources put different prompts before their queries: encoding uses none unless one is named"
        logger.warning("%s (prompt_name: a source's name), or data.text.prompts gives one as `query`", what)


def check_instruction(tokenizer: TextTokenizer, where: str, instruction: str) -> None:
    """Check that a record's own instruction leaves room for its query; `where` is its file and row."""
    try:
        tokenizer.check_prompt(tokenizer.settings.instruction_prompt(instruction), "query")
    except OptionError as error:
        limit = tokenizer.settings.max_length("query")
        what = f"the instruction leaves no room for the query in {limit} tokens"
        raise InputError(where, what, "shorten it, or raise data.text.query_max_length") from error


def check_prompts(tokenizer: TextTokenizer, sources: Sequence[SourceConfig]) -> None:
    """Check that the prompts of all sources leave room for their texts; `check_instruction` checks those of records."""
    text = tokenizer.settings
    for source in sources:
        for prompt in source.query_prompts(text):
            tokenizer.check_prompt(prompt or text.prompts.get("query", ""), "query")
        for prompt in _document_prompts(source, text):
            tokenizer.check_prompt(prompt or text.prompts.get("document", ""), "document")


def _document_prompts(source: SourceConfig, text: TextSettings) -> tuple[str, ...]:
    return source.query_prompts(text) if source.symmetric else (source.document_prompt,)
