"""The prompts that a model is trained with, as it is to know them afterwards."""

from collections.abc import Sequence
from dataclasses import replace

from embeddings.common.errors import InputError, OptionError
from embeddings.common.log import logger
from embeddings.common.text import TextSettings
from embeddings.data.sources import SourceConfig
from embeddings.data.tokenize import TextTokenizer

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
