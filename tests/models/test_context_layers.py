"""The layers of a contextual model: first stage, slots, soft prompts, residual, and states behind a context."""

import pytest
import torch
from transformers import MPNetConfig, MPNetModel

from embeddings.models.context_layers import (
    ContextSlots,
    FirstStage,
    ResidualProjection,
    SoftPrompt,
    first_position,
    learned_positions,
    states_behind_context,
)
from embeddings.models.contextual import broken_rule
from tests.helpers.tiny import tiny_bert, tiny_mistral
from tests.models.contextual_models import BACKBONES, SMALL, tiny_modernbert, tiny_nomic, tiny_xlm_roberta
from tests.models.reading import random_tokens

LENGTHS = [7, 3, 12, 1]


def stage(width=24):
    torch.manual_seed(0)
    return FirstStage(tiny_bert(), 32, width).eval()


@torch.no_grad()
def test_vectors_equal_a_loop_over_documents():
    tokens, first = random_tokens(384, LENGTHS, skip=2), stage()
    vectors = first(*tokens)
    assert vectors.shape == (4, 24)
    inner, outer = first.projection[0], first.projection[2]
    for row, length in enumerate(LENGTHS):
        states = tiny_bert()(tokens.input_ids_NL[row : row + 1, :length]).last_hidden_state[0]
        pooled = [state for state, kept in zip(states, tokens.pooling_mask_NL[row], strict=False) if kept]
        mean = sum(pooled) / max(1, len(pooled)) if pooled else torch.zeros(32)
        hidden = torch.nn.functional.gelu(inner.weight @ mean + inner.bias)
        torch.testing.assert_close(vectors[row], outer.weight @ hidden + outer.bias, rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("skip", [0, 2, 6])
def test_a_limit_reads_the_first_tokens_and_pools_the_last_of_them(skip):
    tokens, first = random_tokens(384, LENGTHS, skip=skip), stage()
    cut = [tensor[:, :5].clone() for tensor in tokens]
    for row, length in enumerate(LENGTHS):
        cut[2][row, min(length, 5) - 1] = True
    expected, whole = first(*cut), first(*tokens)
    first.max_length = 5
    torch.testing.assert_close(first(*tokens), expected)
    assert (whole - expected)[[0, 2]].abs().max() > 1e-4


def test_prompts_are_pooled_too_where_the_released_model_does_so():
    layer, tokens = stage(), random_tokens(384, LENGTHS, skip=2)
    everything = tokens._replace(pooling_mask_NL=tokens.attention_mask_NL)
    with torch.no_grad():
        plain, whole = layer(*tokens), layer(*everything)
        layer.pools_prompt = True
        assert torch.equal(layer(*tokens), whole)
    assert (plain - whole).abs().max() > 1e-3


def slots(num_context=5, dropout_fraction=0.0):
    torch.manual_seed(0)
    return ContextSlots(num_context, 8, dropout_fraction)


def test_every_text_has_the_same_context_and_empty_slots_are_null():
    layer, context = slots().eval(), torch.randn(3, 8)
    assert torch.equal(layer(context, 4), torch.stack([*context, layer.null_H, layer.null_H]).expand(4, 5, 8))
    for given in (None, torch.empty(0, 8), layer.null_H.expand(5, 8)):
        assert torch.equal(layer(given, 2), layer.null_H.expand(2, 5, 8))


@pytest.mark.parametrize("shape", [(6, 8), (5, 9), (1, 5, 8), (8,)])
def test_a_context_that_does_not_fit_is_refused(shape):
    with pytest.raises(ValueError, match="at most 5 vectors of width 8"):
        slots()(torch.zeros(shape), 2)


def test_dropout_of_everything_is_no_context_and_of_nothing_the_whole_with_the_null_vector_in_the_graph():
    """Every rank's graph holds the null vector, or gradients of several ranks would never meet."""
    context = torch.randn(5, 8)
    layer = slots(dropout_fraction=1.0).train()
    assert torch.equal(layer(context, 3), layer(None, 3))
    layer = slots(dropout_fraction=0.0).train()
    filled = layer(context, 3)
    assert torch.equal(filled, context.expand(3, 5, 8))
    filled.sum().backward()
    assert torch.equal(layer.null_H.grad, torch.zeros(8))
    assert abs(float(ContextSlots(1, 4096).null_H.detach().std()) - 0.01) < 1e-3


def test_dropout_replaces_single_slots_of_single_texts_at_its_rate():
    layer, context = slots(50, 0.25).train(), torch.randn(50, 8)
    expected = context.expand(200, 50, 8)
    found = layer(context, 200)
    dropped = (found == layer.null_H).all(-1)
    assert torch.equal(found[~dropped], expected[~dropped])
    assert abs(float(dropped.float().mean()) - 0.25) < 0.02
    assert dropped.any(0).all()
    assert (~dropped).any(1).all()
    assert torch.equal(layer.eval()(context, 200), expected)


@torch.no_grad()
def test_soft_prompts_are_the_projection_of_ones():
    torch.manual_seed(0)
    prompt = SoftPrompt(3, 8)
    first, second = prompt.layers[0], prompt.layers[2]
    hidden = [max(0.0, float(first.weight[i].sum() + first.bias[i])) for i in range(8)]
    flat = second.weight @ torch.tensor(hidden) + second.bias
    torch.testing.assert_close(prompt(), torch.stack([flat[8 * i : 8 * i + 8] for i in range(3)]))
    assert SoftPrompt(0, 8)().shape == (0, 8)
    assert list(SoftPrompt(0, 8).parameters()) == []
    assert "ones_H" not in prompt.state_dict()


def test_the_residual_projection_starts_as_the_identity_and_learns():
    torch.manual_seed(0)
    layer, vectors = ResidualProjection(8), torch.randn(4, 8)
    assert torch.equal(layer(vectors), vectors)
    layer(vectors).square().sum().backward()
    assert layer.layers[2].weight.grad.abs().max() > 0
    torch.nn.init.normal_(layer.layers[2].weight)
    hidden = torch.relu(vectors @ layer.layers[0].weight.T + layer.layers[0].bias)
    torch.testing.assert_close(layer(vectors), vectors + hidden @ layer.layers[2].weight.T)
    # Without the pooled states it starts at random: at zero every text would have the zero vector.
    assert ResidualProjection(8, adds_pooled=False)(vectors).abs().min() > 0


TOKENS = random_tokens(384, [7, 3, 30, 1])
IDS, SEEN = TOKENS.input_ids_NL, TOKENS.attention_mask_NL


def prefix(num_context=6, num_soft_prompts=3):
    torch.manual_seed(5)
    return torch.randn(4, num_context, 32), torch.randn(num_soft_prompts, 32)


def spread(first, second):
    return float((first - second)[SEEN].abs().max())


@pytest.mark.parametrize("kind", BACKBONES)
@torch.no_grad()
def test_the_order_of_the_context_changes_nothing_and_its_content_does(kind):
    backbone, (context, soft) = BACKBONES[kind](), prefix()
    given = states_behind_context(backbone, context, soft, IDS, SEEN)
    turned = states_behind_context(backbone, context[:, [3, 5, 0, 1, 4, 2]], soft, IDS, SEEN)
    assert spread(given, turned) <= 1e-5
    assert spread(given, states_behind_context(backbone, context.roll(1, 2), soft, IDS, SEEN)) > 1e-3


@pytest.mark.parametrize("kind", BACKBONES)
@torch.no_grad()
def test_an_empty_prefix_leaves_the_states_of_the_backbone_and_padding_changes_none(kind):
    backbone = BACKBONES[kind]()
    states = states_behind_context(backbone, *prefix(0, 0), IDS, SEEN)
    assert spread(states, backbone(input_ids=IDS, attention_mask=SEEN.long()).last_hidden_state) <= 1e-5
    context, soft = prefix()
    together = states_behind_context(backbone, context, soft, IDS, SEEN)
    for row, length in enumerate([7, 3, 30, 1]):
        own = slice(row, row + 1)
        alone = states_behind_context(backbone, context[own], soft, IDS[own, :length], SEEN[own, :length])
        assert (alone[0] - together[row, :length]).abs().max() <= 1e-5


@pytest.mark.parametrize("make", [tiny_bert, tiny_xlm_roberta])
@torch.no_grad()
def test_learned_positions_are_added_to_the_text_alone(make):
    backbone = make()
    context, soft = prefix()
    table = learned_positions(backbone)
    assert table is not None
    first = 0 if make is tiny_bert else 2
    assert first_position(table) == first
    seen = []
    handle = backbone.embeddings.LayerNorm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    states_behind_context(backbone, context, soft, IDS, SEEN)
    handle.remove()
    words, kind = backbone.get_input_embeddings()(IDS), backbone.embeddings.token_type_embeddings.weight[0]
    for row in range(4):
        rows = [vector + kind for vector in (*context[row], *soft)]
        rows += [words[row, i] + kind + table.weight[first + i] for i in range(IDS.shape[1])]
        torch.testing.assert_close(seen[0][row], torch.stack(rows), rtol=0, atol=1e-6)


@torch.no_grad()
def test_a_rotary_context_has_index_0_and_the_text_begins_behind_the_soft_prompt():
    backbone, (context, soft) = tiny_nomic(), prefix()
    seen = []
    backbone.rotary_emb.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[1]))
    states_behind_context(backbone, context, soft, IDS, SEEN)
    assert seen[0].tolist() == [[0] * 6 + list(range(6, 6 + 3 + 30))]


@torch.no_grad()
def test_a_window_holds_among_the_texts_tokens_and_for_no_other():
    backbone, (context, soft) = tiny_modernbert(), prefix()
    seen = []
    layer = next(layer for layer in backbone.layers if layer.attention_type == "sliding_attention")
    layer.register_forward_pre_hook(lambda _, inputs, options: seen.append(options["attention_mask"]), with_kwargs=True)
    states_behind_context(backbone, context, soft, IDS, SEEN)
    total = 6 + 3 + IDS.shape[1]
    assert seen[0].shape == (4, 1, total, total)
    for row in range(4):
        for i in range(total):
            for j in range(total):
                near = i < 9 or j < 9 or abs(i - j) <= 3
                is_token = j < 9 or bool(SEEN[row, j - 9])
                assert bool(seen[0][row, 0, i, j]) == (near and is_token)


def test_the_check_leaves_the_mode_and_keeps_no_gradient():
    backbone = tiny_bert(dropout=0.5).train()
    assert broken_rule(backbone) is None
    assert all(module.training for module in backbone.modules())
    assert all(weight.grad is None for weight in backbone.parameters())


def test_a_backbone_that_sees_the_order_breaks_the_rule():
    assert broken_rule(tiny_mistral()) == "must read its context as a set, and sees its order"
    config = MPNetConfig(**SMALL, max_position_embeddings=130)
    assert "not weigh tokens by their distance" in broken_rule(MPNetModel(config, add_pooling_layer=False))
    packed = tiny_bert()
    packed.config._attn_implementation = "flash_attention_2"
    assert broken_rule(packed) == "must be loaded with eager or sdpa attention, not flash_attention_2"


@torch.no_grad()
@pytest.mark.parametrize("kind", ["nomic", "modernbert", "decoder"])
def test_a_context_with_positions_is_read_as_any_tokens_are(kind):
    backbone, ids_NL = BACKBONES[kind](), torch.arange(4, 24).view(2, 10)
    mask_NL = torch.ones_like(ids_NL, dtype=torch.bool)
    mask_NL[1, 7:] = False
    words = backbone.get_input_embeddings()
    prefix_ids = torch.arange(30, 36)
    context, soft = words(prefix_ids[:4]).expand(2, -1, -1), words(prefix_ids[4:])
    states = states_behind_context(backbone, context, soft, ids_NL, mask_NL, has_positions=True)
    whole = torch.cat([prefix_ids.expand(2, -1), ids_NL], dim=1)
    seen = torch.cat([torch.ones(2, 6, dtype=torch.int64), mask_NL.long()], dim=1)
    expected = backbone(input_ids=whole, attention_mask=seen).last_hidden_state[:, 6:]
    torch.testing.assert_close(states[mask_NL], expected[mask_NL], rtol=1e-4, atol=1e-5)
    turned = states_behind_context(backbone, context.flip(1), soft, ids_NL, mask_NL, has_positions=True)
    assert (turned - states)[mask_NL].abs().max() > 1e-5
