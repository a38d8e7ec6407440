"""Device-dependent modules in float32 (on a CPU and, if there is one, a GPU) against float64 on the CPU."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from embeddings.losses import InfoNCE, MatryoshkaInfoNCE
from embeddings.models import AnchorTokenPooling, LatentAttentionPooling, MeanPooling, SelfAttentionPooling, unpadded
from embeddings.models.moe.experts import Experts, Router, loop_experts
from embeddings.models.moe.rotary_moe import MoeMlp
from embeddings.models.pooling import CapturedAttention
from tests.helpers.contrastive import random_batch, relative_error

ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
# (device, dtype) -> results, and the tensors that get gradients of their sum.
Part = Callable[[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]]
WIDTH = 32


def drawn(*shape: int, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Random numbers with a gradient, equal on every device."""
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return values.to(device, dtype).requires_grad_()


def on(module: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """A module with the same random weights on every device."""
    generator = torch.Generator().manual_seed(1)
    for weight in module.parameters():
        weight.data = 0.2 * torch.randn(weight.shape, generator=generator)
    return module.to(device, dtype)


def mask(device: torch.device) -> Tensor:
    """Texts of 9, 5 and 1 tokens."""
    return torch.arange(9, device=device) < torch.tensor([[9], [5], [1]], device=device)


def pooled(make: Callable[[int], nn.Module]) -> Part:
    def part(device: torch.device, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
        pooling, state_NLH = on(make(WIDTH), device, dtype), drawn(3, 9, WIDTH, device=device, dtype=dtype)
        return [pooling(state_NLH, mask(device))], [state_NLH, *pooling.parameters()]

    return part


def anchored(per_head: bool) -> Part:
    def part(device: torch.device, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
        state_NLH = drawn(3, 9, WIDTH, device=device, dtype=dtype)
        query_NALE = drawn(3, 4, 9, 16, device=device, dtype=dtype, seed=2)
        key_NGLE = drawn(3, 2, 9, 16, device=device, dtype=dtype, seed=3)
        attention = [CapturedAttention(query_NALE, key_NGLE, None, False, 0.25)]
        pooling = AnchorTokenPooling(WIDTH, per_head=per_head)
        return [pooling(state_NLH, mask(device), mask(device), attention)], [state_NLH, query_NALE, key_NGLE]

    return part


def experts(gated: bool) -> Part:
    """In float64 a loop over experts, the reference of the grouped products."""

    def part(device: torch.device, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
        backend = loop_experts if dtype == torch.float64 else None
        layer = on(MoeMlp(Router(WIDTH, 4, 2), Experts(WIDTH, 64, 4, gated=gated, backend=backend)), device, dtype)
        state_NLH = drawn(3, 9, WIDTH, device=device, dtype=dtype)
        output, sums = layer(state_NLH, mask(device).flatten().nonzero()[:, 0])
        return [output, sums.probability_X, sums.squared_logsumexp], [state_NLH, *layer.parameters()]

    return part


def loss(make: Callable[[], nn.Module]) -> Part:
    def part(device: torch.device, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
        query_BD, candidate_CD = (
            drawn(6, WIDTH, device=device, dtype=dtype),
            drawn(18, WIDTH, device=device, dtype=dtype, seed=4),
        )
        output = make().to(device)(query_BD, candidate_CD, random_batch(6, 2).to(device))
        return [output.loss], [query_BD, candidate_CD]

    return part


PARTS: dict[str, Part] = {
    "mean": pooled(MeanPooling),
    "self-attention": pooled(SelfAttentionPooling),
    "latents": pooled(lambda width: LatentAttentionPooling(width, num_latents=8, num_heads=2, head_dim=16)),
    "latents as in the paper": pooled(lambda width: LatentAttentionPooling(width, 8, 2, paper_literal=True)),
    "anchor tokens": anchored(False),
    "anchor tokens per head": anchored(True),
    "experts": experts(False),
    "gated experts": experts(True),
    "InfoNCE": loss(lambda: InfoNCE(0.1)),
    "tiled InfoNCE in both directions": loss(lambda: InfoNCE(0.1, directions="both", tile_size=32)),
    "Matryoshka": loss(lambda: MatryoshkaInfoNCE([32, 8], temperature=0.1)),
}


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
def test_results_and_gradients_equal_float64_on_a_cpu(device: str, name: str) -> None:
    actual, expected = [], []
    for values, where, dtype in ((actual, device, torch.float32), (expected, "cpu", torch.float64)):
        results, leaves = PARTS[name](torch.device(where), dtype)
        weighted = [result * torch.linspace(1, 2, result.numel(), device=where).view_as(result) for result in results]
        gradients = torch.autograd.grad(sum((value.sum() for value in weighted), torch.zeros((), device=where)), leaves)
        values += [value.detach().cpu().double() for value in (*results, *gradients)]
    assert all(value.abs().max() > 0 for value in expected)
    for value, reference in zip(actual, expected, strict=True):
        torch.testing.assert_close(value, reference, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("num_keys", [4, 2])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_unpadded_attention_equals_float64_on_a_cpu(is_causal: bool, window: int | None, num_keys: int) -> None:
    """torch's kernel in bfloat16 on a GPU, with gradients, against the loop over texts in float64."""
    lengths, results = [9, 5, 1, 70], []
    start_N1 = torch.tensor([0, *lengths]).cumsum(0).int()
    for where, kind in (("cuda", torch.bfloat16), ("cpu", torch.float64)):
        heads = (4, num_keys, num_keys)
        sides = [
            drawn(1, count, sum(lengths), 16, device=torch.device(where), dtype=kind, seed=count + index)
            for index, count in enumerate(heads)
        ]
        starts, scaling = start_N1.to(where), 0.25
        if kind == torch.float64:
            output = unpadded._by_loop(*sides, starts, is_causal, window, 0.0, scaling)
        else:
            output = unpadded._by_kernel(*sides, starts, max(lengths), is_causal, window, scaling)
        weight = torch.linspace(1, 2, output.numel(), device=where).view_as(output)
        results.append([output, *torch.autograd.grad((output * weight).sum(), sides)])
    for value, reference in zip(*results, strict=True):
        assert relative_error(value.detach().cpu().double(), reference.detach()) < 0.02
