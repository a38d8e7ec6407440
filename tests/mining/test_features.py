"""Features are two concatenated vectors in either order, at unit length, optionally reduced by an SVD."""

import numpy as np
import pytest

from embeddings.common import InputError, OptionError
from embeddings.mining import clusters as features
from embeddings.mining.clusters import VectorFeatures, unit_features
from tests.data.cluster_folders import unit_vectors
from tests.helpers.refusals import refused
from tests.mining.pair_sources import made_vectors, topic_source


def fitted(vectors, **options):
    made = VectorFeatures(vectors, **options)
    made.learned = made.fit()
    return made


def sides(vectors):
    """Query and first positive of each row, looked up one by one."""
    queries, documents = (np.concatenate(list(shards)) for shards in (vectors.query_shards, vectors.document_shards))
    return queries, documents[[int(vectors.index.positives(row)[0]) for row in range(vectors.index.num_queries)]]


@pytest.mark.parametrize("shard_size", [1, 16, 1000])
def test_a_feature_is_query_and_first_positive_side_by_side_in_either_order(shard_size, tmp_path):
    vectors = made_vectors(tmp_path, topic_source(tmp_path), shard_size=shard_size)
    made, (queries, documents) = fitted(vectors), sides(vectors)
    assert (made.num_rows, made.embedding_dim) == (60, 16)
    rows = np.array([0, 3, 17, 18, 59])
    plain, swapped = made.both_orders(rows)
    np.testing.assert_array_equal(made.rows(rows), plain)
    np.testing.assert_allclose(plain, np.concatenate([queries, documents], axis=1)[rows] / 2**0.5, atol=1e-6)
    np.testing.assert_allclose(swapped, np.concatenate([documents, queries], axis=1)[rows] / 2**0.5, atol=1e-6)
    assert plain.dtype == np.float32


@pytest.mark.parametrize("svd_dim", [5, 16])
@pytest.mark.parametrize("block", [7, 1000])
def test_reduced_features_are_those_of_an_svd_of_both_orders(block, svd_dim, tmp_path, monkeypatch):
    monkeypatch.setattr(features, "_BLOCK", block)
    vectors = made_vectors(tmp_path, topic_source(tmp_path))
    queries, documents = sides(vectors)
    both = np.concatenate([np.concatenate(pair, axis=1) for pair in ((queries, documents), (documents, queries))])
    axes = np.linalg.svd(both, full_matrices=False)[2][:svd_dim].T
    made = fitted(vectors, svd_dim=svd_dim)
    found, expected = made.rows(np.arange(60)), both[:60] @ axes
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    assert found.shape == (60, svd_dim)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1.0, atol=1e-6)
    # The sign of an axis is arbitrary; cosines do not depend on it.
    np.testing.assert_allclose(found @ found.T, expected @ expected.T, atol=1e-4)


def test_axes_of_a_sample_depend_on_the_seed_only(tmp_path, monkeypatch):
    vectors = made_vectors(tmp_path, topic_source(tmp_path))
    monkeypatch.setattr(features, "MAX_FITTED_ROWS", 20)
    one, again, other = (VectorFeatures(vectors, 4, seed).fit()["axes"] for seed in (0, 0, 1))
    assert one.tobytes() == again.tobytes() != other.tobytes()


@pytest.mark.parametrize(("value", "kind"), [(0.0, "zero"), (np.nan, "not finite")])
def test_a_row_with_invalid_features_is_named(value, kind, tmp_path):
    queries = unit_vectors(60)
    queries[23] = value
    made = fitted(made_vectors(tmp_path / "vectors", topic_source(tmp_path), queries))
    refused(InputError, rf"queries/vectors-00001\.npy:7: the vector is {kind}", made.rows, np.arange(10, 40))
    with pytest.raises(InputError, match=f"file:5: its features are {kind}"):
        unit_features(np.full((1, 4), value, np.float32), np.array([5]), "file:{}".format)


@pytest.mark.parametrize("svd_dim", [0, 17])
def test_an_invalid_width_is_refused(svd_dim, tmp_path):
    with pytest.raises(OptionError, match=r"svd_dim must be between 1 and 16, twice the width of the vectors, got"):
        VectorFeatures(made_vectors(tmp_path, topic_source(tmp_path)), svd_dim)
