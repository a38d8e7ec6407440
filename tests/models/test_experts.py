from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from embeddings.models.moe.experts import Backend, Experts, Routing, grouped_experts, loop_experts, shared_casts
from embeddings.models.moe.rotary_moe import MoeMlp
from embeddings.training.graphs import GraphMemory
from tests.models.moe import (
    EXPERTS,
    HIDDEN,
    INNER,
    make_experts,
    make_router,
    random_tokens,
    routing_of,
    written_out,
)

BACKENDS: dict[str, Backend] = {"grouped_mm": grouped_experts, "loop": loop_experts}


def balanced(num_tokens: int, top_k: int) -> Tensor:
    return (torch.arange(num_tokens)[:, None] + torch.arange(top_k)) % EXPERTS


def to_one(num_tokens: int, top_k: int) -> Tensor:
    """All tokens to one expert first; the second choices are spread over three of the others."""
    second = 4 + torch.arange(num_tokens)[:, None] % 3
    return torch.cat([torch.full((num_tokens, 1), 2), second], dim=1)[:, :top_k]


def uneven(num_tokens: int, top_k: int) -> Tensor:
    """Most tokens to few experts, the last expert to none."""
    generator = torch.Generator().manual_seed(num_tokens)
    share_X = torch.tensor([8.0, 4.0, 2.0, 1.0, 1.0, 0.5, 0.5, 0.0])
    return torch.multinomial(share_X.expand(num_tokens, -1), top_k, generator=generator)


LOADS: dict[str, Callable[[int, int], Tensor]] = {"balanced": balanced, "to one": to_one, "uneven": uneven}


def outcome(
    run: Callable[[Experts, Tensor, Routing], Tensor], experts: Experts, token_TH: Tensor, expert_TK: Tensor
) -> dict[str, Tensor]:
    """The output, and the gradients of all that has one."""
    experts.zero_grad()
    token_TH = token_TH.clone().requires_grad_()
    routing = routing_of(expert_TK, token_TH.dtype)
    output_TH = run(experts, token_TH, routing)
    factor_TH = torch.randn(output_TH.shape, generator=torch.Generator().manual_seed(3)).to(output_TH)
    (output_TH * factor_TH).sum().backward()
    found = {"output": output_TH.detach(), "tokens": token_TH.grad, "weights": routing.weight_TK.grad}
    found |= {name: parameter.grad.clone() for name, parameter in experts.named_parameters()}
    return found


def by(backend: Backend) -> Callable[[Experts, Tensor, Routing], Tensor]:
    def run(experts: Experts, token_TH: Tensor, routing: Routing) -> Tensor:
        experts.backend = backend
        return experts(token_TH, routing)

    return run


def errors(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    assert found.keys() == expected.keys()
    assert all(value.norm() > 0 for value in expected.values())
    return {
        name: float((found[name] - value).double().norm() / value.double().norm()) for name, value in expected.items()
    }


@pytest.mark.parametrize("inner_bias", [True, False])
@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("num_tokens", [1, 3, 17, 64])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_back_end_equals_the_written_out_sum(
    backend: str, num_tokens: int, load: str, top_k: int, inner_bias: bool
) -> None:
    experts, tokens, chosen = make_experts(inner_bias), random_tokens(num_tokens), LOADS[load](num_tokens, top_k)
    found = outcome(by(BACKENDS[backend]), experts, tokens, chosen)
    assert len(found) == 6 + inner_bias
    found_errors = errors(found, outcome(written_out, experts, tokens, chosen))
    # Of one token it is a single sum that nearly cancels out: 1.8e-6 on some processors.
    assert found_errors.pop("weights") <= 3e-6
    assert max(found_errors.values()) <= 1e-6


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("num_tokens", [500, 4096])
def test_the_grouped_product_equals_the_loop_over_many_tokens(num_tokens: int, load: str) -> None:
    experts, tokens, chosen = make_experts(), random_tokens(num_tokens), LOADS[load](num_tokens, 2)
    found, expected = (outcome(by(backend), experts, tokens, chosen) for backend in BACKENDS.values())
    assert max(errors(found, expected).values()) <= 1e-6


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_expert_without_tokens_has_a_gradient_of_zero_and_its_weights_do_not_matter(backend: str) -> None:
    experts, tokens, chosen = make_experts(), random_tokens(20), uneven(20, 2)
    assert 7 not in chosen
    first = outcome(by(BACKENDS[backend]), experts, tokens, chosen)
    assert first["w1"][7].abs().max() == first["w2"][7].abs().max() == first["bias1"][7].abs().max() == 0
    with torch.no_grad():
        experts.w1[7] = experts.w2[7] = torch.nan
    assert torch.equal(outcome(by(BACKENDS[backend]), experts, tokens, chosen)["output"], first["output"])


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_tokens_at_all_are_no_output_and_gradients_of_zero(backend: str) -> None:
    experts = make_experts()
    experts.backend = BACKENDS[backend]
    output = experts(random_tokens(0), routing_of(torch.zeros(0, 2, dtype=torch.int64)))
    assert output.shape == (0, HIDDEN)
    output.sum().backward()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in experts.parameters())


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_last_of_the_sorted_rows_are_all_computed(backend: str) -> None:
    """torch leaves rows beyond the last offset as they were in memory."""
    experts, tokens = make_experts(), random_tokens(40)
    chosen = torch.full((40, 1), EXPERTS - 1)
    found = outcome(by(BACKENDS[backend]), experts, tokens, chosen)
    assert max(errors(found, outcome(written_out, experts, tokens, chosen)).values()) <= 1e-6


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("renormalize", [True, False])
def test_identical_experts_are_the_dense_mlp(backend: str, renormalize: bool) -> None:
    experts, router, tokens = make_experts(), make_router(renormalize=renormalize), random_tokens(50)
    with torch.no_grad():
        for stacked in (experts.w1, experts.w2, experts.bias1):
            stacked.copy_(stacked[:1].expand_as(stacked))
    experts.backend = BACKENDS[backend]
    routing = router(tokens)
    inner = torch.nn.functional.gelu(tokens @ experts.w1[0].T + experts.bias1[0])
    dense = inner @ experts.w2[0] * routing.weight_TK.sum(1, keepdim=True) + experts.bias2
    assert (routing.weight_TK.sum(1) - 1).abs().max() < 1e-6 or not renormalize
    torch.testing.assert_close(experts(tokens, routing), dense, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_float64_passes_gradcheck(backend: str) -> None:
    experts, router = make_experts().double(), make_router().double()
    experts.backend = BACKENDS[backend]
    tokens = random_tokens(5, torch.float64).requires_grad_()

    def run(token_TH: Tensor, *_: Tensor) -> Tensor:
        return experts(token_TH, router(token_TH))

    assert torch.autograd.gradcheck(run, (tokens, *experts.parameters(), *router.parameters()), fast_mode=True)


def test_widths_that_the_grouped_product_does_not_take_go_through_the_loop() -> None:
    experts = Experts(6, 10, EXPERTS)
    tokens = torch.randn(9, 6)
    output = experts(tokens, routing_of(balanced(9, 2)))
    torch.testing.assert_close(output, written_out(experts, tokens, routing_of(balanced(9, 2))), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_bfloat16_and_autocast_are_near_float32(backend: str) -> None:
    experts, tokens, chosen = make_experts(), random_tokens(64), uneven(64, 2)
    exact = outcome(by(BACKENDS[backend]), experts, tokens, chosen)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under_autocast = outcome(by(BACKENDS[backend]), experts, tokens, chosen)
    assert under_autocast["output"].dtype == torch.bfloat16
    assert under_autocast["w1"].dtype == torch.float32
    assert 1e-5 < max(errors(under_autocast, exact).values()) < 0.03
    experts.to(torch.bfloat16)
    in_bfloat16 = by(BACKENDS[backend])(experts, tokens.bfloat16(), routing_of(chosen))
    assert in_bfloat16.dtype == torch.bfloat16
    assert (in_bfloat16.float() - exact["output"]).norm() < 0.03 * exact["output"].norm()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_checkpointed_layer_has_the_same_gradients(backend: str) -> None:
    experts, tokens, chosen = make_experts(), random_tokens(30), uneven(30, 2)
    run = by(BACKENDS[backend])
    plain = outcome(run, experts, tokens, chosen)
    again = outcome(
        lambda *inputs: torch.utils.checkpoint.checkpoint(run, *inputs, use_reentrant=False), experts, tokens, chosen
    )
    assert all(torch.equal(again[name], value) for name, value in plain.items())


# dynamo looks at what it is handed where a graph was broken.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_layer_compiles(dtype: torch.dtype) -> None:
    """In float32 torch has no shapes for its grouped product, so the graph breaks there; in bfloat16 it is one."""
    layer, state_NLH = MoeMlp(make_router(), make_experts()).to(dtype), random_tokens(16, dtype).view(2, 8, HIDDEN)
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=dtype == torch.bfloat16)
    found = []
    for run in (compiled, layer):
        layer.zero_grad()
        output_NLH, sums = run(state_NLH)
        output_NLH.float().square().sum().backward()
        found.append((output_NLH, sums.count_X, *(parameter.grad.clone() for parameter in layer.parameters())))
    assert len(found[0]) == 7
    torch.testing.assert_close(*found)


def test_the_weights_are_the_released_ones_in_another_shape() -> None:
    experts, tokens = make_experts(inner_bias=False), random_tokens(4)
    w1, w2 = experts.w1.view(EXPERTS * INNER, HIDDEN), experts.w2.view(EXPERTS * INNER, HIDDEN)
    expert = slice(3 * INNER, 4 * INNER)
    alone = torch.nn.functional.gelu(tokens @ w1[expert].T) @ w2[expert]
    routing = routing_of(torch.full((4, 1), 3))
    torch.testing.assert_close(experts(tokens, routing) - experts.bias2, alone * routing.weight_TK)


class Casts(TorchDispatchMode):
    """Counts the casts of tensors of some shape to bfloat16."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.shape, self.count = shape, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if function is torch.ops.aten._to_copy.default and args[0].shape == self.shape:
            self.count += options.get("dtype") is torch.bfloat16
        return function(*args, **options)


def passes(experts: Experts, shares: bool, recomputes: bool) -> tuple[list[Tensor], list[Tensor], int]:
    """Outputs and gradients of three mini-batches, the first without a graph, and how often `w1` was cast for them."""
    routing = routing_of(torch.tensor([[0, 1], [2, 3], [0, 3]]), num_experts=4)
    outputs, tokens = [], random_tokens(3)

    def run() -> Tensor:
        return checkpoint(experts, tokens, routing, use_reentrant=False) if recomputes else experts(tokens, routing)

    sharing = shared_casts() if shares else nullcontext()
    with Casts(experts.w1.shape) as casts, torch.autocast("cpu", torch.bfloat16), sharing:
        with torch.no_grad():
            outputs.append(run())
        outputs += [run(), run()]
    num_casts = casts.count // 2
    for output in outputs[1:]:
        output.float().square().sum().backward()
    gradients = [weight.grad for weight in experts.parameters()]
    assert all(gradient is not None and bool(gradient.any()) for gradient in gradients)
    return outputs, gradients, num_casts


@pytest.mark.parametrize("recomputes", [False, True])
def test_a_step_casts_each_weight_once_with_the_same_values_and_gradients(recomputes: bool) -> None:
    alone, alone_gradients, num_alone = passes(make_experts(num_experts=4), False, recomputes)
    shared, shared_gradients, num_shared = passes(make_experts(num_experts=4), True, recomputes)
    assert (num_alone, num_shared) == (3, 1)
    for found, expected in zip([*shared, *shared_gradients], [*alone, *alone_gradients], strict=True):
        assert torch.equal(found, expected)


def test_kept_graphs_share_the_casts_and_a_changed_weight_is_cast_anew() -> None:
    experts, routing = make_experts(num_experts=4), routing_of(torch.tensor([[0, 1], [2, 3]]), num_experts=4)
    sizes = []
    with torch.autocast("cpu", torch.bfloat16):
        for context in (nullcontext(), shared_casts()):
            with context:
                memory = GraphMemory()
                with memory.measured(torch.device("cpu"), experts.parameters):
                    kept = [experts(random_tokens(2).requires_grad_(), routing) for _ in range(3)]
                sizes.append(memory.num_bytes)
                before = kept[0].detach().clone()
                with torch.no_grad():
                    experts.w1.mul_(2)
                assert not torch.equal(experts(random_tokens(2), routing), before)
    matrices = 2 * (experts.w1.numel() + experts.w2.numel())
    assert sizes[0] - sizes[1] >= 2 * matrices


@pytest.mark.parametrize("num_tokens", [7, 4096])
def test_gated_experts_have_the_gradients_of_the_loop(num_tokens: int) -> None:
    """4,096 tokens go expert by expert, each backward computing the gate again."""
    experts = Experts(HIDDEN, INNER, 4, activation=torch.nn.functional.silu, gated=True)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    assert experts.w1.shape == (4, 2 * INNER, HIDDEN)
    routing, found = routing_of(torch.arange(2 * num_tokens).view(-1, 2) % 4, num_experts=4), []
    for backend in (loop_experts, grouped_experts):
        experts.backend = backend
        experts.zero_grad()
        tokens = random_tokens(num_tokens).requires_grad_()
        output = experts(tokens, routing)
        output.square().mean().backward()
        assert all(bool(parameter.grad.any()) for parameter in experts.parameters())
        found.append([output.detach(), tokens.grad, *(parameter.grad.clone() for parameter in experts.parameters())])
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-6)
    gate_F, value_F = (tokens[0] @ experts.w1[0].T).chunk(2)
    by_hand = (torch.nn.functional.silu(gate_F) * value_F) @ experts.w2[0]
    one_H = Experts.forward(experts, tokens[:1], routing_of(torch.tensor([[0]]), num_experts=4)) - experts.bias2
    weight = routing_of(torch.tensor([[0]]), num_experts=4).weight_TK[0, 0]
    torch.testing.assert_close(one_H[0], weight * by_hand, rtol=1e-4, atol=1e-5)
