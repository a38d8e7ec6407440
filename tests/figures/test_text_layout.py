import random

import pytest

from embeddings.figures.glyphs import width
from embeddings.figures.text_layout import Part, wrapped


def lines_of(parts, num_columns):
    """Each line as it is seen, a dot where nothing is."""
    runs = wrapped(parts, num_columns)
    lines = []
    for run in runs:
        lines += [""] * (run.line + 1 - len(lines))
        assert len(lines[run.line]) <= run.column
        lines[run.line] = lines[run.line].ljust(run.column, ".") + run.text
    return lines


def test_words_stay_whole_and_spaces_at_the_ends_of_lines_go():
    parts = [Part("the", 0), Part(" ", None), Part("quick", 1), Part(" ", None), Part("brown", 2), Part("s", 3)]
    assert lines_of(parts, 9) == ["the quick", "browns"]
    assert lines_of(parts, 8) == ["the ", "quick ", "browns"]
    runs = wrapped(parts, 9)
    assert [(run.line, run.column, run.text, run.owner) for run in runs if run.owner is not None] == [
        (0, 0, "the", 0), (0, 4, "quick", 1), (1, 0, "brown", 2), (1, 5, "s", 3),
    ]  # fmt: skip


def test_a_word_longer_than_a_line_is_broken_and_a_special_token_is_not():
    assert lines_of([Part("a ", None), Part("abcdefgh", 0)], 3) == ["a ", "abc", "def", "gh"]
    assert lines_of([Part("ab ", None), Part(" [CLS] ", 0, True), Part("cd", 1)], 8) == ["ab ", " [CLS] ", "cd"]


def test_ideographs_are_two_columns_and_end_lines_anywhere():
    assert lines_of([Part("ab東京", 0), Part("都です", 1)], 6) == ["ab東京", "都です"]
    runs = wrapped([Part("ab東京", 0), Part("c", 1)], 20)
    assert [(run.column, run.num_columns) for run in runs] == [(0, 6), (6, 1)]


def test_a_line_break_of_the_text_ends_the_line():
    assert lines_of([Part("a↵", 0), Part("b", 1)], 20) == ["a↵", "b"]


@pytest.mark.parametrize("num_columns", [2, 7, 30])
def test_every_letter_but_spaces_is_placed_once_within_the_columns(num_columns):
    generator = random.Random(num_columns)
    for _ in range(50):
        parts = [
            Part("".join(generator.choices("abc de\u0301東↵", k=generator.randint(1, 9))), index)
            for index in range(generator.randint(1, 12))
        ]
        runs = wrapped(parts, num_columns)
        for index, part in enumerate(parts):
            found = "".join(run.text for run in runs if run.owner == index)
            assert found.replace(" ", "") == part.text.replace(" ", "")
        assert all(run.column + run.num_columns <= num_columns for run in runs)
        assert all(run.num_columns == sum(map(width, run.text)) for run in runs)
        places = [(run.line, run.column) for run in runs]
        assert places == sorted(places)
