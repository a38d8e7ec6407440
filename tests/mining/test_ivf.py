"""The lists' search finds most of what the exact one finds, in the same order and with the same scores."""

import numpy as np
import pytest

from embeddings.common import InputError, OptionError
from embeddings.common.jobs import ArrayTask
from embeddings.mining import search as ivf
from embeddings.mining import search as knn
from embeddings.mining.search import ExactSearch, build_ivf, sample_rows
from tests.mining.vectors import shards, unit_vectors


def clustered(count, seed=0, width=16, centres=20):
    """Vectors around a few centres, as those of texts are."""
    centre = unit_vectors(centres, width)[np.random.default_rng(seed).integers(0, centres, count)]
    vectors = centre + 0.6 * unit_vectors(count, width, seed=seed + 1)
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def recall(found, exact):
    return np.mean([len(set(a) & set(b)) / len(b) for a, b in zip(found.tolist(), exact.tolist(), strict=True)])


def test_recall_at_10_rises_with_the_probes_and_reaches_all(tmp_path):
    documents, queries = shards(tmp_path / "documents", clustered(2000), 700), clustered(100, seed=5)
    exact = ExactSearch(documents).search(queries, 10)
    reached = []
    for num_probes in (1, 4, 16):
        search = build_ivf(documents, tmp_path / "ivf", num_probes=num_probes, num_lists=16)
        found = search.search(queries, 10)
        reached.append(recall(found.index_QK, exact.index_QK))
    assert reached[0] > 0.4
    assert reached[1] > 0.9
    np.testing.assert_array_equal(found.index_QK, exact.index_QK)
    np.testing.assert_array_equal(found.score_QK, exact.score_QK)


def test_tasks_and_tiles_change_nothing(tmp_path, monkeypatch):
    documents, queries = shards(tmp_path / "documents", clustered(500), 64), clustered(20, seed=5)
    whole = build_ivf(documents, tmp_path / "whole", num_probes=3, num_lists=10).search(queries, 5)
    for index in (1, 0):
        parts = build_ivf(documents, tmp_path / "parts", num_probes=3, num_lists=10, task=ArrayTask(index, 2))
    for name in ("centroids", "lists"):
        for path in (tmp_path / "whole" / name).glob("*.npy"):
            assert path.read_bytes() == (tmp_path / "parts" / name / path.name).read_bytes()
    monkeypatch.setattr(knn, "TILE_BYTES", 64 * 100)
    monkeypatch.setattr(knn, "QUERY_CHUNK", 7)
    found = parts.search(queries, 5)
    np.testing.assert_array_equal(found.index_QK, whole.index_QK)
    np.testing.assert_array_equal(found.score_QK, whole.score_QK)


def test_where_the_lists_hold_too_few_the_rest_is_minus_one(tmp_path):
    documents = shards(tmp_path / "documents", clustered(30), 30)
    found = build_ivf(documents, tmp_path / "ivf", num_probes=1, num_lists=10).search(clustered(5, seed=5), 20)
    missing = found.index_QK < 0
    assert missing.any()
    assert np.isneginf(found.score_QK[missing]).all()
    assert (np.diff(missing.astype(int), axis=1) >= 0).all()
    assert np.isfinite(found.score_QK[~missing]).all()


@pytest.mark.parametrize(("count", "lists"), [(10, 1), (200, 5), (2000, 51)])
def test_the_default_number_of_lists_suits_the_documents(count, lists, tmp_path):
    documents = shards(tmp_path / "documents", clustered(count), 512)
    search = build_ivf(documents, tmp_path / "ivf")
    assert len(search.centroid_CD) == lists
    assert search.num_probes == min(lists, ivf.PROBES)
    np.testing.assert_allclose(np.linalg.norm(search.centroid_CD, axis=1), 1, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"num_lists": 31}, "num_lists must lie in 1 … 30"),
        ({"num_lists": 4, "num_probes": 5}, "num_probes must lie in"),
    ],
)
def test_impossible_numbers_are_refused_before_anything_is_written(options, says, tmp_path):
    with pytest.raises(OptionError, match=says):
        build_ivf(shards(tmp_path / "documents", clustered(30), 8), tmp_path / "ivf", **options)
    assert not (tmp_path / "ivf").exists()


def test_a_vector_without_direction_is_named_before_the_training(tmp_path):
    vectors = clustered(30)
    vectors[9] = 0
    with pytest.raises(InputError, match=r"vectors-00001\.npy:1: the vector is zero"):
        build_ivf(shards(tmp_path / "documents", vectors, 8), tmp_path / "ivf", num_lists=4)


def test_a_vector_without_direction_is_named_even_if_it_is_in_no_sample(tmp_path):
    vectors = clustered(300)
    sampled = set(sample_rows(300, 1, 0).tolist())
    row = next(row for row in range(8, 300) if row not in sampled)
    vectors[row] = np.nan
    with pytest.raises(InputError, match=rf"vectors-{row // 8:05d}\.npy:{row % 8}: the vector is not finite"):
        build_ivf(shards(tmp_path / "documents", vectors, 8), tmp_path / "ivf", num_lists=1)
