"""Nearest centroids and neighbour lists equal brute force."""

import numpy as np
import pytest

from embeddings.common import InputError
from embeddings.mining import faiss_library as centroids
from embeddings.mining.faiss_library import nearest_centroids, neighbour_lists
from tests.data.cluster_folders import nearest_lists, unit_vectors

pytest.importorskip("faiss")


@pytest.mark.parametrize("block", [1, 7, 1000])
def test_the_nearest_centroid_is_that_of_brute_force(block, monkeypatch):
    monkeypatch.setattr(centroids, "BLOCK", block)
    vectors, means = unit_vectors(50, seed=1), unit_vectors(9)
    found = nearest_centroids(vectors, means)
    assert found.dtype == np.int32
    assert found.tolist() == (vectors @ means.T).argmax(axis=1).tolist()


def test_widths_that_differ_are_refused():
    with pytest.raises(InputError, match="vectors of width 8 do not go with centroids of width 6"):
        nearest_centroids(unit_vectors(5), unit_vectors(5, 6))


@pytest.mark.parametrize(
    ("count", "num_neighbours", "width"), [(40, 5, 5), (40, 39, 39), (3, 32, 2), (2, 1, 1), (1, 4, 0)]
)
def test_lists_hold_the_nearest_others_nearest_first(count, num_neighbours, width):
    means = unit_vectors(count)
    lists = neighbour_lists(means, num_neighbours)
    assert lists.dtype == np.int32
    assert lists.shape == (count, width)
    assert lists.tolist() == nearest_lists(means, width).tolist()


def test_copies_of_a_centroid_list_each_other_and_not_themselves():
    means = np.concatenate([np.tile(unit_vectors(1), (6, 1)), unit_vectors(4, seed=2)])
    lists = neighbour_lists(means, 3)
    for centroid, others in enumerate(lists.tolist()):
        assert centroid not in others
        assert len(set(others)) == 3
    assert all(other < 6 for others in lists[:6].tolist() for other in others)


@pytest.mark.filterwarnings("ignore:.*clustering:UserWarning")
def test_many_centroids_are_compared_group_by_group():
    means = unit_vectors(900, 4)
    exact, grouped = neighbour_lists(means, 8), neighbour_lists(means, 8, max_exact=100)
    assert grouped.min() >= 0
    assert all(row not in others for row, others in enumerate(grouped.tolist()))
    agree = np.mean([len(set(a) & set(b)) / 8 for a, b in zip(exact.tolist(), grouped.tolist(), strict=True)])
    assert agree > 0.95


def test_a_group_too_small_for_a_list_is_filled_from_all():
    means = unit_vectors(120, 4)
    lists = neighbour_lists(means, 119, max_exact=10)
    assert [sorted(others) for others in lists.tolist()] == [[o for o in range(120) if o != row] for row in range(120)]
