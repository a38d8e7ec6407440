"""BM25 weights equal the formula, and pairs about one thing lie together."""

import math
import re

import numpy as np
import pytest

from embeddings.common import InputError, OptionError
from embeddings.data.sources import SourceConfig
from embeddings.data.store import open_cached
from embeddings.mining import features as sparse_features
from embeddings.mining.features import Bm25Features, _bm25_weights, _term_counts
from tests.data.rows import labelled, write_jsonl
from tests.mining.pair_sources import topic_of, topic_source


def fitted(source, **options):
    made = Bm25Features(source, **options)
    made.use(made.fit())
    return made


def bm25(texts):
    """The weight of each word in each text, by the formula."""
    words = [re.findall(r"\w+", text.lower()) for text in texts]
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
    source = open_cached(SourceConfig("s", str(write_jsonl(tmp_path / "s.jsonl", rows))))
    texts = ["a dog a cat", "one", "The DOG, the dog!", "naïve 東京 x"]
    learned = Bm25Features(source).fit()
    weights = _bm25_weights(_term_counts(texts), learned).toarray()
    for row, expected in enumerate(bm25(texts)):
        np.testing.assert_allclose(sorted(weights[row][weights[row] > 0]), sorted(expected.values()), rtol=1e-6)


def test_pairs_about_one_thing_lie_together_and_both_orders_differ(tmp_path):
    made = fitted(topic_source(tmp_path), svd_dim=8)
    assert made.embedding_dim == 16
    found = made.rows(np.arange(60))
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1.0, atol=1e-5)
    topics = [topic_of(row) for row in range(60)]
    cosines, same = found @ found.T, np.equal.outer(topics, topics)
    assert cosines[same].mean() > 0.5
    assert abs(cosines[~same].mean()) < 0.1
    swapped = made.rows(np.arange(60), swapped=True)
    np.testing.assert_allclose(swapped, np.concatenate([found[:, 8:], found[:, :8]], axis=1), atol=1e-6)


def test_one_seed_learns_the_same_bits_and_a_sample_does(tmp_path, monkeypatch):
    source = topic_source(tmp_path)
    monkeypatch.setattr(sparse_features, "MAX_FITTED_ROWS", 30)
    first, again, other = (Bm25Features(source, 4, seed).fit() for seed in (1, 1, 2))
    assert all(first[name].tobytes() == again[name].tobytes() for name in first)
    assert first["axes"].tobytes() != other["axes"].tobytes()
    assert fitted(source, svd_dim=4, seed=1).rows(np.arange(60)).shape == (60, 8)


def test_few_words_leave_axes_at_zero(tmp_path):
    rows = [{"query": "up", "positive": "down"}, {"query": "down", "positive": "up up"}]
    made = fitted(open_cached(SourceConfig("s", str(write_jsonl(tmp_path / "s.jsonl", rows)))), svd_dim=4)
    assert made.rows(np.arange(2)).shape == (2, 8)


def test_a_row_with_words_on_one_side_has_a_direction_and_one_without_any_is_named(tmp_path):
    rows = [{"query": "up", "positive": "down"}, {"query": "?!", "positive": "up"}, {"query": "?!", "positive": "..."}]
    made_of = open_cached(SourceConfig("s", str(write_jsonl(tmp_path / "s.jsonl", rows))))
    made = fitted(made_of, svd_dim=2)
    assert made.rows(np.arange(2)).shape == (2, 4)
    with pytest.raises(InputError, match="row 2: what it is clustered by is zero"):
        made.rows(np.arange(3))
    named = Bm25Features(made_of, svd_dim=2, row_name="file:{}".format)
    named.use(named.fit())
    with pytest.raises(InputError, match="file:2: what it is clustered by is zero"):
        named.rows(np.arange(3))


def test_a_source_without_any_word_is_refused(tmp_path):
    rows = [{"query": "?!", "positive": "..."}]
    made = Bm25Features(open_cached(SourceConfig("s", str(write_jsonl(tmp_path / "s.jsonl", rows)))))
    with pytest.raises(InputError, match="holds a word; use --features vectors"):
        made.fit()


def test_labelled_texts_and_impossible_widths_are_refused(tmp_path):
    with pytest.raises(OptionError, match="svd_dim must lie in 1 … 120, the number of texts, got 121"):
        Bm25Features(topic_source(tmp_path), svd_dim=121)
    path = write_jsonl(tmp_path / "classes.jsonl", labelled(3, 3))
    with pytest.raises(InputError, match="the source holds labelled texts, no pairs"):
        Bm25Features(open_cached(SourceConfig("classes", str(path), conversion="class_by_example")))
