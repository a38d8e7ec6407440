"""The weights of MGH's pooling against a loop over heads, queries and keys, and its two axes in numbers."""

import math
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from embeddings.models import anchor_weights as module
from embeddings.models.anchor_weights import CapturedAttention, anchor_weights, visible_queries

# No tile divides the length; the last holds all.
TILES = (1, 40, 200, 1 << 21)
IS_TOKEN = torch.tensor([[True] * 7, [True] * 4 + [False] * 3])


def attention(dtype: torch.dtype = torch.float64, is_causal: bool = False, mask: Tensor | None = None, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(2, 6, 7, 4, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    key = torch.randn(2, 3, 7, 4, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    return CapturedAttention(query, key, mask, is_causal, 0.5)


def looped(tapped, axis, per_head, by_visible):
    """Eq. 3 written out: one text, one head, one query at a time; the softmax is torch's."""
    rows = []
    for text, length in enumerate(IS_TOKEN.sum(1).tolist()):
        weight = torch.zeros(7, dtype=torch.float64)
        seen_by = torch.zeros(7, dtype=torch.float64)
        for head in range(6):
            of_head = [torch.zeros((), dtype=torch.float64) for _ in range(7)]
            for j in range(length):
                sees = [i for i in range(length) if not tapped.is_causal or i <= j]
                if tapped.mask is not None:
                    sees = [i for i in sees if tapped.mask[text, 0, j, i]]
                key = tapped.key_NGLE[text, head // 2]
                score = torch.stack([tapped.query_NALE[text, head, j] @ key[i] for i in sees]) * tapped.scaling
                for i, paid in zip(sees, score.softmax(0), strict=True):
                    place = i if axis == "key" else j
                    of_head[place] = of_head[place] + torch.log(length * paid + 1)
                    seen_by[i] += 1 / 6
            stacked = torch.stack(of_head)
            weight = weight + (stacked / stacked.sum() if per_head else stacked)
        rows.append(weight / seen_by.clamp(min=1) if by_visible else weight)
    return torch.stack(rows)


@pytest.mark.parametrize(
    ("axis", "per_head", "by_visible"), list(product(("key", "query"), (False, True), (False, True)))
)
@pytest.mark.parametrize("kind", ["bidirectional", "causal", "masked"])
def test_weights_and_gradients_equal_a_loop_at_every_tile(axis, per_head, by_visible, kind, monkeypatch):
    mask = None
    if kind == "masked":
        mask = (torch.rand(2, 1, 7, 7, generator=torch.Generator().manual_seed(1)) > 0.4) | torch.eye(7).bool()
    tapped = attention(is_causal=kind == "causal", mask=mask)
    direction = torch.randn(2, 7, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    expected = looped(tapped, axis, per_head, by_visible)
    expected_gradients = torch.autograd.grad((expected * direction).sum(), (tapped.query_NALE, tapped.key_NGLE))
    for tile in TILES:
        monkeypatch.setattr(module, "TILE_SCORES", tile)
        found = anchor_weights(tapped, IS_TOKEN, axis, per_head, by_visible)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        gradients = torch.autograd.grad((found * direction).sum(), (tapped.query_NALE, tapped.key_NGLE))
        torch.testing.assert_close(gradients, expected_gradients, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("axis", ["key", "query"])
def test_tiles_equal_the_whole_in_float32(axis, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(2, heads, 133, 16, generator=generator) for heads in (8, 4))
    is_token = torch.arange(133) < torch.tensor([[133], [90]])
    found = {}
    for tile in (133 * 16 * 30, 1 << 30):
        monkeypatch.setattr(module, "TILE_SCORES", tile)
        tapped = CapturedAttention(query.requires_grad_(), key.requires_grad_(), None, False, 0.25)
        weight = anchor_weights(tapped, is_token, axis)
        found[tile] = weight.detach(), *torch.autograd.grad(weight.square().sum(), (query, key))
    for tiled, whole in zip(*found.values(), strict=True):
        assert float((tiled - whole).norm() / whole.norm()) <= 1e-6


def test_an_additive_mask_says_what_a_boolean_one_says():
    seen = (torch.rand(2, 1, 7, 7, generator=torch.Generator().manual_seed(1)) > 0.4) | torch.eye(7).bool()
    additive = torch.zeros(2, 1, 7, 7, dtype=torch.float64).masked_fill(~seen, torch.finfo(torch.float64).min)
    torch.testing.assert_close(
        anchor_weights(attention(mask=additive), IS_TOKEN), anchor_weights(attention(mask=seen), IS_TOKEN)
    )
    counts = [visible_queries(attention(mask=mask), IS_TOKEN) for mask in (additive, seen)]
    torch.testing.assert_close(*counts)


def test_padding_neither_receives_nor_adds_weight():
    tapped = attention()
    short = CapturedAttention(tapped.query_NALE[1:, :, :4], tapped.key_NGLE[1:, :, :4], None, False, 0.5)
    found = anchor_weights(tapped, IS_TOKEN)[1]
    torch.testing.assert_close(found[:4], anchor_weights(short, IS_TOKEN[1:, :4])[0])
    assert found[4:].eq(0).all()


def test_no_tile_is_larger_than_its_budget_and_texts_without_tokens_weigh_nothing(monkeypatch):
    monkeypatch.setattr(module, "TILE_SCORES", 100)
    sizes = []
    softmax = torch.Tensor.softmax
    monkeypatch.setattr(torch.Tensor, "softmax", lambda self, **o: (sizes.append(self.numel()), softmax(self, **o))[1])
    tapped = attention()
    weight = anchor_weights(tapped, torch.zeros(2, 7, dtype=torch.bool))
    assert weight.eq(0).all()
    assert len(sizes) == 7
    weight.sum().backward()
    assert tapped.query_NALE.grad.eq(0).all()
    assert len(sizes) == 14
    # One query of each of 2 texts and 6 heads is the least that a tile can hold.
    assert max(sizes) == 2 * 6 * 7


def heads_of(*patterns: Tensor) -> CapturedAttention:
    """Attention whose softmax is each head's given matrix: one-hot queries on the matrix's logarithm as keys."""
    length = patterns[0].shape[0]
    query = torch.eye(length, dtype=torch.float64).expand(1, len(patterns), -1, -1)
    key = torch.stack([pattern.double().clamp(min=1e-300).log().T for pattern in patterns])[None]
    return CapturedAttention(query, key, None, False, 1.0)


def shares(tapped: CapturedAttention, **options) -> Tensor:
    weight = anchor_weights(tapped, torch.ones(1, tapped.query_NALE.shape[2], dtype=torch.bool), **options)[0]
    return weight / weight.sum()


def sink(length: int, place: int, share: float = 1.0) -> Tensor:
    """Every query pays one token `share`, and the others the rest in equal parts."""
    rows = torch.full((length, length), (1 - share) / (length - 1), dtype=torch.float64)
    rows[:, place] = share
    return rows


def test_the_key_axis_finds_a_sink_and_the_query_axis_an_even_look():
    pattern = sink(16, 5, 0.9)
    pattern[9] = 1 / 16
    by_key, by_query = shares(heads_of(pattern)), shares(heads_of(pattern), axis="query")
    assert by_key.argmax() == 5
    assert by_key[5] > 0.5
    # Read to the letter, the sink weighs less than a token of an even share, and the diffuse query most.
    assert by_query[5] < 1 / 16
    assert by_query.argmax() == 9
    assert by_query[9] > 0.13


def test_a_uniform_head_dilutes_the_anchor_unless_heads_count_alike():
    length = 32
    uniform = torch.full((length, length), 1 / length)
    patterns = [sink(length, 3), torch.eye(length), uniform]
    mass = [float(anchor_weights(heads_of(one), torch.ones(1, length, dtype=torch.bool)).sum()) for one in patterns]
    assert mass[:2] == pytest.approx([length * math.log(length + 1)] * 2)
    assert mass[2] == pytest.approx(length**2 * math.log(2))
    assert mass[2] / mass[0] == pytest.approx(6.3, abs=0.05)
    assert float(shares(heads_of(*patterns))[3]) == pytest.approx(0.147, abs=5e-4)
    assert float(shares(heads_of(*patterns), per_head=True)[3]) == pytest.approx(0.354, abs=5e-4)


def test_under_a_causal_mask_the_key_axis_favours_early_tokens_unless_divided_by_the_queries_that_see_them():
    zeros = torch.zeros(1, 1, 32, 4, dtype=torch.float64)
    tapped = CapturedAttention(zeros, zeros, None, True, 1.0)
    biased, mended = shares(tapped), shares(tapped, by_visible_queries=True)
    assert float(biased[0]) == pytest.approx(0.0805, abs=5e-5)
    assert float(biased[-1]) == pytest.approx(0.0013, abs=5e-5)
    assert float(mended.max() / mended.min()) < 2.1
    is_token = torch.ones(1, 32, dtype=torch.bool)
    assert visible_queries(tapped, is_token)[0].tolist() == list(range(32, 0, -1))


@pytest.mark.parametrize("num_heads", [1, 13, 40])
def test_the_logarithm_of_a_product_of_heads_does_not_overflow(num_heads):
    length = 600
    keys = torch.zeros(1, num_heads, length, 1)
    keys[:, :, 7] = 100.0
    tapped = CapturedAttention(torch.ones(1, num_heads, length, 1), keys, None, False, 1.0)
    weight = anchor_weights(tapped, torch.ones(1, length, dtype=torch.bool))
    assert weight.isfinite().all()
    assert float(weight[0, 7]) == pytest.approx(num_heads * length * math.log(length + 1), rel=1e-5)


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_window_says_what_its_mask_says(is_causal):
    distance = torch.arange(7)[:, None] - torch.arange(7)[None, :]
    seen = ((distance.abs() < 3) & ((distance >= 0) | (not is_causal)))[None, None]
    tapped = replace(attention(is_causal=is_causal), window=3)
    masked = attention(mask=seen)
    torch.testing.assert_close(anchor_weights(tapped, IS_TOKEN), anchor_weights(masked, IS_TOKEN))
    assert not torch.allclose(anchor_weights(tapped, IS_TOKEN), anchor_weights(replace(tapped, window=None), IS_TOKEN))
    torch.testing.assert_close(visible_queries(tapped, IS_TOKEN), visible_queries(masked, IS_TOKEN))


def test_autocast_rounds_neither_weights_nor_gradients():
    tapped = attention(torch.float32)
    found = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            weight = anchor_weights(tapped, IS_TOKEN)
            found.append((weight, *torch.autograd.grad(weight.square().sum(), (tapped.query_NALE, tapped.key_NGLE))))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)
