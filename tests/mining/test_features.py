"""Features are two concatenated vectors in either order, at unit length, optionally reduced by an SVD."""

import math
import re
from functools import partial

import numpy as np
import pytest

from embeddings.common import InputError, OptionError
from embeddings.mining import clusters as features
from embeddings.mining.clusters import Bm25Features, VectorFeatures, _bm25_weights, _term_counts, unit_features
from tests.data.cluster_folders import unit_vectors
from tests.data.rows import labelled
from tests.helpers.refusals import refused
from tests.mining.pair_sources import made_vectors, source, topic_source


def fitted(of, kind=VectorFeatures, **options):
    """Fitted features of vectors or of a source."""
    made = kind(of, **options)
    made.learned = made.fit()
    return made


def sides(vectors):
    """Query and first positive of each row, looked up one by one."""
    queries, documents = (np.concatenate(list(shards)) for shards in (vectors.query_shards, vectors.document_shards))
    return queries, documents[[int(vectors.index.positives(row)[0]) for row in range(vectors.index.num_queries)]]


fitted_words = partial(fitted, kind=Bm25Features)


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


def bm25(texts):
    """The weight of each word in each text, by the formula; without spaces, of each character."""
    words = [re.findall(r"[東京]|[^\W東京]+", text.lower()) for text in texts]
    mean = sum(map(len, words)) / len(words)
    found = []
    for text in words:
        weights = {}
        for word in set(text):
            count, holders = text.count(word), sum(word in other for other in words)
            idf = math.log1p((len(words) - holders + 0.5) / (holders + 0.5))
            weights[word] = idf * count * 2.2 / (count + 1.2 * (0.25 + 0.75 * len(text) / mean))
        found.append(weights)
    return found


def test_weights_are_those_of_the_formula(tmp_path):
    rows = [{"query": "a dog a cat", "positive": "The DOG, the dog!"}, {"query": "one", "positive": "naïve 東京 x"}]
    texts = ["a dog a cat", "one", "The DOG, the dog!", "naïve 東京 x"]
    learned = Bm25Features(source(tmp_path, rows)).fit()
    weights = _bm25_weights(_term_counts(texts), learned).toarray()
    for row, expected in enumerate(bm25(texts)):
        np.testing.assert_allclose(sorted(weights[row][weights[row] > 0]), sorted(expected.values()), rtol=1e-6)


@pytest.mark.parametrize(
    ("text", "count"), [("दिन दान दीन", 3), ("snake_case 2x naïve", 3), ("ราคา", 3), ("東京 กิ่ง", 6)]
)
def test_a_word_has_its_vowel_signs(text, count):
    assert _term_counts([text]).nnz == count


def test_the_fit_depends_on_the_seed_only(tmp_path, monkeypatch):
    pairs = topic_source(tmp_path)
    monkeypatch.setattr(features, "MAX_FITTED_ROWS", 30)
    first, again, other = (Bm25Features(pairs, 4, seed).fit() for seed in (1, 1, 2))
    assert all(first[name].tobytes() == again[name].tobytes() for name in first)
    assert first["axes"].tobytes() != other["axes"].tobytes()
    assert fitted_words(pairs, svd_dim=4, seed=1).rows(np.arange(60)).shape == (60, 8)


def test_axes_of_a_sample_hold_nearly_as_much_as_those_of_all_rows_and_every_word(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)

    def text(topic, row):
        words = rng.integers(0, 30, 12)
        return f"only{row} " + " ".join(f"topic{topic}word{word}" for word in words)

    rows = [{"query": text(row % 3, row), "positive": text(row % 3, -row)} for row in range(200)]
    made = Bm25Features(source(tmp_path, rows), 8)
    whole = made.fit()
    weights = _bm25_weights(_term_counts([row[side] for row in rows for side in ("query", "positive")]), whole)
    monkeypatch.setattr(features, "MAX_AXES_ROWS", 50)
    sampled = made.fit()
    assert sampled["idf"].tobytes() == whole["idf"].tobytes()
    np.testing.assert_allclose(sampled["axes"].T @ sampled["axes"], np.eye(8), atol=1e-5)
    assert (np.abs(sampled["axes"]).sum(axis=1) > 0).all()
    energies = [float(((weights @ learned["axes"]) ** 2).sum()) for learned in (sampled, whole)]
    assert 0.9 * energies[1] < energies[0] <= energies[1] * (1 + 1e-6)
    # As many rows as there are: the same bits.
    monkeypatch.setattr(features, "MAX_AXES_ROWS", 200)
    assert made.fit()["axes"].tobytes() == whole["axes"].tobytes()


def test_a_row_needs_words_on_one_side_and_is_named_without(tmp_path):
    rows = [{"query": "up", "positive": "down"}, {"query": "?!", "positive": "up"}, {"query": "?!", "positive": "..."}]
    made_of = source(tmp_path, rows)
    # With two words, two of the four axes are zero.
    made = fitted_words(made_of, svd_dim=4)
    assert made.rows(np.arange(2)).shape == (2, 8)
    refused(InputError, "row 2: its features are zero", made.rows, np.arange(3))
    named = fitted_words(made_of, svd_dim=2, row_name="file:{}".format)
    refused(InputError, "file:2: its features are zero", named.rows, np.arange(3))


def test_a_source_without_any_word_is_refused(tmp_path):
    rows = [{"query": "?!", "positive": "..."}]
    made = Bm25Features(source(tmp_path, rows))
    refused(InputError, "no row contains a word; use --features vectors", made.fit)


def test_labelled_texts_and_invalid_widths_are_refused(tmp_path):
    refused(OptionError, "must be between 1 and the 120 texts, got", Bm25Features, topic_source(tmp_path), svd_dim=121)
    texts = source(tmp_path, labelled(3, 3), conversion="class_by_example")
    refused(InputError, "contains labelled texts, not pairs", Bm25Features, texts)
