"""Contexts are drawn evenly, identified by a hash, and stored with the vectors that were encoded with them."""

import json
from collections import Counter

import numpy as np
import pytest

from embeddings.common import InputError, OptionError
from embeddings.common.io import file_sha256, write_manifest
from embeddings.inference.context import choose_context, documents_sha256, sample_context, sample_rows
from embeddings.inference.encoder import Context, Encoder
from embeddings.inference.vector_folder import Document, encode_corpus
from tests.helpers.refusals import refused
from tests.inference.models import some_texts, tiny_embedder, write_corpus
from tests.models.contextual_models import tiny_contextual

DOCUMENTS = [Document(f"d{row}", f"text {row}") for row in range(4)]
VECTORS = np.arange(12, dtype=np.float32).reshape(4, 3)


def context_of(documents, vectors, seed):
    return Context(tuple(document.document_id for document in documents), documents_sha256(documents), seed, vectors)


@pytest.mark.parametrize(("num_documents", "size"), [(10, 1), (10, 9), (10, 10), (10, 11), (10, 25), (1, 3), (3, 512)])
def test_every_document_is_drawn_as_often_as_any_other_or_once_more(num_documents, size):
    rows = sample_rows(num_documents, size, seed=3)
    assert rows.shape == (size,)
    assert rows.dtype == np.int64
    counts = Counter(rows.tolist())
    assert set(counts) <= set(range(num_documents))
    per_document = [counts[row] for row in range(num_documents)]
    assert max(per_document) - min(per_document) <= 1
    assert sum(per_document) == size


def test_draws_follow_their_seed_alone():
    first = sample_rows(1000, 50, seed=1)
    assert np.array_equal(first, sample_rows(1000, 50, seed=1))
    assert not np.array_equal(first, sample_rows(1000, 50, seed=2))
    assert not np.array_equal(np.sort(first), first)


def test_the_hash_of_a_context_depends_on_ids_texts_and_their_order():
    base = documents_sha256(DOCUMENTS)
    assert base == documents_sha256(list(DOCUMENTS))
    others = [DOCUMENTS[::-1], DOCUMENTS[:3], [*DOCUMENTS[:3], Document("d3", "text")]]
    others += [[*DOCUMENTS[:3], Document("d3text", " 3")]]
    assert len({base, *map(documents_sha256, others)}) == 5


def write(folder):
    context = context_of(DOCUMENTS, VECTORS, seed=7)
    context.write(folder)
    sha = file_sha256(folder / "context.npy")
    write_manifest(folder, {**context.manifest_fields(), "context_vectors_sha256": sha})
    return context


def test_a_context_is_read_back_from_its_folder(tmp_path):
    context = write(tmp_path)
    again = Context.read(tmp_path)
    assert again.summary() == context.summary()
    assert again.document_ids == ("d0", "d1", "d2", "d3")
    assert len(again) == 4
    np.testing.assert_array_equal(again.vector_MH, VECTORS)
    fields = json.loads((tmp_path / "manifest.json").read_text())
    assert fields["context"] == {"num_documents": 4, "seed": 7, "documents_sha256": documents_sha256(DOCUMENTS)}
    assert fields["context_document_ids"] == ["d0", "d1", "d2", "d3"]
    # The vectors that a killed run wrote are used.
    later = context_of(DOCUMENTS, VECTORS + 1e-7, seed=7).write(tmp_path)
    np.testing.assert_array_equal(later.vector_MH, VECTORS)


@pytest.mark.parametrize("damage", ["gone", "changed"])
def test_a_damaged_context_is_refused(damage, tmp_path):
    write(tmp_path)
    (tmp_path / "context.npy").unlink()
    if damage == "changed":
        np.save(tmp_path / "context.npy", VECTORS + 1)
    refused(InputError, r"context\.npy: is not the context of these vectors", Context.read, tmp_path)


@pytest.fixture(scope="module")
def encoder():
    return Encoder(tiny_contextual(), precision="float32")


@pytest.mark.parametrize(("num_texts", "size"), [(11, None), (11, 2), (5, 5), (2, None), (1, 4)])
def test_a_file_a_folder_and_texts_give_the_same_documents(num_texts, size, encoder, tmp_path):
    texts = some_texts(num_texts)
    corpus = write_corpus(tmp_path / "corpus.jsonl", texts)
    plain = Encoder(tiny_embedder(), precision="float32")
    encode_corpus(plain, corpus, tmp_path / "vectors", shard_size=3)
    from_file = choose_context(encoder, corpus, size, seed=4)
    from_folder = choose_context(encoder, tmp_path / "vectors", size, seed=4)
    assert len(from_file) == (size or 5)
    assert from_file.summary() == from_folder.summary()
    rows = sample_rows(num_texts, size or 5, seed=4)
    assert from_file.document_ids == tuple(f"d{row}" for row in rows)
    expected = encoder.encode_context([texts[row] for row in rows])
    for context in (from_file, from_folder, sample_context(encoder, texts, size, seed=4)):
        np.testing.assert_allclose(context.vector_MH, expected, rtol=0, atol=1e-6)


def test_an_impossible_context_is_refused(encoder, tmp_path):
    corpus, plain = write_corpus(tmp_path / "corpus.jsonl", some_texts(9)), Encoder(tiny_embedder())
    for size in (0, -1, 6):
        with pytest.raises(OptionError, match=rf"context_size must be from 1 to the model's 5 .* got {size}"):
            choose_context(encoder, corpus, size)
    refused(OptionError, "context must have at least one document", sample_context, encoder, [])
    refused(InputError, r"empty\.jsonl", choose_context, encoder, write_corpus(tmp_path / "empty.jsonl", []))
    for encode in (lambda: choose_context(plain, corpus), lambda: plain.encode_context(["a"])):
        refused(OptionError, "context must be left out: the model is not contextual", encode)
