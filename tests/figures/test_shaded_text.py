import pytest

from embeddings.common import InputError
from embeddings.figures import shaded_text
from embeddings.figures.png import pyplot
from embeddings.figures.shaded_text import ShadedPiece, ShadedText, _norm, _ticks, draw_shaded_texts

pytest.importorskip("matplotlib")


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """What is drawn: the axes of the figure, kept from being closed."""
    figures = []
    monkeypatch.setattr(shaded_text, "write_png", lambda figure, output: figures.append(figure))

    def draw(texts, subtitle="about it"):
        draw_shaded_texts(texts, "A title", subtitle, "what it means", tmp_path / "a.png")
        (figure,) = figures
        return figure

    yield draw
    for figure in figures:
        pyplot().close(figure)


def test_each_piece_with_a_value_has_a_box_of_its_shade_where_its_letters_are(drawn):
    pieces = [ShadedPiece(" [CLS] 1% ", 4.0, True), ShadedPiece(" ", None), ShadedPiece("$x_1$", 0.5)]
    pieces += [ShadedPiece(" ", None), ShadedPiece("grey", None), ShadedPiece("y", 1.0)]
    texts = [ShadedText(pieces, "caption"), ShadedText([ShadedPiece("z", 1.0)], "other")]
    axis = drawn(texts).axes[0]
    letters = {text.get_text(): text for text in axis.texts}
    assert {"A title", "about it", " [CLS] 1% ", "$x_1$", "grey", "y", "caption", "z", "other"} <= set(letters)
    assert len(axis.patches) == 4
    boxes = dict(zip([" [CLS] 1% ", "$x_1$", "y", "z"], axis.patches, strict=True))
    for name, box in boxes.items():
        left, baseline = letters[name].get_position()
        assert box.get_x() == left
        assert box.get_y() < baseline < box.get_y() + box.get_height()
    shade = {name: sum(box.get_facecolor()[:3]) for name, box in boxes.items()}
    assert shade[" [CLS] 1% "] < shade["y"] == shade["z"] < shade["$x_1$"]
    assert letters[" [CLS] 1% "].get_color() == "white"
    assert letters["grey"].get_color() == shaded_text.GREY
    assert letters["z"].get_position()[1] > letters["caption"].get_position()[1]


def test_letters_without_a_glyph_are_boxes_that_a_note_explains(drawn):
    figure = drawn([ShadedText([ShadedPiece("a\U0001f642", 1.0)], "c")])
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert "a□" in texts
    assert shaded_text._NOTE in texts


def test_texts_beyond_the_room_are_refused_before_anything_is_drawn(tmp_path):
    text = ShadedText([ShadedPiece("a\n" * 600, 1.0)], "c")
    with pytest.raises(InputError, match="fills 1200 lines, and a picture has room for 1000"):
        draw_shaded_texts([text, text], "t", "s", "l", tmp_path / "a.png")
    assert list(tmp_path.iterdir()) == []


def test_the_scale_begins_at_0_and_ends_at_the_largest_value_of_all_texts():
    texts = [ShadedText([ShadedPiece("a", 1.0), ShadedPiece("b", None)], ""), ShadedText([ShadedPiece("a", 9.0)], "")]
    norm = _norm(texts)
    assert [float(norm(value)) for value in (0.0, 2.25, 9.0)] == pytest.approx([0, 0.5, 1])
    assert float(_norm([ShadedText([ShadedPiece("a", 0.0)], "")])(0.0)) == 0


@pytest.mark.parametrize(
    ("largest", "ticks"), [(1.2, [0, 0.02, 0.1, 0.5, 1]), (5.3, [0, 0.1, 0.5, 1, 2, 5]), (20.6, [0, 1, 5, 10, 20])]
)
def test_ticks_are_round_with_1_among_them(largest, ticks):
    assert _ticks(largest) == pytest.approx(ticks)
