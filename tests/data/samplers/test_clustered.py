"""Clustered batches: the folder of clusters, separate blocks per rank, tours, packing."""

from itertools import chain

import numpy as np
import pytest

from embeddings.common import BatchNeeds, InputError, OptionError
from embeddings.data.samplers import clustered
from embeddings.data.samplers.base import SourceIdentity
from embeddings.data.samplers.clustered import (
    ClusteredBatchSampler,
    ClusterFolder,
    PackedClusters,
    nearest_order,
    random_order,
    write_cluster_files,
)
from tests.data.cluster_folders import nearest_lists, unit_vectors, write_clusters
from tests.data.killed_runs import Ledger, configured
from tests.data.rows import placed, rows_of
from tests.helpers.manifests import rewrite_manifest
from tests.helpers.refusals import refused

SIZES = {"first": 90, "second": 31, "third": 12}
NUM_CLUSTERS = {"first": 12, "second": 5, "third": 1}
NAMES = list(SIZES)


def cluster_of(name):
    """The cluster of each row of a source; cluster 3 of the first is empty."""
    ids = np.random.default_rng(len(name)).integers(0, NUM_CLUSTERS[name], SIZES[name])
    return np.where(ids == 3, 0, ids) if name == "first" else ids


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clusters")
    for name in NAMES:
        write_clusters(folder / name, cluster_of(name).tolist(), NUM_CLUSTERS[name], f"key of {name}")
    return folder


@pytest.fixture
def make(root):
    def maker(batch_size=4, **options):
        names = options.pop("names", NAMES)
        sizes = options.pop("sizes", [SIZES[name] for name in names])
        sampler = ClusteredBatchSampler(sizes, batch_size, **{"clusters": str(root), **options})
        sampler.identify([SourceIdentity(name, f"key of {name}") for name in names])
        return sampler

    return maker


def source_of(row):
    return NAMES[int(np.searchsorted(np.cumsum(list(SIZES.values())), row, side="right"))]


@pytest.mark.parametrize("cuts", [[], [1], [7], [3, 4, 11], [0, 12]])
def test_the_files_contain_the_rows_of_each_cluster_in_order_for_any_shards(cuts, tmp_path):
    ids = np.array([2, 0, 2, 4, 0, 2, 1, 1, 4, 2, 0, 4], dtype=np.int32)
    centroids = unit_vectors(5)
    fields = write_cluster_files(tmp_path, np.split(ids, cuts), centroids, nearest_lists(centroids, 3))
    loaded = {path.stem: np.load(path) for path in tmp_path.iterdir()}
    assert loaded["cluster_ids"].tolist() == ids.tolist()
    assert loaded["offsets"].tolist() == [0, 3, 5, 9, 9, 12]
    rows = loaded["rows_by_cluster"]
    assert rows.dtype == np.uint32
    assert rows.tolist() == [row for cluster in range(5) for row in range(12) if ids[row] == cluster]
    assert write_cluster_files(tmp_path, [ids], centroids, nearest_lists(centroids, 3)) == fields


def test_a_folder_is_read_back_and_its_key_depends_on_its_content(tmp_path):
    folder = write_clusters(tmp_path / "clusters", [1, 0, 1, 1], 3)
    assert (folder.num_rows, folder.num_clusters, folder.source_key) == (4, 3, "key")
    assert isinstance(folder.rows_by_cluster, np.memmap)
    assert (folder.centroids.shape, folder.neighbours.shape) == ((3, 8), (3, 2))
    same, other = write_clusters(tmp_path / "same", [1, 0, 1, 1], 3), write_clusters(tmp_path / "c", [1, 1, 0, 1], 3)
    assert folder.key == same.key != other.key


@pytest.mark.parametrize("name", ["rows_by_cluster.npy", "offsets.npy", "centroids.npy", "neighbours.npy"])
def test_a_damaged_missing_or_foreign_folder_is_named_in_one_line(name, tmp_path):
    path = write_clusters(tmp_path / "clusters", [1, 0, 1, 1, 2, 2, 0], 3).path / name
    content = path.read_bytes()
    for damaged in (content[:-3], b"x" * len(content), content[:-1] + bytes([content[-1] ^ 1])):
        path.write_bytes(damaged)
        refused(InputError, f"{name}: is damaged.* make the clusters again", ClusterFolder, path.parent)
    path.unlink()
    refused(InputError, f"{name}: is missing", ClusterFolder, path.parent)
    rewrite_manifest(path.with_name("manifest.json"), complete=False)
    refused(InputError, "field 'complete'", ClusterFolder, path.parent)
    refused(InputError, "no manifest", ClusterFolder, tmp_path)


OWN = {"across_ranks": "own_blocks"}


@pytest.mark.parametrize("order", ["nearest", "random"])
@pytest.mark.parametrize("epoch", [0, 1, 5])
def test_with_own_blocks_ranks_take_the_blocks_of_one_process_in_turn(make, order, epoch):
    """The blocks of one process with the batch size of a rank are distributed over the ranks."""
    blocks = rows_of(make(4, order=order), epoch)
    ranks = [rows_of(placed(make(4, order=order, **OWN), rank, 3), epoch) for rank in range(3)]
    assert len(blocks) == 90 // 4 + 31 // 4 + 12 // 4
    assert list(chain(*zip(*ranks, strict=True))) == blocks[: len(blocks) // 3 * 3]
    assert len(placed(make(4, **OWN), 0, 3)) == len(ranks[0]) == len(blocks) // 3
    seen = [set(chain(*rank)) for rank in ranks]
    assert sum(map(len, seen)) == len(set.union(*seen)) == 4 * 3 * len(ranks[0])
    assert all(len({source_of(row) for row in batch}) == 1 for rank in ranks for batch in rank)
    mixed = [{source_of(row) for rank in ranks for row in rank[step]} for step in range(len(ranks[0]))]
    assert max(map(len, mixed)) > 1


def test_a_plan_depends_on_its_clusters_and_blocks(make, tmp_path):
    first = placed(make(4, **OWN), 0, 3).plan_fields()
    others = [make(12), placed(make(4), 0, 3), placed(make(6, **OWN), 0, 2)]
    for other in others:
        refused(OptionError, "to resume in the middle of its plan", other.check_same_plan, first)
    assert placed(make(2), 0, 2).plan_fields() == make(4).plan_fields() != make(4, order="random").plan_fields()
    write_clusters(tmp_path / "first", cluster_of("first")[::-1].tolist(), 12, "key of first")
    keys = [make(names=["first"], clusters=root).plan_fields()["clusters"] for root in (str(tmp_path), make().clusters)]
    assert keys[0] != keys[1]


def test_a_source_smaller_than_a_block_is_left_out_and_named(make):
    sampler = placed(make(5), 0, 3)
    assert sampler.remarks() == ["sources with fewer rows than a batch of 15 are not used: third (12)"]
    assert {source_of(row) for batch in rows_of(sampler) for row in batch} == {"first", "second"}
    own = placed(make(5, **OWN), 0, 3)
    assert own.remarks() == []
    assert "third" in {source_of(row) for rank in range(3) for row in chain(*rows_of(placed(make(5, **OWN), rank, 3)))}


def test_sources_never_share_a_batch_their_batches_are_mixed_and_a_new_size_is_packed_again(make):
    sampler = make(6)
    rows_of(sampler)
    sampler.batch_size = 3
    batches = rows_of(sampler)
    assert batches == rows_of(make(3))
    names = [name for (name,) in ({source_of(row) for row in batch} for batch in batches)]
    assert set(names) == set(NAMES)
    assert names != sorted(names)
    assert names[:10] != ["first"] * 10


def test_batches_of_a_tour_have_clusters_closer_to_each_other_than_by_chance(tmp_path):
    ids = np.random.default_rng(0).integers(0, 200, 2000)
    folder = write_clusters(tmp_path / "only", ids.tolist(), 200, num_neighbours=16)
    spread = {}
    for order in ("nearest", "random"):
        sampler = ClusteredBatchSampler([2000], 50, clusters={"only": str(tmp_path / "only")}, order=order)
        sampler.identify([SourceIdentity("only", "key")])
        means = [folder.centroids[ids[batch]].mean(0) for batch in rows_of(sampler)]
        spread[order] = np.linalg.norm(means, axis=1).mean()
    assert spread["nearest"] > 1.2 * spread["random"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 91}, r"data\.batch_size must not exceed the 90 rows of the largest source, got 91; lower it"),
        ({"weights": [1, 2, 1]}, "cannot take effect, because every row is used once"),
        ({"clusters": {"first": "a", "second": "b"}}, "must name the clusters of source 'third'"),
    ],
)
def test_invalid_options_are_refused_in_one_line(make, options, message):
    refused(OptionError, message, lambda: len(make(**options)))


def test_a_batch_larger_than_the_sources_of_all_ranks_is_refused(make):
    says = r"largest source \(batch_size x 2 ranks\), got 46"
    refused(OptionError, says, len, placed(make(46), 0, 2))
    says = r"must leave a block for each of 2 ranks, got 46; lower it, or set across_ranks: one_block"
    refused(OptionError, says, len, placed(make(46, **OWN), 0, 2))


def test_clusters_are_found_by_name_and_those_of_another_data_set_are_refused(make, root, tmp_path, monkeypatch):
    monkeypatch.setenv("CLUSTER_ROOT", str(root))
    named = {name: f"${{CLUSTER_ROOT}}/{name}" for name in reversed(NAMES)}
    assert list(make(clusters=named)) == list(make(clusters="$CLUSTER_ROOT")) == list(make())
    other = {name: str(root / ("first" if name == "second" else name)) for name in NAMES}
    refused(InputError, "other data than source 'second' has now; run `cluster`", make, clusters=other)
    says = "clusters have 90 rows, but source 'first' has 89; leave out max_rows"
    refused(InputError, says, make, sizes=[89, 31, 12])
    refused(InputError, "no manifest", make, clusters=str(tmp_path))
    says = "the environment variable NOT_SET_ANYWHERE is not set"
    refused(InputError, says, make, clusters="$NOT_SET_ANYWHERE/clusters")
    # They are checked before the sources are read.
    sampler = ClusteredBatchSampler([90, 31, 12], 4, clusters=str(root))
    sampler.check_sources(NAMES)
    refused(InputError, r"fourth.manifest\.json: this output has no", sampler.check_sources, [*NAMES, "fourth"])
    sampler.clusters = {"first": str(root / "first")}
    refused(OptionError, "must name the clusters of source 'second'", sampler.check_sources, NAMES)


@pytest.mark.parametrize("gathers", [True, False])
def test_the_blocks_of_ranks_depend_on_whether_the_module_gathers_candidates(root, gathers):
    sampler = {"class_path": "embeddings.data.ClusteredBatchSampler", "init_args": {"clusters": str(root)}}
    data = configured(sources=[{"name": name, "path": "none"} for name in NAMES], batch_size=4, sampler=sampler)
    module = Ledger(rows_of=None)
    module.batch_needs = BatchNeeds(gathers_candidates=gathers)
    plan = placed(data._make_plan(list(SIZES.values()), module), 1, 2)
    assert len(plan) == (11 + 3 + 1 if gathers else (22 + 7 + 3) // 2)


def exact_tour(centroids, start):
    """The greedy tour that compares every cluster with all unvisited ones."""
    visited, tour = np.zeros(len(centroids), dtype=bool), [start]
    while len(tour) < len(centroids):
        visited[tour[-1]] = True
        tour.append(int(np.where(visited, -np.inf, centroids @ centroids[tour[-1]]).argmax()))
    return tour


def tour_length(centroids, order):
    return float(np.linalg.norm(np.diff(centroids[order], axis=0), axis=1).sum())


def nested_vectors(count, width):
    """Unit vectors in clusters of clusters, like topics."""
    draw = np.random.default_rng(0)
    tops = draw.standard_normal((count // 200, width))
    centres = tops[draw.integers(0, len(tops), count // 10)] + 0.6 * draw.standard_normal((count // 10, width))
    drawn = centres[draw.integers(0, len(centres), count)] + 0.4 * draw.standard_normal((count, width))
    return np.asarray(drawn / np.linalg.norm(drawn, axis=1, keepdims=True), dtype=np.float32)


@pytest.mark.parametrize("num_clusters", [1, 2, 3, 50])
def test_a_tour_visits_each_cluster_once(num_clusters):
    centroids = unit_vectors(num_clusters)
    tours = [random_order(num_clusters, key=7)]
    for num_neighbours in (1, 3, 49):
        tours.append(nearest_order(centroids, nearest_lists(centroids, min(num_neighbours, num_clusters - 1)), key=7))
    for order in tours:
        assert order.dtype == np.int32
        assert sorted(order) == list(range(num_clusters))


def test_the_tour_is_exact_with_all_neighbours_listed_or_sampled_and_otherwise_little_longer():
    angles = np.linspace(0.0, 1.5, 40)
    line = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    # On a line the second search finds the next cluster, or else the sample contains all unvisited ones.
    for centroids, num_neighbours in ((unit_vectors(60), 59), (line, 2)):
        order = nearest_order(centroids, nearest_lists(centroids, num_neighbours), key=3)
        assert order.tolist() == exact_tour(centroids, int(order[0]))
    centroids = nested_vectors(2000, 32)
    lists, by_chance = nearest_lists(centroids, 32), tour_length(centroids, random_order(2000, 0))
    for num_neighbours, bound in ((32, 1.003), (16, 1.006), (8, 1.015)):
        order = nearest_order(centroids, np.ascontiguousarray(lists[:, :num_neighbours]), key=0)
        shortest = tour_length(centroids, exact_tour(centroids, int(order[0])))
        assert by_chance > 2 * shortest
        assert tour_length(centroids, order) < bound * shortest


def test_products_are_exact_integers_in_any_order_of_summation():
    centroids = unit_vectors(64, width=1024)
    rounded, shuffled = clustered._rounded(centroids), np.random.default_rng(0).permutation(1024)
    products = rounded @ rounded[0]
    assert (products == np.rint(products)).all()
    assert (products == rounded[:, shuffled] @ rounded[0, shuffled]).all()
    np.testing.assert_allclose(products / 4096**2, centroids @ centroids[0], atol=1e-3)


def packed(sizes, batch_size, key=0, order=None):
    """Row r of cluster c is 1000 c + r."""
    rows = np.concatenate([1000 * cluster + np.arange(size) for cluster, size in enumerate(sizes)])
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    chosen = random_order(len(sizes), key) if order is None else np.array(order, dtype=np.int32)
    return PackedClusters(rows.astype(np.uint32), offsets.astype(np.int64), chosen, batch_size, key)


def batches_of(clusters):
    return [clusters.batch(number).tolist() for number in range(clusters.num_batches)]


@pytest.mark.parametrize("sizes", [[10], [1] * 10, [4, 0, 1, 37, 0, 0, 9, 2], [0, 5, 0], [64, 64]])
@pytest.mark.parametrize("batch_size", [1, 2, 5])
@pytest.mark.parametrize("longest_sorted", [3, 1000])
def test_each_row_is_in_one_batch_or_in_the_remainder(sizes, batch_size, longest_sorted, monkeypatch):
    monkeypatch.setattr(clustered, "_MAX_SORTED_ROWS", longest_sorted)
    for key in range(3):
        clusters = packed(sizes, batch_size, key)
        batches = batches_of(clusters)
        assert [len(batch) for batch in batches] == [batch_size] * (sum(sizes) // batch_size)
        rows = list(chain(*batches))
        assert len(set(rows)) == len(rows)
        assert set(rows) <= {1000 * cluster + row for cluster, size in enumerate(sizes) for row in range(size)}


def test_clusters_follow_the_order_of_the_tour_and_a_large_one_is_split_at_random_rows():
    first, second = batches_of(packed([2, 3, 1, 2], batch_size=4, order=[2, 1, 3, 0]))
    assert sorted(first) == [1000, 1001, 1002, 2000]
    assert sorted(second) == [0, 1, 3000, 3001]
    assert [row // 1000 for row in first + second] == [2, 1, 1, 1, 3, 3, 0, 0]
    of_first = set()
    for key in range(12):
        first, second = map(sorted, batches_of(packed([6, 2], batch_size=4, key=key, order=[0, 1])))
        assert all(row < 1000 for row in first)
        assert second[2:] == [1000, 1001]
        of_first.add(tuple(first))
    assert len(of_first) > 5


def test_the_rows_left_out_are_few_and_differ_from_key_to_key():
    everything = {1000 * cluster + row for cluster in range(7) for row in range(5)}
    left_out = [frozenset(everything - set(chain(*batches_of(packed([5] * 7, 8, key, range(7)))))) for key in range(20)]
    assert {len(rows) for rows in left_out} == {3}
    assert len(set(left_out)) > 5
    assert len(frozenset.union(*left_out)) > 9


def test_rows_above_two_to_the_thirty_one_stay_positive():
    rows = np.array([2**32 - 1, 2**31], dtype=np.uint32)
    batch = PackedClusters(rows, np.array([0, 2]), np.zeros(1, dtype=np.int32), 2, 0).batch(0)
    assert sorted(batch.tolist()) == [2**31, 2**32 - 1]
