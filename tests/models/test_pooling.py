"""Poolings against loops; their gradients, precision and masks."""

import math

import pytest
import torch
from torch.nn.functional import layer_norm

from embeddings.models import (
    ClsPooling,
    LastTokenPooling,
    LatentAttentionPooling,
    MeanPooling,
    SelfAttentionPooling,
    WeightedMeanPooling,
)
from tests.models.moe import gelu

SIMPLE = [MeanPooling, ClsPooling, LastTokenPooling, WeightedMeanPooling]
# All tokens pooled, a prompt excluded, padding, a token in the middle excluded, one token.
MASK = torch.tensor(
    [[1, 1, 1, 1, 1], [0, 0, 1, 1, 1], [1, 1, 0, 0, 0], [1, 0, 1, 1, 0], [1, 0, 0, 0, 0]], dtype=torch.bool
)


def states(dtype=torch.float32):
    return torch.randn(5, 5, 8, generator=torch.Generator().manual_seed(0)).to(dtype)


def by_hand(kind, hidden, mask):
    vectors = []
    for text, pooled in zip(hidden.double(), mask.tolist(), strict=True):
        chosen = [position for position, is_pooled in enumerate(pooled) if is_pooled]
        if kind is ClsPooling:
            vectors.append(text[0])
        elif kind is LastTokenPooling:
            vectors.append(text[chosen[-1]])
        else:
            weights = [position + 1 if kind is WeightedMeanPooling else 1 for position in chosen]
            total = sum(weight * text[position] for position, weight in zip(chosen, weights, strict=True))
            vectors.append(total / sum(weights))
    return torch.stack(vectors)


@pytest.mark.parametrize("autocasts", [False, True])
@pytest.mark.parametrize("kind", SIMPLE)
def test_poolings_equal_a_loop(kind, autocasts):
    with torch.autocast("cpu", torch.bfloat16, enabled=autocasts):
        vector = kind(8)(states(), MASK)
    assert vector.dtype == torch.float32
    torch.testing.assert_close(vector.double(), by_hand(kind, states(), MASK), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", [*SIMPLE, LatentAttentionPooling, SelfAttentionPooling])
def test_a_text_without_a_pooled_token_gets_a_finite_vector_and_gradient(kind):
    hidden = states().requires_grad_()
    mask = MASK.clone()
    mask[2] = False
    vector = kind(8)(hidden, mask)
    vector.square().sum().backward()
    assert torch.isfinite(vector).all()
    assert hidden.grad is not None
    assert torch.isfinite(hidden.grad).all()
    if kind not in (ClsPooling, LastTokenPooling):
        assert (vector[2] == 0).all()


@pytest.mark.parametrize("kind", [*SIMPLE, LatentAttentionPooling, SelfAttentionPooling])
def test_states_of_padding_never_affect_a_vector(kind):
    torch.manual_seed(0)
    pooling, mask = kind(8), torch.tensor([[1, 1, 1, 0, 0]] * 5, dtype=torch.bool)
    spoiled = states()
    spoiled[:, 3:] = float("nan")
    torch.testing.assert_close(pooling(spoiled, mask), pooling(states()[:, :3], mask[:, :3]), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", [*SIMPLE, LatentAttentionPooling, SelfAttentionPooling])
def test_vectors_are_float32_for_low_precision_states_and_under_autocast(kind):
    pooling = kind(8)
    assert pooling(states(torch.bfloat16), MASK).dtype == torch.float32
    assert pooling.double()(states(torch.float64), MASK).dtype == torch.float64
    with torch.autocast("cpu", torch.bfloat16):
        assert pooling.float()(states(torch.bfloat16), MASK).dtype == torch.float32


@pytest.mark.parametrize("kind", SIMPLE)
def test_gradients_of_poolings_equal_finite_differences(kind):
    hidden = states(torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: kind(8)(x, MASK), (hidden,))


HIDDEN, HEADS, HEAD_DIM, LATENTS = 8, 2, 4, 5
MASK_ATTENTION = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1], [1, 0, 0, 0]], dtype=torch.bool)


def build(**options):
    torch.manual_seed(0)
    return SelfAttentionPooling(HIDDEN, HEADS, **options).double()


def states_of_attention(mask=MASK_ATTENTION):
    return torch.randn(*mask.shape, HIDDEN, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def by_hand_of_attention(pooling, tokens):
    """The pooled tokens of one text through the layer, head by head and token by token."""
    weights = pooling.state_dict()
    normed = layer_norm(tokens, (HIDDEN,), weights["norm.weight"], weights["norm.bias"])
    query, key, value = (normed @ weights["to_query_key_value.weight"].T).split(HIDDEN, dim=1)
    total = torch.zeros(HIDDEN, dtype=torch.float64)
    for i in range(len(tokens)):
        read = []
        for head in range(HEADS):
            own = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
            shares = torch.stack([query[i, own] @ one[own] / math.sqrt(HEAD_DIM) for one in key]).softmax(0)
            read.append(sum(share * one[own] for share, one in zip(shares, value, strict=True)))
        token = tokens[i] + weights["to_output.weight"] @ torch.cat(read)
        total += token + pooling.feed_forward(token[None])[0].detach()
    return total / len(tokens)


def test_self_attention_equals_a_loop_over_tokens_and_heads():
    pooling, hidden = build(), states_of_attention()
    expected = [by_hand_of_attention(pooling, hidden[row, MASK_ATTENTION[row]]) for row in range(3)]
    torch.testing.assert_close(pooling(hidden, MASK_ATTENTION), torch.stack(expected))


def test_gradients_of_self_attention_equal_finite_differences():
    pooling, hidden = build(), states_of_attention().requires_grad_()
    mask = MASK_ATTENTION.clone()
    mask[1] = False
    assert torch.autograd.gradcheck(lambda x: pooling(x, mask), (hidden,))


def test_heads_that_do_not_divide_the_width_are_refused():
    with pytest.raises(ValueError, match=r"pooling\.num_heads must .*, got 3"):
        SelfAttentionPooling(8, 3)


def build_latent(seed=0, **options):
    torch.manual_seed(seed)
    pooling = LatentAttentionPooling(HIDDEN, num_latents=LATENTS, num_heads=HEADS, **options)
    return pooling.double()


def norm(row, weights, name):
    return layer_norm(row, (HIDDEN,), weights[f"{name}.weight"], weights[f"{name}.bias"])


def released_block(token, weights, head_dim):
    """One token through the released block by a loop over heads and latents, and its attention to the latents."""
    query = weights["attention.to_query.weight"] @ norm(token, weights, "attention.norm")
    latents = [norm(latent, weights, "attention.norm_latents") for latent in weights["latents"]]
    both = [weights["attention.to_key_value.weight"] @ latent for latent in latents]
    width, read, shares = HEADS * head_dim, [], []
    for head in range(HEADS):
        own = slice(head * head_dim, (head + 1) * head_dim)
        shares.append(torch.stack([query[own] @ one[:width][own] / math.sqrt(head_dim) for one in both]).softmax(0))
        read.append(sum(share * one[width:][own] for share, one in zip(shares[-1], both, strict=True)))
    token = token + weights["attention.to_output.weight"] @ torch.cat(read)
    inner = norm(token, weights, "feed_forward.norm")
    wide = weights["feed_forward.expand.weight"] @ inner + weights["feed_forward.expand.bias"]
    gated = wide[: 4 * HIDDEN] * gelu(wide[4 * HIDDEN :])
    token = token + weights["feed_forward.contract.weight"] @ gated + weights["feed_forward.contract.bias"]
    return token, torch.stack(shares)


def paper_block(token, weights, head_dim):
    """One token through Eq. 1 with K = V = latents and heads, then the two-layer MLP; and its attention."""
    read, shares = [], []
    for head in range(HEADS):
        own = slice(head * head_dim, (head + 1) * head_dim)
        shares.append(torch.stack([token[own] @ latent[own] for latent in weights["latents"]]).softmax(0))
        read.append(sum(share * latent[own] for share, latent in zip(shares[-1], weights["latents"], strict=True)))
    active = gelu(weights["mlp.0.weight"] @ torch.cat(read) + weights["mlp.0.bias"])
    return weights["mlp.2.weight"] @ active + weights["mlp.2.bias"], torch.stack(shares)


@pytest.mark.parametrize(
    ("options", "block", "head_dim"),
    [({}, released_block, HIDDEN), ({"head_dim": 3}, released_block, 3), ({"paper_literal": True}, paper_block, 4)],
)
def test_latent_attention_equals_a_loop_over_tokens_heads_and_latents(options, block, head_dim):
    pooling, hidden = build_latent(**options), states_of_attention()
    weights = {name: tensor.detach() for name, tensor in pooling.state_dict().items()}
    for row, (text, pooled) in enumerate(zip(hidden, MASK_ATTENTION, strict=True)):
        tokens, shares = zip(*(block(token, weights, head_dim) for token in text[pooled]), strict=True)
        expected = torch.stack(tokens).mean(0)
        torch.testing.assert_close(pooling(hidden, MASK_ATTENTION)[row], expected, rtol=1e-10, atol=1e-10)
        found_TAR = pooling.weights(text[pooled]).transpose(0, 1)
        torch.testing.assert_close(found_TAR, torch.stack(shares), rtol=1e-9, atol=0)
        assert float(found_TAR.detach().std()) > 0.01


@pytest.mark.parametrize("options", [{}, {"head_dim": 3}, {"paper_literal": True}])
def test_gradients_of_latent_attention_equal_finite_differences(options):
    pooling, hidden = build_latent(**options), states_of_attention().requires_grad_()
    names, tensors = zip(*pooling.named_parameters(), strict=True)

    def run(hidden, *parameters):
        return torch.func.functional_call(pooling, dict(zip(names, parameters, strict=True)), (hidden, MASK_ATTENTION))

    assert torch.autograd.gradcheck(run, (hidden, *tensors), atol=1e-6, fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zero_initialised_branches_equal_mean_pooling_to_the_bit(dtype):
    pooling, hidden = build_latent(zero_init_residual=True).float(), states_of_attention().to(dtype)
    assert torch.equal(pooling(hidden, MASK_ATTENTION), MeanPooling(HIDDEN)(hidden, MASK_ATTENTION))
    assert not torch.equal(build_latent().float()(hidden, MASK_ATTENTION), MeanPooling(HIDDEN)(hidden, MASK_ATTENTION))
    attention = build(zero_init_residual=True).float()
    assert torch.equal(attention(hidden, MASK_ATTENTION), MeanPooling(HIDDEN)(hidden, MASK_ATTENTION))
    # In a batch without pooled tokens all vectors are zero.
    assert not pooling(hidden, torch.zeros_like(MASK_ATTENTION)).any()


def test_zero_initialised_branches_are_trained():
    pooling = build_latent(zero_init_residual=True)
    before = {name: tensor.clone() for name, tensor in pooling.state_dict().items()}
    optimizer = torch.optim.SGD(pooling.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        (pooling(states_of_attention(), MASK_ATTENTION) * torch.arange(HIDDEN)).sum().backward()
        optimizer.step()
    unchanged = [name for name, tensor in pooling.state_dict().items() if torch.equal(tensor, before[name])]
    assert unchanged == []


def test_the_released_size_has_740_million_parameters():
    with torch.device("meta"):
        pooling = LatentAttentionPooling(4096)
    count = sum(parameter.numel() for parameter in pooling.parameters())
    latents, query, key_value, output = 512 * 4096, 4096 * 32768, 4096 * 65536, 32768 * 4096
    feed_forward = (4096 + 1) * 32768 + (16384 + 1) * 4096
    assert count == latents + query + key_value + output + feed_forward + 6 * 4096 == 740_356_096


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"paper_literal": True, "head_dim": 4}, "head_dim"),
        ({"paper_literal": True, "zero_init_residual": True}, "zero_init"),
        ({"paper_literal": True, "num_heads": 3}, "num_heads"),
        ({"num_latents": 0}, "pooling.num_latents must be >= 1, got 0"),
    ],
)
def test_options_that_cannot_take_effect_are_refused(options, word):
    with pytest.raises(ValueError, match=word):
        LatentAttentionPooling(HIDDEN, **options)
