"""Which way the sums go: the fused one on a GPU alone, and there only after it has agreed with the tiled one."""

import logging
import re
from dataclasses import replace

import pytest
import torch

from embeddings.models import anchor_token as module
from embeddings.models.anchor_kernels import fused_sums
from embeddings.models.anchor_token import checked_sums, fastest_sums
from embeddings.models.anchor_weights import CapturedAttention, tiled_sums

CPU = torch.device("cpu")
KIND = (CPU, torch.float32, 8, 2, False, False, None, "key")


@pytest.fixture(autouse=True)
def _no_check_is_remembered(monkeypatch):
    monkeypatch.setattr(module, "_TRIAL_LENGTH", 27)
    checked_sums.cache_clear()
    yield
    checked_sums.cache_clear()


def without_kernels(*_):
    raise RuntimeError("no compiler\nat all")


def shifted(tapped, is_token, axis, per_head):
    """Scores that are off by one in a hundred."""
    return tiled_sums(replace(tapped, scaling=tapped.scaling * 0.99), is_token, axis, per_head)


class RightForwardWrongBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight):
        return weight.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 1.01


def wrong_gradient(*problem):
    return RightForwardWrongBackward.apply(tiled_sums(*problem))


def nan_weights(*problem):
    return tiled_sums(*problem) * torch.nan


def test_a_processor_never_takes_the_fused_way(monkeypatch):
    monkeypatch.setattr(module, "fused_sums", without_kernels)
    tapped, is_token = module._trial(*KIND[:7])
    torch.testing.assert_close(fastest_sums(tapped, is_token), tiled_sums(tapped, is_token), rtol=0, atol=0)


@pytest.mark.parametrize("kind", [KIND, (CPU, torch.bfloat16, 8, 1, True, True, torch.bool, "query")])
def test_a_way_that_agrees_is_taken_and_asked_once(kind):
    calls = []

    def agreeing(*problem):
        calls.append(problem)
        return tiled_sums(*problem)

    assert checked_sums(agreeing, *kind) is agreeing
    assert checked_sums(agreeing, *kind) is agreeing
    assert len(calls) == 1
    assert calls[0][0].query_NALE.shape[1] == 2 * kind[3]
    assert calls[0][0].query_NALE.dtype == kind[1]


@pytest.mark.parametrize(
    ("way", "reason"),
    [
        (without_kernels, "RuntimeError: no compiler$"),
        (shifted, "weights differ by"),
        (wrong_gradient, "query differ by 1.0e-02, more than 1e-04"),
        (nan_weights, "weights differ by nan"),
    ],
)
def test_a_way_that_fails_or_disagrees_is_left_with_one_warning(way, reason, caplog):
    with caplog.at_level(logging.WARNING, logger="embeddings"):
        assert checked_sums(way, *KIND) is tiled_sums
        assert checked_sums(way, *KIND) is tiled_sums
    assert len(caplog.records) == 1
    assert "takes the slower tiled way" in caplog.text
    message = caplog.records[0].getMessage()
    assert re.search(reason, message), message


def test_the_check_works_without_gradients_and_draws_from_no_common_generator():
    before = torch.get_rng_state()
    with torch.inference_mode():
        assert checked_sums(tiled_sums, *KIND) is tiled_sums
    assert module._disagreement(tiled_sums, *module._trial(*KIND[:7]), "key") is None
    assert torch.equal(torch.get_rng_state(), before)


def test_the_check_is_in_float32_under_autocast():
    with torch.autocast("cpu", torch.bfloat16):
        assert module._disagreement(tiled_sums, *module._trial(*KIND[:7]), "key") is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_only_what_the_kernels_are_written_for_is_supported(dtype):
    wide, narrow = (module._trial(CPU, dtype, width, 1, False, False, None)[0] for width in (512, 64))
    assert not module._is_supported(wide)
    assert module._is_supported(narrow) == (dtype == torch.float32)


SHAPES = [(64, 1), (128, 4), (96, 2), (256, 8)]
MASKS = [(True, False, None), (False, True, None), (False, False, torch.bool), (False, False, torch.bfloat16)]
KINDS = [
    *[
        (dtype, *shape, False, False, None)
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
        for shape in SHAPES
    ],
    *[(dtype, 64, 2, *mask) for dtype in (torch.float32, torch.bfloat16) for mask in MASKS],
]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("kind", KINDS)
def test_the_compiled_kernels_pass_their_check(kind, monkeypatch):
    monkeypatch.setattr(module, "_TILE", 64)
    device = torch.device("cuda", torch.cuda.current_device())
    for axis in ("key", "query"):
        assert module._disagreement(fused_sums, *module._trial(device, *kind), axis) is None
        assert checked_sums(fused_sums, device, *kind, axis) is fused_sums


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_fused_sums_of_long_texts_need_no_memory_of_length_squared(monkeypatch):
    monkeypatch.setattr(module, "_TILE", 64)
    generator, length = torch.Generator("cuda").manual_seed(0), 8192
    sides = [
        torch.randn(1, 8, length, 64, device="cuda", dtype=torch.bfloat16, generator=generator).requires_grad_()
        for _ in range(2)
    ]
    tapped = CapturedAttention(*sides, None, False, 0.125)
    is_token = torch.ones(1, length, dtype=torch.bool, device="cuda")
    expected = tiled_sums(tapped, is_token)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = fastest_sums(tapped, is_token)
    found.sum().backward()
    # One head's matrix of scores alone would be 256 MiB.
    assert torch.cuda.max_memory_allocated() - before < 64 * 2**20
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-2)
    assert checked_sums.cache_info().currsize == 1
