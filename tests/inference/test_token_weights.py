"""Token weights against a loop over the attention matrices that an eager backbone returns."""

import math

import numpy as np
import pytest
import torch

from embeddings.common import InputError, OptionError, TextSettings
from embeddings.data.tokenize import TextTokenizer
from embeddings.inference.inspection import token_weights
from embeddings.models import AnchorTokenPooling, Embedder, MeanPooling, make_bidirectional
from tests.helpers.tiny import bpe_tokenizer, sentencepiece_tokenizer, tiny_bert, tiny_mistral, wordpiece_tokenizer
from tests.models.contextual_models import tiny_contextual

TEXTS = ["the quick brown fox: jumps, over", "how do I pad sequences to one length", "dog"]
PROMPT = "search_query: "


def sharp(backbone):
    """The backbone with queries so large that its attention is far from uniform."""
    for name, weight in backbone.named_parameters():
        if "query.weight" in name or "q_proj.weight" in name:
            weight.data *= 50
    return backbone


def embedder_of(kind="bert", pooling=None, causal=False, **text):
    backbone = sharp(tiny_bert() if kind == "bert" else tiny_mistral())
    if kind == "mistral" and not causal:
        make_bidirectional(backbone)
    tokenizer = wordpiece_tokenizer() if kind == "bert" else sentencepiece_tokenizer()
    settings = TextSettings(document_max_length=24, query_max_length=24, **text)
    return Embedder(backbone, tokenizer, pooling or MeanPooling(32), text=settings).eval()


def loop_weights(kind, tokenizer, text, num_prompt=0, layer=-1, axis="key"):
    """Eq. 3 with one number at a time, on a backbone of its own."""
    backbone = sharp(tiny_bert() if kind == "bert" else tiny_mistral())
    if kind == "mistral":
        make_bidirectional(backbone)
    backbone.set_attn_implementation("eager")
    ids = tokenizer(text, truncation=True, max_length=24)["input_ids"]
    with torch.no_grad():
        attention = backbone(torch.tensor([ids]), output_attentions=True).attentions[layer][0].tolist()
    length, weights = len(ids), []
    for token in range(length):
        total = 0.0
        for head in attention:
            for other in range(length):
                paid = head[other][token] if axis == "key" else head[token][other]
                total += math.log(paid * length + 1)
        weights.append(0.0 if token < num_prompt else total)
    return ids, [weight / sum(weights) for weight in weights]


@pytest.mark.parametrize("kind", ["bert", "mistral"])
@pytest.mark.parametrize("axis", ["key", "query"])
def test_the_weights_of_a_model_that_pools_otherwise_are_those_of_the_loop(kind, axis):
    embedder = embedder_of(kind)
    pooling = None if axis == "key" else AnchorTokenPooling(32, axis="query")
    found = token_weights(embedder, TEXTS, pooling, mini_batch_tokens=20)
    assert [weights.text for weights in found] == TEXTS
    for text, weights in zip(TEXTS, found, strict=True):
        ids, expected = loop_weights(kind, embedder.tokenizer, text, axis=axis)
        assert [embedder.tokenizer.convert_tokens_to_ids(span.token) for span in weights.spans] == ids
        np.testing.assert_allclose(weights.weight_T, expected, rtol=1e-3, atol=1e-6)
        assert weights.pooled_T.all()
        assert weights.weight_T.dtype == np.float32
    assert np.ptp(found[0].weight_T) > 1e-3


def test_a_prompt_weighs_nothing_and_the_text_behind_it_everything():
    embedder = embedder_of(prompts={"query": PROMPT})
    (found,) = token_weights(embedder, ["pad the fox"], role="query")
    num_prompt = sum(span.end <= len(PROMPT) for span in found.spans[:-1])
    assert num_prompt >= 4
    _, expected = loop_weights("bert", embedder.tokenizer, PROMPT + "pad the fox", num_prompt)
    np.testing.assert_allclose(found.weight_T, expected, rtol=1e-3, atol=1e-6)
    assert found.pooled_T.tolist() == [False] * num_prompt + [True] * (len(expected) - num_prompt)
    (by_name,) = token_weights(embedder, ["pad the fox"], prompt_name="query")
    (without,) = token_weights(embedder, ["pad the fox"])
    assert by_name.text == found.text == PROMPT + "pad the fox"
    assert without.text == "pad the fox"
    with pytest.raises(OptionError, match="prompt_name"):
        token_weights(embedder, ["a"], prompt_name="qury")


def test_a_models_own_pooling_is_used_unless_another_is_given():
    own = AnchorTokenPooling(32, layers=(0,), include_first=False)
    embedder = embedder_of(pooling=own)
    before = embedder(embedder_tokens(embedder))
    (found,) = token_weights(embedder, TEXTS[:1])
    _, expected = loop_weights("bert", embedder.tokenizer, TEXTS[0], num_prompt=1, layer=0)
    np.testing.assert_allclose(found.weight_T, expected, rtol=1e-3, atol=1e-6)
    (other,) = token_weights(embedder, TEXTS[:1], AnchorTokenPooling(32, layers=(0, -1)))
    layers = [loop_weights("bert", embedder.tokenizer, TEXTS[0], layer=layer)[1] for layer in (0, -1)]
    np.testing.assert_allclose(other.weight_T, np.mean(layers, axis=0), rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(embedder(embedder_tokens(embedder)), before, rtol=0, atol=0)


def embedder_tokens(embedder):
    return TextTokenizer(embedder.tokenizer, embedder.text)(TEXTS, "document").padded(None, 0)


def test_a_model_is_left_as_found_also_after_a_refusal():
    embedder = embedder_of("mistral", causal=True)
    embedder.train()
    embedder.backbone.eval()
    modes = [module.training for module in embedder.modules()]
    configs = [getattr(module, "config", None) for module in embedder.modules()]
    for _ in range(2):
        with pytest.raises(OptionError, match=r"under a causal mask.*by_visible_queries: true"):
            token_weights(embedder, TEXTS)
        token_weights(embedder, TEXTS, AnchorTokenPooling(32, by_visible_queries=True))
    with pytest.raises(OptionError, match=r"layers \[7\] must be among the 2"):
        token_weights(embedder, TEXTS, AnchorTokenPooling(32, layers=(7,)))
    assert [module.training for module in embedder.modules()] == modes
    assert all(
        getattr(module, "config", None) is config for module, config in zip(embedder.modules(), configs, strict=True)
    )


def test_a_byte_level_tokenizer_and_an_empty_text_have_weights_too():
    backbone = tiny_bert()
    embedder = Embedder(backbone, bpe_tokenizer(), MeanPooling(32)).eval()
    found = token_weights(embedder, ["東京 fox", ""])
    assert [float(weights.weight_T.sum()) for weights in found] == pytest.approx([1.0, 1.0])
    assert [len(weights.spans) for weights in found][1] == 1
    assert token_weights(embedder, []) == []


def test_a_contextual_model_is_refused():
    with pytest.raises(InputError, match="is contextual"):
        token_weights(tiny_contextual(), ["a"])
