import numpy as np
import pytest

from embeddings.figures import clusters
from embeddings.figures.cluster_points import ClusterPoints
from embeddings.figures.clusters import MOST_CLUSTERS, draw_clusters
from embeddings.figures.png import pyplot
from embeddings.figures.projection import Plane

pytest.importorskip("matplotlib")


def points_of(num_clusters, rows_each=4):
    rng = np.random.default_rng(0)
    places = np.repeat(np.arange(num_clusters), rows_each)
    vectors = rng.normal(size=(num_clusters, 8))[places] + 0.1 * rng.normal(size=(len(places), 8))
    unit = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
    numbers = list(range(100_000, 100_000 + num_clusters))
    return ClusterPoints(numbers, np.full(num_clusters, 1_234_567), places, unit)


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    figures = []
    monkeypatch.setattr(clusters, "write_png", lambda figure, output: figures.append(figure))

    def draw(points, subtitle="about it"):
        draw_clusters(points, "A $title$", subtitle, tmp_path / "a.png")
        figures[-1].draw_without_rendering()
        return figures[-1]

    draw.figures = figures
    yield draw
    for figure in figures:
        pyplot().close(figure)


def test_each_cluster_has_a_colour_its_rows_and_a_number_at_their_mean(drawn):
    points = points_of(3)
    figure = drawn(points)
    (axis,) = figure.axes
    plane = Plane.of(points.vector_ND)
    expected = plane.points(points.vector_ND)
    assert len(axis.collections) == 3
    for place, dots in enumerate(axis.collections):
        np.testing.assert_allclose(np.asarray(dots.get_offsets()), expected[4 * place : 4 * place + 4], atol=1e-6)
        np.testing.assert_allclose(
            axis.texts[place].get_position(), expected[4 * place : 4 * place + 4].mean(0), atol=1e-6
        )
    assert [text.get_text() for text in axis.texts] == ["100000", "100001", "100002"]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "100000 (1,234,567)",
        "100001 (1,234,567)",
        "100002 (1,234,567)",
    ]
    assert axis.get_xlabel().startswith(f"first principal axis ({plane.share_2[0]:.1%}")
    assert figure.get_suptitle() == "A $title$"


def test_a_map_takes_the_place_of_the_plane_and_has_no_scale(drawn, tmp_path):
    points = points_of(2)
    map_N2 = np.arange(16.0).reshape(8, 2) ** 2
    draw_clusters(points, "t", "s", tmp_path / "a.png", map_N2)
    figure = drawn.figures[-1]
    (axis,) = figure.axes
    for place, dots in enumerate(axis.collections):
        own_n2 = map_N2[4 * place : 4 * place + 4]
        np.testing.assert_allclose(np.asarray(dots.get_offsets()), own_n2)
        np.testing.assert_allclose(axis.texts[place].get_position(), np.median(own_n2, axis=0))
    assert (list(axis.get_xticks()), list(axis.get_yticks())) == ([], [])
    assert axis.get_xlabel().startswith("t-SNE")


def test_a_dollar_sign_of_a_path_begins_no_formula(drawn):
    (axis,) = drawn(points_of(2), r"rows of my$\a{$/c.jsonl").axes
    assert axis.get_title(loc="left") == r"rows of my$\a{$/c.jsonl"


@pytest.mark.parametrize("num_clusters", [1, MOST_CLUSTERS])
def test_colours_differ_and_no_text_leaves_the_page(num_clusters, drawn):
    figure = drawn(points_of(num_clusters), "a subtitle of many words, " * 20)
    (axis,), (legend,) = figure.axes, figure.legends
    colours = {tuple(dots.get_facecolor()[0]) for dots in axis.collections}
    assert len(colours) == num_clusters
    for part in (legend, axis.title, axis._left_title, axis.xaxis.label, axis.yaxis.label, figure._suptitle):
        box = part.get_window_extent()
        assert figure.bbox.x0 <= box.x0 <= box.x1 <= figure.bbox.x1
        assert figure.bbox.y0 <= box.y0 <= box.y1 <= figure.bbox.y1
    assert legend.get_window_extent().x0 >= axis.get_window_extent().x1 - 1
    assert axis._left_title.get_window_extent().x1 <= legend.get_window_extent().x0
    assert axis._left_title.get_window_extent().y1 <= figure._suptitle.get_window_extent().y0


def test_the_picture_is_a_png(tmp_path):
    draw_clusters(points_of(2), "t", "s", tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
