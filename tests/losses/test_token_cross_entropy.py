import math

import pytest
import torch
from torch import Tensor, nn

from embeddings.losses.prediction import token_cross_entropy


def case(num_targets: int = 11, vocabulary: int = 7) -> tuple[Tensor, Tensor, nn.Linear]:
    generator = torch.Generator().manual_seed(0)
    state_PH = torch.randn(num_targets, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    label_P = torch.randint(vocabulary, (num_targets,), generator=generator)
    torch.manual_seed(0)
    return state_PH, label_P, nn.Linear(5, vocabulary).double()


@pytest.mark.parametrize("tile_positions", [1, 4, 11, 100])
def test_the_loss_and_its_gradients_are_those_of_a_loop(tile_positions: int) -> None:
    state_PH, label_P, head = case()
    total, right = torch.zeros((), dtype=torch.float64), 0
    for state_H, label in zip(state_PH, label_P, strict=True):
        logits = head(state_H)
        total = total + logits.exp().sum().log() - logits[label]
        right += int(logits.argmax() == label)
    inputs = (state_PH, *head.parameters())
    expected = torch.autograd.grad(total / 11, inputs)

    output = token_cross_entropy(state_PH, label_P, head, tile_positions)
    assert output.loss.item() == pytest.approx(total.item() / 11, rel=1e-12)
    assert output.terms["perplexity"].item() == pytest.approx(math.exp(total.item() / 11), rel=1e-12)
    assert output.terms["accuracy"].item() == pytest.approx(right / 11)
    found = torch.autograd.grad(output.loss, inputs)
    assert all(gradient.abs().max() > 0 for gradient in expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_no_more_logits_than_a_tiles_exist_at_once() -> None:
    state_PH, label_P, head = case()
    seen: list[int] = []

    def watched(state_pH: Tensor) -> Tensor:
        seen.append(len(state_pH))
        return head(state_pH)

    output = token_cross_entropy(state_PH, label_P, watched, 4)
    assert seen == [4, 4, 3]
    output.loss.backward()
    assert seen == [4, 4, 3, 3, 4, 4]


def test_the_mean_goes_by_the_count_that_is_given() -> None:
    state_PH, label_P, head = case()
    plain = token_cross_entropy(state_PH, label_P, head, 4)
    scaled = token_cross_entropy(state_PH, label_P, head, 4, num_targets=22.0)
    assert scaled.loss.item() == pytest.approx(plain.loss.item() / 2)
    assert scaled.terms["perplexity"].item() == pytest.approx(plain.terms["perplexity"].item())


def test_without_targets_the_loss_and_all_gradients_are_zero() -> None:
    _, _, head = case()
    state_0H = torch.zeros(0, 5, dtype=torch.float64, requires_grad=True)
    output = token_cross_entropy(state_0H, torch.zeros(0, dtype=torch.int64), head, 4, num_targets=3.0)
    assert output.loss.item() == 0.0
    output.loss.backward()
    assert head.weight.grad is not None
    assert not head.weight.grad.any()


def test_bfloat16_logits_are_summed_in_float32() -> None:
    state_PH, label_P, head = case()
    output = token_cross_entropy(state_PH.bfloat16(), label_P, head.bfloat16(), 4)
    assert output.loss.dtype == torch.float32
    assert output.loss.item() == pytest.approx(token_cross_entropy(*case(), 4).loss.item(), rel=0.02)
