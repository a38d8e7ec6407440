"""What a model writes around its JSON is put aside; what is no JSON is rejected, and nothing is made up."""

import json

import pytest

from embeddings.synthesis.validate import Answer, RejectedAnswer, parse_answer

VALUE = {"query": "a [b], {c}", "list": [1, {"text": 'say "x",'}]}
TEXT = json.dumps(VALUE)


@pytest.mark.parametrize(
    ("content", "repairs"),
    [
        (TEXT, ()),
        (f"\n {json.dumps(VALUE, indent=2)} \n", ()),
        (f"```json\n{TEXT}\n```", ("code_fence",)),
        (f"Sure!\n```\n{TEXT}\n```\nAnything else?", ("code_fence",)),
        (f"Here it is: {TEXT} I hope it helps.", ("text_around",)),
        (f"<think>\nMaybe {{this}}?\n</think>\n{TEXT}", ("thoughts",)),
        (TEXT.replace("}]", ",},]"), ("trailing_comma",)),
        (f"```json\n{TEXT.replace('}]', '}, ]')}\n```", ("code_fence", "trailing_comma")),
        (repr(VALUE), ("python_literal",)),
    ],
)
def test_an_answer_is_read_with_as_few_repairs_as_it_needs(content, repairs):
    assert parse_answer(Answer(content)) == (VALUE, repairs)


def test_a_raw_line_break_inside_a_text_is_kept():
    parsed = parse_answer(Answer('{"query": "two\nlines"}'))
    assert parsed == ({"query": "two\nlines"}, ("raw_line_break",))


def test_commas_inside_texts_stay():
    parsed = parse_answer(Answer('{"query": "a ,] b ,} \\" ,]",}'))
    assert parsed.value == {"query": 'a ,] b ,} " ,]'}


def test_a_python_list_is_a_list():
    assert parse_answer(Answer("['it\\'s', \"one\"]")).value == ["it's", "one"]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (Answer(None), "empty_answer"),
        (Answer("  \n"), "empty_answer"),
        (Answer(TEXT, refused="I will not"), "refused"),
        (Answer(TEXT, "content_filter"), "refused"),
        (Answer(TEXT, "length"), "cut_off"),
        (Answer(TEXT[:-2]), "not_json"),
        (Answer("I cannot do that."), "not_json"),
        (Answer('{"query": open("x")}'), "not_json"),
        (Answer("{'query': {1, 2}}"), "not_json"),
        (Answer("{1: 'query'}"), "not_json"),
        (Answer("[" * 50_000), "not_json"),
        (Answer("(" * 50_000), "not_json"),
        (Answer('{"a":' * 50_000), "not_json"),
        (Answer("[" + "9" * 5000 + "]"), "not_json"),
        (Answer("x" * 1_000_001), "not_json"),
    ],
)
def test_what_is_no_answer_is_rejected_with_its_reason(answer, reason):
    with pytest.raises(RejectedAnswer) as rejected:
        parse_answer(answer)
    assert rejected.value.reason == reason
    assert len(rejected.value.detail) <= 120
