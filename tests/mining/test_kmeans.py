"""k-means equals a loop, uses every vector, and says what faiss keeps to itself."""

import numpy as np
import pytest

from embeddings.common import InputError, OptionError
from embeddings.mining.faiss_library import kmeans_run, num_duplicates, spherical_kmeans
from tests.data.cluster_folders import unit_vectors

faiss = pytest.importorskip("faiss")


def blobs(num_blobs, rows_each, width=6, spread=0.05):
    """Unit rows around directions, blob by blob."""
    drawn = np.random.default_rng(1).standard_normal((num_blobs * rows_each, width)) * spread
    rows = np.repeat(unit_vectors(num_blobs, width), rows_each, axis=0) + drawn
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def lloyd(vectors, centroids, num_iterations):
    """Spherical k-means, one step after another; the objective is that of the last assignment."""
    for _ in range(num_iterations):
        cosines = vectors @ centroids.T
        nearest = cosines.argmax(axis=1)
        objective = cosines.max(axis=1).mean()
        for cluster in range(len(centroids)):
            mean = vectors[nearest == cluster].sum(axis=0)
            centroids[cluster] = mean / np.linalg.norm(mean)
    return centroids, objective


def reference(vectors, num_clusters, **options):
    """faiss by itself, with everything it needs to be told."""
    told = {"spherical": True, "max_points_per_centroid": 10**6, "min_points_per_centroid": 1}
    kmeans = faiss.Kmeans(vectors.shape[1], num_clusters, **told, **options)
    kmeans.train(vectors)
    return kmeans


def test_a_run_equals_lloyds_loop_from_the_same_start():
    vectors = blobs(5, 40)
    start = reference(vectors, 5, niter=1, seed=3).centroids
    # One iteration of faiss is one of ours; the loop goes on from there.
    expected, _ = lloyd(vectors, start.copy(), 6)
    found = kmeans_run(vectors, 5, num_iterations=7, seed=3)
    np.testing.assert_allclose(found.centroids, expected, atol=1e-5)
    _, objective = lloyd(vectors, start.copy(), 6)
    assert found.objective == pytest.approx(objective, rel=1e-5)


@pytest.mark.parametrize("num_iterations", [1, 7, 20, 25])
def test_runs_cut_into_calls_equal_one_call_of_faiss_with_the_best_of_three(num_iterations):
    vectors = unit_vectors(300, 8)
    expected = reference(vectors, 12, niter=num_iterations, nredo=3, seed=5)
    found = spherical_kmeans(vectors, 12, num_iterations=num_iterations, seed=5)
    np.testing.assert_allclose(found.centroids, expected.centroids, atol=1e-5)
    assert found.objective * 300 == pytest.approx(max(expected.obj), rel=1e-5)
    runs = [kmeans_run(vectors, 12, run, num_iterations, seed=5).objective for run in range(3)]
    assert len(set(runs)) == 3
    assert found.objective == max(runs)


def test_every_vector_counts_where_faiss_by_itself_takes_256_a_cluster():
    vectors = blobs(2, 600, spread=0.4)
    one = kmeans_run(vectors, 1, num_iterations=2)
    mean = vectors.sum(axis=0, dtype=np.float64)
    np.testing.assert_allclose(one.centroids[0], mean / np.linalg.norm(mean), atol=1e-6)
    alone = faiss.Kmeans(6, 1, niter=2, spherical=True, seed=0)
    alone.train(vectors)
    assert np.abs(alone.centroids - one.centroids).max() > 1e-4


def test_centroids_are_unit_vectors_and_one_seed_gives_the_same_bits():
    vectors = unit_vectors(200, 8)
    first, again, other = (spherical_kmeans(vectors, 9, num_iterations=5, seed=seed) for seed in (1, 1, 2))
    assert first.centroids.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(first.centroids, axis=1), 1.0, atol=1e-6)
    assert first.centroids.tobytes() == again.centroids.tobytes() != other.centroids.tobytes()
    assert first.objective == again.objective


@pytest.mark.parametrize("seed", [-1, 2**31, 2**63])
def test_any_integer_is_a_seed(seed):
    assert kmeans_run(unit_vectors(20), 3, 2, 3, seed).centroids.shape == (3, 8)


def test_a_cluster_for_each_vector_is_that_vector():
    vectors = unit_vectors(7)
    found = kmeans_run(vectors, 7)
    assert sorted(map(tuple, found.centroids)) == sorted(map(tuple, vectors))
    assert found.objective == 1.0


def test_centroids_of_vectors_that_are_all_the_same_are_copies():
    same = np.tile(unit_vectors(1), (1000, 1))
    found = kmeans_run(same, 50, num_iterations=10)
    assert num_duplicates(found.centroids) >= 25
    assert num_duplicates(unit_vectors(50)) == 0


@pytest.mark.parametrize(("value", "kind"), [(0.0, "zero"), (np.nan, "not finite"), (np.inf, "not finite")])
def test_a_vector_without_direction_is_named_by_its_row(value, kind):
    vectors = unit_vectors(20)
    vectors[13] = value
    with pytest.raises(InputError, match=f"vectors:13: the vector is {kind}"):
        spherical_kmeans(vectors, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_clusters": 21}, "num_clusters must not exceed the 20 rows, got 21"),
        ({"num_clusters": 0}, "num_clusters must be >= 1"),
        ({"num_iterations": 0}, "num_iterations must be >= 1"),
        ({"num_runs": 0}, "num_runs must be >= 1"),
        ({"gpu": True}, "gpu needs"),
    ],
)
def test_impossible_options_are_refused_in_one_line(options, message):
    if options.get("gpu") and faiss.get_num_gpus():
        pytest.skip("there is a GPU")
    with pytest.raises(OptionError, match=message) as raised:
        spherical_kmeans(unit_vectors(20), **{"num_clusters": 2, **options})
    assert "\n" not in str(raised.value)
