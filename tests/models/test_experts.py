"""Experts and routers compared with loop references: outputs, gradients, precision and back ends."""

import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from embeddings.common import OptionError
from embeddings.models import set_expert_backend
from embeddings.models.moe.experts import Experts, Router, grouped_experts, loop_experts, shared_casts
from embeddings.models.moe.rotary_moe import MoeMlp
from tests.helpers.casts import Casts
from tests.models.moe import EXPERTS, HIDDEN, make_experts, make_router, random_tokens, routing_of, written_out

BACKENDS = {"grouped_mm": grouped_experts, "loop": loop_experts}


def balanced(num_tokens, top_k):
    return (torch.arange(num_tokens)[:, None] + torch.arange(top_k)) % EXPERTS


def to_one(num_tokens, top_k):
    """Expert 2 is the first choice of all tokens; the second choices are three other experts, the third ones two."""
    token_T1 = torch.arange(num_tokens)[:, None]
    return torch.cat([torch.full((num_tokens, 1), 2), 4 + token_T1 % 3, token_T1 % 2], dim=1)[:, :top_k]


def uneven(num_tokens, top_k):
    """Most tokens to few experts, the last expert to none."""
    generator = torch.Generator().manual_seed(num_tokens)
    share_X = torch.tensor([8.0, 4.0, 2.0, 1.0, 1.0, 0.5, 0.5, 0.0])
    return torch.multinomial(share_X.expand(num_tokens, -1), top_k, generator=generator)


LOADS = {"balanced": balanced, "to one": to_one, "uneven": uneven}


def outcome(run, experts, token_TH, expert_TK):
    """The output and all gradients."""
    experts.zero_grad()
    token_TH = token_TH.clone().requires_grad_()
    routing = routing_of(expert_TK, token_TH.dtype)
    output_TH = run(experts, token_TH, routing)
    factor_TH = torch.randn(output_TH.shape, generator=torch.Generator().manual_seed(3)).to(output_TH)
    (output_TH * factor_TH).sum().backward()
    found = {"output": output_TH.detach(), "tokens": token_TH.grad, "weights": routing.weight_TK.grad}
    found |= {name: parameter.grad.clone() for name, parameter in experts.named_parameters()}
    return found


def by(backend):
    def run(experts, token_TH, routing):
        experts.backend = backend
        return experts(token_TH, routing)

    return run


def errors(found, expected):
    assert found.keys() == expected.keys()
    assert all(value.norm() > 0 for value in expected.values())
    return {
        name: float((found[name] - value).double().norm() / value.double().norm()) for name, value in expected.items()
    }


@pytest.mark.parametrize(("inner_bias", "gated"), [(True, False), (False, False), (False, True)])
@pytest.mark.parametrize("top_k", [1, 2, 3])
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("num_tokens", [1, 3, 17, 64])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_back_end_equals_the_written_out_sum(backend, num_tokens, load, top_k, inner_bias, gated):
    experts, chosen = make_experts(inner_bias, gated=gated), LOADS[load](num_tokens, top_k)
    tokens = random_tokens(num_tokens)
    found = outcome(by(BACKENDS[backend]), experts, tokens, chosen)
    assert len(found) == 6 + inner_bias
    found_errors = errors(found, outcome(written_out, experts, tokens, chosen))
    # For one token it is a single sum with cancellation: 1.8e-6 on some CPUs.
    assert found_errors.pop("weights") <= 3e-6
    assert max(found_errors.values()) <= 1e-6


def test_widths_that_the_grouped_product_does_not_support_use_the_loop():
    torch.manual_seed(0)
    experts, tokens, routing = Experts(6, 10, EXPERTS), torch.randn(9, 6), routing_of(balanced(9, 2))
    torch.testing.assert_close(experts(tokens, routing), written_out(experts, tokens, routing), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_expert_without_tokens_has_zero_gradients_and_does_not_affect_the_output(backend):
    experts, tokens, chosen = make_experts(), random_tokens(20), uneven(20, 2)
    assert 7 not in chosen
    first = outcome(by(BACKENDS[backend]), experts, tokens, chosen)
    assert first["w1"][7].abs().max() == first["w2"][7].abs().max() == first["bias1"][7].abs().max() == 0
    with torch.no_grad():
        experts.w1[7] = experts.w2[7] = torch.nan
    assert torch.equal(outcome(by(BACKENDS[backend]), experts, tokens, chosen)["output"], first["output"])


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_tokens_the_output_is_empty_and_gradients_are_zero(backend):
    experts = make_experts()
    experts.backend = BACKENDS[backend]
    output = experts(random_tokens(0), routing_of(torch.zeros(0, 2, dtype=torch.int64)))
    assert output.shape == (0, HIDDEN)
    output.sum().backward()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in experts.parameters())


@pytest.mark.parametrize("backend", BACKENDS)
def test_float64_passes_gradcheck(backend):
    experts, router = make_experts().double(), make_router().double()
    experts.backend = BACKENDS[backend]
    tokens = random_tokens(5, torch.float64).requires_grad_()

    def run(token_TH, *_):
        return experts(token_TH, router(token_TH))

    assert torch.autograd.gradcheck(run, (tokens, *experts.parameters(), *router.parameters()), fast_mode=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_bfloat16_is_close_to_float32(backend):
    experts, tokens, routing = make_experts(), random_tokens(64), routing_of(uneven(64, 2))
    exact = by(BACKENDS[backend])(experts, tokens, routing)
    in_bfloat16 = by(BACKENDS[backend])(experts.to(torch.bfloat16), tokens.bfloat16(), routing)
    assert in_bfloat16.dtype == torch.bfloat16
    assert (in_bfloat16.float() - exact).norm() < 0.03 * exact.norm()


def test_small_gradients_in_float16_reach_the_router():
    """Outputs of 0.01 with gradients of 1e-4: each product of the two is below float16's normal values."""
    experts, tokens = make_experts(), random_tokens(64)
    with torch.no_grad():
        experts.w2.mul_(0.01)
    found = []
    for dtype in (torch.float16, torch.float64):
        routing = routing_of(balanced(64, 2), torch.promote_types(dtype, torch.float32))
        output_TH = experts.to(dtype)(tokens.to(dtype), routing)
        output_TH.backward(torch.full_like(output_TH, 1e-4))
        found.append(routing.weight_TK.grad.double())
    assert (found[0] - found[1]).norm() < 5e-3 * found[1].norm()


# dynamo accesses attributes of its inputs after a graph break.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.filterwarnings("ignore:<class 'torch.autograd.function.Function'>:DeprecationWarning")
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_layer_compiles(dtype):
    """torch cannot trace its grouped product in float32, so the graph breaks there; in bfloat16 it does not."""
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


def passes(experts, shares, recomputes):
    """Outputs and gradients of three mini-batches, the first without a graph, and how often `w1` was cast for them."""
    routing = routing_of(torch.tensor([[0, 1], [2, 3], [0, 3]]), num_experts=4)
    outputs, tokens = [], random_tokens(3)

    def run():
        return checkpoint(experts, tokens, routing, use_reentrant=False) if recomputes else experts(tokens, routing)

    sharing = shared_casts() if shares else nullcontext()
    with Casts(experts) as casts, torch.autocast("cpu", torch.bfloat16), sharing:
        with torch.no_grad():
            outputs.append(run())
        outputs += [run(), run()]
    num_casts = casts.count["w1"]
    for output in outputs[1:]:
        output.float().square().sum().backward()
    gradients = [weight.grad for weight in experts.parameters()]
    assert all(gradient is not None and bool(gradient.any()) for gradient in gradients)
    return outputs, gradients, num_casts


@pytest.mark.parametrize("recomputes", [False, True])
def test_a_step_casts_each_weight_once_with_the_same_values_and_gradients(recomputes):
    alone, alone_gradients, num_alone = passes(make_experts(num_experts=4), False, recomputes)
    shared, shared_gradients, num_shared = passes(make_experts(num_experts=4), True, recomputes)
    assert (num_alone, num_shared) == (3, 1)
    for found, expected in zip([*shared, *shared_gradients], [*alone, *alone_gradients], strict=True):
        assert torch.equal(found, expected)


def test_a_changed_weight_is_cast_again():
    experts, routing = make_experts(num_experts=4), routing_of(torch.tensor([[0, 1], [2, 3]]), num_experts=4)
    with torch.autocast("cpu", torch.bfloat16), shared_casts():
        before = experts(random_tokens(2), routing)
        with torch.no_grad():
            experts.w1.mul_(2)
        assert not torch.equal(experts(random_tokens(2), routing), before)


@pytest.mark.parametrize("top_k", [1, 2, EXPERTS])
@pytest.mark.parametrize("renormalize", [True, False])
def test_the_most_probable_experts_are_chosen_and_weighted(top_k, renormalize):
    router, tokens = make_router(top_k, renormalize=renormalize), random_tokens(12)
    routing = router(tokens)
    assert routing.expert_TK.shape == routing.weight_TK.shape == (12, top_k)
    for token, experts, weights in zip(tokens, routing.expert_TK.tolist(), routing.weight_TK.tolist(), strict=True):
        shares = (router.weight.detach().double() @ token.double()).softmax(0).tolist()
        best = sorted(range(EXPERTS), key=lambda expert: -shares[expert])[:top_k]
        assert experts == best
        total = sum(shares[expert] for expert in best) if renormalize else 1.0
        assert weights == pytest.approx([shares[expert] / total for expert in best], rel=1e-5)


def test_the_sums_of_a_router_are_sums_over_tokens():
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


def test_the_router_gets_a_gradient_from_its_weights_unless_it_renormalises_one_expert():
    router, alone = make_router(), make_router(1, renormalize=True)
    for one in (router, alone):
        one(random_tokens(5)).weight_TK[:, 0].sum().backward()
    assert router.weight.grad.abs().max() > 1e-3
    assert alone.weight.grad.abs().max() < 1e-7


def test_noise_is_added_only_in_training_and_probabilities_are_float32():
    router, tokens = make_router(noise=0.5), random_tokens(20)
    exact = make_router().train()(tokens).weight_TK
    assert not torch.equal(router.train()(tokens).weight_TK, exact)
    assert torch.equal(router.eval()(tokens).weight_TK, exact)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(router(tokens).weight_TK, exact)
    assert router.bfloat16()(tokens.bfloat16()).weight_TK.dtype == torch.float32


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"num_experts": 4, "top_k": 0}, "top_k must be from 1 to the number of experts, 4, got 0"),
        ({"num_experts": 4, "top_k": 2, "noise": 1.0}, "noise must be >= 0 and < 1, got 1.0"),
    ],
)
def test_invalid_routing_options_are_refused(options, says):
    with pytest.raises(ValueError, match=says):
        Router(HIDDEN, **options)


def test_a_megablocks_that_is_missing_is_refused(monkeypatch):
    monkeypatch.delitem(sys.modules, "megablocks", raising=False)
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(OptionError, match=r"No module named 'megablocks': its newest release.* got 'megablocks'"):
        set_expert_backend(make_experts(), "megablocks")


def install(monkeypatch, available):
    """Replace megablocks' grouped product by a loop with its requirements: contiguous matrices and int64 sizes."""

    def gmm(a, b, batch_sizes, trans_b=False):
        assert b.is_contiguous()
        assert batch_sizes.dtype == torch.int64
        parts = a.split(batch_sizes.tolist())
        return torch.cat([part @ (matrix.T if trans_b else matrix) for part, matrix in zip(parts, b, strict=True)])

    util = SimpleNamespace(ops=SimpleNamespace(gmm=gmm), grouped_gemm_is_available=lambda: available)
    for name in ("megablocks", "megablocks.grouped_gemm_util"):
        monkeypatch.setitem(sys.modules, name, util)


def test_the_grouped_product_of_megablocks_has_the_same_output(monkeypatch):
    install(monkeypatch, available=False)
    with pytest.raises(OptionError, match="lacks its grouped product"):
        set_expert_backend(make_experts(), "megablocks")
    install(monkeypatch, available=True)
    experts, tokens = make_experts().bfloat16(), random_tokens(40, torch.bfloat16)
    routing = make_router()(tokens.float())
    expected = experts(tokens, routing)
    set_expert_backend(experts, "megablocks")
    torch.testing.assert_close(experts(tokens, routing), expected)
    with pytest.raises(OptionError, match="supports only bfloat16, got 'megablocks in torch"):
        experts.float()(tokens.float(), routing)
