import pytest

from embeddings.figures.glyphs import MISSING
from embeddings.figures.page import draw_scale, write, write_heading
from embeddings.figures.png import pyplot

pytest.importorskip("matplotlib")


@pytest.fixture
def figure():
    figure = pyplot().figure(figsize=(5, 2))
    yield figure
    pyplot().close(figure)


def test_a_dollar_sign_is_a_dollar_sign(figure):
    write(figure.add_axes((0, 0, 1, 1)), 0, 0, "from $a to $b", size=9)
    figure.draw_without_rendering()
    (text,) = figure.axes[0].texts
    assert text.get_text() == "from $a to $b"
    assert not text.get_parse_math()


def test_what_no_font_has_is_a_box_in_lines_and_headings(figure, recwarn):
    axis = figure.add_axes((0, 0, 1, 1))
    write(axis, 0, 0, "a\ufdd0", size=9)
    write_heading(figure, axis, "$\\a{$\ufdd0", "about \ufdd0", 40)
    figure.draw_without_rendering()
    words = (axis.texts[0].get_text(), figure.get_suptitle(), axis.get_title(loc="left"))
    assert words == (f"a{MISSING}", rf"$\a{{${MISSING}", f"about {MISSING}")
    assert [warning for warning in recwarn if "Glyph" in str(warning.message)] == []


@pytest.mark.parametrize(
    ("even", "labels"),
    [(0.25, ["0.0%", "25.0%", "80.0%"]), (0.05, ["0.0%", "80.0%"]), (0.8, ["0.0%", "80.0%"])],
)
def test_a_scale_marks_the_even_share_where_there_is_room(even, labels, figure):
    image = figure.add_axes((0.1, 0.5, 0.8, 0.4)).imshow([[0.1, 0.8]], vmin=0.0, vmax=0.8)
    draw_scale(figure, image, 36, (360, 144), "share of it", even)
    scale = figure.axes[-1]
    assert [label.get_text() for label in scale.get_xticklabels()] == labels
    assert scale.get_xlabel() == f"share of it (even: {even:.1%})"
    assert scale.get_position().bounds == pytest.approx((0.1, 40 / 144, 250 / 360, 8 / 144))
