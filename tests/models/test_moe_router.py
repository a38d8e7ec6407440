import math

import pytest
import torch

from embeddings.models.moe.experts import Router
from tests.models.moe import EXPERTS, HIDDEN, make_router, random_tokens


def softmax(logits: list[float]) -> list[float]:
    powers = [math.exp(logit - max(logits)) for logit in logits]
    return [power / sum(powers) for power in powers]


@pytest.mark.parametrize("top_k", [1, 2, EXPERTS])
@pytest.mark.parametrize("renormalize", [True, False])
def test_the_most_probable_experts_are_chosen_and_weighed(top_k: int, renormalize: bool) -> None:
    router, tokens = make_router(top_k, renormalize=renormalize), random_tokens(12)
    routing = router(tokens)
    assert routing.expert_TK.shape == routing.weight_TK.shape == (12, top_k)
    for token, experts, weights in zip(tokens, routing.expert_TK.tolist(), routing.weight_TK.tolist(), strict=True):
        shares = softmax(
            [sum(w * t for w, t in zip(row, token.tolist(), strict=True)) for row in router.weight.tolist()]
        )
        best = sorted(range(EXPERTS), key=lambda expert: -shares[expert])[:top_k]
        assert experts == best
        total = sum(shares[expert] for expert in best) if renormalize else 1.0
        assert weights == pytest.approx([shares[expert] / total for expert in best], rel=1e-5)


def test_the_sums_are_those_of_the_tokens() -> None:
    router, tokens = make_router(), random_tokens(30)
    sums = router(tokens).sums
    assert sums.count_X.dtype == torch.int64
    assert int(sums.count_X.sum()) == 60
    parts = [router(part).sums for part in tokens.split([1, 9, 20])]
    assert torch.equal(sum(part.count_X for part in parts), sums.count_X)
    torch.testing.assert_close(sum(part.probability_X for part in parts), sums.probability_X)
    logits = tokens @ router.weight.T
    torch.testing.assert_close(sums.probability_X, logits.softmax(1).sum(0))
    torch.testing.assert_close(sums.squared_logsumexp, logits.exp().sum(1).log().square().sum())


def test_probabilities_are_float32_under_autocast_and_for_bfloat16_weights() -> None:
    router, tokens = make_router(), random_tokens(20)
    exact = router(tokens)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under_autocast = router(tokens)
    assert torch.equal(under_autocast.weight_TK, exact.weight_TK)
    assert router.bfloat16()(tokens.bfloat16()).weight_TK.dtype == torch.float32


def test_the_router_learns_from_what_its_experts_do() -> None:
    router, tokens = make_router(), random_tokens(5).requires_grad_()
    router(tokens).weight_TK[:, 0].sum().backward()
    assert router.weight.grad.abs().max() > 1e-3
    assert tokens.grad.abs().max() > 1e-3


def test_one_renormalised_expert_teaches_the_router_nothing() -> None:
    router = make_router(1, renormalize=True)
    router(random_tokens(5)).weight_TK.sum().backward()
    assert router.weight.grad.abs().max() < 1e-7


def test_noise_is_drawn_in_training_alone() -> None:
    router, tokens = make_router(noise=0.5), random_tokens(20)
    exact = make_router()(tokens).weight_TK
    assert torch.equal(router.eval()(tokens).weight_TK, exact)
    assert not torch.equal(router.train()(tokens).weight_TK, exact)
    assert torch.equal(make_router().train()(tokens).weight_TK, exact)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"num_experts": 0, "top_k": 1}, "num_experts must be >= 1, got 0"),
        ({"num_experts": 4, "top_k": 5}, "top_k must be from 1 to the 4 experts there are, got 5"),
        ({"num_experts": 4, "top_k": 0}, "top_k must be from 1 to the 4 experts there are, got 0"),
        ({"num_experts": 4, "top_k": 2, "noise": 1.0}, "noise must be >= 0 and < 1, got 1.0"),
    ],
)
def test_an_impossible_routing_is_named(options: dict[str, float], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Router(HIDDEN, **options)  # type: ignore[arg-type]
