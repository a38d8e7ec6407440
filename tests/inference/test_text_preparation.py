"""Texts that were tokenised apart have the vectors of texts that were not."""

import pickle

import numpy as np
import pytest
import torch

from embeddings.common import OptionError
from embeddings.data.tokenize import TextTokenizer
from embeddings.inference import encoder as text_preparation
from embeddings.inference.encoder import Encoder, unique_texts
from tests.inference.models import some_texts, tiny_embedder


@pytest.mark.parametrize("texts", [[], some_texts(1), some_texts(13), some_texts(7) + some_texts(7)[::-1]])
@pytest.mark.parametrize("arguments", [{}, {"role": "query"}, {"prompt_name": "other"}])
def test_what_another_process_tokenised_has_the_same_bytes(texts, arguments, monkeypatch):
    monkeypatch.setattr(text_preparation, "TEXTS_PER_BLOCK", 5)
    encoder = Encoder(tiny_embedder(prompts={"query": "the ", "other": "a dog "}), precision="float32")
    expected = encoder.encode(texts, **arguments)
    preparation = pickle.loads(pickle.dumps(encoder.preparation(**arguments)))
    prepared = pickle.loads(pickle.dumps(preparation(texts)))
    assert len(prepared.blocks) == -(-len(set(texts)) // 5)
    monkeypatch.setattr(TextTokenizer, "__call__", lambda *_: pytest.fail("tokenised again"))
    np.testing.assert_array_equal(encoder.encode(prepared, **arguments), expected)


def test_blocks_ahead_are_those_of_the_texts_in_order(monkeypatch):
    monkeypatch.setattr(text_preparation, "TEXTS_PER_BLOCK", 4)
    preparation = Encoder(tiny_embedder()).preparation()
    blocks, texts = list(preparation.blocks_ahead(some_texts(10))), some_texts(10)
    assert [len(block) for block in blocks] == [4, 4, 2]
    whole = preparation.tokenizer(texts, "document", "")
    assert torch.equal(torch.cat([block.input_ids_T for block in blocks]), whole.input_ids_T)
    assert list(preparation.blocks_ahead([])) == []


def test_the_role_is_the_prompts_where_none_is_given():
    encoder = Encoder(tiny_embedder(prompts={"query": "the "}))
    assert (encoder.preparation().role, encoder.preparation().prompt) == ("document", "")
    assert (encoder.preparation("query").role, encoder.preparation("query").prompt) == ("query", "the ")
    with pytest.raises(OptionError, match="prompt_name must name a prompt"):
        encoder.preparation("nope")


def test_each_text_is_there_once_with_a_row_for_each_given():
    assert unique_texts(["a", "b"]) == (["a", "b"], None)
    texts, row_N = unique_texts(["b", "a", "b", "b", "c"])
    assert texts == ["b", "a", "c"]
    assert row_N.tolist() == [0, 1, 0, 0, 2]
