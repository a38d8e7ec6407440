"""Clustering writes the same folder with any number of tasks and after kills."""

import json
import signal
import tracemalloc
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from embeddings.common import InputError, OptionError
from embeddings.common.jobs import ArrayTask
from embeddings.mining import clusters, kmeans
from embeddings.mining.clusters import ClusterSettings, VectorFeatures, cluster_pairs
from tests.data.cluster_folders import unit_vectors
from tests.helpers.forks import in_a_child
from tests.helpers.interrupts import interrupted_at
from tests.helpers.refusals import refused
from tests.mining.pair_sources import content, made_vectors, topic_of, topic_source

pytest.importorskip("faiss")
SETTINGS = ClusterSettings(num_clusters=5, num_iterations=4, num_runs=3, shard_size=16, seed=2)


@pytest.fixture
def source(tmp_path):
    return topic_source(tmp_path)


@pytest.fixture
def features(source, tmp_path):
    return VectorFeatures(made_vectors(tmp_path / "vectors", source))


def test_each_row_belongs_to_the_centroid_nearest_to_its_query_and_document(features, source, tmp_path):
    folder = cluster_pairs(features, source, tmp_path / "out", SETTINGS)
    assert (folder.num_rows, folder.num_clusters, folder.source_key) == (60, 5, source.key)
    features.learned = {}
    expected = (features.rows(np.arange(60)) @ folder.centroids.T).argmax(axis=1)
    ids = np.load(tmp_path / "out" / "cluster_ids.npy")
    assert ids.tolist() == expected.tolist()
    assert folder.neighbours.shape == (5, 4)
    assert sorted(content(tmp_path / "out")) == [
        "centroids.npy", "cluster_ids.npy", "manifest.json", "neighbours.npy", "offsets.npy", "rows_by_cluster.npy",
    ]  # fmt: skip
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["largest_cluster"] == np.bincount(ids).max()
    assert 0 < manifest["objective"] <= 1
    assert manifest["faiss"]


def test_both_orders_are_trained_on_and_the_best_run_is_kept(features, source, tmp_path, monkeypatch):
    trained, runs = [], []
    run = clusters.kmeans_run

    def noted(vectors, *args):
        trained.append(vectors)
        runs.append(run(vectors, *args))
        return runs[-1]

    monkeypatch.setattr(clusters, "kmeans_run", noted)
    folder = cluster_pairs(features, source, tmp_path / "out", SETTINGS)
    assert len({found.objective for found in runs}) == 3
    assert (folder.centroids == max(runs, key=lambda found: found.objective).centroids).all()
    assert (trained[0] == np.concatenate(features.both_orders(np.arange(60)))).all()
    assert trained[0] is trained[2]


def test_a_corpus_larger_than_the_memory_is_trained_on_a_sample_within_it(tmp_path, monkeypatch):
    monkeypatch.setattr(clusters, "_BLOCK", 512)
    source, documents = topic_source(tmp_path, 20_000), unit_vectors(20_001, 128, seed=1)
    made = made_vectors(tmp_path / "vectors", source, unit_vectors(20_000, 128), documents, shard_size=4096)
    features, bound = VectorFeatures(made), 8 * 2**20
    assert 4 * bound < 2 * 20_000 * 256 * 4
    settings = ClusterSettings(num_clusters=8, num_iterations=2, num_runs=1, memory_gib=bound / 2**30)
    tracemalloc.start()
    try:
        folder = cluster_pairs(features, source, tmp_path / "out", settings)
        # Some blocks of features are in memory beside the training rows.
        peak = tracemalloc.get_traced_memory()[1]
        assert bound / 2 < peak < 1.5 * bound
    finally:
        tracemalloc.stop()
    rows = json.loads((tmp_path / "out" / "manifest.json").read_text())["max_training_rows"]
    assert rows == (bound - 4 * 8 * 256 * 4) // (2 * (4 * 256 + 24))
    expected = (features.rows(np.arange(20_000)) @ folder.centroids.T).argmax(axis=1)
    assert (np.load(tmp_path / "out" / "cluster_ids.npy") == expected).mean() > 0.999


def test_a_sample_is_reported_and_part_of_the_manifest(features, source, tmp_path, caplog):
    settings = replace(SETTINGS, memory_gib=(4 * 5 * 16 * 4 + 20 * 2 * (4 * 16 + 24)) / 2**30)
    cluster_pairs(features, source, tmp_path / "whole", settings)
    assert "k-means is trained on 20 of 60 rows, 8 vectors per cluster, fewer than 39" in caplog.text
    with pytest.raises(InputError, match="field 'max_training_rows' is 20, expected None"):
        cluster_pairs(features, source, tmp_path / "whole", SETTINGS)


def test_many_rows_are_sampled_by_default_and_all_are_assigned(features, source, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(clusters, "MAX_FITTED_ROWS", 20)
    trained, run = [], clusters.kmeans_run
    monkeypatch.setattr(
        clusters, "kmeans_run", lambda vectors, *args: (trained.append(vectors), run(vectors, *args))[1]
    )
    settings = replace(SETTINGS, num_runs=1, vectors_per_cluster=9)
    folder = cluster_pairs(features, source, tmp_path / "sampled", settings)
    assert "k-means is trained on 23 of 60 rows" in caplog.text
    assert len(trained[0]) == 2 * 23
    expected = (features.rows(np.arange(60)) @ folder.centroids.T).argmax(axis=1)
    assert np.load(tmp_path / "sampled" / "cluster_ids.npy").tolist() == expected.tolist()
    # All rows where they are few, however they are asked for.
    for name, per_cluster, least in (("least", 1, 60), ("all", None, 20), ("bound", 24, 20)):
        monkeypatch.setattr(clusters, "MAX_FITTED_ROWS", least)
        cluster_pairs(features, source, tmp_path / name, replace(settings, vectors_per_cluster=per_cluster))
        assert len(trained[-1]) == 120
        assert content(tmp_path / name) == content(tmp_path / "least")


def test_the_default_sample_is_256_vectors_per_cluster_of_more_than_131072_rows():
    def rows(num_rows, **options):
        settings = ClusterSettings(**options)
        return settings.resolve_training_rows(num_rows, settings.resolve_num_clusters(num_rows), 64)

    assert [rows(131_072), rows(200_000), rows(1_000_000)] == [None, 131_072, 128 * 1954]
    assert rows(1_000_000, vectors_per_cluster=None) is None
    assert rows(1_000_000, cluster_size=128) is None


def test_the_memory_for_reddits_65_million_rows_is_as_documented():
    rows, width = 65_000_000, 1536
    k = ClusterSettings().resolve_num_clusters(rows)
    sampled = [
        ClusterSettings(memory_gib=gib, vectors_per_cluster=None).resolve_training_rows(rows, k, width)
        for gib in (16, 64, 749, 750)
    ]
    assert (k, sampled[0], sampled[1], sampled[3]) == (126_954, 1_139_741, 5_317_724, None)
    by_default = [ClusterSettings(memory_gib=gib).resolve_training_rows(rows, k, width) for gib in (64, 189, 190, 750)]
    assert (by_default[0], by_default[2:]) == (sampled[1], [128 * k, 128 * k])
    assert by_default[1] < 128 * k
    assert 64_000_000 < sampled[2] < rows
    assert [round(2 * few / k) for few in sampled[:2]] == [18, 84]


def test_topics_become_clusters(source, tmp_path):
    topics, noise = unit_vectors(3), 0.2 * unit_vectors(121, seed=3)
    # Documents are numbered by first appearance: that of row 0, the second one of all rows, that of row 1, …
    of_document = [topic_of(0), 0, *(topic_of(row) for row in range(1, 60))]
    queries = topics[[topic_of(row) for row in range(60)]] + noise[:60]
    documents = topics[of_document] + noise[60:]
    unit = (side / np.linalg.norm(side, axis=1, keepdims=True) for side in (queries, documents))
    features = VectorFeatures(made_vectors(tmp_path / "vectors", source, *unit))
    cluster_pairs(features, source, tmp_path / "out", ClusterSettings(num_clusters=3, num_iterations=20, shard_size=16))
    ids = np.load(tmp_path / "out" / "cluster_ids.npy")
    assert len({(topic_of(row), int(ids[row])) for row in range(60)}) == 3


@pytest.mark.parametrize(
    ("name", "call"),
    [
        *(("_save", 1), ("kmeans_run", 2), ("nearest_centroids", 3), ("neighbour_lists", 1)),
        *(("num_duplicates", 1), ("write_cluster_files", 1)),
    ],
)
def test_a_process_killed_anywhere_is_resumed_with_the_same_bytes(name, call, source, tmp_path):
    # A third of the rows fit in the memory.
    settings, vectors = replace(SETTINGS, memory_gib=2.3e-6), made_vectors(tmp_path / "vectors", source)
    go = partial(cluster_pairs, VectorFeatures(vectors, 6), source, settings=settings)
    go(tmp_path / "whole")

    def killed():
        setattr(clusters, name, interrupted_at(getattr(clusters, name), call, killed=True))
        go(tmp_path / "killed")

    assert in_a_child(killed) == -signal.SIGKILL
    refused(InputError, "'complete' is False", clusters.ClusterFolder, tmp_path / "killed")
    go(tmp_path / "killed")
    assert content(tmp_path / "killed") == content(tmp_path / "whole")


def test_tasks_of_an_array_make_the_folder_of_one_process(features, source, tmp_path):
    cluster_pairs(features, source, tmp_path / "whole", SETTINGS)
    found = [cluster_pairs(features, source, tmp_path / "parts", SETTINGS, ArrayTask(index, 3)) for index in (2, 0, 1)]
    assert [folder is None for folder in found] == [True, True, False]
    assert content(tmp_path / "parts") == content(tmp_path / "whole")


def test_other_options_or_another_source_are_refused_by_name(features, source, tmp_path):
    cluster_pairs(features, source, tmp_path / "out", SETTINGS)
    before = content(tmp_path / "out")
    with pytest.raises(InputError, match="field 'num_clusters' is 5, expected 6"):
        cluster_pairs(features, source, tmp_path / "out", ClusterSettings(num_clusters=6))
    reduced = VectorFeatures(made_vectors(tmp_path / "vectors", source), 6)
    refused(
        InputError, "field 'svd_dim' is None, expected 6", cluster_pairs, reduced, source, tmp_path / "out", SETTINGS
    )
    (tmp_path / "other").mkdir()
    other = topic_source(tmp_path / "other", 61)
    features = VectorFeatures(made_vectors(tmp_path / "other vectors", other))
    refused(InputError, "field 'source_key'", cluster_pairs, features, other, tmp_path / "out", SETTINGS)
    assert content(tmp_path / "out") == before


def test_k_follows_the_cluster_size_and_the_format_bounds_the_rows():
    assert [ClusterSettings().resolve_num_clusters(rows) for rows in (512, 513)] == [1, 2]
    assert ClusterSettings(cluster_size=1).resolve_num_clusters(7) == 7
    assert ClusterSettings(num_clusters=3).resolve_num_clusters(7) == 3
    refused(OptionError, "must have at most 4294967296 rows", ClusterSettings().resolve_num_clusters, 2**32 + 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_clusters": 61}, "num_clusters must not exceed the 60 rows, got 61"),
        ({"num_clusters": 0}, "num_clusters must be >= 1, got 0"),
        ({"num_iterations": 0}, "num_iterations must be >= 1, got 0"),
        ({"cluster_size": 0}, "cluster_size must be >= 1, got 0"),
        ({"shard_size": -1}, "shard_size must be >= 1"),
        ({"vectors_per_cluster": 0}, "vectors_per_cluster must be >= 1, got 0"),
        ({"memory_gib": 1e-6, "num_clusters": 50}, "memory_gib must be at least 0.1 for 50 clusters of width 16"),
    ],
)
def test_invalid_settings_are_refused_and_write_nothing(options, message, features, source, tmp_path):
    refused(OptionError, message, lambda: cluster_pairs(features, source, tmp_path / "out", ClusterSettings(**options)))
    assert not (tmp_path / "out").exists()


def test_equal_rows_are_reported(source, tmp_path, caplog):
    same = np.tile(unit_vectors(1), (61, 1))
    features = VectorFeatures(made_vectors(tmp_path / "same", source, same[:60], same))
    cluster_pairs(features, source, tmp_path / "out", ClusterSettings(num_clusters=10, num_iterations=2, num_runs=1))
    assert "of 10 clusters have no rows" in caplog.text
    assert "centroids are copies" in caplog.text


def test_the_centroids_are_indexed_once_a_shard(features, source, tmp_path, monkeypatch):
    monkeypatch.setattr(clusters, "_BLOCK", 5)
    indexed, index = [], kmeans._index
    monkeypatch.setattr(kmeans, "_index", lambda *given: (indexed.append(given), index(*given))[1])
    cluster_pairs(features, source, tmp_path / "out", SETTINGS)
    # In each iteration of three runs, for each of four shards, and for the neighbours.
    assert len(indexed) == 3 * 4 + 4 + 1
