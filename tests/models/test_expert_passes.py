"""The experts' passes give what autograd makes of each expert's MLP written out."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from embeddings.models.moe.experts import ROWS_BY_EXPERT, Activation, Experts, Routing, grouped_experts, pass_experts
from tests.models.moe import EXPERTS, routing_of

SIZES = (5, 0, 1, 9)
HIDDEN, INNER = 6, 10


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()


def inputs(with_bias: bool = True) -> list[Tensor]:
    w1, w2 = drawn(4, INNER, HIDDEN, seed=1), drawn(4, INNER, HIDDEN, seed=2)
    return [drawn(sum(SIZES), HIDDEN), w1, w2, *([drawn(4, INNER, seed=3)] if with_bias else [])]


def passed(row: Tensor, w1: Tensor, w2: Tensor, bias: Tensor | None = None) -> Tensor:
    return pass_experts(row, SIZES, w1, w2, bias, F.gelu)


def written_out(row: Tensor, w1: Tensor, w2: Tensor, bias: Tensor | None = None) -> Tensor:
    parts = []
    for expert, part in enumerate(row.split(SIZES)):  # type: ignore[no-untyped-call]
        inner = part @ w1[expert].T + (0 if bias is None else bias[expert])
        parts.append(F.gelu(inner) @ w2[expert])
    return torch.cat(parts)


@pytest.mark.parametrize("with_bias", [True, False])
def test_output_and_gradients_are_those_of_the_written_out_mlps(with_bias: bool) -> None:
    found, factor = [], drawn(sum(SIZES), HIDDEN, seed=5).detach()
    for run in (passed, written_out):
        given = inputs(with_bias)
        output = run(*given)
        found.append((output, *torch.autograd.grad(output, given, factor)))
    assert len(found[0]) == 4 + with_bias
    assert all(value.abs().max() > 0 for value in found[0])
    # The expert without rows has gradients of zero, not what lay in memory.
    assert all(not value[1].any() for value in found[0][2:])
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("frozen", range(4))
def test_what_is_frozen_gets_no_gradient_and_the_rest_its_own(frozen: int) -> None:
    found = []
    for run in (passed, written_out):
        given = inputs()
        given[frozen].requires_grad_(False)
        torch.autograd.backward(run(*given).square().sum())
        assert given[frozen].grad is None
        found.append([one.grad for one in given if one.grad is not None])
    assert len(found[0]) == 3
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


def test_it_passes_gradcheck() -> None:
    assert torch.autograd.gradcheck(passed, inputs(), fast_mode=True)


def kept_numbers(experts: Experts, state: Tensor, routing: Routing) -> int:
    """How many numbers a pass keeps for the backward one, beside the parameters."""
    kept: dict[int, int] = {}
    own = {parameter.data_ptr() for parameter in experts.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = tensor.numel() if tensor.is_floating_point() else 0
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        experts(state, routing)
    return sum(kept.values())


@pytest.mark.parametrize("activation", [F.gelu, nn.PReLU()])
def test_large_loads_keep_one_inner_state_a_row_where_the_activation_does_not_learn(activation: Activation) -> None:
    """Grouped products keep what the activation is given and what it gives, two inner states."""
    torch.manual_seed(0)
    experts = Experts(8, 64, EXPERTS, activation=activation, backend=grouped_experts)
    state = torch.randn(ROWS_BY_EXPERT * EXPERTS // 2, 8).requires_grad_()
    chosen = (torch.arange(len(state))[:, None] + torch.arange(2)) % EXPERTS
    inner_states = {}
    for name, few in (("many", len(state)), ("one too few", len(state) - 1)):
        numbers = kept_numbers(experts, state[:few], routing_of(chosen[:few]))
        inner_states[name] = numbers // (2 * few * 64)
    learns = isinstance(activation, nn.Module)
    assert inner_states == {"many": 2 if learns else 1, "one too few": 2}
    experts(state, routing_of(chosen)).sum().backward()
    assert all(parameter.grad is not None for parameter in experts.parameters())
