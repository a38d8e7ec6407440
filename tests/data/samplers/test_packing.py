"""Tours that visit each cluster once, close to the exact one, and batches that hold each row once."""

import tracemalloc
from collections import Counter
from itertools import chain

import numpy as np
import pytest
from numpy.typing import NDArray

from embeddings.data.samplers import clustered
from embeddings.data.samplers.clustered import PackedClusters, nearest_order, random_order
from tests.data.cluster_folders import nearest_lists, unit_vectors


def exact_tour(centroids: NDArray[np.float32], start: int) -> list[int]:
    """The greedy tour, every cluster compared with all that are left."""
    visited, tour = np.zeros(len(centroids), dtype=bool), [start]
    while len(tour) < len(centroids):
        visited[tour[-1]] = True
        tour.append(int(np.where(visited, -np.inf, centroids @ centroids[tour[-1]]).argmax()))
    return tour


def tour_length(centroids: NDArray[np.float32], order: NDArray[np.int32] | list[int]) -> float:
    return float(np.linalg.norm(np.diff(centroids[order], axis=0), axis=1).sum())


def nested_vectors(count: int, width: int) -> NDArray[np.float32]:
    """Directions around centres around centres, as topics lie."""
    draw = np.random.default_rng(0)
    tops = draw.standard_normal((count // 200, width))
    centres = tops[draw.integers(0, len(tops), count // 10)] + 0.6 * draw.standard_normal((count // 10, width))
    drawn = centres[draw.integers(0, len(centres), count)] + 0.4 * draw.standard_normal((count, width))
    return np.asarray(drawn / np.linalg.norm(drawn, axis=1, keepdims=True), dtype=np.float32)


@pytest.mark.parametrize("num_clusters", [1, 2, 3, 50])
@pytest.mark.parametrize("num_neighbours", [1, 3, 49])
def test_a_tour_visits_each_cluster_once(num_clusters: int, num_neighbours: int) -> None:
    centroids = unit_vectors(num_clusters)
    lists = nearest_lists(centroids, min(num_neighbours, num_clusters - 1))
    for order in (nearest_order(centroids, lists, key=7), random_order(num_clusters, key=7)):
        assert order.dtype == np.int32
        assert sorted(order) == list(range(num_clusters))


@pytest.fixture(scope="module")
def topics() -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """Centroids and their 32 nearest each."""
    centroids = nested_vectors(2000, 32)
    return centroids, nearest_lists(centroids, 32)


def test_with_every_neighbour_listed_the_tour_is_the_exact_one() -> None:
    centroids = unit_vectors(60)
    order = nearest_order(centroids, nearest_lists(centroids, 59), key=1)
    assert order.tolist() == exact_tour(centroids, int(order[0]))


def test_where_the_sample_holds_all_that_are_left_short_lists_cost_nothing() -> None:
    """On a line of clusters the second look finds the next one or there is none near."""
    angles = np.linspace(0.0, 1.5, 40)
    centroids = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    order = nearest_order(centroids, nearest_lists(centroids, 2), key=3)
    assert order.tolist() == exact_tour(centroids, int(order[0]))


@pytest.mark.parametrize(("num_neighbours", "bound"), [(32, 1.003), (16, 1.006), (8, 1.015)])
def test_the_tour_is_hardly_longer_than_the_exact_greedy_one(
    num_neighbours: int, bound: float, topics: tuple[NDArray[np.float32], NDArray[np.int32]]
) -> None:
    centroids, lists = topics
    order = nearest_order(centroids, np.ascontiguousarray(lists[:, :num_neighbours]), key=0)
    length, shortest = (tour_length(centroids, tour) for tour in (order, exact_tour(centroids, int(order[0]))))
    by_chance = tour_length(centroids, random_order(2000, 0))
    assert by_chance > 2 * shortest
    assert length < bound * shortest


def test_a_sample_of_what_is_left_does_where_the_lists_lead_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two clusters list only each other, so nearly every step samples."""
    monkeypatch.setattr(clustered, "SAMPLE", 8)
    centroids = unit_vectors(200)
    pairs = (np.arange(200, dtype=np.int32) ^ 1)[:, None]
    order = nearest_order(centroids, pairs, key=5)
    assert sorted(order) == list(range(200))
    assert tour_length(centroids, order) < 0.9 * tour_length(centroids, random_order(200, 5))


def test_keys_decide_where_a_tour_starts_and_equal_keys_agree() -> None:
    centroids = unit_vectors(100)
    lists = nearest_lists(centroids, 4)
    starts = {int(nearest_order(centroids, lists, key)[0]) for key in range(20)}
    assert len(starts) > 10
    assert nearest_order(centroids, lists, 3).tolist() == nearest_order(centroids, lists, 3).tolist()
    assert random_order(100, 3).tolist() == random_order(100, 3).tolist() != random_order(100, 4).tolist()


def test_products_are_whole_numbers_that_no_order_of_addition_changes() -> None:
    centroids = unit_vectors(64, width=1024)
    products = clustered._products(centroids, np.arange(64, dtype=np.int32), 0)
    shuffled = np.random.default_rng(0).permutation(1024)
    assert (products == np.rint(products)).all()
    assert (products == clustered._products(centroids[:, shuffled], np.arange(64, dtype=np.int32), 0)).all()
    np.testing.assert_allclose(products / 4096**2, centroids @ centroids[0], atol=1e-3)


def packed(sizes: list[int], batch_size: int, key: int = 0, order: list[int] | None = None) -> PackedClusters:
    """Row r of cluster c is 1000 c + r."""
    rows = np.concatenate([1000 * cluster + np.arange(size) for cluster, size in enumerate(sizes)])
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    chosen = random_order(len(sizes), key) if order is None else np.array(order, dtype=np.int32)
    return PackedClusters(rows.astype(np.uint32), offsets.astype(np.int64), chosen, batch_size, key)


def batches_of(clusters: PackedClusters) -> list[list[int]]:
    return [clusters.batch(number).tolist() for number in range(clusters.num_batches)]


@pytest.mark.parametrize("sizes", [[10], [1] * 10, [4, 0, 1, 37, 0, 0, 9, 2], [0, 5, 0], [64, 64]])
@pytest.mark.parametrize("batch_size", [1, 2, 5])
@pytest.mark.parametrize("longest_sorted", [3, 1000])
def test_each_row_is_in_one_batch_or_in_the_remainder(
    sizes: list[int], batch_size: int, longest_sorted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clustered, "_SORTED", longest_sorted)
    for key in range(3):
        clusters = packed(sizes, batch_size, key)
        batches = batches_of(clusters)
        assert [len(batch) for batch in batches] == [batch_size] * (sum(sizes) // batch_size)
        rows = list(chain(*batches))
        assert len(set(rows)) == len(rows)
        assert set(rows) <= {1000 * cluster + row for cluster, size in enumerate(sizes) for row in range(size)}


def test_a_batch_of_whole_clusters_is_what_a_reader_expects() -> None:
    clusters = packed([2, 3, 1, 2], batch_size=4, order=[2, 1, 3, 0])
    first, second = batches_of(clusters)
    assert sorted(first) == [1000, 1001, 1002, 2000]
    assert sorted(second) == [0, 1, 3000, 3001]


def test_a_big_cluster_is_split_at_random_rows_and_a_small_one_shares() -> None:
    splits = [
        [sorted(batch) for batch in batches_of(packed([6, 2], batch_size=4, key=key, order=[0, 1]))]
        for key in range(12)
    ]
    for first, second in splits:
        assert all(row < 1000 for row in first)
        assert second[2:] == [1000, 1001]
    assert len({tuple(first) for first, _ in splits}) > 5


def test_clusters_in_a_batch_follow_each_other_in_the_order() -> None:
    sizes = np.random.default_rng(0).integers(0, 9, 300).tolist()
    order = random_order(300, 1).tolist()
    clusters = packed(sizes, batch_size=32, key=1, order=order)
    filled = [cluster for cluster in order if sizes[cluster]]
    for batch in batches_of(clusters):
        places = sorted({filled.index(row // 1000) for row in batch})
        assert places == list(range(places[0], places[-1] + 1))
        whole = Counter(row // 1000 for row in batch)
        assert all(whole[filled[place]] == sizes[filled[place]] for place in places[1:-1])


def test_the_rows_left_out_are_few_and_differ_from_key_to_key() -> None:
    sizes = [5] * 7
    everything = {1000 * cluster + row for cluster in range(7) for row in range(5)}
    order = list(range(7))
    left_out = [frozenset(everything - set(chain(*batches_of(packed(sizes, 8, key, order))))) for key in range(20)]
    assert {len(rows) for rows in left_out} == {3}
    assert len(set(left_out)) > 5
    assert len(set.union(*(set(rows) for rows in left_out))) > 9


def test_rows_of_a_batch_come_cluster_after_cluster() -> None:
    batch = packed([4, 3, 5], 12, order=[2, 0, 1]).batch(0)
    assert [row // 1000 for row in batch.tolist()] == [2] * 5 + [0] * 4 + [1] * 3


def test_rows_past_two_to_the_thirty_first_stay_positive() -> None:
    rows = np.array([2**32 - 1, 2**31], dtype=np.uint32)
    batch = PackedClusters(rows, np.array([0, 2]), np.zeros(1, dtype=np.int32), 2, 0).batch(0)
    assert sorted(batch.tolist()) == [2**31, 2**32 - 1]


def test_memory_grows_with_the_clusters_and_not_with_the_rows() -> None:
    num_rows, offsets = 2_000_000, np.arange(0, 2_000_001, 2000)
    rows = np.broadcast_to(np.uint32(7), num_rows)
    tracemalloc.start()
    clusters = PackedClusters(rows, offsets, random_order(1000, 0), 256, 0)
    clusters.batch(3000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200_000
