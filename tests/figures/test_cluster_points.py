import numpy as np
import pytest

from embeddings.common import OptionError
from embeddings.data.samplers.cluster_folder import ClusterFolder
from embeddings.data.surrogate_vectors import SurrogateVectors
from embeddings.figures.cluster_points import ClusterPoints, draw_cluster_points
from tests.figures.cluster_folders import SOURCE_KEY, write_clusters

IDS = [0, 3, 0, 1, 3, 3, 0, 1, 3, 3, 0, 3]  # nothing in 2


@pytest.fixture
def drawn(tmp_path):
    folder, query, document = write_clusters(tmp_path / "clusters", IDS, 4)
    opened = ClusterFolder(folder), SurrogateVectors(tmp_path / "clusters.vectors", SOURCE_KEY)
    return lambda *options: draw_cluster_points(*opened, *options), np.concatenate([query, document], axis=1) / 2**0.5


def test_all_rows_of_all_clusters_with_rows_are_drawn_where_there_is_room(drawn):
    draw, row_ND = drawn
    points = draw(20, 100)
    assert points.clusters == [0, 1, 3]
    assert points.num_rows_K.tolist() == [4, 2, 6]
    assert points.place_N.tolist() == [0] * 4 + [1] * 2 + [2] * 6
    order = [row for cluster in (0, 1, 3) for row, own in enumerate(IDS) if own == cluster]
    np.testing.assert_allclose(points.vector_ND, row_ND[order], atol=1e-6)


def test_of_many_some_are_drawn_by_the_seed_alone(drawn):
    draw, row_ND = drawn
    draws = [draw(2, 3, seed) for seed in range(8)]
    assert {tuple(points.clusters) for points in draws} == {(0, 1), (0, 3), (1, 3)}
    assert all(np.bincount(points.place_N).max() <= 3 for points in draws)
    again = draw(2, 3, 5)
    np.testing.assert_array_equal(again.vector_ND, draws[5].vector_ND)
    for points in draws:
        rows = [int(np.abs(row_ND - vector).sum(axis=1).argmin()) for vector in points.vector_ND]
        assert [IDS[row] for row in rows] == [points.clusters[place] for place in points.place_N]
        assert len({*rows}) == len(rows)


def test_facts_are_those_of_a_loop():
    vectors = np.array([[1, 0, 0], [0.6, 0.8, 0], [0, 1, 0], [0, 0.8, 0.6], [0, 0, 1]], dtype=np.float32)
    points = ClusterPoints([4, 7, 9], np.array([20, 2, 1]), np.array([0, 0, 1, 1, 2]), vectors)
    means = [vectors[:2].sum(0), vectors[2:4].sum(0), vectors[4]]
    means = [mean / np.linalg.norm(mean) for mean in means]
    facts = points.facts()
    assert [each[:3] for each in facts] == [(4, 20, 2), (7, 2, 2), (9, 1, 1)]
    assert [each.nearest for each in facts] == [7, 4, 7]
    assert facts[0].cosine == pytest.approx(np.mean([vectors[row] @ means[0] for row in (0, 1)]))
    assert facts[2].nearest_cosine == pytest.approx(means[2] @ means[1])
    nearest = [int(np.argmax([vector @ mean for mean in means])) for vector in vectors]
    assert nearest == [0, 0, 1, 1, 2]
    assert [each.at_home for each in facts] == [1, 1, 1]
    strayed = np.eye(3, dtype=np.float32)[[0, 0, 1, 1, 1]]
    assert ClusterPoints([4, 7], np.array([3, 2]), np.array([0, 0, 0, 1, 1]), strayed).facts()[0].at_home == 2 / 3


def test_a_cluster_alone_is_its_own_neighbour():
    points = ClusterPoints([3], np.array([2]), np.array([0, 0]), np.eye(2, dtype=np.float32))
    (facts,) = points.facts()
    assert (facts.nearest, facts.nearest_cosine, facts.at_home) == (3, 1.0, 1.0)


@pytest.mark.parametrize(("options", "name"), [((0, 5), "num_clusters"), ((5, 0), "rows_per_cluster")])
def test_nothing_is_no_sample(options, name, drawn):
    with pytest.raises(OptionError, match=f"{name} must be >= 1, got 0"):
        drawn[0](*options)
