"""Conversion of answers to records, repairs, and reasons for rejection."""

import json

import pytest

from embeddings.data.records import parse_record
from embeddings.synthesis.prompts import MGH
from embeddings.synthesis.validate import (
    MAX_TASK_CHARACTERS,
    Answer,
    RejectedAnswer,
    parse_answer,
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
    value = {"user_query": QUERY, "positive_document": "Red ones take ten.", "hard_negative_document": graded()}
    return {name: text for name, text in {**value, **changes}.items() if text is not ...}


def example(value, category=SHORT_LONG, prompt=""):
    return read_example(value, category, TASK, prompt, "short_long-0")


def test_a_good_answer_is_a_record_with_levels_from_the_hardest():
    # A list of one object is accepted as that object.
    fields = example([answer(comment="ignored", user_query=f"  {QUERY}\n")])
    assert fields == {
        "id": "short_long-0",
        "query": QUERY,
        "positive": "Red ones take ten.",
        "negatives": [{"text": text, "level": level} for level, text in enumerate(TEXTS, start=1)],
        "instruction": TASK,
    }
    record = parse_record(json.loads(json.dumps(fields)), {}, "x:1")
    assert [negative.level for negative in record.negatives] == [1, 2, 3, 4]


def test_levels_in_another_order_or_spelling_are_sorted():
    shuffled = [graded()[place] for place in (3, 1, 0, 2)]
    spelt = [{**item, "similarity_level": f" {item['similarity_level'].upper()} "} for item in shuffled]
    for found in (shuffled, spelt):
        fields = example(answer(hard_negative_document=found))
        assert [item["text"] for item in fields["negatives"]] == TEXTS


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("text", "not_an_object"),
        ([answer(), answer()], "not_an_object"),
        (answer(user_query=...), "missing_field"),
        (answer(hard_negative_document=...), "missing_field"),
        (answer(positive_document=None), "wrong_type"),
        (answer(hard_negative_document=TEXTS), "wrong_type"),
        (answer(hard_negative_document=[{"similarity_level": "high"}]), "missing_field"),
        (answer(user_query=" \n"), "empty_text"),
        (answer(hard_negative_document=graded(["", *TEXTS[1:]])), "empty_text"),
        (answer(hard_negative_document=graded()[:3]), "wrong_levels"),
        (answer(hard_negative_document=[*graded(), *graded(["x y z"], ["low"])]), "wrong_levels"),
        (answer(hard_negative_document=[{"text": text} for text in TEXTS]), "wrong_levels"),
        (answer(positive_document=QUERY.upper()), "repeated_text"),
        (answer(hard_negative_document=graded([TEXTS[1], *TEXTS[1:]])), "repeated_text"),
        (answer(hard_negative_document=graded([f"{QUERY}?", *TEXTS[1:]])), "repeated_text"),
        (answer(positive_document="You ask: How long do lentils, have to boil? Ten minutes."), "leaked_query"),
        (answer(hard_negative_document=graded([*TEXTS[:3], f"Ask {QUERY} again"])), "leaked_query"),
        (answer(positive_document="half \ud800"), "unusable_text"),
        (answer(user_query="a\x00b"), "unusable_text"),
    ],
)
def test_invalid_answers_are_rejected(value, reason):
    with pytest.raises(RejectedAnswer) as rejected:
        example(value)
    assert rejected.value.reason == reason


@pytest.mark.parametrize(
    ("query", "reason"),
    [
        ("<the query>", "template_text"),
        ("The query", "template_text"),
        ("Why is the SKY blue at noon", "copied_seed"),
        ("why does sunlight make the whole sky look so blue", "copied_seed"),
        # One word of it differs.
        ("why does sunlight make the whole sky look so red at noon", "copied_seed"),
    ],
)
def test_a_text_copied_from_the_prompt_is_rejected(query, reason):
    prompt = """{"user_query": "why is the sky blue at noon?"} {"user_query": "<the query>"}
{"user_query": "Why does sunlight make the whole sky look so blue at noon?"}"""
    with pytest.raises(RejectedAnswer, match=reason):
        example(answer(user_query=query), prompt=prompt)
    for other in ("<b>bold</b>", "why does sunlight make the moon and some planets shine"):
        assert example(answer(user_query=other), prompt=prompt)["query"] == other


@pytest.mark.parametrize(
    ("query", "document", "leaks"),
    [
        ("solar panels for boats", "Solar panels for boats are small.", False),
        ("cheap solar panels for boats", "New: cheap SOLAR panels, for boats!", True),
        ("cheap solar panels for boats", "Cheap solar panels for boatsmen", False),
        ("cheap solar panels for boats", "For boats: cheap solar panels", False),
        ("北京天气怎么样", "有人问北京天气怎么样的问题", False),
        ("今天下午北京的天气怎么样呢", "有人问:今天下午北京的天气怎么样呢?", True),
        ("दिल्ली का मौसम", "आज दिल्ली का मौसम अच्छा है।", False),
        ("आज दिल्ली का मौसम कैसा है", "प्रश्न: आज दिल्ली का मौसम कैसा है?", True),
        ("ราคาตั๋วเครื่องบินไปเชียงใหม่", "ถามว่าราคาตั๋วเครื่องบินไปเชียงใหม่เท่าไร", True),
        ("តម្លៃសំបុត្រយន្តហោះទៅភ្នំពេញ", "សួរអំពីតម្លៃសំបុត្រយន្តហោះទៅភ្នំពេញ", True),
    ],
)
def test_a_query_of_five_words_must_not_be_in_a_document(query, document, leaks):
    value = answer(user_query=query, positive_document=document)
    if leaks:
        with pytest.raises(RejectedAnswer, match="leaked_query"):
            example(value)
    else:
        assert example(value)["query"] == query


def test_a_label_must_not_be_in_its_text():
    value = {"input_text": "A joyful day.", "label": "joy", "misleading_labels": graded(["rest", "pride", "calm", "x"])}
    assert example(value, MGH.category("long_short"))["positive"] == "joy"
    with pytest.raises(RejectedAnswer, match="leaked_label"):
        example({**value, "input_text": "What a Joy, this day!"}, MGH.category("long_short"))


def test_new_negatives_do_not_change_other_fields():
    record = {"query": QUERY, "positive": ["one", "one"], "id": "7", "label": "food", "score": 0.5}
    fields = read_negatives({"hard": graded()}, record, "hard", "")
    assert {name: fields[name] for name in record} == record
    assert [item["level"] for item in fields["negatives"]] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("texts", "reason"),
    [
        (["One.", *TEXTS[1:]], "repeated_text"),
        ([QUERY, *TEXTS[1:]], "repeated_text"),
        ([TEXTS[0], TEXTS[0].lower(), *TEXTS[2:]], "repeated_text"),
        ([f"so {QUERY} then", *TEXTS[1:]], "leaked_query"),
    ],
)
def test_new_negatives_that_repeat_the_pair_are_rejected(texts, reason):
    record = {"query": QUERY, "positive": ["Ten minutes.", "one"]}
    with pytest.raises(RejectedAnswer, match=reason):
        read_negatives({"hard": graded(texts)}, record, "hard", "")


def test_tasks_are_cleaned_and_duplicates_dropped():
    items = ["1. Find  a\nthing.", "- find a thing", 3, "", None, "x" * (MAX_TASK_CHARACTERS + 1), "a\x00b", "Another."]
    assert read_tasks(items) == ["Find a thing.", "Another."]
    assert read_tasks({"tasks": items, "note": "n"}) == ["Find a thing.", "Another."]
    # They differ in a vowel sign.
    assert read_tasks(["दिन खोजें।", "दान खोजें।", "दान खोजें"]) == ["दिन खोजें।", "दान खोजें।"]


@pytest.mark.parametrize("value", ["text", {}, {"a": ["x"], "b": ["y"]}, [], [3, None], 4])
def test_an_answer_without_tasks_is_rejected(value):
    with pytest.raises(RejectedAnswer, match="no_tasks"):
        read_tasks(value)


VALUE = {"query": "a [b], {c}", "list": [1, {"text": 'say "x",'}]}
TEXT = json.dumps(VALUE)


@pytest.mark.parametrize(
    "content",
    [
        f"\n {json.dumps(VALUE, indent=2)} \n",
        f"Sure!\n```json\n{TEXT}\n```\nAnything else?",
        f"Here it is: {TEXT} I hope it helps.",
        f"<think>\nMaybe {{this}}?\n</think>\n{TEXT}",
        f"```json\n{TEXT.replace('}]', '}, ]')}\n```",
        f"{TEXT} I hope that {{this}} helps.",
        f"{TEXT}\n\n{TEXT[:-5]}",
        f"{TEXT}\n{TEXT}",
    ],
)
def test_an_answer_is_repaired(content):
    assert parse_answer(Answer(content)) == VALUE
    # Complete, and followed by talk up to the limit.
    assert parse_answer(Answer(content, "length")) == VALUE


def test_raw_line_breaks_and_commas_inside_texts_are_unchanged():
    assert parse_answer(Answer('{"query": "two\nlines"}')) == {"query": "two\nlines"}
    assert parse_answer(Answer('{"query": "a ,] b ,} \\" ,]",}')) == {"query": 'a ,] b ,} " ,]'}


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (Answer(None), "empty_answer"),
        (Answer("  \n"), "empty_answer"),
        (Answer(TEXT, refused="I will not"), "refused"),
        (Answer(TEXT, "content_filter"), "refused"),
        (Answer(TEXT[:-2], "length"), "cut_off"),
        (Answer(f"<think> Maybe {TEXT}", "length"), "cut_off"),
        # Two records in one object would pair the second query with the first positive.
        (Answer('{"query": "a", "positive": "b", "query": "c"}'), "repeated_key"),
        (Answer('[{"a": {"b": 1, "b": 2}}]'), "repeated_key"),
        (Answer(TEXT[:-2]), "not_json"),
        (Answer('{"query": open("x")}'), "not_json"),
        (Answer("{'query': 1}"), "not_json"),
        (Answer("(" * 50_000), "not_json"),
        (Answer('{"a":' * 50_000), "not_json"),
        (Answer("[" + "9" * 5000 + "]"), "not_json"),
    ],
)
def test_unusable_answers_are_rejected_with_a_reason(answer, reason):
    with pytest.raises(RejectedAnswer) as rejected:
        parse_answer(answer)
    assert rejected.value.reason == reason
    assert len(rejected.value.detail) <= 120
