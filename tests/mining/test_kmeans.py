"""k-means equals a loop and uses every vector, and errors are explicit where faiss is silent."""

import numpy as np
import pytest
import torch
from tqdm import tqdm

from embeddings.common import InputError
from embeddings.mining import kmeans, lists
from embeddings.mining.kmeans import kmeans_run, neighbour_lists
from tests.data.cluster_folders import nearest_lists, unit_vectors
from tests.helpers.refusals import refused

faiss = pytest.importorskip("faiss")


def blobs(num_blobs, rows_each, width=6, spread=0.05):
    """Unit rows around directions, blob by blob."""
    drawn = np.random.default_rng(1).standard_normal((num_blobs * rows_each, width)) * spread
    rows = np.repeat(unit_vectors(num_blobs, width), rows_each, axis=0) + drawn
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def reference(vectors, num_clusters, **options):
    """faiss called directly, with all necessary options."""
    options |= {"spherical": True, "max_points_per_centroid": 10**6, "min_points_per_centroid": 1}
    kmeans = faiss.Kmeans(vectors.shape[1], num_clusters, **options)
    kmeans.train(vectors)
    return kmeans


@pytest.mark.parametrize("num_iterations", [1, 7, 20, 25])
def test_runs_equal_the_best_of_three_of_faiss(num_iterations):
    vectors = unit_vectors(300, 8)
    expected = reference(vectors, 12, niter=num_iterations, nredo=3, seed=5)
    runs = [kmeans_run(vectors, 12, run, num_iterations, seed=5) for run in range(3)]
    assert len({run.objective for run in runs}) == 3
    found = max(runs, key=lambda run: run.objective)
    np.testing.assert_array_equal(found.centroids, expected.centroids)
    assert found.objective * 300 == pytest.approx(max(expected.obj), rel=1e-5)


def test_many_centroids_are_compared_in_groups_and_all_groups_change_nothing(monkeypatch):
    vectors = blobs(60, 40, spread=0.4)
    exact, near = kmeans_run(vectors, 120, num_iterations=5), neighbour_lists(vectors[:100], 5)
    for limit in ("MAX_COMPARED", "MAX_UNGROUPED"):
        monkeypatch.setattr(kmeans, limit, 50)
    monkeypatch.setattr(kmeans, "CENTROIDS_PER_GROUP", 10)
    monkeypatch.setattr(kmeans, "GROUP_PROBES", 12)
    compared, best = [], lists.Lists.best
    monkeypatch.setattr(lists.Lists, "best", lambda *args: (compared.append(args[2].shape[1]), best(*args))[1])
    every = kmeans_run(vectors, 120, num_iterations=5)
    np.testing.assert_allclose(every.centroids, exact.centroids, atol=1e-6)
    assert every.objective == pytest.approx(exact.objective, rel=1e-6)
    monkeypatch.setattr(kmeans, "GROUP_PROBES", 3)
    few = kmeans_run(vectors, 120, num_iterations=5)
    assert 0.99 * exact.objective < few.objective != exact.objective
    assert np.mean(neighbour_lists(vectors[:100], 5) == near) > 0.5
    assert compared == [12] * 5 + [3] * 5


@pytest.mark.parametrize(
    ("scores", "products", "block"), [(3 * 8000, 1 << 34, 4096), (1 << 27, 24 * 1100, 1024), (1, 1, 512)]
)
def test_progress_is_shown_within_an_iteration_and_blocks_change_nothing(scores, products, block, monkeypatch):
    vectors, shown = unit_vectors(10_000, 8), []
    whole = kmeans_run(vectors, 3, num_iterations=2)
    update = tqdm.update
    monkeypatch.setattr(tqdm, "update", lambda bar, count: (shown.append(count), update(bar, count))[1])
    monkeypatch.setattr(kmeans, "_BLOCK_SCORES", scores)
    monkeypatch.setattr(kmeans, "_BLOCK_PRODUCTS", products)
    blocks = kmeans_run(vectors, 3, num_iterations=2)
    num_full, rest = divmod(10_000, block)
    assert shown == ([block] * num_full + [rest]) * 2
    np.testing.assert_array_equal(blocks.centroids, whole.centroids)


def test_every_vector_is_used_where_faiss_uses_256_per_cluster():
    vectors = blobs(2, 600, spread=0.4)
    one = kmeans_run(vectors, 1, num_iterations=2)
    mean = vectors.sum(axis=0, dtype=np.float64)
    np.testing.assert_allclose(one.centroids[0], mean / np.linalg.norm(mean), atol=1e-6)
    alone = faiss.Kmeans(6, 1, niter=2, spherical=True, seed=0)
    alone.train(vectors)
    assert np.abs(alone.centroids - one.centroids).max() > 1e-4


@pytest.mark.parametrize(("value", "kind"), [(0.0, "zero"), (np.nan, "not finite"), (np.inf, "not finite")])
def test_an_invalid_vector_is_named_by_its_row(value, kind):
    vectors = unit_vectors(20)
    vectors[13] = value
    refused(InputError, f"vectors:13: the vector is {kind}", kmeans_run, vectors, 2)


@pytest.mark.parametrize(
    ("count", "num_neighbours", "width"), [(40, 5, 5), (40, 39, 39), (3, 32, 2), (2, 1, 1), (1, 4, 0)]
)
@pytest.mark.parametrize("block", [7, 1000])
def test_lists_contain_the_nearest_others_nearest_first(count, num_neighbours, width, block, monkeypatch):
    monkeypatch.setattr(kmeans, "_block_rows", lambda *_: block)
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


def test_ctrl_c_need_not_wait_for_a_long_product(monkeypatch):
    """Python ends at the next product, whose scores have a fixed number; all at once would be 3.2e9 multiplications."""
    vectors, sizes, product = unit_vectors(2048, 768), [], torch.Tensor.mm

    def measured(first, second):
        sizes.append(len(first) * second.numel())
        return product(first, second)

    monkeypatch.setattr(torch.Tensor, "mm", measured)
    kmeans_run(vectors, 2047, num_iterations=1)
    assert sum(sizes) >= 2048 * 2047 * 768
    assert max(sizes) < 2e9
