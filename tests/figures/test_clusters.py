"""Clusters and documents in contexts, on the plane of their principal axes."""

import numpy as np
import pytest

from embeddings.data.samplers.clustered import ClusterFolder
from embeddings.data.surrogate_vectors import SurrogateVectors
from embeddings.figures.clusters import (
    ClusterPoints,
    draw_cluster_points,
    draw_clusters,
    draw_contextual_shift,
    principal_plane,
)
from embeddings.inference import ContextualShift
from tests.figures.cluster_folders import SOURCE_KEY, write_clusters

pytest.importorskip("matplotlib")


def points_of(num_clusters, rows_each=4):
    rng = np.random.default_rng(0)
    places = np.repeat(np.arange(num_clusters), rows_each)
    vectors = rng.normal(size=(num_clusters, 8))[places] + 0.1 * rng.normal(size=(len(places), 8))
    unit = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
    numbers = list(range(100_000, 100_000 + num_clusters))
    return ClusterPoints(numbers, np.full(num_clusters, 1_234_567), places, unit)


def test_each_cluster_has_a_colour_and_a_number_at_its_mean(kept, tmp_path):
    points = points_of(3)
    draw_clusters(points, "A $title$", "about it", tmp_path / "a.png")
    (figure,) = kept
    (axis,) = figure.axes
    plane = principal_plane(points.vector_ND)
    expected = plane.transform(points.vector_ND)
    assert len(axis.collections) == 3
    for place, dots in enumerate(axis.collections):
        np.testing.assert_allclose(np.asarray(dots.get_offsets()), expected[4 * place : 4 * place + 4], atol=1e-6)
        np.testing.assert_allclose(
            axis.texts[place].get_position(), expected[4 * place : 4 * place + 4].mean(0), atol=1e-6
        )
    assert [text.get_text() for text in axis.texts] == ["100000", "100001", "100002"]
    (legend,) = figure.legends
    wanted = ["100000 (1,234,567)", "100001 (1,234,567)", "100002 (1,234,567)"]
    assert [text.get_text() for text in legend.get_texts()] == wanted
    assert axis.get_xlabel().startswith(f"first principal axis ({plane.explained_variance_ratio_[0]:.1%}")
    assert figure.get_suptitle() == "A $title$"


IDS = [0, 3, 0, 1, 3, 3, 0, 1, 3, 3, 0, 3]  # nothing in 2


def test_a_sample_depends_on_the_seed_only(tmp_path):
    folder, query, document = write_clusters(tmp_path / "clusters", IDS, 4)
    opened = ClusterFolder(folder), SurrogateVectors(tmp_path / "clusters.vectors", SOURCE_KEY)
    row_ND = np.concatenate([query, document], axis=1) / 2**0.5
    draws = [draw_cluster_points(*opened, 2, 3, seed) for seed in range(8)]
    assert {tuple(points.clusters) for points in draws} == {(0, 1), (0, 3), (1, 3)}
    assert all(np.bincount(points.index_N).max() <= 3 for points in draws)
    again = draw_cluster_points(*opened, 2, 3, 5)
    np.testing.assert_array_equal(again.vector_ND, draws[5].vector_ND)
    for points in draws:
        rows = [int(np.abs(row_ND - vector).sum(axis=1).argmin()) for vector in points.vector_ND]
        assert [IDS[row] for row in rows] == [points.clusters[place] for place in points.index_N]
        assert len({*rows}) == len(rows)


def test_facts_are_those_of_a_loop():
    vectors = np.array([[1, 0, 0], [0.6, 0.8, 0], [0, 1, 0], [0, 0.8, 0.6], [0, 0, 1]], dtype=np.float32)
    points = ClusterPoints([4, 7, 9], np.array([20, 2, 1]), np.array([0, 0, 1, 1, 2]), vectors)
    means = [vectors[:2].sum(0), vectors[2:4].sum(0), vectors[4]]
    means = [mean / np.linalg.norm(mean) for mean in means]
    header, *rows = points.table()
    assert {len(row) for row in rows} == {len(header)}
    assert [row[:3] for row in rows] == [[4, "20", 2], [7, "2", 2], [9, "1", 1]]
    assert [row[4] for row in rows] == [7, 4, 7]
    assert rows[0][3] == f"{np.mean([vectors[row] @ means[0] for row in (0, 1)]):.3f}"
    assert rows[2][5] == f"{means[2] @ means[1]:.3f}"
    nearest = [int(np.argmax([vector @ mean for mean in means])) for vector in vectors]
    assert nearest == [0, 0, 1, 1, 2]
    assert [row[6] for row in rows] == ["100.0%"] * 3
    strayed = np.eye(3, dtype=np.float32)[[0, 0, 1, 1, 1]]
    assert ClusterPoints([4, 7], np.array([3, 2]), np.array([0, 0, 0, 1, 1]), strayed).table()[1][6] == "66.7%"


def test_the_plane_is_that_of_the_largest_eigenvalues():
    rng = np.random.default_rng(0)
    vectors = (rng.normal(size=(50, 6)) * [1, 5, 1, 3, 1, 0.5] + 7).astype(np.float32)
    plane = principal_plane(vectors)
    values, axes = np.linalg.eigh(np.cov(vectors.T.astype(np.float64)))
    np.testing.assert_allclose(plane.explained_variance_ratio_, values[::-1][:2] / values.sum(), rtol=1e-6)
    np.testing.assert_allclose(np.abs(plane.components_ @ axes[:, ::-1][:, :2]), np.eye(2), atol=1e-6)
    points = plane.transform(vectors)
    np.testing.assert_allclose(points, (vectors - vectors.mean(0)) @ plane.components_.T, atol=1e-4)
    np.testing.assert_allclose(points.var(axis=0, ddof=1), values[::-1][:2], rtol=1e-5)
    assert (plane.components_[np.arange(2), np.abs(plane.components_).argmax(1)] > 0).all()
    # A single vector has a place too.
    np.testing.assert_allclose(principal_plane(vectors[:1]).transform(vectors[:1]), np.zeros((1, 2)), atol=1e-6)
    # Mirrored vectors have the same axes.
    np.testing.assert_allclose(principal_plane(-vectors).components_, plane.components_, atol=1e-6)


def shift_of(num_documents, num_contexts):
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(num_documents, 8)) + 0.2 * rng.normal(size=(num_contexts + 1, num_documents, 8))
    unit = (vectors / np.linalg.norm(vectors, axis=2, keepdims=True)).astype(np.float32)
    return ContextualShift(unit[:-1], unit[-1])


def test_documents_have_colours_corpora_have_markers_and_no_context_is_a_cross(kept, tmp_path):
    shift, names, corpora = shift_of(2, 3), ["first $x$ text", "second"], ["wiki", "wiki", "code"]
    draw_contextual_shift(shift, names, corpora, "A $title$", "about it", tmp_path / "a.png")
    (figure,) = kept
    (axis,) = figure.axes
    plane = principal_plane(shift.vector_CND.reshape(6, 8))
    dots = [np.asarray(collection.get_offsets()) for collection in axis.collections]
    for document in range(2):
        own = dots[3 * document : 3 * document + 3]
        np.testing.assert_allclose(own[0], plane.transform(shift.vector_CND[:2, document]), atol=1e-6)
        np.testing.assert_allclose(own[1], plane.transform(shift.vector_CND[2:, document]), atol=1e-6)
        np.testing.assert_allclose(own[2], plane.transform(shift.alone_ND[document][None]), atol=1e-6)
        colours = {tuple(c.get_edgecolor()[0][:3]) for c in axis.collections[3 * document : 3 * document + 3]}
        assert len(colours) == 1
    assert len({tuple(collection.get_edgecolor()[0][:3]) for collection in axis.collections}) == 2
    (legend,) = figure.legends
    labels = [text.get_text() for text in legend.get_texts()]
    assert labels == ["first $x$ text", "second", "contexts of wiki", "contexts of code", "no context"]
    assert axis.get_xlabel().startswith("first principal axis (")
