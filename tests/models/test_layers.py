"""Compiled layers against plain ones: the same gradients, dropout and names of weights, whatever lies around them."""

import shutil
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from embeddings.common import OptionError
from embeddings.models import AnchorTokenPooling, Embedder, LoraSettings, Upcycling, add_lora, upcycle
from embeddings.models import backbone as layers_module
from embeddings.models.backbone import compile_layers, enable_checkpointing, is_compiled
from embeddings.models.bidirectional import layers
from embeddings.training import GradCache
from tests.helpers.contrastive import TinyStep, random_batch, relative_error
from tests.helpers.tiny import sentencepiece_tokenizer, tiny_bert, tiny_mistral
from tests.models.moe import tiny_rotary
from tests.training.test_gradcache import cached_gradient, direct_gradient, plain_gradient

EAGER = {"backend": "aot_eager"}
INDUCTOR = dict(layers_module._COMPILER)
# The compiler looks at things of which torch warns; it hides its own warnings by a way that errors do not take.
pytestmark = pytest.mark.filterwarnings("default")
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler")


@pytest.fixture(params=["aot_eager", pytest.param("inductor", marks=needs_compiler)])
def compiler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Graphs that run as they were traced, or as C++ of their own, which takes minutes."""
    monkeypatch.setattr(layers_module, "_COMPILER", EAGER if request.param == "aot_eager" else INDUCTOR)
    yield
    torch.compiler.reset()


@pytest.fixture
def eager_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(layers_module, "_COMPILER", EAGER)
    yield
    torch.compiler.reset()


def decoder() -> nn.Module:
    return add_lora(tiny_mistral(), LoraSettings(rank=4, dropout=0.1))


def recomputed() -> nn.Module:
    model = tiny_bert(dropout=0.1)
    enable_checkpointing(model)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "encoder": lambda: tiny_bert(dropout=0.1),
    "encoder, recomputed": recomputed,
    "decoder with adapters": decoder,
}


def plain_and_compiled(model: str) -> tuple[TinyStep, TinyStep]:
    """Two steps of the same weights, with dropout."""
    steps = []
    for compiles in (False, True):
        torch.manual_seed(0)
        backbone = MODELS[model]().train()
        if compiles:
            compile_layers(backbone)
        steps.append(TinyStep(backbone))
    plain, compiled = steps
    assert is_compiled(compiled)
    assert not is_compiled(plain)
    assert list(compiled.state_dict()) == list(plain.state_dict())
    return plain, compiled


def test_a_plain_step_has_the_gradient_of_plain_layers(eager_compiler: None) -> None:
    steps, batch, found = plain_and_compiled("encoder"), random_batch(4, 2), []
    for step in (*steps, steps[0]):
        torch.manual_seed(1 + len(found) // 2)
        found.append(plain_gradient(step, batch)[1])
    assert relative_error(found[1], found[0]) < 1e-6
    assert relative_error(found[2], found[0]) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_gradcache_has_it_too_and_dropout_is_replayed(model: str, compiler: None) -> None:
    plain, compiled = plain_and_compiled(model)
    for num_pairs in (4, 7):
        batch, engine = random_batch(num_pairs, 2), GradCache(mini_batch_tokens=30, kept_fraction=0.5)
        torch.manual_seed(1)
        direct = direct_gradient(plain, batch, engine)[1]
        torch.manual_seed(1)
        cached = cached_gradient(compiled, batch, engine)[1]
        assert relative_error(cached, direct) < 1e-6
        assert relative_error(cached_gradient(compiled, batch, engine)[1], direct) > 1e-3


def test_layers_are_the_members_of_the_outermost_lists() -> None:
    bert = tiny_bert()
    assert list(layers(bert)) == list(bert.encoder.layer)
    module = nn.Module()
    module.outer = nn.ModuleList([nn.Sequential(nn.ModuleList([nn.Linear(3, 2)]))])
    assert list(layers(module)) == [module.outer[0]]


def test_texts_of_any_number_and_length_share_one_graph(eager_compiler: None) -> None:
    model = tiny_bert().train()
    compile_layers(model)
    counted = torch._dynamo.utils.counters
    counted.clear()
    for num_texts, length in ((2, 3), (3, 9), (5, 30), (8, 4)):
        model(torch.ones(num_texts, length, dtype=torch.int64)).last_hidden_state.sum().backward()
    assert counted["stats"]["unique_graphs"] == 1
    assert not counted["graph_break"]


def compiled_ones(model: PreTrainedModel) -> list[bool]:
    return [is_compiled(layer) for layer in layers(model)]


def test_layers_that_are_read_or_have_experts_are_left_as_they_are() -> None:
    decoder = tiny_mistral()
    Embedder(
        decoder, sentencepiece_tokenizer(), AnchorTokenPooling(decoder.config.hidden_size, by_visible_queries=True)
    )
    compile_layers(decoder)
    *others, last = compiled_ones(decoder)
    assert others
    assert all(others)
    assert not last
    sparse = upcycle(tiny_rotary(num_layers=4), Upcycling(num_experts=2))
    compile_layers(sparse)
    assert compiled_ones(sparse) == [True, False, True, False]


def test_eager_attention_is_refused() -> None:
    model = tiny_bert()
    model.set_attn_implementation("eager")
    with pytest.raises(OptionError, match=r"backbone\.compile does not go with eager attention.*sdpa"):
        compile_layers(model)


def test_a_model_without_another_layer_is_refused() -> None:
    sparse = upcycle(tiny_rotary(), Upcycling(num_experts=2, first=0, every=1))
    with pytest.raises(OptionError, match=r"backbone\.compile compiles no layer of this model: each has experts, or"):
        compile_layers(sparse)
