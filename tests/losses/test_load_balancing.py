"""The balancing loss and the z-loss of routers against loops, published values and a gradient by hand."""

import pytest
import torch
from torch import Tensor

from embeddings.common import OptionError
from embeddings.losses import LoadBalancing, load_balancing_loss, router_z_loss

LAYERS, EXPERTS, TOP_K = 3, 8, 2


def routed(num_tokens: int = 40, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Probabilities of tokens at layers, (Y, T, X), and their choices, (Y, T, K)."""
    logits = torch.randn(LAYERS, num_tokens, EXPERTS, generator=torch.Generator().manual_seed(seed)).double()
    probability_YTX = (2 * logits).softmax(-1)
    return probability_YTX, probability_YTX.topk(TOP_K).indices


def counts(choice_YTK: Tensor) -> Tensor:
    return torch.stack([torch.bincount(of_layer.flatten(), minlength=EXPERTS) for of_layer in choice_YTK])


def loop_reference(probability_YTX: Tensor, choice_YTK: Tensor, normalization: str) -> float:
    layers, tokens, experts = probability_YTX.shape
    if normalization == "transformers":
        probability_YTX, choice_YTK = probability_YTX.flatten(0, 1)[None], choice_YTK.flatten(0, 1)[None]
        layers, tokens = 1, layers * tokens
    total = 0.0
    for layer in range(layers):
        for expert in range(experts):
            share = sum(expert in chosen for chosen in choice_YTK[layer].tolist()) / tokens
            total += share * float(probability_YTX[layer, :, expert].mean()) / layers
    return total * {"balanced": experts / TOP_K, "paper": 1 / TOP_K, "transformers": experts}[normalization]


@pytest.mark.parametrize("normalization", ["balanced", "paper", "transformers"])
def test_the_balancing_loss_equals_a_loop(normalization: str) -> None:
    probability, choice = routed()
    found = load_balancing_loss(counts(choice), probability.sum(1), TOP_K, normalization)  # type: ignore[arg-type]
    assert found.item() == pytest.approx(loop_reference(probability, choice, normalization), rel=1e-12)


@pytest.mark.parametrize(
    ("normalization", "value"), [("balanced", 1.0), ("paper", 1 / EXPERTS), ("transformers", TOP_K)]
)
@pytest.mark.parametrize("loads", [[10] * EXPERTS, [40, 40] + [0] * 6])
def test_a_uniform_router_has_exactly_the_published_value(normalization: str, value: float, loads: list[int]) -> None:
    """For any choice among ties: the probabilities of a uniform router are all equal."""
    count, probability = torch.tensor([loads] * LAYERS), torch.full((LAYERS, EXPERTS), 40 / EXPERTS)
    assert load_balancing_loss(count, probability, TOP_K, normalization).item() == value  # type: ignore[arg-type]


def test_the_gradient_lowers_the_probability_of_overloaded_experts() -> None:
    count = torch.tensor([[30, 10, 0, 0]])
    probability = torch.full((1, 4), 5.0, requires_grad=True)
    loss = load_balancing_loss(count, probability, 2)
    loss.backward()
    torch.testing.assert_close(probability.grad, 4 * count / (2 * 20 * 20))


def test_without_tokens_the_losses_are_zero() -> None:
    assert load_balancing_loss(torch.zeros(2, 4, dtype=torch.int64), torch.zeros(2, 4), 2).item() == 0
    assert router_z_loss(torch.zeros(2), torch.tensor(0.0)).item() == 0


def test_the_z_loss_is_the_mean_square_of_logsumexp() -> None:
    logits = torch.randn(LAYERS, 7, EXPERTS)
    sums = logits.logsumexp(-1).square().sum(1)
    torch.testing.assert_close(router_z_loss(sums, torch.tensor(7)), logits.exp().sum(-1).log().square().mean())


@pytest.mark.parametrize("options", [{"coefficient": -1.0}, {"z_coefficient": float("nan")}])
def test_invalid_weights_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(OptionError, match=rf"load_balancing\.{next(iter(options))} must be >= 0"):
        LoadBalancing(**options)
