"""Shares of the weight by place against a loop over dense attention matrices."""

import math
import sys

import numpy as np
import pytest
import torch

from embeddings.common import OptionError, TextSettings
from embeddings.data.tokenize import TokenSpan
from embeddings.inference.inspection import PLACES, TokenWeights, anchor_shares, place_of, shares_of
from embeddings.models import Embedder, MeanPooling
from tests.helpers.tiny import tiny_bert, wordpiece_tokenizer

TEXTS = ["the quick, brown - fox.", "how do I pad: sequences", "dog", "..."]


def weights_of(text, spans, weights, pooled=None):
    spans = [TokenSpan(name, start, end, start == end) for name, start, end in spans]
    pooled = np.array(pooled or [True] * len(spans))
    return TokenWeights(text, spans, np.array(weights, dtype=np.float32), pooled)


def loop_shares(texts):
    """The mean over texts, one number at a time, of an eager backbone's attention matrices."""
    backbone, tokenizer = tiny_bert(), wordpiece_tokenizer()
    backbone.set_attn_implementation("eager")
    sums = {"weight": dict.fromkeys(PLACES, 0.0), "tokens": dict.fromkeys(PLACES, 0.0)}
    for text in texts:
        ids = tokenizer(text)["input_ids"]
        with torch.no_grad():
            heads = backbone(torch.tensor([ids]), output_attentions=True).attentions[-1][0].tolist()
        length = len(ids)
        received = [
            sum(math.log(head[query][key] * length + 1) for head in heads for query in range(length))
            for key in range(length)
        ]
        for position, token in enumerate(tokenizer.convert_ids_to_tokens(ids)):
            marks = token.removeprefix("##")
            place = "punctuation" if marks in (",", "-", ".", ":") else "rest"
            place = "first" if position == 0 else "last" if position == length - 1 else place
            sums["weight"][place] += received[position] / sum(received) / len(texts)
            sums["tokens"][place] += 1 / length / len(texts)
    return sums


def test_the_shares_of_a_corpus_are_those_of_the_loop_whatever_the_blocks(monkeypatch):
    embedder = Embedder(tiny_bert(), wordpiece_tokenizer(), MeanPooling(32))
    expected = loop_shares(TEXTS)
    assert min(expected["weight"].values()) > 0.05
    for block in (1024, 3):
        monkeypatch.setattr(sys.modules[anchor_shares.__module__], "TEXTS_PER_BLOCK", block)
        found = anchor_shares(embedder, TEXTS, mini_batch_tokens=16)
        assert found.weight == pytest.approx(expected["weight"], abs=1e-5)
        assert found.tokens == pytest.approx(expected["tokens"], abs=1e-9)
        assert found.num_texts == 4
    assert found.weight["first"] != pytest.approx(found.tokens["first"], abs=1e-4)


def test_the_places_of_a_text_by_hand():
    text = "Hi (–, a1"
    spans = [("<s>", 0, 0), ("Hi", 0, 2), (" (", 2, 4), ("–,", 4, 6), ("a", 7, 8), ("1", 8, 9), ("</s>", 0, 0)]
    weights = weights_of(text, spans, [0.3, 0.1, 0.1, 0.1, 0.1, 0.1, 0.2])
    assert place_of(weights) == ["first", "rest", "punctuation", "punctuation", "rest", "rest", "last"]
    shares = shares_of(weights)
    assert shares.weight == pytest.approx({"first": 0.3, "last": 0.2, "punctuation": 0.2, "rest": 0.3}, abs=1e-6)
    assert shares.tokens == pytest.approx({"first": 1 / 7, "last": 1 / 7, "punctuation": 2 / 7, "rest": 3 / 7})


def test_a_prompt_has_no_place():
    spans = [("[CLS]", 0, 0), (":", 0, 1), ("!", 1, 2), ("a", 2, 3), ("[SEP]", 0, 0)]
    weights = weights_of(":!a", spans, [0, 0, 0.5, 0.3, 0.2], [False, False, True, True, True])
    assert place_of(weights) == [None, None, "first", "rest", "last"]
    assert sum(shares_of(weights).tokens.values()) == pytest.approx(1)


@pytest.mark.parametrize(("size", "places"), [(1, ["first"]), (2, ["first", "last"])])
def test_short_texts_have_a_first_token_before_a_last_one(size, places):
    weights = weights_of("..", [(".", 0, 1), (".", 1, 2)][:size], [1 / size] * size)
    assert place_of(weights) == places


def test_a_special_token_in_the_middle_is_no_punctuation():
    spans = [("a", 0, 1), ("!", 0, 0), (" ", 1, 2), ("b", 2, 3)]
    assert place_of(weights_of("a b", spans, [0.25] * 4)) == ["first", "rest", "rest", "last"]


def test_prompts_reach_the_weights_and_no_text_is_refused():
    text = TextSettings(prompts={"query": "search_query: "})
    embedder = Embedder(tiny_bert(), wordpiece_tokenizer(), MeanPooling(32), text=text)
    plain, prompted = (anchor_shares(embedder, ["dog"], role=role) for role in ("document", "query"))
    assert plain.tokens["rest"] == pytest.approx(1 / 3)
    assert prompted.tokens == pytest.approx({"first": 0.5, "last": 0.5, "punctuation": 0, "rest": 0})
    with pytest.raises(OptionError, match="texts must not be empty"):
        anchor_shares(embedder, [])
