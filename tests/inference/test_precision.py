"""The precision of matrix products depends on the hardware, the option and the weights."""

import json
import os
import platform

import numpy as np
import pytest
import torch
from torch import nn

from embeddings.common import OptionError
from embeddings.inference import CorpusSearch, Encoder, encode_corpus, precision
from embeddings.inference.encoder import resolve_precision
from embeddings.inference.precision import HalfProducts, Int8Products, QuantisedInput, has_int8_products
from embeddings.models import AnchorTokenPooling, Embedder, LoraSettings, MeanPooling, add_lora, make_bidirectional
from tests.helpers.casts import Casts
from tests.helpers.processes import run_command
from tests.helpers.refusals import refused
from tests.helpers.tiny import tiny_bert, tiny_mistral, wordpiece_tokenizer
from tests.inference.models import tiny_embedder, write_corpus
from tests.models.contextual_models import tiny_contextual, tiny_modernbert, tiny_nomic, tiny_xlm_roberta
from tests.models.moe import tiny_moe

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "expected", "has_products"),
    [
        *((name, torch.bfloat16, False) for name in ("avx512_bf16", "amx_bf16", "bf16")),
        *((name, torch.float32, True) for name in ("avx512_vnni", "avx_vnni", "amx_int8")),
        ("avx2", torch.float32, False),
    ],
)
def test_bfloat16_and_8_bit_products_follow_the_cpus_instructions(name, expected, has_products, monkeypatch):
    known = {"avx512_bf16": False, "avx_vnni": False, name: True}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: known)
    monkeypatch.setattr(precision.platform, "system", lambda: "Linux")
    assert (resolve_precision("auto", CPU), has_int8_products()) == (expected, has_products)
    monkeypatch.setattr(precision.platform, "system", lambda: "Darwin")
    assert (resolve_precision("auto", CPU), has_int8_products()) == (torch.float32, False)


CUDA, MIXED = torch.device("cuda"), {torch.float32, torch.bfloat16}


def test_the_weights_and_the_device_restrict_the_precision(monkeypatch):
    assert resolve_precision("auto", CUDA, {torch.float16}) == torch.float16
    assert resolve_precision("auto", CPU, {torch.bfloat16}) == torch.bfloat16
    assert resolve_precision("int8", CPU, {torch.float32}) == torch.int8
    # float32 adapters on bfloat16 weights allow any precision.
    assert resolve_precision("float32", CPU, MIXED) == torch.float32
    for precision_, device, weights, message in (
        ("auto", CPU, {torch.float16}, "must not be float16 on a CPU"),
        ("float32", CPU, {torch.bfloat16}, "must match the weights, bfloat16"),
        ("int8", CPU, {torch.bfloat16}, "must match the weights, bfloat16"),
        ("int8", CUDA, (), "precision runs on a CPU, not on cuda, got 'int8'"),
        ("int4", CPU, (), "precision must be one of auto, float32, bfloat16, int8, got 'int4'"),
    ):
        refused(OptionError, message, resolve_precision, precision_, device, weights)
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with pytest.raises(OptionError, match="precision needs an x86 CPU and a torch build with oneDNN, got 'int8'"):
        resolve_precision("int8", CPU, {torch.float32})


pytestmark = pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="int8 is for x86 CPUs")

TEXTS = ["how do I pad sequences", "the quick brown fox jumps over the lazy dog", "z", ""]


def embedder(backbone=None):
    torch.manual_seed(0)
    return Embedder(backbone or tiny_bert(), wordpiece_tokenizer(), MeanPooling(32), head=nn.Linear(32, 12)).eval()


class Tiny(nn.Module):
    """A layer in a backbone, as `Int8Products` requires."""

    def __init__(self):
        super().__init__()
        self.backbone = tiny_bert()
        self.layer = self.backbone.encoder.layer[0].intermediate.dense


def rounded(layer, input_NI):
    """The reference: weights rounded to 255 steps per row, inputs to about as many per token."""
    weight_scale_O1 = layer.weight.abs().amax(1, keepdim=True) / 127
    input_scale_N1 = input_NI.abs().amax(1, keepdim=True) / 127
    weight_OI = torch.round(layer.weight / weight_scale_O1) * weight_scale_O1
    return torch.round(input_NI / input_scale_N1) * input_scale_N1 @ weight_OI.T + layer.bias


@pytest.mark.parametrize("reduce", [False, True])
@torch.no_grad()
def test_products_equal_those_of_rounded_numbers(reduce, monkeypatch):
    if not (reduce or has_int8_products()):
        pytest.skip("this CPU sums pairs of products in 16 bits")
    monkeypatch.setattr(precision, "has_int8_products", lambda: not reduce)
    model = Tiny()
    input_NI = torch.randn(50, 32) * torch.logspace(-3, 3, 50)[:, None]
    exact = model.layer(input_NI)
    with Int8Products(model).on():
        found = model.layer(input_NI)
        zero = model.layer(torch.zeros(2, 3, 32))
    size_N1 = (exact - model.layer.bias).abs().amax(1, keepdim=True)
    limit = 0.04 if reduce else 0.02
    assert ((found - rounded(model.layer, input_NI)) / size_N1).abs().max() < limit
    assert 1e-4 < ((found - exact) / size_N1).abs().max() < 2 * limit
    torch.testing.assert_close(zero, model.layer.bias.expand(2, 3, -1))


@pytest.mark.parametrize("make", [tiny_bert, tiny_xlm_roberta, tiny_nomic, tiny_modernbert, tiny_mistral])
@torch.no_grad()
def test_no_backbone_changes_a_tensor_between_layers_that_share_it(make, monkeypatch):
    backbone, ids = make().eval(), torch.randint(5, 100, (2, 9))
    with Int8Products(backbone).on():
        shared = backbone(ids).last_hidden_state
    quantised = precision.QuantisedInput.quantise
    monkeypatch.setattr(precision.QuantisedInput, "of", lambda self, _, input_I: quantised(self, input_I))
    with Int8Products(backbone).on():
        assert torch.equal(backbone(ids).last_hidden_state, shared)


@torch.no_grad()
def test_a_model_is_restored_afterwards():
    model = embedder()
    ids = torch.randint(5, 300, (2, 9))
    before, products = model.backbone(ids).last_hidden_state, Int8Products(model)
    assert len(products._products) == 12
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with products.on():
        assert not torch.equal(model.backbone(ids).last_hidden_state, before)
    with pytest.raises(KeyError), products.on():
        raise KeyError
    assert torch.equal(model.backbone(ids).last_hidden_state, before)
    assert all(value is None for name, value in vars(products._inputs).items() if name != "steps")
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def with_anchor_tokens():
    backbone = tiny_mistral()
    make_bidirectional(backbone)
    return Embedder(backbone, wordpiece_tokenizer(), AnchorTokenPooling(32)).eval()


@pytest.mark.parametrize(
    "make",
    [
        tiny_embedder,
        lambda: embedder(tiny_xlm_roberta()),
        lambda: embedder(tiny_nomic()),
        lambda: embedder(tiny_modernbert()),
        lambda: embedder(tiny_mistral()),
        lambda: embedder(add_lora(tiny_bert(), LoraSettings(rank=2))),
        lambda: embedder(tiny_moe()),
        with_anchor_tokens,
        tiny_contextual,
    ],
)
def test_weights_that_are_cast_once_give_the_bits_of_autocast(make):
    model = make()
    encoder = Encoder(model, precision="bfloat16")
    expected = encoder.encode(TEXTS)
    encoder._products = HalfProducts(model, torch.bfloat16)
    assert len(encoder._products._products) >= 4
    np.testing.assert_array_equal(encoder.encode(TEXTS), expected)


def test_a_loaded_model_casts_no_weight_of_a_linear_layer_in_a_call(tmp_path):
    tiny_embedder().save_pretrained(tmp_path)
    encoder = Encoder.from_pretrained(str(tmp_path), device="cpu", precision="bfloat16")
    with Casts(encoder.embedder) as casts:
        found = encoder.encode(TEXTS)
    assert not [name for name in casts.count if "layer." in name and "LayerNorm" not in name]
    np.testing.assert_array_equal(found, Encoder(encoder.embedder, precision="bfloat16").encode(TEXTS))
    assert Encoder.from_pretrained(str(tmp_path), device="cpu", precision="float32")._products is None


def test_adapters_and_their_base_layers_run_in_int8_and_the_head_does_not():
    model = embedder(add_lora(tiny_bert(), LoraSettings(rank=2)))
    parts = {name: module for name, module in model.backbone.named_modules() if type(module) is nn.Linear}
    beneath = [module for name, module in parts.items() if name.endswith(".base_layer")]
    adapters = [module for name, module in parts.items() if ".lora_" in name]
    assert (len(beneath), len(adapters)) == (12, 24)
    with Int8Products(model).on():
        assert all("forward" in layer.__dict__ for layer in [*beneath, *adapters])
        assert model.head is not None
        assert "forward" not in model.head.__dict__
    assert not any("forward" in layer.__dict__ for layer in parts.values())


@torch.no_grad()
def test_non_finite_inputs_give_non_finite_outputs():
    model, input_NI = Tiny(), torch.randn(3, 32)
    input_NI[0, 4], input_NI[1, 5] = torch.nan, torch.inf
    with Int8Products(model).on():
        assert model.layer(input_NI).isfinite().all(dim=1).tolist() == [False, False, True]


def test_int8_vectors_are_close_and_can_be_searched(tmp_path):
    model = embedder()
    exact = Encoder(model, precision="float32").encode(TEXTS)
    encoder = Encoder(model, precision="int8")
    found = encoder.encode(TEXTS)
    assert found.dtype == np.float32
    assert (exact * found).sum(1).min() > 0.99
    assert np.abs(exact - found).max() > 1e-5
    assert np.abs(encoder.encode(TEXTS[:1]) - found[:1]).max() < 0.02
    assert np.array_equal(Encoder(model, precision="float32").encode(TEXTS), exact)
    encode_corpus(encoder, write_corpus(tmp_path / "corpus.jsonl", TEXTS[:3]), tmp_path / "vectors")
    assert json.loads((tmp_path / "vectors" / "manifest.json").read_text())["precision"] == "int8"
    for searching in (encoder, Encoder(model, precision="float32")):
        (hits,) = CorpusSearch(searching, tmp_path / "vectors").search([TEXTS[1]], 3)
        assert hits[0].document_id == "d1"


OVERFLOW = """
import torch
from embeddings.inference import precision as module
module.has_int8_products = lambda: {has_products}
layer = torch.nn.Linear(64, 8)
with torch.inference_mode():
    layer.weight.fill_(0.5)[::2] *= -1
    product = module.linear_product(layer, layer, module.QuantisedInput())
    input_NI = torch.full((40, 64), 3.0)
    print((product(input_NI) - layer(input_NI)).abs().max().item())
"""


@pytest.mark.parametrize(("has_products", "is_right"), [(False, True), (True, False)])
def test_7_bit_inputs_do_not_overflow_on_a_cpu_without_8_bit_products(has_products, is_right):
    """oneDNN is forced to AVX2: 7-bit inputs are exact there, and 8-bit inputs overflow."""
    code, environment = OVERFLOW.format(has_products=has_products), {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"}
    run = run_command(["-c", code], env=environment, check=True)
    assert (float(run.stdout) < 1e-3) is is_right


@torch.no_grad()
def test_another_tensor_or_another_module_is_quantised_again():
    inputs, owners = QuantisedInput(), (nn.Identity(), nn.Identity())
    first, second = torch.randn(4, 8), torch.randn(4, 8)
    found = inputs.of(owners[0], first)
    assert inputs.of(owners[0], first) is found
    assert inputs.of(owners[1], first) is not found
    assert not torch.equal(inputs.of(owners[1], second)[0], found[0])
    first.neg_()
    assert torch.equal(inputs.of(owners[1], first)[0].int(), 2 * (inputs.steps + 1) - found[0].int())
