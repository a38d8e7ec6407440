"""Partial whitening: the formula, the layer that computes it, and what it refuses."""

import json

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from torch import nn

from embeddings.adaptation import Whitening, write_whitened
from embeddings.cli.main import main
from embeddings.common import InputError, OptionError
from embeddings.inference import Encoder, encode_corpus
from embeddings.interop.golden import read_golden
from embeddings.models import Embedder, MeanPooling
from tests.helpers.refusals import assert_refused, refused
from tests.helpers.tiny import tiny_bert
from tests.inference.models import _tokenizer, some_texts, tiny_embedder, write_corpus
from tests.models.contextual_models import tiny_contextual


def by_hand(vector_ND):
    """The matrix by the formula, with scipy's power of a matrix and a loop for the covariance."""
    from scipy.linalg import fractional_matrix_power

    unit_ND = vector_ND.astype(np.float64)
    unit_ND /= np.linalg.norm(unit_ND, axis=1, keepdims=True)
    mean_D, width = unit_ND.mean(axis=0), unit_ND.shape[1]
    covariance_DD = np.zeros((width, width))
    for vector_D in unit_ND:
        covariance_DD += np.outer(vector_D - mean_D, vector_D - mean_D) / len(unit_ND)
    mean = np.trace(covariance_DD) / width
    return np.real(fractional_matrix_power(covariance_DD + 0.1 * mean * np.eye(width), -0.25))


def test_the_matrix_is_that_of_the_formula_in_any_tiles():
    generator = np.random.default_rng(0)
    vector_ND = (generator.normal(size=(600, 8)) * np.arange(1, 9) + 3).astype(np.float32)
    found = Whitening.of([vector_ND])
    np.testing.assert_allclose(found.matrix_DD, by_hand(vector_ND), rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(found.matrix_DD, found.matrix_DD.T, atol=1e-12)
    parts = Whitening.of(iter([vector_ND[:1], vector_ND[1:500], vector_ND[500:]]))
    np.testing.assert_allclose(parts.matrix_DD, found.matrix_DD, rtol=1e-9, atol=1e-12)
    assert parts.num_documents == 600
    whitened = found(vector_ND)
    np.testing.assert_allclose(np.linalg.norm(whitened, axis=1), 1, atol=1e-6)
    unit_ND = vector_ND / np.linalg.norm(vector_ND, axis=1, keepdims=True)
    wanted = unit_ND @ by_hand(vector_ND)
    np.testing.assert_allclose(whitened, wanted / np.linalg.norm(wanted, axis=1, keepdims=True), atol=1e-6)
    # A mean was not subtracted: the direction that all share is still there.
    assert (whitened.mean(axis=0) ** 2).sum() > 0.1


def test_too_few_and_equal_vectors_are_not_whitened():
    vector_ND = np.random.default_rng(0).normal(size=(512, 4)).astype(np.float32)
    assert Whitening.of([vector_ND]) is not None
    assert Whitening.of([vector_ND[:511]]) is None
    assert Whitening.of([]) is None
    assert Whitening.of([np.ones((600, 4), np.float32) * [1, 0, 0, 0]]) is None


def models():
    head = nn.Linear(32, 16)
    plain = nn.Linear(32, 16, bias=False)
    return {
        "unit": lambda: tiny_embedder(prompts={"query": "q: "}),
        "any length": lambda: tiny_embedder(normalize=False),
        "head": lambda: Embedder(tiny_bert(), _tokenizer(), MeanPooling(32), head=head, trained_widths=(16, 8)).eval(),
        "no bias": lambda: Embedder(tiny_bert(), _tokenizer(), MeanPooling(32), head=plain).eval(),
    }


@pytest.mark.parametrize("kind", models())
def test_the_directory_computes_the_formula_here_and_in_sentence_transformers(kind, tmp_path):
    embedder = models()[kind]()
    embedder.save_pretrained(tmp_path / "model")
    encoder = Encoder.from_pretrained(str(tmp_path / "model"), precision="float32")
    corpus = write_corpus(tmp_path / "corpus.jsonl", some_texts(520))
    folder = encode_corpus(encoder, corpus, tmp_path / "vectors")
    found = write_whitened(tmp_path / "model", folder, tmp_path / "out")
    np.testing.assert_allclose(found.matrix_DD, by_hand(np.concatenate(list(folder.tiles()))), rtol=1e-5, atol=1e-7)
    texts = some_texts(9, seed=3)
    for role in ("query", "document"):
        wanted = encoder.encode(texts, role=role) @ found.matrix_DD
        wanted /= np.linalg.norm(wanted, axis=1, keepdims=True)
        np.testing.assert_allclose(found(encoder.encode(texts, role=role)), wanted, atol=1e-5)
        ours = Encoder.from_pretrained(str(tmp_path / "out"), precision="float32").encode(texts, role=role)
        np.testing.assert_allclose(ours, wanted, atol=1e-5)
        model = SentenceTransformer(str(tmp_path / "out"), device="cpu")
        theirs = (model.encode_query if role == "query" else model.encode_document)(texts)
        np.testing.assert_allclose(theirs, wanted, atol=1e-5)
    modules = json.loads((tmp_path / "out" / "modules.json").read_text())
    kinds = [module["type"].rpartition(".")[2] for module in modules]
    assert kinds == ["Transformer", "Pooling", "Dense", "Normalize"]
    settings = json.loads((tmp_path / "out" / "2_Dense" / "config.json").read_text())
    assert settings["activation_function"] == "torch.nn.modules.linear.Identity"
    assert settings["bias"] == (kind == "head")
    assert read_golden(tmp_path / "out") is not None
    assert "520 documents" in (tmp_path / "out" / "README.md").read_text()
    assert Embedder.from_pretrained(tmp_path / "out").trained_widths == ()


def test_vectors_of_another_model_and_too_few_are_refused(tmp_path, capsys):
    tiny_embedder().save_pretrained(tmp_path / "model")
    other = tiny_embedder()
    with torch.no_grad():
        next(other.parameters()).add_(1)
    other.save_pretrained(tmp_path / "other")
    encoder = Encoder.from_pretrained(str(tmp_path / "model"), precision="float32")
    encode_corpus(encoder, write_corpus(tmp_path / "corpus.jsonl", some_texts(20)), tmp_path / "vectors")
    out = tmp_path / "out"
    refused(InputError, "another model", write_whitened, tmp_path / "other", tmp_path / "vectors", out)
    line = ["whiten", "--model", str(tmp_path / "model"), "--vectors", str(tmp_path / "vectors"), "--output", str(out)]
    assert_refused(capsys, tmp_path, "has 20 vectors, whitening needs 512", main, line)
    encode_corpus(encoder, tmp_path / "corpus.jsonl", tmp_path / "queries", role="query")
    refused(InputError, "role", write_whitened, tmp_path / "model", tmp_path / "queries", out)
    encode_corpus(encoder, tmp_path / "corpus.jsonl", tmp_path / "bits", vector_format="binary")
    refused(InputError, "whitening needs float32", write_whitened, tmp_path / "model", tmp_path / "bits", out)


def test_truncated_vectors_are_refused(tmp_path):
    embedder = tiny_embedder()
    embedder.trained_widths = (32, 16)
    embedder.save_pretrained(tmp_path / "model")
    encoder = Encoder.from_pretrained(str(tmp_path / "model"), dimensions=16)
    folder = encode_corpus(encoder, write_corpus(tmp_path / "corpus.jsonl", some_texts(520)), tmp_path / "vectors")
    what = "field 'embedding_dim' is 16, expected 32"
    refused(InputError, what, write_whitened, tmp_path / "model", folder, tmp_path / "out")


def test_a_model_that_compares_lengths_and_a_contextual_one_are_refused(tmp_path):
    embedder = tiny_embedder(normalize=False)
    embedder.similarity = "dot"
    embedder.save_pretrained(tmp_path / "dot")
    encoder = Encoder.from_pretrained(str(tmp_path / "dot"), precision="float32")
    folder = encode_corpus(encoder, write_corpus(tmp_path / "corpus.jsonl", some_texts(20)), tmp_path / "vectors")
    out = tmp_path / "out"
    refused(OptionError, "whitening needs cosines", write_whitened, tmp_path / "dot", tmp_path / "vectors", out)
    tiny_contextual().save_pretrained(tmp_path / "contextual")
    message = "is a contextual model, whose vectors cannot be whitened"
    refused(InputError, message, write_whitened, tmp_path / "contextual", folder, out)
