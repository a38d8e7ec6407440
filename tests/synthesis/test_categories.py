"""What the papers say of their categories, and that the templates ask for what the answers are read by."""

import re

import pytest

from embeddings.synthesis.prompts import LEVELS, METHODS, MGH, NV_EMBED, Templates

CATEGORIES = [(method, category) for method in METHODS.values() for category in method.categories]
IDS = [f"{method.name}-{category.name}" for method, category in CATEGORIES]


def test_the_categories_are_those_of_the_papers():
    assert [category.name for category in MGH.categories] == [
        "short_long",
        "long_short",
        "long_long",
        "short_short",
        "sts",
    ]
    assert [category.name for category in NV_EMBED.categories] == ["short_long", "long_short", "short_short"]
    assert len(set(NV_EMBED.shares.values())) == 1
    large, small = {"short_long", "long_short", "sts"}, {"long_long", "short_short"}
    assert min(MGH.shares[name] for name in large) > max(MGH.shares[name] for name in small)
    assert (MGH.tasks_per_list, NV_EMBED.tasks_per_list) == (20, 40)


def test_short_long_draws_what_table_6_lists():
    for method in (MGH, NV_EMBED):
        drawn = method.category("short_long").placeholders
        assert drawn["query_type"] == ("extremely long-tail", "long-tail", "common")
        assert drawn["query_length"] == ("less than 5 words", "5 to 15 words", "at least 10 words")
        assert drawn["difficulty"] == ("high school", "college", "PhD")
        assert drawn["clarity"] == ("clear", "understandable with some effort", "ambiguous")
        assert drawn["num_words"] == ("50", "100", "200", "300", "400", "500")
        words = method.category("long_short").placeholders["num_words"]
        assert words == ("less than 10", "at least 10", "at least 50", "at least 100", "at least 200")


@pytest.mark.parametrize(("method", "category"), CATEGORIES, ids=IDS)
def test_a_prompt_names_every_field_that_its_answer_is_read_by(method, category):
    prompt = Templates(method).example(category, "Some task.", 0, 0)
    asked = re.findall(r'^(?:  |- )"(\w+)":', prompt, re.MULTILINE)
    assert asked == [category.query_field, category.positive_field, *category.negative_fields]
    levels = re.findall(r'"similarity_level": "(\w+)"', prompt)
    assert levels == (list(LEVELS) if category.graded else [])


def test_mgh_has_four_levels_and_nv_embed_none():
    assert LEVELS == ("high", "medium", "medium", "low")
    assert all(category.graded for category in MGH.categories)
    assert not any(category.graded for category in NV_EMBED.categories)
