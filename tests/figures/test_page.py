import pytest

from embeddings.figures.page import draw_scale, write
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
