"""k-means in torch equals a loop and faiss, in chunks and tiles of any size."""

import numpy as np
import pytest
import torch

from embeddings.common import OptionError
from embeddings.mining import ClusterSettings, torch_kmeans
from embeddings.mining.kmeans import check_gpu, kmeans_run, nearest_centroids, neighbour_lists
from embeddings.mining.torch_kmeans import DeviceCentroids, DeviceVectors, device_kmeans
from tests.data.cluster_folders import nearest_lists, unit_vectors
from tests.helpers.refusals import refused

faiss = pytest.importorskip("faiss")


def loop(vectors, centroids):
    """The sums, the sizes and the mean cosine of one assignment, vector by vector."""
    sums, sizes, total = np.zeros(centroids.shape), np.zeros(len(centroids), np.int64), 0.0
    for vector in vectors.astype(np.float64):
        cosines = [float(vector @ centroid) for centroid in centroids.astype(np.float64)]
        nearest = cosines.index(max(cosines))
        sums[nearest] += vector
        sizes[nearest] += 1
        total += max(cosines)
    return sums, sizes, total / len(vectors)


@pytest.fixture(params=[(10**6, 10**6, 10**6, None), (7, 4, 12, None), (7, 4, 12, 20), (64, 1, 5, 0)])
def cut(request, monkeypatch):
    """Set the sizes of the chunks, of the tiles of centroids and of scores, and the rows that stay on the device."""
    chunk, tile, scores, resident = request.param
    monkeypatch.setattr(torch_kmeans, "_CHUNK_ROWS", chunk)
    monkeypatch.setattr(torch_kmeans, "_TILE_CENTROIDS", tile)
    monkeypatch.setattr(torch_kmeans, "_TILE_SCORES", scores)
    if resident is not None:
        monkeypatch.setattr(DeviceVectors, "_rows_that_fit", lambda _: resident)


def test_a_round_equals_a_loop(cut):
    vectors, centroids, shown = unit_vectors(150, 8), unit_vectors(9, 8, seed=4), []
    centroids[6] = -unit_vectors(150, 8).mean(axis=0) / np.linalg.norm(unit_vectors(150, 8).mean(axis=0))
    rows = DeviceVectors(vectors, "cpu")
    sums, sizes, objective = loop(vectors, centroids)
    for _ in range(2):
        found_sums, found_sizes, found_objective = rows.round(centroids, shown.append)
        np.testing.assert_array_equal(found_sizes, sizes)
        np.testing.assert_allclose(found_sums, sums, atol=1e-5)
        assert found_objective == pytest.approx(objective, abs=1e-6)
    assert sum(shown) == 2 * len(vectors)


def test_the_first_of_equal_centroids_is_the_nearest(cut):
    centroids = np.repeat(unit_vectors(4, 8), 3, axis=0)
    _, sizes, _ = DeviceVectors(unit_vectors(60, 8, seed=3), "cpu").round(centroids, int)
    assert sizes.reshape(4, 3)[:, 1:].sum() == 0
    assert sizes.sum() == 60


@pytest.mark.parametrize(("num_clusters", "num_iterations"), [(12, 1), (12, 25), (60, 10)])
def test_a_run_reaches_the_objective_of_faiss_from_the_same_start(num_clusters, num_iterations, cut):
    vectors = unit_vectors(300, 8)
    order = np.empty(300, np.int32)
    faiss.rand_perm(faiss.swig_ptr(order), 300, 6)
    start = vectors[order[:num_clusters]]
    centroids, objective = device_kmeans(vectors, start, num_iterations, "cpu", "k-means")
    options = {"spherical": True, "max_points_per_centroid": 10**6, "min_points_per_centroid": 1}
    expected = faiss.Kmeans(8, num_clusters, niter=num_iterations, seed=5, **options)
    expected.train(vectors)
    assert objective == pytest.approx(expected.obj[-1] / 300, abs=1e-6)
    np.testing.assert_allclose(centroids, expected.centroids, atol=2e-6)


def test_an_empty_cluster_gets_half_of_the_largest():
    """As with faiss: more clusters than distinct vectors."""
    vectors = np.repeat(unit_vectors(5, 8), 20, axis=0)
    start = np.concatenate([vectors[::20], vectors[:3]])
    centroids, objective = device_kmeans(vectors, start, 3, "cpu", "k-means")
    assert np.isfinite(centroids).all()
    np.testing.assert_allclose(np.linalg.norm(centroids, axis=1), 1, atol=1e-6)
    assert objective == pytest.approx(1.0, abs=1e-6)


def test_two_runs_are_equal_to_the_bit(cut):
    vectors = unit_vectors(300, 8)
    first, second = (device_kmeans(vectors, vectors[:12], 8, "cpu", "k-means") for _ in range(2))
    np.testing.assert_array_equal(first[0], second[0])
    assert first[1] == second[1]


@pytest.mark.parametrize(("count", "width"), [(40, 5), (3, 2)])
def test_the_library_searches_centroids_in_torch_as_with_faiss(count, width, cut, monkeypatch):
    monkeypatch.setattr(torch_kmeans, "DeviceCentroids", lambda centroids, _: DeviceCentroids(centroids, "cpu"))
    centroids, vectors = unit_vectors(count), unit_vectors(90, seed=7)
    assert nearest_centroids([vectors], centroids, "torch").tolist() == nearest_centroids([vectors], centroids).tolist()
    assert neighbour_lists(centroids, width, "torch").tolist() == nearest_lists(centroids, width).tolist()


def test_a_run_on_a_gpu_starts_as_on_a_cpu(monkeypatch):
    devices = []

    def on_cpu(vectors, centroids, num_iterations, device, title):
        devices.append(device)
        return device_kmeans(vectors, centroids, num_iterations, "cpu", title)

    monkeypatch.setattr(torch_kmeans, "device_kmeans", on_cpu)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    vectors = unit_vectors(300, 8)
    found, expected = (kmeans_run(vectors, 12, num_iterations=20, seed=3, gpu=gpu) for gpu in ("torch", None))
    assert devices == ["cuda"]
    assert found.objective == pytest.approx(expected.objective, abs=1e-6)
    np.testing.assert_allclose(found.centroids, expected.centroids, atol=2e-6)


def test_a_library_without_a_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refused(OptionError, "gpu needs a CUDA device", check_gpu, "torch")
    refused(OptionError, "gpu_library has no effect on a CPU", ClusterSettings, gpu_library="faiss")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("resident", [None, 0])
def test_a_gpu_assigns_by_products_in_float16_and_sums_in_float32(resident, monkeypatch):
    vectors, centroids = unit_vectors(3000, 64), unit_vectors(40, 64, seed=4)
    expected = DeviceVectors(vectors, "cpu").round(centroids, int)
    if resident is not None:
        monkeypatch.setattr(DeviceVectors, "_rows_that_fit", lambda _: resident)
    found = DeviceVectors(vectors, "cuda").round(centroids, int)
    assert np.abs(found[1] - expected[1]).sum() <= 30
    assert found[2] == pytest.approx(expected[2], abs=1e-5)
    again = DeviceVectors(vectors, "cuda").round(centroids, int)
    np.testing.assert_array_equal(found[0], again[0])
    assert nearest_centroids([vectors], centroids, "torch").tolist() == nearest_centroids([vectors], centroids).tolist()
