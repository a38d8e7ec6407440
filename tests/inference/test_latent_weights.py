"""The attention to latents, against each text alone, head by head."""

import numpy as np
import pytest
import torch

from embeddings.common import InputError, OptionError, TextSettings
from embeddings.inference import latent_weights
from embeddings.models import Embedder, LatentAttentionPooling, MeanPooling
from tests.helpers.tiny import tiny_bert, wordpiece_tokenizer
from tests.models.contextual_models import tiny_contextual

TEXTS = ["the quick brown fox: jumps, over", "how do I pad sequences to one length", "dog"]
PROMPT = "search_query: "


def embedder_of(**options):
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
    own = slice(8 * head, 8 * head + 8)
    return ids, ((query_TW[:, own].double() @ key_RW[:, own].double().T) / 8**0.5).softmax(1).numpy()


@pytest.mark.parametrize("mini_batch_tokens", [12, 1000])
def test_the_weights_are_those_of_each_text_alone(mini_batch_tokens):
    embedder = embedder_of()
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
    embedder = embedder_of()
    (found,) = latent_weights(embedder, ["pad the fox"], role="query")
    assert found.text == PROMPT + "pad the fox"
    assert [span.token for span in found.spans] == ["pad", "the", "fox", "[SEP]"]
    _, weight_TR = alone(embedder, PROMPT + "pad the fox", 1)
    (of_head,) = latent_weights(embedder, ["pad the fox"], prompt_name="query", head=1)
    np.testing.assert_allclose(of_head.weight_TR, weight_TR[-4:], rtol=1e-4, atol=1e-6)


def test_the_model_is_left_as_found():
    embedder = embedder_of()
    assert embedder.training
    latent_weights(embedder, TEXTS)
    assert embedder.training


def test_what_has_no_latents_or_no_such_head_is_refused():
    other = Embedder(tiny_bert(), wordpiece_tokenizer(), MeanPooling(32))
    for model in (other, tiny_contextual()):
        with pytest.raises(InputError, match="the model: has mean pooling, and no latents; give one with latent"):
            latent_weights(model, TEXTS)
    for head in (-1, 2):
        with pytest.raises(OptionError, match=f"head must be from 0 to 1, the model's heads, got {head}"):
            latent_weights(embedder_of(), TEXTS, head=head)
    with pytest.raises(OptionError, match="must name a prompt of the model"):
        latent_weights(embedder_of(), TEXTS, prompt_name="qury")
