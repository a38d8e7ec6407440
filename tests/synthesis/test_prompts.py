"""Prompts and their templates: drawn values, seeds, and invalid templates and options."""

import re
from pathlib import Path

import pytest

from embeddings.common import InputError, OptionError
from embeddings.synthesis.prompts import (
    LEVELS,
    METHODS,
    MGH,
    NV_EMBED,
    PromptOptions,
    Templates,
    answer_of,
    answer_schema,
    reference_tasks,
)
from tests.helpers.refusals import refused

SHORT_LONG = MGH.category("short_long")


@pytest.mark.parametrize("method", [MGH, NV_EMBED], ids=["mgh", "nv_embed"])
def test_placeholder_values_are_drawn_uniformly_and_independently(method):
    templates = Templates(method)
    for category in method.categories:
        drawn = [templates.drawn(category, 3, index) for index in range(600)]
        pairs = set()
        for name, values in category.placeholders.items():
            counts = [sum(draw[name] == value for draw in drawn) for value in values]
            assert min(counts) > 0.7 * 600 / len(values)
            pairs.add(len({(draw[name], draw["difficulty"]) for draw in drawn}) / len(values))
        assert max(pairs) == 3


def test_the_prompt_contains_the_drawn_values_and_the_task():
    templates = Templates(MGH, PromptOptions(languages=["Swahili"]))
    drawn = templates.drawn(SHORT_LONG, 0, 5)
    prompt = templates.example(SHORT_LONG, "Find $5 notes, ${task} and {braces}.", 0, 5)
    assert prompt.startswith("This is a text retrieval task: Find $5 notes, ${task} and {braces}.\n")
    assert set(drawn) == {"query_type", "query_length", "difficulty", "clarity", "num_words", "language"}
    for value in drawn.values():
        assert value in prompt
    assert drawn["language"] == "Swahili"


def test_brainstorming_shows_two_different_tasks_and_other_ones_in_other_calls():
    templates = Templates(NV_EMBED)
    category = NV_EMBED.category("long_short")
    shown = set()
    for call in range(40):
        prompt = templates.brainstorm(category, 0, call)
        lines = [line[2:] for line in prompt.splitlines() if line[2:] in reference_tasks(category)]
        assert len(set(lines)) == 2
        assert "about 40 strings" in prompt
        shown.add(tuple(lines))
    assert len(shown) > 20


def test_a_users_template_replaces_ours_and_changes_the_hash(tmp_path):
    (tmp_path / "example_short_long.txt").write_text("Write about $task in $language, $$5.\n")
    own = Templates(MGH, PromptOptions(tmp_path))
    assert own.example(SHORT_LONG, "cats", 0, 0) == "Write about cats in English, $5."
    assert own.brainstorm(SHORT_LONG, 0, 0) == Templates(MGH).brainstorm(SHORT_LONG, 0, 0)
    hashes = {
        own.sha256,
        Templates(MGH).sha256,
        Templates(NV_EMBED).sha256,
        Templates(MGH, PromptOptions(languages=["Thai"])).sha256,
    }
    assert len(hashes) == 4
    assert Templates(MGH).sha256 == Templates(MGH).sha256


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"Write $task in $colour.", "has the unknown placeholder $colour; use clarity, difficulty, language"),
        (b"Write something.", "lacks the placeholder $task"),
        (b"$task for $ 5", "starts no placeholder"),
        (b"$task \xff", "is not UTF-8"),
    ],
)
def test_an_invalid_template_is_refused(tmp_path, content, says):
    (tmp_path / "example_short_long.txt").write_bytes(content)
    message = refused(InputError, r"example_short_long\.txt", lambda: Templates(MGH, PromptOptions(tmp_path)))
    assert says in message


@pytest.mark.parametrize(
    ("method", "options", "says"),
    [
        (NV_EMBED, {"languages": ["Thai"]}, "languages has no effect on nv_embed"),
        (MGH, {"templates": Path("nowhere")}, "templates must be a folder"),
    ],
)
def test_options_that_cannot_take_effect_are_refused(method, options, says):
    refused(OptionError, says, lambda: Templates(method, PromptOptions(**options)))


CATEGORIES = [(method, category) for method in METHODS.values() for category in method.categories]
IDS = [f"{method.name}-{category.name}" for method, category in CATEGORIES]


@pytest.mark.parametrize(("method", "category"), CATEGORIES, ids=IDS)
def test_a_prompt_names_every_field_of_its_answer(method, category):
    prompt = Templates(method).example(category, "Some task.", 0, 0)
    asked = re.findall(r'^(?:  |- )"(\w+)":', prompt, re.MULTILINE)
    assert asked == [category.query_field, category.positive_field, *category.negative_fields]
    levels = re.findall(r'"similarity_level": "(\w+)"', prompt)
    assert levels == (list(LEVELS) if category.graded else [])


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_the_schema_of_a_category_has_the_fields_of_its_answers(method):
    for category in method.categories:
        schema = answer_schema(category)
        negatives = [{"text": f"n{level}", "level": level} for level in range(1, 5)] if category.graded else ["m", "n"]
        answer = answer_of({"query": "q", "positive": "p", "negatives": negatives}, category)
        assert set(schema["required"]) == set(schema["properties"]) == set(answer)
        for name, value in answer.items():
            field = schema["properties"][name]
            assert field["type"] == {str: "string", list: "array"}[type(value)]
            if isinstance(value, list):
                assert field["minItems"] == field["maxItems"] == len(value)
                item = field["items"]
                assert all(set(each) == set(item["required"]) == set(item["properties"]) for each in value)
                assert {each["similarity_level"] for each in value} == set(
                    item["properties"]["similarity_level"]["enum"]
                )
