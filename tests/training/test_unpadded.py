"""Gradients of unpadded texts equal those of padded texts, plain and under GradCache."""

from functools import partial

import pytest
import torch

from embeddings.common import Representations
from embeddings.losses import InfoNCE
from embeddings.models import Embedder, LoraSettings, MeanPooling, add_lora
from embeddings.models.attention_capture import attention_layers
from embeddings.models.backbone import enable_checkpointing
from embeddings.models.moe.upcycling import COUNTS, PROBABILITIES
from embeddings.training import GradCache
from embeddings.training.gradcache import plain_step
from tests.helpers.contrastive import (
    TinyStep,
    batch_of,
    gradient_vector,
    random_batch,
    random_records,
    relative_error,
    with_context,
)
from tests.helpers.tiny import wordpiece_tokenizer
from tests.models.contextual_models import tiny_contextual
from tests.models.test_unpadded import BACKBONES, POOLINGS
from tests.modules.moe_modules import dense_folder, moe_module
from tests.training.test_gradcache import REPLAYED

ENGINES = {"plain": None} | {name: GradCache(**REPLAYED[name]) for name in ("one text", "uneven", "half kept")}
QUICK = ["plain", "uneven"]
# Sums have other orders: up to 1.05e-6 in float32 on one of three kinds of CPU.
TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-12}


@pytest.fixture(autouse=True)
def _norms_in_float64(monkeypatch):
    """Gemma's norms always sum the gradients of their weights in float32."""
    monkeypatch.setattr(torch.Tensor, "float", lambda x: x if x.dtype == torch.float64 else x.to(torch.float32))


class EmbedderStep(TinyStep):
    """The vectors of an embedder, InfoNCE."""

    def __init__(self, embedder: Embedder) -> None:
        super().__init__(embedder.backbone, InfoNCE(temperature=0.05))
        self.embedder = embedder

    def embed(self, tokens, context=None):
        return Representations(self.embedder(tokens))


def gradient(step, batch, engine=None):
    step.zero_grad()
    if engine is None:
        plain_step(step, batch).loss.backward()
    else:
        engine.step(step, batch)
    return gradient_vector(step)


def step_of(backbone, dtype, pooling=MeanPooling):
    torch.manual_seed(1)
    return EmbedderStep(Embedder(backbone.to(dtype), wordpiece_tokenizer(), pooling(32)).to(dtype)).eval()


def error(backbone, engine, dtype, pooling=MeanPooling, training=False):
    """The error of the unpadded gradient relative to the padded plain step."""
    step = step_of(backbone, dtype, pooling).train(training)
    batch = batch_of(random_records(5, 2, vocabulary=60))
    expected = gradient(step, batch)
    step.embedder.unpad(True)
    assert step.embedder.unpadding is not None
    return relative_error(gradient(step, batch, engine), expected)


def adapted(name):
    torch.manual_seed(3)
    backbone = add_lora(BACKBONES[name](), LoraSettings(rank=4, alpha=8, dropout=0.0))
    for parameter in backbone.parameters():
        if parameter.requires_grad:
            # With larger weights the padded float32 gradient has an error of 1.4e-6.
            torch.nn.init.normal_(parameter, std=0.02)
    return backbone


# Backbone, pooling, engine. In float64 transformers' eager attention returns NaN for padding outside a window.
CASES = [
    *((BACKBONES[name], MeanPooling, "plain", name) for name in BACKBONES if "eager" not in name),
    *(
        (BACKBONES[name], MeanPooling, engine, name)
        for name in ("bert", "mistral, both ways")
        for engine in ENGINES
        if engine != "plain"
    ),
    *((BACKBONES["llama, both ways"], pooling, engine, name) for name, pooling in POOLINGS.items() for engine in QUICK),
    *(
        (partial(adapted, name), MeanPooling, engine, f"LoRA, {name}")
        for name in ("bert", "mistral", "modernbert")
        for engine in QUICK
    ),
]


# Every case in float64, and every second one in float32 too.
@pytest.mark.parametrize(
    ("backbone", "pooling", "engine", "dtype"),
    [
        pytest.param(*case[:3], dtype, id=f"{case[3]}, {case[2]}-{dtype}")
        for row, case in enumerate(CASES)
        for dtype in TOLERANCE
        if dtype == torch.float64 or row % 2 == 0
    ],
)
def test_gradients_equal_those_of_padded_texts(backbone, pooling, engine, dtype):
    assert error(backbone(), ENGINES[engine], dtype, pooling) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("engine", QUICK)
@pytest.mark.parametrize("name", ["bert", "mistral, both ways"])
def test_checkpointed_layers_have_the_gradients_of_padded_texts(name, engine, dtype):
    backbone = BACKBONES[name]()
    enable_checkpointing(backbone)
    forwards = []
    attention_layers(backbone)[0].register_forward_pre_hook(lambda *_: forwards.append(1))
    assert error(backbone, ENGINES[engine], dtype, training=True) <= TOLERANCE[dtype]
    assert len(forwards) > 8


def cde_gradient(kind, dtype, engine=None, unpad=False):
    """The gradient of both stages."""
    embedder = tiny_contextual(kind).to(dtype)
    embedder.first_stage.max_length = 9
    if unpad:
        embedder.unpad(True)
        assert embedder.unpadding is not None
        assert embedder.first_unpadding is not None
    step = ContextualEmbedderStep(embedder)
    return gradient(step, with_context(batch_of(random_records(5, 2))), engine)


class ContextualEmbedderStep(EmbedderStep):
    """A step whose texts follow the context documents of their batch."""

    trains_context = True

    def embed_context(self, tokens):
        return self.embedder.embed_context(tokens)

    def embed(self, tokens, context=None):
        return Representations(self.embedder(tokens, context))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("engine", QUICK)
@pytest.mark.parametrize("kind", ["bert", "xlm_roberta", "nomic", "decoder"])
def test_two_stages_have_the_gradients_of_padded_texts(kind, engine, dtype):
    expected = cde_gradient(kind, dtype)
    assert relative_error(cde_gradient(kind, dtype, ENGINES[engine], unpad=True), expected) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("engine", QUICK)
def test_experts_have_the_gradients_of_padded_texts(tmp_path, engine, dtype):
    """Includes the balancing loss, whose counts and probabilities exclude padding."""
    batch, folder, found = random_batch(5, 2), dense_folder(tmp_path), []
    for unpadded in (False, True):
        module = moe_module(folder).to(dtype)
        module.embedder.unpad(unpadded)
        found.append(gradient(module, batch, ENGINES[engine] if unpadded else None))
        sums = module.embed(batch.query).statistics
        found.append(torch.cat([sums[name].detach().double().flatten() for name in (COUNTS, PROBABILITIES)]))
    assert relative_error(found[2], found[0]) <= TOLERANCE[dtype]
    assert relative_error(found[3], found[1]) <= TOLERANCE[dtype]
