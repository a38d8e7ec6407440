"""A model knows afterwards which prompts it was trained with."""

import logging

import pytest

from embeddings.common import OptionError, TextSettings, instruction_prompt
from embeddings.data import SourceConfig
from embeddings.data.checks import check_prompts, warn_of_unnamed_prompts, with_source_prompts
from embeddings.data.tokenize import TextTokenizer
from tests.helpers.tiny import wordpiece_tokenizer

ASK, FIND = instruction_prompt("Answer"), instruction_prompt("Find")


def prompts(*sources: SourceConfig, **given: str) -> dict[str, str]:
    return with_source_prompts(TextSettings(query_max_length=9, prompts=given), sources).prompts


def source(name: str, **options: object) -> SourceConfig:
    return SourceConfig(name, "a.jsonl", **options)  # type: ignore[arg-type]


def test_one_source_gives_its_prompts_by_its_name_and_by_role() -> None:
    found = prompts(source("faq", instruction="Answer", document_prompt="passage: "))
    assert found == {"faq": ASK, "query": ASK, "document": "passage: "}


def test_prompts_that_all_sources_share_are_those_of_the_roles() -> None:
    pair = {"query_prompt": "search_query: ", "document_prompt": "search_document: "}
    found = prompts(source("a", **pair), source("b", **pair))
    assert found == {
        "a": "search_query: ",
        "b": "search_query: ",
        "query": "search_query: ",
        "document": "search_document: ",
    }


def test_prompts_that_differ_are_kept_by_name_alone() -> None:
    assert prompts(source("a", instruction="Answer"), source("b", instruction="Find")) == {"a": ASK, "b": FIND}
    assert prompts(source("a", instruction="Answer"), source("b")) == {"a": ASK}


def test_the_first_of_several_alternates_stands_for_them() -> None:
    both = ["Answer", "Find"]
    assert prompts(source("a", instruction=both), source("b", instruction=both)) == {"a": ASK, "b": ASK, "query": ASK}
    assert prompts(source("a", instruction=both), source("b", instruction="Answer")) == {"a": ASK, "b": ASK}


def test_symmetric_sources_put_the_query_prompt_before_documents() -> None:
    assert prompts(source("a", instruction="Find", symmetric=True)) == {"a": FIND, "query": FIND, "document": FIND}


def test_prompts_that_are_given_stay_and_a_source_called_like_a_role_gives_none() -> None:
    assert prompts(source("a", instruction="Find"), query="q: ") == {"a": FIND, "query": "q: "}
    assert prompts(source("query", instruction="Find"), source("b")) == {}


def test_without_prompts_nothing_changes() -> None:
    text = TextSettings(query_max_length=9)
    assert with_source_prompts(text, [source("a"), source("b")]) == text


def test_prompts_that_no_encoding_uses_by_itself_are_worth_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    differing = [source("a", instruction="Answer"), source("b", instruction="Find")]
    for sources, given, expected in ((differing, {}, 1), (differing, {"query": ASK}, 0), ([source("a")], {}, 0)):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            text = with_source_prompts(TextSettings(prompts=given), sources)
            warn_of_unnamed_prompts(text, sources)
        assert len(caplog.records) == expected


@pytest.mark.parametrize(
    ("options", "given", "limit"),
    [
        ({"instruction": ["Find", "f o x " * 4]}, {}, "query_max_length"),
        ({"query_prompt": "f o x " * 4}, {}, "query_max_length"),
        ({"document_prompt": "f o x " * 4}, {}, "document_max_length"),
        ({}, {"query": "f o x " * 4}, "query_max_length"),
        ({}, {"document": "f o x " * 4}, "document_max_length"),
    ],
)
def test_a_prompt_that_leaves_no_room_is_refused_before_a_text_is_read(
    options: dict[str, object], given: dict[str, str], limit: str
) -> None:
    lengths = {"query_max_length": 64, "document_max_length": 64}
    sources = [source("short", query_prompt="q: "), source("long", **options)]
    check_prompts(TextTokenizer(wordpiece_tokenizer(), TextSettings(**lengths, prompts=given)), sources)
    lengths[limit] = 14
    tokenizer = TextTokenizer(wordpiece_tokenizer(), TextSettings(**lengths, prompts=given))
    with pytest.raises(OptionError, match=rf"data\.text\.{limit} must exceed the \d+ tokens of the prompt"):
        check_prompts(tokenizer, sources)


def test_a_symmetric_sources_prompt_takes_room_from_documents_too() -> None:
    settings = TextSettings(query_max_length=64, document_max_length=8)
    with pytest.raises(OptionError, match=r"data\.text\.document_max_length must exceed"):
        check_prompts(
            TextTokenizer(wordpiece_tokenizer(), settings), [source("sts", query_prompt="f o x " * 4, symmetric=True)]
        )
