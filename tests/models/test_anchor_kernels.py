"""The kernels, run by Triton's interpreter on the processor where triton is there, against the tiled way."""

import importlib.util
import os

import pytest
import torch

from embeddings.models import anchor_token
from embeddings.models.anchor_kernels import fused_sums
from embeddings.models.anchor_weights import CapturedAttention, tiled_sums

# The interpreter asks numpy for scalars in a way that it will give up.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
# 16 is the least that a product of tiles takes; three tiles of 43 tokens then, the last a part of one.
TILE, LENGTH = 16, 43
CASES = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"has_window": True},
    "causal window": {"is_causal": True, "has_window": True},
    "bool mask": {"mask_dtype": torch.bool},
    "added mask": {"mask_dtype": torch.float32},
}


@pytest.fixture
def interpreter(monkeypatch):
    """The kernels as the interpreter runs them, with small tiles."""
    if torch.cuda.is_available():
        pytest.skip("the tests marked gpu run the compiled kernels")
    pytest.importorskip("triton", reason="triton, which comes with a CUDA build of torch, is not here")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton interprets where TRITON_INTERPRET=1 was set before python began")
    monkeypatch.setattr("embeddings.models.anchor_kernels.TILE", TILE)
    monkeypatch.setattr(anchor_token, "_TRIAL_LENGTH", LENGTH)


def problem(dtype=torch.float32, num_shared=1, width=20, is_causal=False, has_window=False, mask_dtype=None):
    device = torch.device("cpu")
    return anchor_token._trial(device, dtype, width, num_shared, is_causal, has_window, mask_dtype)


def solved(way, tapped, is_token, axis, per_head=False):
    weight = way(tapped, is_token, axis, per_head)
    direction = torch.randn(weight.shape, generator=torch.Generator().manual_seed(3))
    return weight.detach(), *torch.autograd.grad((weight * direction).sum(), (tapped.query_NALE, tapped.key_NGLE))


def assert_alike(tapped, is_token, axis, limit=2e-6, **options):
    for found, expected in zip(
        solved(fused_sums, tapped, is_token, axis, **options),
        solved(tiled_sums, tapped, is_token, axis, **options),
        strict=True,
    ):
        assert found.shape == expected.shape
        assert found.dtype == expected.dtype
        assert expected.norm() > 0
        assert float((found.double() - expected.double()).norm() / expected.double().norm()) <= limit


def test_a_machine_without_triton_has_no_kernels():
    if importlib.util.find_spec("triton") is not None:
        pytest.skip("triton is here")
    with pytest.raises(ImportError, match="triton"):
        fused_sums(*problem())


@pytest.mark.parametrize("axis", ["key", "query"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("interpreter")
def test_weights_and_gradients_equal_the_tiled_ones(case, axis):
    tapped, is_token = problem(**CASES[case])
    assert tapped.query_NALE.shape[2] == LENGTH
    assert_alike(tapped, is_token, axis)


@pytest.mark.parametrize("axis", ["key", "query"])
@pytest.mark.usefixtures("interpreter")
def test_heads_that_share_a_key_and_heads_told_apart(axis):
    assert_alike(*problem(num_shared=3), axis, per_head=True)


@pytest.mark.usefixtures("interpreter")
def test_half_precision_inputs_are_summed_in_float32():
    """The interpreter knows no bfloat16 arithmetic; the tests marked gpu have it."""
    tapped, is_token = problem(torch.float16)
    assert_alike(tapped, is_token, "key", 5e-4)
    found, expected = (way(tapped, is_token, "key", False) for way in (fused_sums, tiled_sums))
    assert float(((found - expected).norm() / expected.norm()).detach()) <= 2e-6


@pytest.mark.usefixtures("interpreter")
def test_a_text_without_tokens_and_a_query_that_sees_nothing_weigh_nothing():
    tapped, is_token = problem(mask_dtype=torch.bool)
    tapped.mask[0, 0, 7] = False
    is_token[1] = False
    assert_alike(tapped, is_token, "key")
    assert fused_sums(tapped, is_token, "key", False)[1].eq(0).all()
    assert fused_sums(tapped, is_token, "query", False)[0, 7] == 0


@pytest.mark.usefixtures("interpreter")
def test_a_mask_over_keys_alone_is_spread_over_heads_and_queries():
    tapped, is_token = problem()
    seen = torch.rand(2, 1, 1, LENGTH, generator=torch.Generator().manual_seed(4)) > 0.3
    assert_alike(CapturedAttention(tapped.query_NALE, tapped.key_NGLE, seen, False, 0.3), is_token, "key")
