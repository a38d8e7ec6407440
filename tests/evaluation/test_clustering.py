"""Clusters agree with labels where the vectors do."""

import numpy as np
import pytest

from embeddings.evaluation.clustering import kmeans_v_measure


def test_clusters_far_apart_are_found_whatever_their_names():
    labels = np.repeat(["b", "a"], 20)
    vectors = np.repeat(np.array([[1.0, 0.0], [0.0, 1.0]], np.float32), 20, axis=0)
    vectors += 0.01 * np.random.default_rng(0).normal(size=vectors.shape).astype(np.float32)
    assert kmeans_v_measure(vectors, labels) == {"v_measure": pytest.approx(1.0), "v_measure_std": pytest.approx(0.0)}


def test_labels_that_have_nothing_to_do_with_the_vectors_score_near_zero_and_the_same_each_time():
    generator = np.random.default_rng(0)
    vectors, labels = generator.normal(size=(200, 4)).astype(np.float32), generator.integers(0, 4, 200).astype(str)
    first = kmeans_v_measure(vectors, labels, seed=3)
    assert first == kmeans_v_measure(vectors, labels, seed=3)
    assert first != kmeans_v_measure(vectors, labels, seed=4)
    assert 0 <= first["v_measure"] < 0.1
    assert first["v_measure_std"] > 0


def test_the_mean_is_over_the_starts():
    generator = np.random.default_rng(0)
    vectors, labels = generator.normal(size=(60, 4)).astype(np.float32), generator.integers(0, 4, 60).astype(str)
    one = kmeans_v_measure(vectors, labels, num_runs=1)
    assert one["v_measure_std"] == 0.0
    assert one["v_measure"] != kmeans_v_measure(vectors, labels, num_runs=2)["v_measure"]
