"""Checks and warnings before a run: negatives and their levels, prompts, and unused columns."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from embeddings.common.errors import InputError, OptionError
from embeddings.common.process import logger
from embeddings.common.protocols import BatchNeeds
from embeddings.common.text import TextSettings, canonical, shorten
from embeddings.data.dataset import SourceDataset
from embeddings.data.sources import SourceConfig
from embeddings.data.tokenize import TextTokenizer

# Labels that usually tell whether a pair matches, and are no classes.
_MATCH_MARKS = frozenset(("0", "1", "-1", "0.0", "1.0", "-1.0", "true", "false"))
# Rows whose queries are compared, and the share of masked in-batch negatives that is worth a warning.
_NUM_COMPARED, _LARGE_SHARE = 1024, 0.05


def check_negatives_asked_for(
    sources: Sequence[SourceConfig], needs: BatchNeeds, num_negatives: int, num_queries: int
) -> None:
    """Refuse sources that cannot have negatives (their loss is 0 and has no gradient) or as many, before any is read.

    `num_queries` is the number of queries whose candidates a batch compares.
    """
    if needs.compares_documents and not any(_has_in_batch(source, needs, num_queries) for source in sources):
        rule, fix = "has no effect if no source has in-batch negatives", "set query_to_document"
        raise OptionError("model.loss.directions", "both", rule, fix)
    for source in sources:
        if (source.num_negatives or 0) > num_negatives:
            rule = f"must not exceed data.num_negatives, which is {num_negatives}"
            raise source.fault("num_negatives", source.num_negatives, rule, "lower it, or raise data.num_negatives")
        if _has_in_batch(source, needs, num_queries):
            continue
        if num_negatives == 0:
            raise _without_negatives(source, needs, num_queries, "set data.num_negatives to 1 or more")
        if source.conversion == "sts":
            fix = "mine negatives for it (`mine --conversion sts`) and train on the output as pairs"
            raise _without_negatives(source, needs, num_queries, fix)


def check_labels(sources: Sequence[SourceDataset], needs: BatchNeeds) -> None:
    """Refuse pairs whose labels are no classes; warn if their classes mask many in-batch negatives."""
    for source in sources:
        labels, name = source.cached.labels, source.config.name
        if source.config.conversion != "pairs" or not labels:
            continue
        if _MATCH_MARKS.issuperset(label.casefold() for label in labels):
            what = f"its labels are {' and '.join(labels)}, as if they marked which pairs match; every row is a match"
            fix = "remove rows that do not match, or make them negatives, and set columns: {label: null}"
            raise InputError(f"source {name!r}", what, f"{fix}; write classes as words")
        if not needs.masks_class or not _has_in_batch(source.config, needs, num_queries=2):
            continue
        if len(labels) == 1:
            what = f"all labelled rows have the label {labels[0]!r}, so none is a negative of another"
            fix = "set columns: {label: null}, or mask_same_class: false of the loss"
            raise InputError(f"source {name!r}", what, fix)
        label_N = source.cached.table.labels()
        share = float(np.square(np.bincount(label_N[label_N >= 0]) / len(label_N)).sum())
        if share >= _LARGE_SHARE:
            what = f"its {len(labels)} labels mask about {share:.0%} of its in-batch negatives"
            logger.warning("source %s: %s; columns: {label: null} keeps them", name, what)


def check_negatives_found(
    sources: Sequence[SourceDataset], needs: BatchNeeds, num_negatives: int, num_queries: int
) -> None:
    """Refuse a converted source with neither in-batch nor hard negatives; warn of records without negatives."""
    for source in sources:
        if source.config.conversion != "pairs":
            continue
        if _has_in_batch(source.config, needs, num_queries):
            if len(sources) == 1 and needs.masks_text:
                _check_queries_differ(source, num_negatives)
            continue
        total = len(source.cached.table)
        count = sum(int(np.count_nonzero(levels_N == 0)) for levels_N in source.cached.table.row_levels())
        if count == total:
            alike = [name for name, field in source.cached.unused_columns.items() if field == "negatives"]
            mapped = f"map them with columns: {{negatives: {alike[0]}}}" if alike else ""
            fix = mapped or "give its records `negatives`, which `mine` finds"
            raise _without_negatives(source.config, needs, num_queries, fix)
        if count:
            why = "have no negative, and without in-batch negatives they train nothing"
            logger.warning("source %s: %d of %d records %s", source.config.name, count, total, why)


def _check_queries_differ(source: SourceDataset, num_negatives: int) -> None:
    """Refuse the only source if its queries are one text and its records have no negatives."""
    table = source.cached.table
    rows = np.unique(np.linspace(0, len(table) - 1, _NUM_COMPARED, dtype=np.int64))
    queries = set(map(canonical, table.queries(rows)))
    if len(rows) > 1 and len(queries) == 1 and not (num_negatives and any(l_N.any() for l_N in table.row_levels())):
        what = f"all rows have the query {shorten(queries.pop(), 40)!r}, so none is a negative of another"
        raise InputError(f"source {source.config.name!r}", what, "map the column of the queries, or add `negatives`")


def check_levels(sources: Sequence[SourceDataset], levels: Sequence[int], allow_missing: bool) -> None:
    """Check that every record has a negative of every level; with `allow_missing`, log how many lack one.

    If no source has levels, an `OptionError` is raised: the curriculum has no effect.
    """
    # For each source: the levels of each record as a bit mask (bit l: level l).
    masks = [np.concatenate(list(source.cached.table.row_levels())) for source in sources]
    if all((mask_N <= 1).all() for mask_N in masks):
        rule = "needs negatives with levels, but no source has any"
        fix = 'write negatives as {"text", "level"}, or use another sampler'
        raise OptionError("data.sampler", "CurriculumBatchSampler", rule, fix)
    for source, mask_N in zip(sources, masks, strict=True):
        name, total = source.config.name, len(mask_N)
        num_ungraded = int((mask_N <= 1).sum())
        for level in sorted(levels, reverse=True):
            lacks_N = mask_N >> level & 1 == 0
            num_lacking = int(lacks_N.sum())
            if num_lacking and not allow_missing:
                what = f"record {lacks_N.argmax() + 1} has no negative of level {level}"
                fix = "add it, or set the sampler's missing_level: coarser"
                raise InputError(f"source {name!r}", f"{what} ({num_lacking} of {total} lack one)", fix)
            if num_lacking > num_ungraded:
                number = num_lacking - num_ungraded
                logger.info("source %s: %d of %d records have no negative of level %d", name, number, total, level)
        if num_ungraded:
            logger.info("source %s: %d of %d records have no negative with a level", name, num_ungraded, total)


def _has_in_batch(source: SourceConfig, needs: BatchNeeds, num_queries: int) -> bool:
    if needs.only_hard_negatives or num_queries == 1:
        return False
    return source.in_batch_negatives if needs.in_batch_negatives == "source" else needs.in_batch_negatives == "on"


def _without_negatives(source: SourceConfig, needs: BatchNeeds, num_queries: int, fix: str) -> InputError:
    what = "has neither in-batch nor hard negatives, so its loss is 0 and trains nothing"
    if needs.only_hard_negatives:
        what, switch = "has no hard negatives, without which its loss is 0", "a contrastive_weight above 0"
    elif num_queries == 1:
        switch = "a larger data.batch_size"
    else:
        forced = needs.in_batch_negatives == "off"
        switch = "model.loss.in_batch_negatives: source" if forced else "in_batch_negatives: true"
    return InputError(f"source {source.name!r}", what, f"{fix}, or set {switch}")


def warn_of_unused_columns(source: SourceDataset, num_negatives: int) -> None:
    """Warn of unused columns that resemble a field; of `negatives` only if `num_negatives` > 0."""
    columns = source.cached.unused_columns.items()
    unused = {name: field for name, field in columns if num_negatives > 0 or field != "negatives"}
    if not unused:
        return
    # A score has no field (see `Facts.unused_columns`).
    first = {field: name for name, field in reversed(unused.items())}
    mapping = ", ".join(f"{field}: {name}" for field, name in first.items() if field not in ("", "label", "scores"))
    fix = f"; to use one, map it: columns: {{{mapping}}}" if mapping else ""
    if "" in first:
        fix += "; a score is used only with conversion: sts"
    logger.warning("source %s: columns not used: %s%s", source.config.name, ", ".join(unused), fix)


def warn_of_unscored_negatives(source: SourceDataset) -> None:
    """Warn if hard negatives have no surrogate vectors, so the filter of false negatives cannot remove them."""
    surrogates = source.surrogates
    if surrogates is None or surrogates.has_negatives:
        return
    if any(levels_N.any() for levels_N in source.cached.table.row_levels()):
        what = f"its hard negatives have no vectors in {surrogates.folder}"
        why = "so a filter of false negatives cannot remove them"
        fix = "encode them too (`cluster --negatives true`)"
        logger.warning("source %s: %s, %s; %s", source.config.name, what, why, fix)


def warn_of_several_surrogates(sources: Sequence[SourceDataset]) -> None:
    """Warn if the surrogate vectors of two sources are by two models: a cosine of such vectors has no meaning."""
    models = {source.surrogates.model for source in sources if source.surrogates is not None}
    if len(models) > 1:
        what = "the surrogate vectors are by different models, so scores between texts of two sources are meaningless"
        logger.warning("%s; encode all sources with one model, or draw each batch from one source", what)


def with_source_prompts(
    text: TextSettings, sources: Sequence[SourceConfig], model: TextSettings | None = None
) -> TextSettings:
    """The settings `text` over the prompts of the sources, over the settings of the model that training starts from.

    The first query prompt of a source is stored under its name. A prompt that all sources share also becomes `query` or
    `document`, the default for encoding.
    """
    model = TextSettings() if model is None else model
    settings = text.following(model)
    named = {
        source.name: source.query_prompts(settings)[0] for source in sources if source.name not in ("query", "document")
    }
    shared = {
        "query": {source.query_prompts(settings) for source in sources},
        "document": {_document_prompts(source, settings) for source in sources},
    }
    for role, prompts in shared.items():
        if len(prompts) == 1:
            named[role] = next(iter(prompts))[0]
    from_sources = {name: prompt for name, prompt in named.items() if prompt is not None}
    return replace(settings, prompts=model.prompts | from_sources | text.prompts)


def warn_of_unnamed_prompts(
    text: TextSettings, sources: Sequence[SourceConfig], has_instructions: bool = False
) -> None:
    """Warn if texts are trained with prompts, or queries with instructions of records, but encoding uses none."""
    if "query" not in text.prompts and any(any(source.query_prompts(text)) for source in sources):
        what = "the sources have different query prompts, so encoding uses none by default"
        logger.warning("%s; pass prompt_name (the name of a source), or set `query` in data.text.prompts", what)
    elif "query" not in text.prompts and has_instructions:
        what = "records have instructions, but encoding uses none by default"
        logger.warning("%s; pass the prompt, or set `query` in data.text.prompts", what)
    if "document" not in text.prompts and any(source.document_prompt for source in sources):
        what = "the sources have different document prompts, so encoding uses none by default"
        logger.warning("%s; pass the prompt, or set `document` in data.text.prompts", what)


def check_instruction(tokenizer: TextTokenizer, where: str, instruction: str) -> None:
    """Check that the instruction of a record leaves room for its query; `where` is its file and row."""
    try:
        tokenizer.check_prompt(tokenizer.settings.instruction_prompt(instruction), "query")
    except OptionError as error:
        limit = tokenizer.settings.max_length("query")
        what = f"the instruction leaves no room for the query in {limit} tokens"
        raise InputError(where, what, "shorten it, or raise data.text.query_max_length") from error


def check_prompts(tokenizer: TextTokenizer, sources: Sequence[SourceConfig]) -> None:
    """Check that the prompts of all sources leave room for the texts; `check_instruction` checks those of records."""
    text = tokenizer.settings
    for source in sources:
        for prompt in source.query_prompts(text):
            tokenizer.check_prompt(text.prompt_or_default(prompt, "query"), "query")
        for prompt in _document_prompts(source, text):
            tokenizer.check_prompt(text.prompt_or_default(prompt, "document"), "document")


def _document_prompts(source: SourceConfig, text: TextSettings) -> tuple[str | None, ...]:
    return source.query_prompts(text) if source.symmetric else (source.document_prompt,)
