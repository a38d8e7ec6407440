"""Where tokens go, against each text routed by itself."""

import pytest
import torch

from embeddings.common import InputError, OptionError, TextSettings
from embeddings.inference import Encoder, expert_loads
from embeddings.models import Embedder, MeanPooling
from tests.helpers.tiny import tiny_bert, wordpiece_tokenizer
from tests.models.contextual_models import tiny_contextual
from tests.models.moe import tiny_moe

TEXTS = ["the quick brown fox", "dog", "how do I pad sequences to one length", "7 jumps " * 20]
PROMPT = "search_query: "


def encoder(mini_batch_tokens: int = 64) -> Encoder:
    text = TextSettings(12, 16, prompts={"query": PROMPT})
    embedder = Embedder(tiny_moe(num_layers=4), wordpiece_tokenizer(), MeanPooling(32), text=text)
    return Encoder(embedder, precision="float32", mini_batch_tokens=mini_batch_tokens)


@pytest.mark.parametrize("mini_batch_tokens", [16, 1000])
@pytest.mark.parametrize("role", ["document", "query"])
def test_the_loads_are_those_of_each_text_alone(role, mini_batch_tokens):
    model = encoder(mini_batch_tokens)
    loads = expert_loads(model, TEXTS, role=role)
    prompt, length = (PROMPT, 12) if role == "query" else ("", 16)
    embedder = model.embedder.eval()
    ids = [embedder.tokenizer(prompt + text, truncation=True, max_length=length)["input_ids"] for text in TEXTS]
    expected = sum(embedder.backbone(input_ids=torch.tensor([row])).expert_counts for row in ids)
    assert torch.equal(loads.count_YX, expected)
    assert loads.count_YX.shape == (2, 4)
    assert (loads.layers, loads.top_k, loads.num_tokens) == ([1, 3], 2, sum(map(len, ids)))
    assert loads.share_YX.sum(1).tolist() == pytest.approx([1, 1])
    torch.testing.assert_close(loads.share_YX, expected.double() / expected.sum(1, keepdim=True))


def test_a_prompt_by_name_holds_and_a_text_given_twice_counts_once():
    model = encoder()
    named = expert_loads(model, TEXTS, prompt_name="query")
    assert named.num_tokens > expert_loads(model, TEXTS).num_tokens
    assert torch.equal(expert_loads(model, TEXTS + TEXTS[:2], "query").count_YX, named.count_YX)
    with pytest.raises(OptionError, match="must name a prompt of the model"):
        expert_loads(model, TEXTS, "qury")


def test_the_model_is_left_as_found():
    model = encoder()
    assert model.embedder.training
    hooks = len(model.embedder.backbone._forward_hooks)
    expert_loads(model, TEXTS)
    assert model.embedder.training
    assert len(model.embedder.backbone._forward_hooks) == hooks


def test_what_routes_no_tokens_is_refused():
    dense = Embedder(tiny_bert(), wordpiece_tokenizer(), MeanPooling(32))
    with pytest.raises(InputError, match="the model: is dense: it has no experts to send tokens to; give a sparse one"):
        expert_loads(Encoder(dense), TEXTS)
    with pytest.raises(InputError, match="the model: is contextual"):
        expert_loads(Encoder(tiny_contextual()), TEXTS)
