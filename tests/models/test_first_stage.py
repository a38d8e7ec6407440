import pytest
import torch

from embeddings.models.context_layers import FirstStage
from tests.helpers.tiny import tiny_bert
from tests.models.reading import random_tokens

LENGTHS = [7, 3, 12, 1]


def stage(width: int = 24) -> FirstStage:
    torch.manual_seed(0)
    return FirstStage(tiny_bert(), 32, width).eval()


@torch.no_grad()
def test_vectors_equal_a_loop_over_documents() -> None:
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
def test_vectors_are_not_normalised_and_float32_whatever_the_weights() -> None:
    tokens = random_tokens(384, LENGTHS)
    exact = stage()(*tokens)
    assert (exact.norm(dim=1) - 1).abs().max() > 0.05
    with torch.autocast("cpu", torch.bfloat16):
        cast = stage()(*tokens)
    for vectors in (cast, stage().bfloat16()(*tokens)):
        assert vectors.dtype == torch.float32
        assert torch.nn.functional.cosine_similarity(vectors, exact).min() > 0.99
    assert stage().double()(*tokens).dtype == torch.float64


@torch.no_grad()
@pytest.mark.parametrize("skip", [0, 2, 6])
def test_a_limit_reads_the_first_tokens_and_pools_the_last_of_them(skip: int) -> None:
    tokens, first = random_tokens(384, LENGTHS, skip=skip), stage()
    cut = [tensor[:, :5].clone() for tensor in tokens]
    for row, length in enumerate(LENGTHS):
        cut[2][row, min(length, 5) - 1] = True
    expected, whole = first(*cut), first(*tokens)
    first.max_length = 5
    torch.testing.assert_close(first(*tokens), expected)
    assert (whole - expected)[[0, 2]].abs().max() > 1e-4
    assert stage().extra_repr() == ""
    assert first.extra_repr() == "max_length=5"


def test_prompts_are_pooled_too_where_the_released_model_does_so() -> None:
    layer, tokens = stage(), random_tokens(384, LENGTHS, skip=2)
    everything = tokens._replace(pooling_mask_NL=tokens.attention_mask_NL)
    with torch.no_grad():
        plain, whole = layer(*tokens), layer(*everything)
        layer.pools_prompt = True
        assert torch.equal(layer(*tokens), whole)
    assert (plain - whole).abs().max() > 1e-3
