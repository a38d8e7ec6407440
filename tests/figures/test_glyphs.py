import pytest

from embeddings.figures.glyphs import MISSING, drawable, installed_fonts, shortened, width

pytest.importorskip("matplotlib")


def test_the_fonts_have_what_texts_and_pictures_are_made_of():
    fonts = installed_fonts()
    assert fonts.names[0] == "DejaVu Sans Mono"
    assert {ord(letter) for letter in "aZ9éжλ$" + MISSING + "↵␣…"} <= fonts.known
    assert installed_fonts() is fonts


def test_what_no_font_has_is_a_box_and_white_space_is_seen_or_a_space():
    known = frozenset(map(ord, "ab"))
    assert drawable("a\u6771b\tc\u00a0\n\ud800\x07", known) == f"a{MISSING}b {MISSING} ↵{MISSING}{MISSING}"


@pytest.mark.parametrize(("letter", "columns"), [("a", 1), ("é", 1), ("\u0301", 0), ("東", 2), (MISSING, 1), (" ", 1)])
def test_a_letter_has_its_columns(letter, columns):
    assert width(letter) == columns


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("abcdef", "abcdef"),
        ("abcdefg", "abcde…"),
        (" ab \n cd ", "ab cd"),
        ("東京東", "東京東"),
        ("東京東京", "東京…"),
        ("a" + "e\u0301" * 5, "a" + "e\u0301" * 5),
        ("", "…"),
    ],
)
def test_a_text_is_shortened_to_its_columns(text, shown):
    assert shortened(text, 6) == shown
    assert sum(map(width, shown)) <= 6
