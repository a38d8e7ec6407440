"""Token weights, latent weights, expert loads and effects of contexts equal those of loops."""

import math

import numpy as np
import pytest
import torch

from embeddings.common import OptionError, TextSettings, UserError
from embeddings.data.tokenize import TextTokenizer, TokenSpan
from embeddings.inference import (
    ContextualShift,
    Encoder,
    contextual_shift,
    expert_loads,
    latent_weights,
    sample_context,
)
from embeddings.inference.inspection import TokenWeights, place_of, shares_of, token_weights
from embeddings.models import AnchorTokenPooling, Embedder, LatentAttentionPooling, MeanPooling, make_bidirectional
from tests.helpers.refusals import refused
from tests.helpers.tiny import sentencepiece_tokenizer, tiny_bert, tiny_mistral, wordpiece_tokenizer
from tests.models.contextual_models import tiny_contextual
from tests.models.moe import tiny_moe

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
    """Eq. 3 with one number at a time, on a separate backbone with eager attention."""
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
def test_the_weights_of_a_model_with_another_pooling_equal_those_of_a_loop(kind, axis):
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


def test_a_prompt_has_no_weight_and_the_text_after_it_has_all():
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


def test_the_pooling_of_the_model_is_used_unless_another_is_given():
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


def test_a_model_is_not_changed_even_after_an_error():
    embedder = embedder_of("mistral", causal=True)
    embedder.train()
    embedder.backbone.eval()
    modes = [module.training for module in embedder.modules()]
    configs = [getattr(module, "config", None) for module in embedder.modules()]
    for _ in range(2):
        refused(OptionError, r"under a causal mask.*by_visible_queries: true", token_weights, embedder, TEXTS)
        token_weights(embedder, TEXTS, AnchorTokenPooling(32, by_visible_queries=True))
    refused(
        OptionError,
        r"layers \[7\] must be",
        token_weights,
        embedder,
        TEXTS,
        AnchorTokenPooling(32, layers=(7,), axis="query"),
    )
    assert [module.training for module in embedder.modules()] == modes
    assert all(
        getattr(module, "config", None) is config for module, config in zip(embedder.modules(), configs, strict=True)
    )


def weighed(text, spans, weights, pooled=None):
    spans = [TokenSpan(name, start, end, start == end) for name, start, end in spans]
    pooled = np.array(pooled or [True] * len(spans))
    return TokenWeights(text, spans, np.array(weights, dtype=np.float32), pooled)


def test_the_places_of_a_text_by_hand():
    text = "Hi (–, a1"
    spans = [("<s>", 0, 0), ("Hi", 0, 2), (" (", 2, 4), ("–,", 4, 6), ("a", 7, 8), ("1", 8, 9), ("</s>", 0, 0)]
    weights = weighed(text, spans, [0.3, 0.1, 0.1, 0.1, 0.1, 0.1, 0.2])
    assert place_of(weights) == ["first", "rest", "punctuation", "punctuation", "rest", "rest", "last"]
    shares = shares_of([weights])
    assert shares.weight == pytest.approx({"first": 0.3, "last": 0.2, "punctuation": 0.2, "rest": 0.3}, abs=1e-6)
    assert shares.tokens == pytest.approx({"first": 1 / 7, "last": 1 / 7, "punctuation": 2 / 7, "rest": 3 / 7})
    # Texts count equally.
    other = weighed("..", [(".", 0, 1), (".", 1, 2)], [0.5, 0.5])
    both = {"first": 0.4, "last": 0.35, "punctuation": 0.1, "rest": 0.15}
    assert shares_of([weights, other]).weight == pytest.approx(both, abs=1e-6)


@pytest.mark.parametrize(
    ("text", "spans", "pooled", "places"),
    [
        # A prompt has no place.
        (":!a", [("[CLS]", 0, 0), (":", 0, 1), ("!", 1, 2), ("a", 2, 3), ("[SEP]", 0, 0)], [0, 0, 1, 1, 1],
         [None, None, "first", "rest", "last"]),
        # A text with one token has a first token but no last one.
        (".", [(".", 0, 1)], [1], ["first"]),
        ("..", [(".", 0, 1), (".", 1, 2)], [1, 1], ["first", "last"]),
        # A special token in the middle is not punctuation.
        ("a b", [("a", 0, 1), ("!", 0, 0), (" ", 1, 2), ("b", 2, 3)], [1] * 4, ["first", "rest", "rest", "last"]),
    ],
)  # fmt: skip
def test_the_place_of_a_token_is_that_among_pooled_tokens(text, spans, pooled, places):
    weights = weighed(text, spans, [each / sum(pooled) for each in pooled], [each == 1 for each in pooled])
    assert place_of(weights) == places
    assert sum(shares_of([weights]).tokens.values()) == pytest.approx(1)
    assert sum(shares_of([weights]).weight.values()) == pytest.approx(1)


def latent_embedder(**options):
    torch.manual_seed(0)
    pooling = LatentAttentionPooling(32, num_latents=7, num_heads=2, head_dim=8, **options)
    for weight in pooling.parameters():
        weight.data *= 5
    text = TextSettings(16, 24, prompts={"query": PROMPT}, pool_prompt=False)
    return Embedder(tiny_bert(), wordpiece_tokenizer(), pooling, text=text)


def alone(embedder, text, head):
    """The softmax of one text's tokens, without padding and in float64."""
    embedder = embedder.eval()
    ids = embedder.tokenizer(text, truncation=True, max_length=24)["input_ids"]
    with torch.no_grad():
        state_TH = embedder.backbone(torch.tensor([ids])).last_hidden_state[0]
        attention = embedder.pooling.attention
        query_TW = attention.to_query(attention.norm(state_TH))
        key_RW = attention.to_key_value(attention.norm_latents(embedder.pooling.latents))[:, :16]
    columns = slice(8 * head, 8 * head + 8)
    return ids, ((query_TW[:, columns].double() @ key_RW[:, columns].double().T) / 8**0.5).softmax(1).numpy()


@pytest.mark.parametrize("mini_batch_tokens", [12, 1000])
def test_latent_weights_equal_those_of_each_text_alone(mini_batch_tokens):
    embedder = latent_embedder()
    heads = [latent_weights(embedder, TEXTS, head=head, mini_batch_tokens=mini_batch_tokens) for head in (0, 1)]
    means = latent_weights(embedder, TEXTS, mini_batch_tokens=mini_batch_tokens)
    for number, text in enumerate(TEXTS):
        expected = []
        for head in (0, 1):
            ids, weight_TR = alone(embedder, text, head)
            found = heads[head][number]
            assert found.text == text
            assert [embedder.tokenizer.convert_tokens_to_ids(span.token) for span in found.spans] == ids
            np.testing.assert_allclose(found.weight_TR, weight_TR, rtol=1e-4, atol=1e-6)
            expected.append(weight_TR)
        np.testing.assert_allclose(means[number].weight_TR, np.mean(expected, axis=0), rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(means[number].mean_R, np.mean(expected, axis=(0, 1)), rtol=1e-4, atol=1e-6)
        assert np.ptp(expected[0]) > 0.2
        assert not np.allclose(*expected, atol=0.05)


def test_a_prompt_that_is_not_pooled_has_no_row():
    embedder = latent_embedder()
    (found,) = latent_weights(embedder, ["pad the fox"], role="query", head=1)
    assert found.text == PROMPT + "pad the fox"
    assert [span.token for span in found.spans] == ["pad", "the", "fox", "[SEP]"]
    _, weight_TR = alone(embedder, PROMPT + "pad the fox", 1)
    np.testing.assert_allclose(found.weight_TR, weight_TR[-4:], rtol=1e-4, atol=1e-6)


ROUTED_TEXTS = ["the quick brown fox", "dog", "how do I pad sequences to one length", "7 jumps " * 20]


def routed_encoder(mini_batch_tokens: int = 64) -> Encoder:
    text = TextSettings(12, 16, prompts={"query": PROMPT})
    embedder = Embedder(tiny_moe(num_layers=4), wordpiece_tokenizer(), MeanPooling(32), text=text)
    return Encoder(embedder, precision="float32", mini_batch_tokens=mini_batch_tokens)


@pytest.mark.parametrize("mini_batch_tokens", [16, 1000])
@pytest.mark.parametrize("role", ["document", "query"])
def test_expert_loads_equal_those_of_each_text_alone(role, mini_batch_tokens):
    model = routed_encoder(mini_batch_tokens)
    loads = expert_loads(model, ROUTED_TEXTS, role=role)
    prompt, length = (PROMPT, 12) if role == "query" else ("", 16)
    embedder = model.embedder.eval()
    ids = [embedder.tokenizer(prompt + text, truncation=True, max_length=length)["input_ids"] for text in ROUTED_TEXTS]
    expected = sum(embedder.backbone(input_ids=torch.tensor([row])).expert_counts for row in ids)
    assert torch.equal(loads.count_YX, expected)
    again = expert_loads(model, ROUTED_TEXTS + ROUTED_TEXTS[:2], role=role)
    assert torch.equal(again.count_YX, expected), "a text given twice counts once"
    assert loads.count_YX.shape == (2, 4)
    assert (loads.layers, loads.top_k, loads.num_tokens) == ([1, 3], 2, sum(map(len, ids)))
    assert loads.share_YX.sum(1).tolist() == pytest.approx([1, 1])
    torch.testing.assert_close(loads.share_YX, expected.double() / expected.sum(1, keepdim=True))


SHIFT_TEXTS = ["the quick brown fox", "dog", "how do I pad sequences to one length"]
CORPUS = ["jumps over", "the lazy dog", "return the sum", "two numbers", "one length", "pad 7"]


def test_documents_are_encoded_in_each_context_and_without_one():
    encoder = Encoder(tiny_contextual(normalize=False), precision="float32")
    contexts = [sample_context(encoder, CORPUS, 3, seed) for seed in (1, 2)]
    shift = contextual_shift(encoder, SHIFT_TEXTS, contexts)
    assert shift.vector_CND.shape == (2, 3, 32)
    for found, context in zip([*shift.vector_CND, shift.alone_ND], [*contexts, None], strict=True):
        expected = encoder.encode(SHIFT_TEXTS, None, context, role="document")
        expected /= np.linalg.norm(expected, axis=1, keepdims=True)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
    assert np.abs(shift.vector_CND[0] - shift.vector_CND[1]).max() > 1e-4
    assert np.abs(shift.vector_CND[0] - shift.alone_ND).max() > 1e-4


def test_the_cosines_equal_those_of_loops():
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


@pytest.mark.parametrize(
    ("look", "message"),
    [
        (lambda: token_weights(tiny_contextual(), ["a"]), "is contextual"),
        (lambda: latent_weights(embedder_of(), TEXTS), "has mean pooling, without latents; use one with latent"),
        (lambda: latent_weights(latent_embedder(), TEXTS, head=2), "head must be from 0 to 1: .* got 2"),
        (lambda: expert_loads(Encoder(embedder_of()), TEXTS), "is dense: it has no experts; use a sparse model"),
        (lambda: expert_loads(Encoder(tiny_contextual()), TEXTS), "the model: is contextual"),
        (lambda: contextual_shift(Encoder(tiny_contextual()), ["a"], []), "documents must be two or more"),
    ],
)
def test_an_inspection_that_does_not_fit_the_model_is_refused(look, message):
    refused(UserError, message, look)
