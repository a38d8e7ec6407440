"""An answer becomes a record of four levels, or is rejected for the first thing that is wrong with it."""

import json

import pytest

from embeddings.data.records import parse_record
from embeddings.synthesis.prompts import MGH, NV_EMBED
from embeddings.synthesis.validate import (
    MAX_TASK_CHARACTERS,
    Parsed,
    RejectedAnswer,
    normalised,
    read_example,
    read_negatives,
    read_tasks,
)

SHORT_LONG = MGH.category("short_long")
TASK = "Find recipes for a dish."
QUERY = "how long do lentils have to boil"
TEXTS = ["Beans take an hour.", "Lentils are legumes.", "Rice boils for ten minutes.", "Paris is in France."]
LEVELS = ["high", "medium", "medium", "low"]


def graded(texts=TEXTS, levels=LEVELS):
    return [{"similarity_level": level, "text": text} for level, text in zip(levels, texts, strict=True)]


def answer(**changes):
    value = {
        "user_query": QUERY,
        "positive_document": "Red ones are done in ten minutes.",
        "hard_negative_document": graded(),
    }
    return {name: text for name, text in {**value, **changes}.items() if text is not ...}


def example(value, category=SHORT_LONG, prompt=""):
    return read_example(Parsed(value, ()), category, TASK, prompt, "short_long-0")


def test_a_good_answer_is_a_record_with_levels_from_the_hardest():
    draft = example(answer(comment="ignored", user_query=f"  {QUERY}\n"))
    assert draft.fields == {
        "id": "short_long-0",
        "query": QUERY,
        "positive": "Red ones are done in ten minutes.",
        "negatives": [{"text": text, "level": level} for level, text in enumerate(TEXTS, start=1)],
        "instruction": TASK,
    }
    record = parse_record(json.loads(json.dumps(draft.fields)), {}, "x:1")
    assert [negative.level for negative in record.negatives] == [1, 2, 3, 4]
    assert draft.repairs == ()


def test_levels_in_another_order_are_sorted_and_counted():
    shuffled = [graded()[place] for place in (3, 1, 0, 2)]
    draft = example(answer(hard_negative_document=shuffled))
    assert [item["text"] for item in draft.fields["negatives"]] == TEXTS
    assert draft.repairs == ("levels_sorted",)
    spelt = [{**item, "similarity_level": f" {item['similarity_level'].upper()} "} for item in graded()]
    assert example(answer(hard_negative_document=spelt)).repairs == ()


def test_an_object_alone_in_a_list_is_the_object():
    assert example([answer()]).fields["query"] == QUERY


def test_nv_embeds_negatives_have_no_levels():
    value = answer(hard_negative_document=..., hard_negative_document1=TEXTS[0], hard_negative_document2=TEXTS[1])
    assert example(value, NV_EMBED.category("short_long")).fields["negatives"] == TEXTS[:2]


def test_sts_has_an_instruction_of_its_own():
    value = {"query": "It rains.", "positive_example": "Rain is falling.", "hard_negative_examples": graded()}
    fields = example(value, MGH.category("sts")).fields
    assert fields["instruction"] == "Retrieve semantically similar text"


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("text", "not_an_object"),
        ([answer(), answer()], "not_an_object"),
        (None, "not_an_object"),
        (answer(user_query=...), "missing_field"),
        (answer(hard_negative_document=...), "missing_field"),
        (answer(positive_document=3), "wrong_type"),
        (answer(positive_document=None), "wrong_type"),
        (answer(positive_document=["a"]), "wrong_type"),
        (answer(hard_negative_document=TEXTS), "wrong_type"),
        (answer(hard_negative_document="a"), "wrong_type"),
        (answer(hard_negative_document=[{"similarity_level": "high"}]), "missing_field"),
        (answer(user_query=" \n"), "empty_text"),
        (answer(hard_negative_document=graded(["", *TEXTS[1:]])), "empty_text"),
        (answer(hard_negative_document=graded()[:3]), "wrong_levels"),
        (answer(hard_negative_document=[*graded(), *graded(["x y z"], ["low"])]), "wrong_levels"),
        (answer(hard_negative_document=graded(levels=["high", "high", "medium", "low"])), "wrong_levels"),
        (answer(hard_negative_document=[{"text": text} for text in TEXTS]), "wrong_levels"),
        (answer(positive_document=QUERY.upper()), "repeated_text"),
        (answer(hard_negative_document=graded([TEXTS[1], *TEXTS[1:]])), "repeated_text"),
        (answer(positive_document=f"{TEXTS[2]} "), "repeated_text"),
        (answer(hard_negative_document=graded([f"{QUERY}?", *TEXTS[1:]])), "repeated_text"),
        (answer(positive_document="You ask: How long do lentils, have to boil? Ten minutes."), "leaked_query"),
        (answer(hard_negative_document=graded([*TEXTS[:3], f"Ask {QUERY} again"])), "leaked_query"),
        (answer(positive_document="half \ud800"), "unusable_text"),
        (answer(user_query="a\x00b"), "unusable_text"),
    ],
)
def test_what_training_could_not_use_is_rejected(value, reason):
    with pytest.raises(RejectedAnswer) as rejected:
        example(value)
    assert rejected.value.reason == reason


def test_a_text_of_the_prompt_itself_is_rejected():
    prompt = '{"user_query": "<the query>"}'
    with pytest.raises(RejectedAnswer, match="template_text"):
        example(answer(user_query="<the query>"), prompt=prompt)
    assert example(answer(user_query="<b>bold</b>"), prompt=prompt).fields["query"] == "<b>bold</b>"


@pytest.mark.parametrize(
    ("query", "document", "leaks"),
    [
        ("solar panels for boats", "Solar panels for boats are small.", False),
        ("cheap solar panels for boats", "New: cheap SOLAR panels, for boats!", True),
        ("cheap solar panels for boats", "Cheap solar panels for boatsmen", False),
        ("cheap solar panels for boats", "For boats: cheap solar panels", False),
        ("北京天气怎么样", "有人问北京天气怎么样的问题", False),
        ("今天下午北京的天气怎么样呢", "有人问:今天下午北京的天气怎么样呢?", True),
    ],
)
def test_a_query_of_five_words_must_not_stand_in_a_document(query, document, leaks):
    value = answer(user_query=query, positive_document=document)
    if leaks:
        with pytest.raises(RejectedAnswer, match="leaked_query"):
            example(value)
    else:
        assert example(value).fields["query"] == query


@pytest.mark.parametrize(
    ("text", "leaks"),
    [("What a Joy, this day!", True), ("She felt a sudden warmth.", False), ("A joyful day.", False)],
)
def test_a_label_must_not_stand_in_its_text(text, leaks):
    value = {"input_text": text, "label": "joy", "misleading_labels": graded(["relief", "pride", "calm", "anger"])}
    if leaks:
        with pytest.raises(RejectedAnswer, match="leaked_label"):
            example(value, MGH.category("long_short"))
    else:
        assert example(value, MGH.category("long_short")).fields["positive"] == "joy"


def test_new_negatives_leave_the_rest_of_a_record_alone():
    record = {"query": QUERY, "positive": ["one", "one"], "id": "7", "label": "food", "score": 0.5}
    draft = read_negatives(Parsed({"hard": graded()}, ("code_fence",)), record, "hard", "")
    assert {name: draft.fields[name] for name in record} == record
    assert [item["level"] for item in draft.fields["negatives"]] == [1, 2, 3, 4]
    assert draft.repairs == ("code_fence",)


@pytest.mark.parametrize(
    ("texts", "reason"),
    [
        (["One.", *TEXTS[1:]], "repeated_text"),
        ([QUERY, *TEXTS[1:]], "repeated_text"),
        ([TEXTS[0], TEXTS[0].lower(), *TEXTS[2:]], "repeated_text"),
        ([f"so {QUERY} then", *TEXTS[1:]], "leaked_query"),
    ],
)
def test_new_negatives_that_say_what_the_pair_says_are_rejected(texts, reason):
    record = {"query": QUERY, "positive": ["Ten minutes.", "one"]}
    with pytest.raises(RejectedAnswer, match=reason):
        read_negatives(Parsed({"hard": graded(texts)}, ()), record, "hard", "")


def test_tasks_are_cleaned_and_copies_left_out():
    items = ["1. Find  a\nthing.", "- find a thing", 3, "", None, "x" * (MAX_TASK_CHARACTERS + 1), "a\x00b", "Another."]
    assert read_tasks(Parsed(items, ())) == ["Find a thing.", "Another."]
    assert read_tasks(Parsed({"tasks": items, "note": "n"}, ())) == ["Find a thing.", "Another."]


@pytest.mark.parametrize("value", ["text", {}, {"a": ["x"], "b": ["y"]}, [], [3, None], 4])
def test_an_answer_without_tasks_is_rejected(value):
    with pytest.raises(RejectedAnswer, match="no_tasks"):
        read_tasks(Parsed(value, ()))


def test_texts_are_compared_without_case_and_punctuation():
    assert normalised(" What's  UP?") == normalised("what s up")
    assert normalised("???") == "???"
