import numpy as np
import pytest

from embeddings.common import InputError
from embeddings.data.tokenize import TokenSpan
from embeddings.figures import latent_weights
from embeddings.figures.glyphs import drawable, installed_fonts, width
from embeddings.figures.latent_weights import (
    MOST_ROWS,
    busiest_latents,
    draw_latent_weights,
    draw_latents_by_text,
    spread,
)
from embeddings.figures.png import pyplot
from embeddings.inference import LatentWeights

pytest.importorskip("matplotlib")


def weights_of(text, rows):
    """A text whose words are its tokens between [CLS] and [SEP]."""
    spans, place = [TokenSpan("[CLS]", 0, 0, True)], 0
    for word in text.split(" "):
        spans.append(TokenSpan(word.lower(), place, place + len(word), False))
        place += len(word) + 1
    spans.append(TokenSpan("[SEP]", 0, 0, True))
    weight_TR = np.resize(np.array(rows, dtype=np.float32), (len(spans), len(rows[0])))
    return LatentWeights(text, spans, weight_TR[None])


ONE = weights_of("A $dog$", [[0.1, 0.6, 0.3, 0.0], [0.25, 0.25, 0.25, 0.25]])
TWO = weights_of("fox", [[0.0, 0.0, 0.0, 1.0]])


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """The axes of what is drawn, kept from being closed: the page, a heat map a text, the scale."""
    figures = []
    monkeypatch.setattr(latent_weights, "write_png", lambda figure, output: figures.append(figure))

    def draw(texts, num_columns=3, subtitle="about it"):
        draw_latent_weights(texts, num_columns, "A title", subtitle, tmp_path / "a.png")
        figures[-1].draw_without_rendering()
        return figures[-1].axes

    yield draw
    for figure in figures:
        pyplot().close(figure)


def labels(axis):
    return [[label.get_text() for label in found] for found in (axis.get_xticklabels(), axis.get_yticklabels())]


def test_the_papers_picture_has_a_row_a_text_and_a_column_for_each_latent_of_each_head(monkeypatch, tmp_path):
    figures = []
    monkeypatch.setattr(latent_weights, "write_png", lambda figure, output: figures.append(figure))
    # Two heads, two tokens, three latents: averaged over the tokens by hand.
    first = LatentWeights("good", [], np.array([[[1, 0, 0], [0, 1, 0]], [[0, 0, 1], [0, 0, 1]]], dtype=np.float32))
    second = LatentWeights("$bad$", [], np.array([[[0, 0, 1]], [[0.5, 0.25, 0.25]]], dtype=np.float32))
    draw_latents_by_text([first, second], "A title", "about it", tmp_path / "a.png")
    figures[0].draw_without_rendering()
    axis = figures[0].axes[0]
    expected = [[0.5, 0.5, 0, 0, 0, 1], [0, 0, 1, 0.5, 0.25, 0.25]]
    np.testing.assert_array_equal(np.asarray(axis.images[0].get_array()), expected)
    assert labels(axis) == [["head 0", "head 1"], ["good", "$bad$"]]
    pyplot().close(figures[0])
    with pytest.raises(InputError, match=f"are {MOST_ROWS + 1}, and a picture has room for {MOST_ROWS}"):
        draw_latents_by_text([first] * (MOST_ROWS + 1), "", "", tmp_path / "a.png")


def test_texts_count_alike_in_which_latents_are_the_busiest():
    assert busiest_latents([ONE], 4) == [1, 2, 0, 3]
    # The text of three tokens weighs as much as the one of four.
    assert busiest_latents([ONE, TWO], 2) == [3, 1]


def test_the_spread_is_how_many_latents_share_alike():
    assert spread(np.array([0.25] * 4, dtype=np.float32)) == pytest.approx(4)
    assert spread(np.array([0.5, 0.0, 0.5], dtype=np.float32)) == pytest.approx(2)
    assert spread(np.array([0.0, 1.0], dtype=np.float32)) == 1


def test_each_token_has_a_row_each_busy_latent_a_column_and_each_text_its_mean(drawn):
    page, one, two, scale = drawn([ONE, TWO])
    assert labels(one) == [["3", "1", "2"], ["[CLS]", "A", "$dog$", "[SEP]", "mean"]]
    assert labels(two) == [["3", "1", "2"], ["[CLS]", "fox", "[SEP]", "mean"]]
    rows = np.array(one.images[0].get_array())
    np.testing.assert_allclose(rows[0], [0.0, 0.6, 0.3])
    np.testing.assert_allclose(rows[-1], ONE.weight_TR.mean(0)[[3, 1, 2]])
    assert {axis.images[0].get_clim() for axis in (one, two)} == {(0.0, 1.0)}
    words = [text.get_text() for text in page.texts]
    assert words[:3] == ["A title", "about it", "A $dog$"]
    # What the fourth latent has, and exp(entropy), row by row; the numbers of the mean last.
    statistics = words[words.index("spread") + 1 :][:10]
    assert statistics[:4] == ["10.0%", "2.5", "25.0%", "4.0"]
    assert statistics[-2] == f"{ONE.weight_TR.mean(0)[0]:.1%}"
    assert scale.get_xlabel() == "share of a token's attention (even: 25.0%)"


@pytest.mark.parametrize("num_latents", [1, 24, 64])
def test_no_text_leaves_the_page_or_lies_on_another(num_latents, drawn):
    rng = np.random.default_rng(0)
    texts = [
        weights_of(text, rng.dirichlet(np.ones(512), 4).tolist())
        for text in ("the quick brown averyveryverylongwordindeed fox " * 4, "a 東京 b")
    ]
    page, *maps, scale = drawn(texts, num_latents, "a subtitle of many words, " * 12)
    figure = page.figure
    texts = [*page.texts, scale.xaxis.label, *scale.get_xticklabels()]
    for axis in maps:
        texts += [axis.xaxis.label, *axis.get_xticklabels(), *axis.get_yticklabels()]
    boxes = [text.get_window_extent() for text in texts if text.get_text()]
    assert len(boxes) > 60
    for box in boxes:
        assert figure.bbox.x0 <= box.x0 < box.x1 <= figure.bbox.x1
        assert figure.bbox.y0 <= box.y0 < box.y1 <= figure.bbox.y1
    for place, box in enumerate(boxes):
        assert not any(
            min(box.x1, other.x1) - max(box.x0, other.x0) > 0.5 and min(box.y1, other.y1) - max(box.y0, other.y0) > 0.5
            for other in boxes[:place]
        )


def test_a_text_without_spaces_is_shown_as_far_as_it_fits_and_no_letter_is_missing(drawn, recwarn):
    text = "機械学習は人工知能" * 40
    weights = LatentWeights(text, [TokenSpan(text[:30], 0, 30, False)], np.array([[[0.5, 0.5]]], np.float32))
    page, heat, _ = drawn([weights], 2, "言語: about it")
    known = installed_fonts().known
    caption = page.texts[2].get_text()
    assert caption.startswith(drawable(text[:20], known))
    assert caption.endswith("…")
    name = labels(heat)[1][0]
    assert sum(map(width, name)) <= 18
    assert name.endswith("…")
    assert [str(warning.message) for warning in recwarn if "Glyph" in str(warning.message)] == []


def test_an_even_attention_has_a_middle_shade(drawn):
    _, heat, _ = drawn([weights_of("fox", [[0.1] * 10])])
    assert float(heat.images[0].norm(0.1)) == pytest.approx(0.5)


def test_a_png_is_written_and_more_tokens_than_have_room_are_refused(tmp_path):
    draw_latent_weights([ONE], 3, "t", "s", tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    many = weights_of("a " * MOST_ROWS, [[0.5, 0.5]])
    with pytest.raises(InputError, match="TEXT: fills 1004 rows, and a picture has room for 1000"):
        draw_latent_weights([many], 3, "t", "s", tmp_path / "b.png")
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]
