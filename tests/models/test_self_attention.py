import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from embeddings.models import MeanPooling, SelfAttentionPooling

HIDDEN, HEADS, HEAD_DIM = 8, 2, 4
MASK = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1], [1, 0, 0, 0]], dtype=torch.bool)


def build(**options: bool) -> SelfAttentionPooling:
    torch.manual_seed(0)
    return SelfAttentionPooling(HIDDEN, HEADS, **options).double()


def states() -> Tensor:
    return torch.randn(3, 4, HIDDEN, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def by_hand(pooling: SelfAttentionPooling, tokens: Tensor) -> Tensor:
    """The pooled tokens of one text through the layer, head by head and token by token."""
    weights = pooling.state_dict()
    normed = layer_norm(tokens, (HIDDEN,), weights["norm.weight"], weights["norm.bias"])
    query, key, value = (normed @ weights["to_query_key_value.weight"].T).split(HIDDEN, dim=1)
    total = torch.zeros(HIDDEN, dtype=torch.float64)
    for i in range(len(tokens)):
        read = []
        for head in range(HEADS):
            own = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
            powers = [math.exp(float(query[i, own] @ key[j, own]) / math.sqrt(HEAD_DIM)) for j in range(len(tokens))]
            read.append(sum(power / sum(powers) * value[j, own] for j, power in enumerate(powers)))
        token = tokens[i] + weights["to_output.weight"] @ torch.cat(read)  # type: ignore[arg-type]
        total += token + pooling.feed_forward(token[None])[0].detach()
    return total / len(tokens)


def test_self_attention_equals_a_loop_over_tokens_and_heads() -> None:
    pooling, hidden = build(), states()
    for row in range(3):
        torch.testing.assert_close(pooling(hidden, MASK)[row], by_hand(pooling, hidden[row, MASK[row]]))


def test_gradients_of_self_attention_are_right() -> None:
    pooling, hidden = build(), states().requires_grad_()
    mask = MASK.clone()
    mask[1] = False
    assert torch.autograd.gradcheck(lambda x: pooling(x, mask), (hidden,))


def test_tokens_outside_the_mask_change_nothing() -> None:
    pooling, hidden = build(), states()
    spoiled = hidden.clone()
    spoiled[~MASK] = 1e6
    assert torch.equal(pooling(spoiled, MASK), pooling(hidden, MASK))


def test_zero_branches_start_as_plain_mean_pooling() -> None:
    assert torch.equal(build(zero_init_residual=True)(states(), MASK), MeanPooling(HIDDEN)(states(), MASK))


def test_its_arguments_rebuild_it() -> None:
    pooling = build(zero_init_residual=True)
    assert SelfAttentionPooling(HIDDEN, **pooling.arguments()).arguments() == pooling.arguments()


def test_heads_that_do_not_divide_the_width_are_refused() -> None:
    with pytest.raises(ValueError, match=r"pooling\.num_heads"):
        SelfAttentionPooling(HIDDEN, 3)


def test_no_head_is_refused():
    with pytest.raises(ValueError, match=r"pooling.num_heads must be >= 1, got 0"):
        SelfAttentionPooling(8, num_heads=0)
