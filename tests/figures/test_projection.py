import numpy as np
import pytest

from embeddings.figures.png import pyplot
from embeddings.figures.projection import Plane


def test_the_plane_is_that_of_the_largest_eigenvalues():
    rng = np.random.default_rng(0)
    vectors = (rng.normal(size=(50, 6)) * [1, 5, 1, 3, 1, 0.5] + 7).astype(np.float32)
    plane = Plane.of(vectors)
    values, axes = np.linalg.eigh(np.cov(vectors.T.astype(np.float64)))
    np.testing.assert_allclose(plane.share_2, values[::-1][:2] / values.sum(), rtol=1e-6)
    np.testing.assert_allclose(np.abs(plane.axis_2D @ axes[:, ::-1][:, :2]), np.eye(2), atol=1e-6)
    points = plane.points(vectors)
    np.testing.assert_allclose(points, (vectors - vectors.mean(0)) @ plane.axis_2D.T, atol=1e-4)
    np.testing.assert_allclose(points.var(axis=0, ddof=1), values[::-1][:2], rtol=1e-5)
    assert (plane.axis_2D[np.arange(2), np.abs(plane.axis_2D).argmax(1)] > 0).all()
    # Mirrored vectors lie mirrored on the same axes.
    np.testing.assert_allclose(Plane.of(-vectors).axis_2D, plane.axis_2D, atol=1e-6)


@pytest.mark.parametrize(
    "vectors", [[[1.0, 2.0]], [[3.0], [5.0]], [[1.0, 1.0]] * 3, [[0.0, 0.0, 1.0], [0.0, 1.0, 0.0]]]
)
def test_vectors_that_span_no_plane_have_finite_points(vectors):
    plane = Plane.of(np.array(vectors, dtype=np.float32))
    assert np.isfinite(plane.points(np.array(vectors))).all()
    assert plane.share_2.tolist() == pytest.approx([float(len({*map(tuple, vectors)}) > 1), 0.0], abs=1e-6)


def test_the_axes_are_named_with_what_they_show():
    pytest.importorskip("matplotlib")
    figure, axis = pyplot().subplots()
    Plane(np.zeros(2), np.eye(2), np.array([0.5, 0.125])).name_axes(axis)
    assert axis.get_xlabel() == "first principal axis (50.0% of the variance)"
    assert axis.get_ylabel() == "second principal axis (12.5% of the variance)"
    assert axis.get_aspect() == 1
    pyplot().close(figure)
