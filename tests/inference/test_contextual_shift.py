"""Vectors in several contexts, against the encoder and against loops over pairs."""

import numpy as np
import pytest

from embeddings.common import OptionError
from embeddings.inference import ContextualShift, Encoder, contextual_shift, sample_context
from embeddings.models import Embedder, MeanPooling
from tests.helpers.tiny import tiny_bert, wordpiece_tokenizer
from tests.models.contextual_models import tiny_contextual

TEXTS = ["the quick brown fox", "dog", "how do I pad sequences to one length"]
CORPUS = ["jumps over", "the lazy dog", "return the sum", "two numbers", "one length", "pad 7"]


def test_each_context_is_read_on_its_own_and_none_is_one_too():
    encoder = Encoder(tiny_contextual(normalize=False), precision="float32")
    contexts = [sample_context(encoder, CORPUS, 3, seed) for seed in (1, 2)]
    shift = contextual_shift(encoder, TEXTS, contexts)
    assert shift.vector_CND.shape == (2, 3, 32)
    for found, context in zip([*shift.vector_CND, shift.alone_ND], [*contexts, None], strict=True):
        expected = encoder.encode(TEXTS, None, context, role="document")
        expected /= np.linalg.norm(expected, axis=1, keepdims=True)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
    assert np.abs(shift.vector_CND[0] - shift.vector_CND[1]).max() > 1e-4
    assert np.abs(shift.vector_CND[0] - shift.alone_ND).max() > 1e-4


def test_the_cosines_are_those_of_loops():
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(5, 4, 6))
    vectors /= np.linalg.norm(vectors, axis=2, keepdims=True)
    shift = ContextualShift(vectors[:4], vectors[4])
    for n in range(4):
        pairs = [vectors[a, n] @ vectors[b, n] for a in range(4) for b in range(a + 1, 4)]
        np.testing.assert_allclose(shift.own_cosine_NP[n], pairs)
        assert shift.alone_cosine_N[n] == pytest.approx(np.mean([vectors[c, n] @ vectors[4, n] for c in range(4)]))
        nearest = [max(vectors[c, n] @ vectors[c, m] for m in range(4) if m != n) for c in range(4)]
        assert shift.other_cosine_N[n] == pytest.approx(np.mean(nearest))
    stays = []
    for c in range(4):
        for n in range(4):
            others = {(d, m): vectors[c, n] @ vectors[d, m] for d in range(4) if d != c for m in range(4)}
            stays.append(max(others, key=others.get)[1] == n)
    assert 0 < np.mean(stays) < 1
    assert shift.stays_nearest == pytest.approx(np.mean(stays))


def test_documents_that_do_not_move_stay_nearest():
    vectors = np.stack([np.eye(3)] * 2)
    shift = ContextualShift(vectors, np.eye(3))
    assert shift.stays_nearest == 1
    assert shift.own_cosine_NP.tolist() == [[1], [1], [1]]
    assert shift.other_cosine_N.tolist() == [0, 0, 0]


def test_too_little_to_compare_and_a_model_without_a_context_are_refused():
    encoder = Encoder(tiny_contextual(), precision="float32")
    contexts = [sample_context(encoder, CORPUS, 3, seed) for seed in (1, 2)]
    with pytest.raises(OptionError, match="documents must be two or more"):
        contextual_shift(encoder, TEXTS[:1], contexts)
    with pytest.raises(OptionError, match="contexts must be two or more"):
        contextual_shift(encoder, TEXTS, contexts[:1])
    plain = Encoder(Embedder(tiny_bert(), wordpiece_tokenizer(), MeanPooling(32)), precision="float32")
    with pytest.raises(OptionError, match="this model takes none"):
        contextual_shift(plain, TEXTS, contexts)


def test_another_document_in_the_same_context_may_be_nearer():
    degrees = np.deg2rad([[0, 5], [-20, 25]])
    vectors = np.stack([np.cos(degrees), np.sin(degrees)], axis=-1)
    assert ContextualShift(vectors, vectors[0]).stays_nearest == 1
