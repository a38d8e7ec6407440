"""Layer norms in bfloat16, on a CPU with a GPU's rules, and attention whose backward pass on a CPU is in float32."""

import re
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import BertConfig, BertModel
from transformers.models.nomic_bert import NomicBertConfig, NomicBertModel

from embeddings.models import Embedder, MeanPooling, half_precision
from embeddings.models.half_precision import LayerNorm, use_half_precision
from tests.docs.pages import ROOT
from tests.helpers.contrastive import gradient_vector, relative_error
from tests.helpers.passes import SavedBytes, of_a_layer
from tests.helpers.tiny import tiny_bert, tiny_mistral, tiny_t5, wordpiece_tokenizer
from tests.models.contextual_models import tiny_modernbert, tiny_nomic
from tests.models.test_unpadded import texts


class Float32Norm(nn.LayerNorm):
    """torch's layer norm under CUDA's autocast, which casts to float32 and returns it; that of a CPU does not."""

    def forward(self, input):
        if torch.is_autocast_enabled("cpu"):
            input = input.float()
        return super().forward(input)


@pytest.fixture
def on_gpu(monkeypatch):
    """The rules for a GPU's autocast apply to a CPU's."""
    monkeypatch.setattr(half_precision, "_rounds", lambda device_type: torch.is_autocast_enabled("cpu"))
    monkeypatch.setattr(half_precision, "_FloatBackward", nullcontext)


def with_norms(model, kind):
    """The model with layer norms of one kind."""
    use_half_precision(model)
    changed = [part for part in model.modules() if type(part) is LayerNorm]
    assert len(changed) >= 3
    for part in changed:
        part.__class__ = kind
    return model


def embedder_of(backbone):
    torch.manual_seed(1)
    return Embedder(backbone, wordpiece_tokenizer(), MeanPooling(32)).train()


MODELS = {"bert": tiny_bert, "nomic": tiny_nomic}


def gradient(model, kind, autocast=True):
    embedder = embedder_of(MODELS[model]())
    with torch.no_grad():
        for weight in embedder.parameters():
            if weight.ndim == 2:
                weight.normal_(std=0.2)
    with_norms(embedder.backbone, kind)
    if not autocast:
        embedder.double()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        vector_ND = embedder(texts((12, 30, 7, 25)))
    weight_ND = torch.randn(vector_ND.shape, generator=torch.Generator().manual_seed(0))
    (vector_ND.double() * weight_ND).sum().backward()
    return gradient_vector(embedder)


@pytest.mark.parametrize("model", MODELS)
def test_gradients_are_as_close_to_float64_as_with_norms_in_float32(model, on_gpu):
    """With weights so large that the layers matter. The unit roundoff of bfloat16 is 0.4 %."""
    exact = gradient(model, nn.LayerNorm, autocast=False)
    before, after = (relative_error(gradient(model, kind), exact) for kind in (Float32Norm, LayerNorm))
    assert 1e-3 < before < 2e-2
    assert 1e-3 < after < 1.6 * before


@pytest.mark.parametrize("model", MODELS)
def test_no_state_is_saved_in_float32(model, on_gpu):
    """The mean and the deviation of each token are; the embedding before the first norm is float32."""
    found = {}
    for kind in (Float32Norm, LayerNorm):
        embedder = embedder_of(MODELS[model]())
        with_norms(embedder.backbone, kind)
        saved, tokens = SavedBytes(embedder.parameters()), texts((12, 30, 7, 25)).padded()
        inputs = {"input_ids": tokens.input_ids_NL, "attention_mask": tokens.attention_mask_NL.long()}
        with saved.counted(), torch.autocast("cpu", torch.bfloat16):
            output = embedder.backbone(**inputs).last_hidden_state
        num_values = output.numel()
        wide = [size for dtype, size in saved.sizes.values() if dtype == torch.float32 and size == 4 * num_values]
        found[kind] = len(wide)
        assert output.dtype == (torch.bfloat16 if kind is LayerNorm else torch.float32)
    assert found[Float32Norm] >= 4
    assert found[LayerNorm] <= 1


def test_the_norm_rounds_once_from_float32(on_gpu):
    norm = LayerNorm(64)
    nn.init.normal_(norm.weight)
    state = torch.randn(50, 64).bfloat16() + 30
    with torch.autocast("cpu", torch.bfloat16):
        found = norm(state)
    with torch.no_grad():
        weight, bias = norm.weight.bfloat16().double(), norm.bias.bfloat16().double()
    exact = F.layer_norm(state.double(), (64,), weight, bias, norm.eps)
    torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("make", [tiny_mistral, tiny_nomic, tiny_modernbert])
@torch.no_grad()
def test_a_model_cast_to_bfloat16_has_the_vectors_of_the_model_that_is_loaded(make, tmp_path):
    """Rotary frequencies in bfloat16 would rotate later tokens by other angles."""
    model = embedder_of(make()).eval().bfloat16()
    model.save_pretrained(tmp_path / "model")
    tokens = texts((90, 30))
    found, expected = model(tokens), Embedder.from_pretrained(tmp_path / "model")(tokens)
    assert torch.equal(found, expected)
    assert {buffer.dtype for name, buffer in model.double().named_buffers() if "inv_freq" in name} == {torch.float64}


def test_in_float32_and_on_a_cpu_it_is_torchs_norm():
    plain, model = tiny_bert(), tiny_bert()
    use_half_precision(model)
    assert repr(model) == repr(plain)
    ids = torch.arange(5, 17).view(2, 6)
    for autocast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            found, expected = (each(ids).last_hidden_state for each in (model, plain))
        assert torch.equal(found, expected)
        assert found.dtype == expected.dtype


class AttentionDtypes(TorchDispatchMode):
    """Whether each call of torch's attention kernel is of the backward pass, and the dtype of its queries."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name
        if "scaled_dot_product" in name:
            self.found.add((name.rpartition("_")[2] == "backward", args[name.endswith("backward")].dtype))
        return function(*args, **(kwargs or {}))


ATTENTION = {
    "bert": tiny_bert,
    "mistral": tiny_mistral,
    "modernbert, with windows": tiny_modernbert,
    "nomic": tiny_nomic,
}


def attention_dtypes(model, training=True, chosen=True, **autocast):
    if chosen:
        use_half_precision(model)
    model.train(training)
    ids = torch.randint(5, 50, (2, 12))
    mask = torch.ones_like(ids)
    mask[0, 9:] = 0
    with AttentionDtypes() as seen, torch.autocast("cpu", **{"dtype": torch.bfloat16, **autocast}):
        states = model(input_ids=ids, attention_mask=mask).last_hidden_state
        states.float().square().sum().backward()
    assert all(weight.grad.isfinite().all() for weight in model.parameters() if weight.grad is not None)
    return seen.found


HALF, MIXED, FULL, DOUBLE = (
    {(False, forward), (True, backward)}
    for forward, backward in (
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    )
)


@pytest.mark.parametrize("name", ATTENTION)
def test_the_backward_pass_of_attention_on_a_cpu_is_in_float32(name):
    assert attention_dtypes(ATTENTION[name]()) == MIXED
    assert attention_dtypes(ATTENTION[name]().bfloat16(), enabled=False) == MIXED


def test_outside_of_training_and_in_models_of_others_it_is_torchs():
    assert attention_dtypes(tiny_mistral(), training=False) == HALF
    assert attention_dtypes(tiny_mistral(), chosen=False) == HALF
    assert attention_dtypes(tiny_mistral(), enabled=False) == FULL
    assert attention_dtypes(tiny_mistral().double(), enabled=False) == DOUBLE


def test_for_long_texts_it_is_torchs(monkeypatch):
    monkeypatch.setattr(half_precision, "MAX_SIZE", 11 * 8)
    assert attention_dtypes(tiny_mistral()) == HALF
    monkeypatch.setattr(half_precision, "MAX_SIZE", 12 * 8)
    assert attention_dtypes(tiny_mistral()) == MIXED


def test_with_dropout_or_learned_biases_torch_has_no_kernel():
    assert not attention_dtypes(tiny_bert(dropout=0.1))
    assert not attention_dtypes(tiny_t5())


def states(num_heads=4, length=12, width=8):
    return torch.randn(2, num_heads, length, width, dtype=torch.bfloat16)


QUERY, KEY = states(), states()
# Queries, keys, values and options of torch's function, and whether torch calls its kernel for them.
CALLS = {
    "plain": ((QUERY, KEY, states()), {}, True),
    "causal": ((QUERY, KEY, states()), {"is_causal": True}, True),
    "shared keys": ((QUERY, states(2), states(2)), {"is_causal": True, "enable_gqa": True, "scale": 0.1}, True),
    "a mask": ((QUERY, KEY, states()), {"attn_mask": torch.rand(2, 1, 12, 12) < 0.7}, True),
    "a mask without texts": ((QUERY, KEY, states()), {"attn_mask": torch.rand(4, 12, 12) < 0.7}, False),
    "transposed": (tuple(states(4, 8, 12).transpose(2, 3) for _ in range(3)), {}, False),
    "wide values": ((QUERY, KEY, states(4, 12, 16)), {}, False),
}


@pytest.mark.parametrize("name", CALLS)
def test_it_is_called_only_where_torch_calls_its_kernel(name):
    inputs, options, has_kernel = CALLS[name]
    inputs, found = [each.requires_grad_() for each in inputs], []
    for mode in (nullcontext(), half_precision._FloatBackward()):
        with mode:
            output = F.scaled_dot_product_attention(*inputs, **options)
        found.append((output.detach(), *torch.autograd.grad(output.float().square().sum(), inputs)))
    assert torch.equal(found[0][0], found[1][0])
    assert ("_Attention" in type(output.grad_fn).__name__) == has_kernel
    for expected, gradient in zip(*found, strict=True):
        assert relative_error(gradient.double(), expected.double()) < (2**-7 if has_kernel else 1e-12)


def attention_gradient(chosen, autocast=True, model=tiny_mistral):
    model = model().train()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.normal_(std=0.2)
    if chosen:
        use_half_precision(model)
    ids = torch.randint(5, 50, (4, 30), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, 9:] = mask[1, 20:] = 0
    model = model if autocast else model.double()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        states = model(input_ids=ids, attention_mask=mask).last_hidden_state[mask.bool()]
    states.double().square().mean().backward()
    return gradient_vector(model), states


# Whether the layers are those of this file, and whether they run under autocast; else in float64.
RUNS = ((False, False), (False, True), (True, True))


@pytest.mark.parametrize("name", ATTENTION)
def test_states_are_equal_and_gradients_as_close_to_float64_as_with_torchs_attention(name):
    """With weights so large that the layers matter. The unit roundoff of bfloat16 is 0.4 %."""
    model = ATTENTION[name]
    (exact, _), (before, old), (after, new) = (attention_gradient(*each, model) for each in RUNS)
    assert new.dtype == old.dtype
    assert torch.equal(new, old)
    assert not torch.equal(before, after)
    assert relative_error(after, exact) < 1.05 * relative_error(before, exact)


TOKENS, LENGTH = 65_536, 128
SIZES = {
    "BERT base": (BertModel, BertConfig, {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}),
    "NomicBERT": (NomicBertModel, NomicBertConfig, {}),
}


def counted(name, kind):
    model_class, config_class, options = SIZES[name]

    def build(num_layers):
        model = model_class(config_class(num_hidden_layers=num_layers, **options), add_pooling_layer=False)
        return with_norms(model, kind).train()

    def run(model):
        ids = torch.zeros(TOKENS // LENGTH, LENGTH, dtype=torch.int64)
        return model(input_ids=ids, attention_mask=None).last_hidden_state

    return of_a_layer(build, run)


@pytest.mark.parametrize("name", SIZES)
def test_the_table_of_the_documentation_is_what_is_counted(name, on_gpu):
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    pattern = rf"^\| {name} \| (\d+) \| ([\d.]+) \| ([\d.]+) \| (\d+) \| ([\d.]+) \| ([\d.]+) \|$"
    (row,) = re.findall(pattern, page, re.MULTILINE)
    found = []
    for kind in (Float32Norm, LayerNorm):
        kernels, num_bytes, saved, _ = counted(name, kind)
        found += [str(kernels), f"{num_bytes / 1e9:.1f}", f"{saved / 1e9:.2f}"]
    assert list(row) == found
