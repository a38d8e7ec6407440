import numpy as np
import pytest

from embeddings.figures import contextual_shift
from embeddings.figures.contextual_shift import MOST_CORPORA, MOST_DOCUMENTS, draw_contextual_shift
from embeddings.figures.png import pyplot
from embeddings.figures.projection import Plane
from embeddings.inference import ContextualShift

pytest.importorskip("matplotlib")


def shift_of(num_documents, num_contexts):
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(num_documents, 8)) + 0.2 * rng.normal(size=(num_contexts + 1, num_documents, 8))
    unit = (vectors / np.linalg.norm(vectors, axis=2, keepdims=True)).astype(np.float32)
    return ContextualShift(unit[:-1], unit[-1])


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    figures = []
    monkeypatch.setattr(contextual_shift, "write_png", lambda figure, output: figures.append(figure))

    def draw(shift, names, corpora, subtitle="about it"):
        draw_contextual_shift(shift, names, corpora, "A $title$", subtitle, tmp_path / "a.png")
        figures[-1].draw_without_rendering()
        return figures[-1]

    yield draw
    for figure in figures:
        pyplot().close(figure)


def test_a_document_has_a_colour_a_corpus_a_shape_and_no_context_a_cross(drawn):
    shift = shift_of(2, 3)
    figure = drawn(shift, ["first $x$ text", "second"], ["wiki", "wiki", "code"])
    (axis,) = figure.axes
    plane = Plane.of(shift.vector_CND.reshape(6, 8))
    dots = [np.asarray(collection.get_offsets()) for collection in axis.collections]
    for document in range(2):
        own = dots[3 * document : 3 * document + 3]
        np.testing.assert_allclose(own[0], plane.points(shift.vector_CND[:2, document]), atol=1e-6)
        np.testing.assert_allclose(own[1], plane.points(shift.vector_CND[2:, document]), atol=1e-6)
        np.testing.assert_allclose(own[2], plane.points(shift.alone_ND[document][None]), atol=1e-6)
        colours = {tuple(c.get_edgecolor()[0][:3]) for c in axis.collections[3 * document : 3 * document + 3]}
        assert len(colours) == 1
    assert len({tuple(collection.get_edgecolor()[0][:3]) for collection in axis.collections}) == 2
    (legend,) = figure.legends
    labels = [text.get_text() for text in legend.get_texts()]
    assert labels == ["first $x$ text", "second", "contexts of wiki", "contexts of code", "no context"]
    assert axis.get_xlabel().startswith("first principal axis (")


def test_a_dollar_sign_of_a_path_begins_no_formula(drawn):
    (axis,) = drawn(shift_of(2, 2), ["a", "b"], ["x", "x"], r"documents of my$\a{$/c.jsonl").axes
    assert axis.get_title(loc="left") == r"documents of my$\a{$/c.jsonl"


def test_no_text_leaves_the_page_at_the_most_that_is_drawn(drawn):
    names = [f"{number} " + "東京 a long document " * 9 for number in range(MOST_DOCUMENTS)]
    corpora = [f"corpus_{context % MOST_CORPORA}_{'x' * 20}" for context in range(12)]
    figure = drawn(shift_of(MOST_DOCUMENTS, 12), names, corpora, "a subtitle of many words, " * 20)
    (axis,), (legend,) = figure.axes, figure.legends
    assert len(legend.get_texts()) == MOST_DOCUMENTS + MOST_CORPORA + 1
    for part in (legend, axis._left_title, axis.xaxis.label, axis.yaxis.label, figure._suptitle):
        box = part.get_window_extent()
        assert figure.bbox.x0 <= box.x0 <= box.x1 <= figure.bbox.x1
        assert figure.bbox.y0 <= box.y0 <= box.y1 <= figure.bbox.y1
    assert legend.get_window_extent().y1 <= axis.xaxis.label.get_window_extent().y0 + 1
    assert axis._left_title.get_window_extent().y1 <= figure._suptitle.get_window_extent().y0
    assert len({c.get_paths()[0].vertices.shape for c in axis.collections}) > 2


def test_the_picture_is_a_png(tmp_path):
    draw_contextual_shift(shift_of(2, 2), ["a", " "], ["x", "x"], "t", "s", tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
