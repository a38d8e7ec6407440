"""AnchorTokenPooling against the attention matrices of real backbones; captured attention; fused kernels."""

import logging
import math
import re
from dataclasses import replace
from itertools import product

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from embeddings.common import OptionError
from embeddings.models import (
    AnchorTokenPooling,
    BackboneConfig,
    Embedder,
    anchor_token,
    load_backbone,
    make_bidirectional,
)
from embeddings.models.anchor_token import (
    ProblemKind,
    anchor_weights,
    checked_sums,
    fastest_sums,
    fused_sums,
    tiled_sums,
    visible_queries,
)
from embeddings.models.attention_capture import AttentionCapture, _captured_attention, attention_layers
from embeddings.models.pooling import CapturedAttention
from tests.helpers.tiny import save_backbone, sentencepiece_tokenizer, tiny_bert, tiny_mistral, wordpiece_tokenizer
from tests.helpers.triton_interpreter import require_interpreter
from tests.models.reading import random_tokens

TOKENS = random_tokens(384, [7, 3, 12, 5], skip=2)


def backbone_of(kind, attn="sdpa", causal=False):
    backbone = tiny_bert() if kind == "bert" else tiny_mistral()
    if kind == "mistral" and not causal:
        make_bidirectional(backbone)
    backbone.set_attn_implementation(attn)
    return backbone


def embedder_of(kind="bert", attn="sdpa", causal=False, **options):
    tokenizer = wordpiece_tokenizer() if kind == "bert" else sentencepiece_tokenizer()
    return Embedder(backbone_of(kind, attn, causal), tokenizer, AnchorTokenPooling(32, **options)).eval()


def expected_vectors(kind, causal=False, layers=(-1,), by_visible=False, backbone=None, tokens=TOKENS):
    """Vectors from the attention matrices that an eager backbone returns, one text at a time without padding."""
    backbone = backbone or backbone_of(kind, "eager", causal)
    vectors = []
    for row, length in enumerate(tokens.attention_mask_NL.sum(1).tolist()):
        ids = tokens.input_ids_NL[row : row + 1, :length]
        output = backbone(input_ids=ids, attention_mask=torch.ones_like(ids), output_attentions=True)
        pooled = tokens.pooling_mask_NL[row, :length]
        shares = []
        for layer in layers:
            weight = (output.attentions[layer][0] * length + 1).log().sum(dim=(0, 1))
            if by_visible:
                weight = weight / torch.arange(length, 0, -1)
            weight = weight * pooled
            shares.append(weight / weight.sum())
        vectors.append(torch.stack(shares).mean(0) @ output.last_hidden_state[0])
    return torch.nn.functional.normalize(torch.stack(vectors), dim=-1)


@torch.no_grad()
@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@pytest.mark.parametrize(
    ("kind", "causal", "layers"),
    [("bert", False, (-1,)), ("mistral", False, (-1,)), ("mistral", False, (-1, 0)), ("mistral", True, (-1,))],
)
def test_vectors_equal_those_from_the_backbones_own_attention_matrices(kind, causal, layers, attn):
    found = embedder_of(kind, attn, causal, layers=layers, by_visible_queries=causal)(TOKENS)
    expected = expected_vectors(kind, causal, layers, by_visible=causal)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
def test_the_key_axis_under_a_causal_mask_is_refused_and_removes_its_capture(attn):
    backbone, tokenizer = backbone_of("mistral", attn, causal=True), sentencepiece_tokenizer()
    with pytest.raises(OptionError, match=r"causal mask.* bidirectional: true .* by_visible_queries: true"):
        Embedder(backbone, tokenizer, AnchorTokenPooling(32))
    Embedder(backbone, tokenizer, AnchorTokenPooling(32, axis="query"))


def test_missing_layers_and_unknown_axes_are_refused():
    with pytest.raises(OptionError, match=r"layers \[5\] must be among the 2 attention layers"):
        embedder_of("bert", layers=(5,))
    with pytest.raises(ValueError, match=r"pooling\.axis must be key or query"):
        AnchorTokenPooling(32, axis="row")
    with pytest.raises(ValueError, match="must name a layer"):
        AnchorTokenPooling(32, layers=())


def test_the_first_token_is_kept_if_a_text_has_no_other():
    mask = torch.tensor([[True, False, False], [True, True, False]])
    states = torch.zeros(2, 1, 3, 4)
    captured = [CapturedAttention(states, states, None, False, 1.0)]
    weight = AnchorTokenPooling(4, include_first=False).weights(mask, mask, captured)
    assert weight.tolist() == [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]


@torch.no_grad()
@pytest.mark.parametrize("kind", ["bert", "mistral"])
def test_the_capture_changes_neither_states_nor_config_of_the_backbone(kind):
    found, expected = embedder_of(kind).backbone, backbone_of(kind)
    arguments = {"input_ids": TOKENS.input_ids_NL, "attention_mask": TOKENS.attention_mask_NL.long()}
    assert torch.equal(found(**arguments).last_hidden_state, expected(**arguments).last_hidden_state)
    assert found.config.to_dict() == expected.config.to_dict()
    assert found.config._attn_implementation == "sdpa"
    assert found.state_dict().keys() == expected.state_dict().keys()


def gradients(embedder, tokens=TOKENS):
    embedder.zero_grad()
    target = torch.randn(4, 32, generator=torch.Generator().manual_seed(0)).to(next(embedder.parameters()).dtype)
    (embedder(tokens) * target).sum().backward()
    return torch.cat([p.grad.flatten() for p in embedder.parameters() if p.grad is not None])


@pytest.mark.parametrize("kind", ["bert", "mistral"])
def test_the_gradient_passes_through_the_weights_unless_they_are_detached(kind):
    backbone = backbone_of(kind, "eager").double()
    target = torch.randn(4, 32, generator=torch.Generator().manual_seed(0)).double()
    (expected_vectors(kind, backbone=backbone) * target).sum().backward()
    expected = torch.cat([p.grad.flatten() for p in backbone.parameters() if p.grad is not None])
    found = gradients(embedder_of(kind).double())
    # Mistral's norms are in float32 whatever the weights.
    assert float((found - expected).norm() / expected.norm()) <= (1e-12 if kind == "bert" else 1e-6)
    attached, detached = gradients(embedder_of(kind).double()), gradients(embedder_of(kind, detach=True).double())
    assert float((attached - detached).norm() / attached.norm()) > 1e-4


def test_gradient_checkpointing_does_not_change_the_gradient(tmp_path):
    found = []
    for checkpointing in (False, True):
        folder = save_backbone(str(tmp_path / "backbone"), tiny_bert(), wordpiece_tokenizer())
        backbone, tokenizer = load_backbone(BackboneConfig(folder, gradient_checkpointing=checkpointing, dropout=0.0))
        embedder = Embedder(backbone.double(), tokenizer, AnchorTokenPooling(32)).train()
        found.append(gradients(embedder))
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


# No tile divides the length; the last tile contains all scores.
TILES = (1, 40, 200, 1 << 21)
IS_TOKEN = torch.tensor([[True] * 7, [True] * 4 + [False] * 3])


def attention(dtype=torch.float64, is_causal=False, mask=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(2, 6, 7, 4, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    key = torch.randn(2, 3, 7, 4, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    return CapturedAttention(query, key, mask, is_causal, 0.5)


def looped(captured, axis, per_head, by_visible):
    """Eq. 3 by a loop over texts, heads and queries; the softmax is torch's."""
    rows = []
    for text, length in enumerate(IS_TOKEN.sum(1).tolist()):
        weight = torch.zeros(7, dtype=torch.float64)
        seen_by = torch.zeros(7, dtype=torch.float64)
        for head in range(6):
            of_head = [torch.zeros((), dtype=torch.float64) for _ in range(7)]
            for j in range(length):
                sees = [i for i in range(length) if not captured.is_causal or i <= j]
                if captured.mask is not None:
                    sees = [i for i in sees if captured.mask[text, 0, j, i]]
                key = captured.key_NGLE[text, head // 2]
                score = torch.stack([captured.query_NALE[text, head, j] @ key[i] for i in sees]) * captured.scaling
                for i, paid in zip(sees, score.softmax(0), strict=True):
                    index = i if axis == "key" else j
                    of_head[index] = of_head[index] + torch.log(length * paid + 1)
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
    captured = attention(is_causal=kind == "causal", mask=mask)
    direction = torch.randn(2, 7, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    expected = looped(captured, axis, per_head, by_visible)
    expected_gradients = torch.autograd.grad((expected * direction).sum(), (captured.query_NALE, captured.key_NGLE))
    for tile in TILES:
        monkeypatch.setattr(anchor_token, "TILE_SCORES", tile)
        found = anchor_weights(captured, IS_TOKEN, axis, per_head, by_visible)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        gradients = torch.autograd.grad((found * direction).sum(), (captured.query_NALE, captured.key_NGLE))
        torch.testing.assert_close(gradients, expected_gradients, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_window_and_an_additive_mask_equal_a_boolean_mask(is_causal):
    distance = torch.arange(7)[:, None] - torch.arange(7)[None, :]
    seen = ((distance.abs() < 3) & ((distance >= 0) | (not is_causal)))[None, None]
    added = torch.zeros(1, 1, 7, 7, dtype=torch.float64).masked_fill(~seen, torch.finfo(torch.float64).min)
    masked, window = attention(mask=seen), replace(attention(is_causal=is_causal), window=3)
    for other in (window, attention(mask=added)):
        torch.testing.assert_close(anchor_weights(other, IS_TOKEN), anchor_weights(masked, IS_TOKEN))
        torch.testing.assert_close(visible_queries(other, IS_TOKEN), visible_queries(masked, IS_TOKEN))
    assert not torch.allclose(anchor_weights(window, IS_TOKEN), anchor_weights(replace(window, window=None), IS_TOKEN))


@pytest.mark.parametrize("num_heads", [1, 13, 40])
def test_the_logarithm_of_a_product_of_heads_does_not_overflow(num_heads):
    length = 600
    keys = torch.zeros(1, num_heads, length, 1)
    keys[:, :, 7] = 100.0
    captured = CapturedAttention(torch.ones(1, num_heads, length, 1), keys, None, False, 1.0)
    weight = anchor_weights(captured, torch.ones(1, length, dtype=torch.bool))
    assert weight.isfinite().all()
    assert float(weight[0, 7]) == pytest.approx(num_heads * length * math.log(length + 1), rel=1e-5)


def test_autocast_rounds_neither_weights_nor_gradients():
    captured = attention(torch.float32)
    found = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            weight = anchor_weights(captured, IS_TOKEN)
            sides = (captured.query_NALE, captured.key_NGLE)
            found.append((weight, *torch.autograd.grad(weight.square().sum(), sides)))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


CPU = torch.device("cpu")
KIND = (ProblemKind(CPU, torch.float32, 8, 2, False, False, None), "key")


@pytest.fixture(autouse=True)
def _clear_checks(monkeypatch):
    monkeypatch.setattr(anchor_token, "_TRIAL_LENGTH", 27)
    checked_sums.cache_clear()
    yield
    checked_sums.cache_clear()


def without_kernels(*_):
    raise RuntimeError("no compiler\nat all")


def shifted(captured, is_token, axis, per_head):
    """Scores with a relative error of 1 %."""
    return tiled_sums(replace(captured, scaling=captured.scaling * 0.99), is_token, axis, per_head)


def wrong_gradient(*problem):
    weight = tiled_sums(*problem)
    weight.register_hook(lambda gradient: gradient * 1.01)
    return weight


def nan_weights(*problem):
    return tiled_sums(*problem) * torch.nan


@pytest.mark.parametrize("kind", [KIND, (ProblemKind(CPU, torch.bfloat16, 8, 1, True, True, torch.bool), "query")])
def test_sums_that_pass_the_check_are_used_and_checked_once(kind):
    calls = []

    def agreeing(*problem):
        calls.append(problem)
        return tiled_sums(*problem)

    assert checked_sums(agreeing, *kind) is agreeing
    assert checked_sums(agreeing, *kind) is agreeing
    assert len(calls) == 1
    assert calls[0][0].query_NALE.shape[1] == 2 * kind[0].num_shared
    assert calls[0][0].query_NALE.dtype == kind[0].dtype


@pytest.mark.parametrize(
    ("sums", "reason"),
    [
        (without_kernels, "RuntimeError: no compiler$"),
        (shifted, "weights differ by"),
        (wrong_gradient, "query differ by 1.0e-02, more than 1e-04"),
        (nan_weights, "weights differ by nan"),
    ],
)
def test_sums_that_fail_the_check_are_replaced_with_one_warning(sums, reason, caplog):
    with caplog.at_level(logging.WARNING, logger="embeddings"):
        assert checked_sums(sums, *KIND) is tiled_sums
        assert checked_sums(sums, *KIND) is tiled_sums
    assert len(caplog.records) == 1
    assert "uses the slower tiled sums" in caplog.text
    message = caplog.records[0].getMessage()
    assert re.search(reason, message), message


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
    monkeypatch.setattr(anchor_token, "_TRIAL_LENGTH", 139)
    device = torch.device("cuda", torch.cuda.current_device())
    for axis in ("key", "query"):
        assert anchor_token._disagreement(fused_sums, *anchor_token._trial(ProblemKind(device, *kind)), axis) is None
        assert checked_sums(fused_sums, ProblemKind(device, *kind), axis) is fused_sums


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_fused_sums_of_long_texts_need_no_memory_of_length_squared(monkeypatch):
    monkeypatch.setattr(anchor_token, "_TRIAL_LENGTH", 139)
    generator, length = torch.Generator("cuda").manual_seed(0), 8192
    sides = [
        torch.randn(1, 8, length, 64, device="cuda", dtype=torch.bfloat16, generator=generator).requires_grad_()
        for _ in range(2)
    ]
    captured = CapturedAttention(*sides, None, False, 0.125)
    is_token = torch.ones(1, length, dtype=torch.bool, device="cuda")
    expected = tiled_sums(captured, is_token)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = fastest_sums(captured, is_token)
    found.sum().backward()
    # One head's matrix of scores alone would be 256 MiB.
    assert torch.cuda.max_memory_allocated() - before < 64 * 2**20
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-2)
    assert checked_sums.cache_info().currsize == 1


# Triton's interpreter converts arrays to scalars in a way that numpy has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
# 16 is the minimum size of a product of tiles; 43 tokens are three tiles, the last one partial.
TILE, LENGTH = 16, 43
CASES = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"has_window": True},
    "causal window": {"is_causal": True, "has_window": True},
    "bool mask": {"mask_dtype": torch.bool},
    "added mask": {"mask_dtype": torch.float32},
    "shared keys": {"num_shared": 3},
    # The interpreter does not support bfloat16; the tests marked gpu cover it.
    "half precision": {"dtype": torch.float16},
}


@pytest.fixture
def interpreter(monkeypatch):
    """The kernels in Triton's interpreter, with small tiles and tighter tolerances."""
    require_interpreter()
    monkeypatch.setattr("embeddings.models.anchor_kernels.TILE", TILE)
    monkeypatch.setattr(anchor_token, "_TRIAL_LENGTH", LENGTH)
    monkeypatch.setattr(anchor_token, "_WEIGHT_TOLERANCE", 2e-6)
    monkeypatch.setattr(anchor_token, "_GRADIENT_TOLERANCE", {torch.float32: 2e-6, torch.float16: 5e-4})


def problem(dtype=torch.float32, num_shared=1, width=20, is_causal=False, has_window=False, mask_dtype=None):
    return anchor_token._trial(ProblemKind(CPU, dtype, width, num_shared, is_causal, has_window, mask_dtype))


@pytest.mark.parametrize("axis", ["key", "query"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("interpreter")
def test_weights_and_gradients_equal_the_tiled_ones(case, axis):
    captured, is_token = problem(**CASES[case])
    assert captured.query_NALE.shape[2] == LENGTH
    assert anchor_token._disagreement(fused_sums, captured, is_token, axis) is None


@pytest.mark.usefixtures("interpreter")
def test_a_mask_over_keys_is_broadcast_and_texts_or_queries_without_visible_keys_have_zero_weights():
    captured, is_token = problem(mask_dtype=torch.bool)
    over_keys = replace(captured, mask=captured.mask[:, :, :1].clone())
    assert anchor_token._disagreement(fused_sums, over_keys, is_token, "key") is None
    captured.mask[0, 0, 7] = False
    is_token[1] = False
    assert anchor_token._disagreement(fused_sums, captured, is_token, "key") is None
    assert fused_sums(captured, is_token, "key", False)[1].eq(0).all()
    assert fused_sums(captured, is_token, "query", False)[0, 7] == 0


MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])


def test_unsupported_attention_is_refused_by_name():
    backbone = tiny_bert()
    capture = AttentionCapture(backbone, (-1,))
    module = attention_layers(backbone)[-1]
    states = torch.zeros(1, 4, 3, 8)
    with capture.open(), pytest.raises(ValueError, match="attention with softcap cannot be read"):
        _captured_attention(module, states, states, states, None, softcap=30.0)


@pytest.mark.parametrize("mask", [None, MASK])
def test_without_a_four_dimensional_mask_causality_and_window_come_from_the_call(mask, monkeypatch):
    """As in calls of flash attention: the mask contains only padding; causality and window are arguments."""
    capture, module = AttentionCapture(tiny_bert(), (-1,)), torch.nn.Module()
    object.__setattr__(module, "embeddings_capture", (capture, "recording"))
    calls = []
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "recording", lambda *args, **_: calls.append(args))
    states = torch.zeros(2, 4, 5, 8)
    captured = []
    for attention_mask in (mask, torch.ones(2, 1, 5, 5, dtype=torch.bool)):
        with capture.open():
            _captured_attention(module, states, states, states, attention_mask, is_causal=True, sliding_window=3)
            captured.append(capture.captured[id(module)])
    assert (captured[0].mask, captured[0].is_causal, captured[0].window) == (None, True, 3)
    assert (captured[1].is_causal, captured[1].window) == (False, None)
    assert captured[1].mask is not None
    assert len(calls) == 2
