import torch

from embeddings.models.moe.rotary_moe import MoeMlp
from tests.models.moe import HIDDEN, make_experts, make_router, random_tokens, written_out


def test_padding_is_neither_routed_nor_counted() -> None:
    layer = MoeMlp(make_router(), make_experts())
    state_NLH = random_tokens(12).view(3, 4, HIDDEN)
    mask_NL = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 0, 0]], dtype=torch.bool)
    row_T = mask_NL.flatten().nonzero().squeeze(1)
    output_NLH, sums = layer(state_NLH, row_T)
    assert int(sums.count_X.sum()) == 2 * 7
    torch.testing.assert_close(sums.probability_X.sum(), torch.tensor(7.0))
    assert not output_NLH[~mask_NL].any()
    changed_NLH = state_NLH.masked_fill(~mask_NL[..., None], torch.nan)
    again_NLH, again = layer(changed_NLH, row_T)
    assert torch.equal(again_NLH, output_NLH)
    assert torch.equal(again.probability_X, sums.probability_X)


def test_each_token_has_the_output_that_it_has_alone() -> None:
    layer = MoeMlp(make_router(), make_experts())
    state_NLH = random_tokens(12).view(3, 4, HIDDEN)
    output_NLH, sums = layer(state_NLH)
    assert int(sums.count_X.sum()) == 2 * 12
    tokens = state_NLH.flatten(0, 1)
    expected = written_out(layer.experts, tokens, layer.router(tokens))
    torch.testing.assert_close(output_NLH.flatten(0, 1), expected, rtol=1e-5, atol=1e-6)
