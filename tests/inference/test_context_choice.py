"""A corpus gives a model its context: a file, a folder of vectors, or texts."""

import json

import numpy as np
import pytest

from embeddings.common import InputError, OptionError
from embeddings.inference import context as module
from embeddings.inference.context import choose_context, draw_context, draw_documents, sample_context, sample_rows
from embeddings.inference.corpus import read_corpus
from embeddings.inference.encoder import Encoder
from embeddings.inference.vector_folder import encode_corpus
from tests.inference.models import some_texts, tiny_embedder
from tests.models.contextual_models import tiny_contextual


@pytest.fixture(scope="module")
def encoder():
    return Encoder(tiny_contextual(), precision="float32")


def write_corpus(path, texts):
    path.write_text("".join(json.dumps({"_id": f"d{row}", "text": text}) + "\n" for row, text in enumerate(texts)))
    return path


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


def test_first_stage_vectors_are_computed_once_however_often_they_are_used(encoder, tmp_path):
    calls = []
    handle = encoder.embedder.first_stage.register_forward_hook(lambda *_: calls.append(1))
    context = choose_context(encoder, write_corpus(tmp_path / "corpus.jsonl", some_texts(9)))
    made = len(calls)
    for _ in range(3):
        encoder.encode(some_texts(4), context=context)
    handle.remove()
    assert made > 0
    assert len(calls) == made


def test_a_file_is_read_twice_row_by_row(encoder, tmp_path, monkeypatch):
    corpus, rows_read = write_corpus(tmp_path / "corpus.jsonl", some_texts(50)), []
    monkeypatch.setattr(module, "read_corpus", lambda path: (rows_read.append(1) or row for row in read_corpus(path)))
    context = choose_context(encoder, corpus, 3, seed=1)
    assert len(rows_read) == 100
    assert len(context.document_ids) == 3


@pytest.mark.parametrize("size", [0, -1, 6])
def test_a_size_that_the_model_does_not_take_is_refused(size, encoder, tmp_path):
    corpus = write_corpus(tmp_path / "corpus.jsonl", some_texts(9))
    with pytest.raises(OptionError, match=rf"context_size must be from 1 to the model's 5 .* got {size}"):
        choose_context(encoder, corpus, size)


def test_bad_corpora_are_one_line(encoder, tmp_path):
    with pytest.raises(InputError, match=r"no\.jsonl"):
        choose_context(encoder, tmp_path / "no.jsonl")
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(InputError, match=r"empty\.jsonl"):
        choose_context(encoder, tmp_path / "empty.jsonl")
    with pytest.raises(InputError, match="no manifest lies beside this output"):
        choose_context(encoder, tmp_path)
    with pytest.raises(OptionError, match="context must hold at least one document"):
        sample_context(encoder, [])


def test_a_model_without_a_context_refuses_one(tmp_path):
    plain = Encoder(tiny_embedder())
    with pytest.raises(OptionError, match="context must be left out: this model takes none"):
        choose_context(plain, write_corpus(tmp_path / "corpus.jsonl", some_texts(3)))
    with pytest.raises(OptionError, match="context must be left out: this model takes none"):
        plain.encode_context(["a"])


def test_documents_are_drawn_like_a_contexts_and_may_be_more_than_a_model_takes(encoder, tmp_path):
    texts = some_texts(30)
    corpus = write_corpus(tmp_path / "corpus.jsonl", texts)
    encode_corpus(Encoder(tiny_embedder(), precision="float32"), corpus, tmp_path / "vectors", shard_size=7)
    found = draw_documents(corpus, 12, seed=4)
    assert [document.text for document in found] == [texts[row] for row in sample_rows(30, 12, seed=4)]
    assert draw_documents(tmp_path / "vectors", 12, seed=4) == found
    assert draw_documents(corpus, 5, seed=4) == list(draw_context(encoder, corpus, 5, seed=4).documents)
