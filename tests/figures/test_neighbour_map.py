import numpy as np
import pytest

from embeddings.common import OptionError
from embeddings.figures.neighbour_map import MOST_POINTS, check_neighbour_map, neighbour_map


def groups(seed=0):
    """Three groups of 12 unit vectors that lie far apart."""
    rng = np.random.default_rng(seed)
    place_N = np.repeat(np.arange(3), 12)
    vector_ND = np.eye(8)[place_N] + 0.1 * rng.normal(size=(36, 8))
    return place_N, (vector_ND / np.linalg.norm(vector_ND, axis=1, keepdims=True)).astype(np.float32)


def test_neighbours_stay_neighbours():
    place_N, vector_ND = groups()
    point_N2 = neighbour_map(vector_ND, perplexity=5)
    assert point_N2.shape == (36, 2)
    distance_NN = np.linalg.norm(point_N2[:, None] - point_N2[None], axis=-1)
    nearest_N5 = np.argsort(distance_NN, axis=1)[:, 1:6]
    assert (place_N[nearest_N5] == place_N[:, None]).all()


def test_the_same_vectors_lie_in_the_same_places_and_others_elsewhere():
    one, same, other = (neighbour_map(groups(seed)[1], 5) for seed in (1, 1, 2))
    np.testing.assert_array_equal(one, same)
    assert not np.array_equal(one, other)


@pytest.mark.parametrize(
    ("num_points", "perplexity", "says"),
    [
        (36, 12, "perplexity must be below a third of the 36 rows drawn, got 12; lower it, or draw more rows"),
        (1, 1, "perplexity must be below a third of the 1 rows drawn"),
        (36, 0.5, "perplexity must be >= 1, got 0.5"),
        (36, float("nan"), "perplexity must be >= 1, got nan"),
        (MOST_POINTS + 1, 30, "projection is for at most 5,000 rows, here 5,001"),
    ],
)
def test_what_cannot_be_laid_out_is_refused(num_points, perplexity, says):
    with pytest.raises(OptionError, match=says):
        neighbour_map(np.zeros((num_points, 2)), perplexity)


@pytest.mark.parametrize(("num_points", "perplexity"), [(37, 12), (MOST_POINTS, 30)])
def test_the_edges_are_allowed(num_points, perplexity):
    check_neighbour_map(num_points, perplexity)
