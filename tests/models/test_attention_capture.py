"""What a capture reads of a backbone's attention, and when."""

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from embeddings.models.attention_capture import AttentionCapture, _captured_attention, attention_layers
from embeddings.models.embedder import reads_causally
from tests.helpers.tiny import tiny_bert, tiny_mistral

IDS = torch.arange(5, 15).view(2, 5)
MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])


def run(backbone):
    return backbone(input_ids=IDS, attention_mask=MASK).last_hidden_state


@torch.no_grad()
def test_queries_and_keys_are_those_that_the_layers_own_products_make():
    backbone = tiny_bert()
    with AttentionCapture(backbone, (-1, 0)).open() as captured:
        run(backbone)
        _, layer = captured()
    attention = backbone.encoder.layer[0].attention.self
    state = backbone.embeddings(input_ids=IDS)
    assert torch.equal(layer.query_NALE.transpose(1, 2).flatten(2), attention.query(state))
    assert torch.equal(layer.key_NGLE.transpose(1, 2).flatten(2), attention.key(state))
    assert layer.scaling == 8**-0.5
    assert not layer.is_causal


def test_a_backbone_has_one_capture_and_a_refused_one_leaves_every_layer_as_it_was():
    backbone = tiny_bert()
    capture = AttentionCapture(backbone, (-1,))
    for layers in ((-1,), (0, -1)):
        with pytest.raises(ValueError, match="reads this backbone's attention already"):
            AttentionCapture(backbone, layers)
    AttentionCapture(backbone, (0,))
    with pytest.raises(ValueError, match=r"layers \[1, -1\] must name each layer once"):
        AttentionCapture(tiny_bert(), (1, -1))
    run(backbone)
    with capture.open() as captured, pytest.raises(RuntimeError, match="without calling its attention function"):
        captured()


def test_a_capture_that_is_detached_leaves_its_layers_to_another_and_comes_back():
    backbone = tiny_bert()
    before = [(module.config, set(vars(module))) for module in attention_layers(backbone)]
    capture = AttentionCapture(backbone, (-1, 0))
    capture.detach()
    assert all(
        module.config is config and set(vars(module)) == names
        for module, (config, names) in zip(attention_layers(backbone), before, strict=True)
    )
    other = AttentionCapture(backbone, (0,))
    with pytest.raises(ValueError, match="already"):
        capture.attach()
    other.detach()
    capture.attach()
    with capture.open() as captured:
        run(backbone)
        assert len(captured()) == 2


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
def test_a_causal_backbone_is_told_from_one_that_sees_both_ways(attn):
    for backbone, expected in ((tiny_mistral(), True), (tiny_bert(), False)):
        backbone.set_attn_implementation(attn)
        capture = AttentionCapture(backbone.train(), (-1,))
        assert reads_causally(backbone, capture) is expected
        assert all(module.training for module in backbone.modules())


def test_attention_that_cannot_be_read_is_refused_by_name():
    backbone = tiny_bert()
    capture = AttentionCapture(backbone, (-1,))
    module = attention_layers(backbone)[-1]
    states = torch.zeros(1, 4, 3, 8)
    with capture.open(), pytest.raises(ValueError, match="attention with softcap cannot be read"):
        _captured_attention(module, states, states, states, None, softcap=30.0)


@pytest.mark.parametrize("mask", [None, MASK])
def test_without_a_whole_mask_causality_and_window_are_those_of_the_call(mask, monkeypatch):
    """As flash attention is called: a mask of padding alone, the rest by name."""
    capture, module = AttentionCapture(tiny_bert(), (-1,)), torch.nn.Module()
    object.__setattr__(module, "embeddings_capture", (capture, "told"))
    called = []
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "told", lambda *given, **_: called.append(given))
    states = torch.zeros(2, 4, 5, 8)
    noted = []
    for whole in (mask, torch.ones(2, 1, 5, 5, dtype=torch.bool)):
        with capture.open():
            _captured_attention(module, states, states, states, whole, is_causal=True, sliding_window=3)
            noted.append(capture.found[id(module)])
    assert (noted[0].mask, noted[0].is_causal, noted[0].window) == (None, True, 3)
    assert (noted[1].is_causal, noted[1].window) == (False, None)
    assert noted[1].mask is not None
    assert len(called) == 2
