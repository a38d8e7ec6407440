"""A sparse layer under bfloat16 autocast: its passes over memory, what it keeps, and its errors."""

import re

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from embeddings.models.moe.experts import Experts, Router, grouped_experts, loop_experts
from embeddings.models.moe.rotary_moe import MoeMlp
from tests.docs.pages import ROOT
from tests.helpers.passes import Passes, SavedBytes

TOKENS, HIDDEN, INNER, EXPERTS = 65_536, 768, 3072, 8
PRODUCTS = ("mm", "addmm", "_grouped_mm")


def sparse(top_k=2):
    return MoeMlp(Router(HIDDEN, EXPERTS, top_k), Experts(HIDDEN, INNER, EXPERTS))


def dense():
    """A dense MLP as wide inside as two experts together."""
    return nn.Sequential(nn.Linear(HIDDEN, 2 * INNER), nn.GELU(), nn.Linear(2 * INNER, HIDDEN))


LAYERS = {"dense MLP of equal operations": dense, "sparse layer": sparse}


class Wide(TorchDispatchMode):
    """The shapes of all results in float32 that have a value for each of the states' values."""

    def __init__(self):
        super().__init__()
        self.shapes = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor) and each.dtype == torch.float32 and each.numel() >= TOKENS * HIDDEN:
                self.shapes.add(tuple(each.shape))
        return result


def traced(build, mode):
    """Run both passes under the mode, without computing anything; returns what the graph saves."""
    with FakeTensorMode():
        layer, state = build(), torch.empty(1, TOKENS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
        saved = SavedBytes(layer.parameters())
        with mode:
            with saved.counted(), torch.autocast("cpu", torch.bfloat16):
                output = layer(state)
            output = output[0] if isinstance(output, tuple) else output
            output.backward(torch.empty_like(output))
    return saved


@pytest.mark.parametrize("name", LAYERS)
def test_the_table_of_the_documentation_is_what_is_counted(name):
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    (row,) = re.findall(rf"^\| {name} \| (\d+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", page, re.MULTILINE)
    saved = traced(LAYERS[name], passes := Passes())
    in_products = sum(passes.bytes_of[each] for each in PRODUCTS)
    num_bytes = (passes.bytes_of.total() - in_products, in_products, saved.of())
    assert list(row) == [
        str(passes.kernels.total()),
        *(f"{each / 1e9:.{digits}f}" for each, digits in zip(num_bytes, (1, 1, 2), strict=True)),
    ]


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_no_row_of_an_expert_is_in_float32_and_no_state_is_kept_in_it(top_k):
    """The router's input is, and the sum over a token's experts before its last term."""
    wide = Wide()
    saved = traced(lambda: sparse(top_k), wide)
    assert wide.shapes == {(TOKENS, HIDDEN)}
    assert 0 < saved.of(torch.float32) < 0.03 * TOKENS * HIDDEN * 4


def outcome(backend, top_k, gated, dtype):
    """The output and all gradients of a small layer, with the tokens, weights and output's gradient of each dtype."""
    torch.manual_seed(0)
    layer = MoeMlp(Router(64, EXPERTS, top_k), Experts(64, 128, EXPERTS, inner_bias=True, gated=gated, backend=backend))
    for weight in layer.parameters():
        nn.init.normal_(weight, std=64**-0.5)
    state, gradient = (torch.randn(1, 1024, 64).bfloat16() for _ in range(2))
    layer, state = (
        layer.to(dtype),
        state.to(torch.float64 if dtype == torch.float64 else torch.bfloat16).requires_grad_(),
    )
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype != torch.float64):
        output, sums = layer(state)
    balance = sums.probability_X.square().sum().double() / 1e4
    ((output.double() * gradient.double()).sum() + balance).backward()
    found = {"output": output, "tokens": state.grad} | {name: each.grad for name, each in layer.named_parameters()}
    return {name: each.detach().double() for name, each in found.items()}


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_under_autocast_all_gradients_are_as_close_to_float64_as_those_of_the_loop(top_k, gated):
    """The unit roundoff of bfloat16 is 3.9e-3."""
    exact = outcome(loop_experts, top_k, gated, torch.float64)
    found, loop = (outcome(backend, top_k, gated, torch.float32) for backend in (grouped_experts, loop_experts))
    assert len(exact) == 7
    for name, value in exact.items():
        error, by_loop = (float((each[name] - value).norm() / value.norm()) for each in (found, loop))
        assert error <= min(8e-3, 1.15 * by_loop + 1e-6), (name, error, by_loop)
        assert name == "experts.bias2" or error > 1e-3
    again = outcome(grouped_experts, top_k, gated, torch.float32)
    assert all(torch.equal(again[name], value) for name, value in found.items())
