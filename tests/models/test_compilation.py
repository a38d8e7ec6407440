"""Compiled layers against plain ones: gradients, dropout, texts without padding, graphs, and a compiler that fails."""

import os
import re
import shutil
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import varlen

from embeddings.common import OptionError
from embeddings.inference import Encoder
from embeddings.models import (
    AnchorTokenPooling,
    BackboneConfig,
    Embedder,
    LoraSettings,
    MeanPooling,
    add_lora,
    compilation,
    unpadded,
)
from embeddings.models.backbone import enable_checkpointing
from embeddings.models.bidirectional import layers
from embeddings.models.compilation import (
    compilation_line,
    compile_automatic,
    compile_layers,
    is_compiled,
    set_compilation,
)
from embeddings.training import GradCache
from tests.helpers.contrastive import (
    TinyStep,
    batch_of,
    gradient_vector,
    random_batch,
    random_records,
    relative_error,
    with_context,
)
from tests.helpers.tiny import sentencepiece_tokenizer, tiny_bert, tiny_mistral, wordpiece_tokenizer
from tests.models.contextual_models import tiny_contextual
from tests.models.test_unpadded import texts
from tests.modules.moe_modules import dense_folder, moe_module
from tests.training.test_gradcache import cached_gradient, direct_gradient
from tests.training.test_unpadded import ContextualEmbedderStep, EmbedderStep

# Compiling causes warnings of torch; the compiler suppresses its own only if warnings are not errors.
pytestmark = pytest.mark.filterwarnings("default")
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler")
counted = torch._dynamo.utils.counters


@pytest.fixture(params=["aot_eager", pytest.param("inductor", marks=needs_compiler)])
def compiler(request, monkeypatch):
    """Traced graphs without code generation, or compiled to C++, which takes minutes."""
    if request.param == "aot_eager":
        monkeypatch.setattr(compilation, "_COMPILER", {"backend": "aot_eager"})
    counted.clear()
    yield
    torch.compiler.reset()


traced = pytest.mark.parametrize("compiler", ["aot_eager"], indirect=True)


def recomputed():
    model = tiny_bert(dropout=0.1)
    enable_checkpointing(model)
    return model


MODELS = {
    "encoder": lambda: tiny_bert(dropout=0.1),
    "encoder, recomputed": recomputed,
    "decoder with adapters": lambda: add_lora(tiny_mistral(), LoraSettings(rank=4, dropout=0.1)),
}


def plain_and_compiled(model):
    """A plain and a compiled step with the same weights, with dropout."""
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


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_gradcache_has_the_gradient_of_plain_layers_and_replays_dropout(model, compiler):
    plain, compiled = plain_and_compiled(model)
    for num_pairs in (4, 7):
        batch, engine = random_batch(num_pairs, 2), GradCache(mini_batch_tokens=30, kept_fraction=0.5)
        torch.manual_seed(1)
        direct = direct_gradient(plain, batch, engine)[1]
        torch.manual_seed(1)
        cached = cached_gradient(compiled, batch, engine)[1]
        assert relative_error(cached, direct) < 1e-6
        assert relative_error(cached_gradient(compiled, batch, engine)[1], direct) > 1e-3


@pytest.mark.slow
@traced
def test_mini_batches_of_many_sizes_need_no_new_compilation(compiler):
    """Four compiled graphs: with and without padding, each with and without gradients, as in GradCache's passes."""
    model, found = tiny_bert().train(), []
    compile_layers(model)
    for num_texts, length in ((4, 16), (7, 24), (12, 5), (2, 31)):
        mask_NL = torch.ones(num_texts, length, dtype=torch.int64)
        padded_NL = mask_NL.clone()
        padded_NL[0, length // 2 :] = 0
        for attention_NL in (mask_NL, padded_NL):
            with torch.no_grad():
                model(mask_NL, attention_mask=attention_NL)
            model(mask_NL, attention_mask=attention_NL).last_hidden_state.sum().backward()
        found.append(counted["stats"]["unique_graphs"])
    assert found == [4] * len(found)
    assert not counted["graph_break"]


def rows_of(query, key, value, start, is_causal, scale, window_size):
    """Queries, keys and values of each text, (A, L, E), with the weights of its attention and the range of its rows."""
    shared = query.shape[1] // key.shape[1]
    for begin, end in zip(start[:-1].tolist(), start[1:].tolist(), strict=True):
        q, k, v = (side[begin:end].transpose(0, 1) for side in (query, key, value))
        k, v = (side.repeat_interleave(shared, dim=0) for side in (k, v))
        index = torch.arange(end - begin)
        distance = index[:, None] - index
        left, right = (len(index) if size < 0 else size for size in window_size)
        sees = (distance <= left) & (-distance <= (0 if is_causal else right))
        yield slice(begin, end), q, k, v, (q @ k.mT * scale).masked_fill(~sees, -torch.inf).softmax(-1)


@pytest.fixture
def kernel(monkeypatch):
    """torch's operator for texts without padding is computed on a CPU by a loop; its graph and backward are torch's."""

    def forward(query, key, value, start, other, longest, longest_key, is_causal=False, scale=None, window=None, *_):
        scale, output = scale or query.shape[-1] ** -0.5, torch.empty_like(query)
        for rows, _, _, v, weight in rows_of(query, key, value, start, is_causal, scale, window):
            output[rows] = (weight @ v).transpose(0, 1)
        return output, query.new_zeros(query.shape[1], len(query)), torch.zeros(2, dtype=torch.uint64)

    def backward(gradient, query, key, value, out, lse, start, other, longest, longest_key, is_causal, rng,
                 scale=None, window=None):  # fmt: skip
        scale, shared = scale or query.shape[-1] ** -0.5, query.shape[1] // key.shape[1]
        found = [torch.empty_like(side) for side in (query, key, value)]
        for rows, q, k, v, weight in rows_of(query, key, value, start, is_causal, scale, window):
            of_output = gradient[rows].transpose(0, 1)
            of_weight = of_output @ v.mT
            of_score = weight * (of_weight - (of_weight * weight).sum(-1, keepdim=True)) * scale
            sides = of_score @ k, of_score.mT @ q, weight.mT @ of_output
            for side, target in zip(sides, found, strict=True):
                side = side if target.shape[1] == len(side) else side.unflatten(0, (-1, shared)).sum(1)
                target[rows] = side.transpose(0, 1)
        return tuple(found)

    # They stay registered: on a CPU the operator has no other kernel.
    varlen._varlen_attn.register_kernel("cpu")(forward)
    varlen._varlen_attn_backward.register_kernel("cpu")(backward)
    monkeypatch.setattr(unpadded, "_kernel_supports", lambda query, value: True)


def embedder_step(backbone):
    torch.manual_seed(1)
    return EmbedderStep(Embedder(backbone, wordpiece_tokenizer(), MeanPooling(32)))


def adapted():
    torch.manual_seed(3)
    return add_lora(tiny_mistral(), LoraSettings(rank=4, alpha=8, dropout=0.1))


def contextual():
    return ContextualEmbedderStep(tiny_contextual("nomic"))


# Steps, and their graphs: for each type of layer with and without gradients. None: the same in all batches but one.
STEPS = {
    "encoder": (lambda folder: embedder_step(tiny_bert(dropout=0.1)), 2),
    # The input of the first layer needs no gradient, because its weights are frozen.
    "decoder with adapters": (lambda folder: embedder_step(adapted()), 3),
    "two stages": (lambda folder: contextual(), 4),
    # In float32 the product of the experts is outside the graph (see `grouped_experts`).
    "experts": (lambda folder: moe_module(dense_folder(folder, dropout=0.1)), None),
}


def batch_for(name, num_queries, seed):
    batch = batch_of(random_records(num_queries, 2, seed, vocabulary=60))
    return with_context(batch) if name == "two stages" else batch


@pytest.mark.slow
@traced
@pytest.mark.parametrize("name", STEPS)
def test_texts_without_padding_have_the_same_gradient_by_the_same_graphs(name, tmp_path, compiler, kernel):
    """Over more than 20 mini-batches of different lengths and counts, with dropout and half of the graphs kept."""
    make, expected = STEPS[name]
    plain, compiled = (make(tmp_path / str(number)).train() for number in range(2))
    compiled.load_state_dict(plain.state_dict())
    for step in (plain, compiled):
        step.embedder.unpad(True)
    for part in {compiled.embedder.backbone, getattr(compiled.embedder, "first_stage", compiled.embedder).backbone}:
        compile_layers(part)
    engine, num_mini_batches, num_graphs = GradCache(mini_batch_tokens=60, kept_fraction=0.5), 0, []
    for num_queries, seed in ((5, 0), (9, 1), (4, 2), (7, 3)):
        batch, found = batch_for(name, num_queries, seed), []
        num_mini_batches += sum(map(len, engine.plan(batch)))
        for step in (plain, compiled):
            step.zero_grad()
            torch.manual_seed(seed)
            engine.step(step, batch)
            found.append(gradient_vector(step))
        assert relative_error(found[1], found[0]) <= 2e-6
        num_graphs.append(counted["stats"]["unique_graphs"])
    assert num_mini_batches >= 20
    if expected is None:
        assert num_graphs[1:] == num_graphs[1:2] * 3
    else:
        assert num_graphs[-1] == expected
        assert not counted["graph_break"]


@pytest.mark.slow
@traced
def test_the_kernel_is_one_operator_of_the_graph_in_bfloat16_too(compiler, kernel):
    embedder, graphs = embedder_step(tiny_bert()).embedder.train(), []
    embedder.unpad(True)

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    for layer in layers(embedder.backbone):
        layer.compile(dynamic=True, backend=backend)
    with torch.autocast("cpu", torch.bfloat16):
        for lengths in ((5, 3, 2), (9, 4, 4, 1)):
            embedder(texts(lengths)).sum().backward()
    assert len(graphs) == 1
    called = [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert sum("_varlen_attn" in name for name in called) == 1
    line = compilation_line(embedder)
    assert re.fullmatch(r"compiled the layers into 1 graph in \d+ s; .* keeps their code", line)
    assert compilation_line(tiny_bert()) is None


def test_layers_that_a_pooling_reads_are_not_compiled_and_eager_attention_is_refused(caplog):
    partly, whole = tiny_mistral(), tiny_mistral()
    for decoder, read_layers in ((partly, (-1,)), (whole, (0, 1))):
        pooling = AnchorTokenPooling(32, layers=read_layers, by_visible_queries=True)
        Embedder(decoder, sentencepiece_tokenizer(), pooling)
    compile_layers(partly)
    assert [is_compiled(layer) for layer in layers(partly)] == [True, False]
    with pytest.raises(OptionError, match=r"backbone\.compile cannot compile any layer of this model: the pooling"):
        compile_layers(whole)
    whole.set_attn_implementation("eager")
    with pytest.raises(OptionError, match=r"backbone\.compile does not support eager attention.*sdpa"):
        compile_layers(whole)


@pytest.fixture
def with_triton(monkeypatch):
    found = compilation.importlib.util.find_spec
    fake = SimpleNamespace(util=SimpleNamespace(find_spec=lambda name: name == "triton" or found(name)))
    monkeypatch.setattr(compilation, "importlib", fake)


def test_auto_compiles_marked_backbones_and_says_in_a_line_why_not(with_triton, caplog, monkeypatch):
    model = Embedder(tiny_bert(), wordpiece_tokenizer(), MeanPooling(32))
    assert BackboneConfig("name").compile == "auto"
    for mode in (False, "auto"):
        set_compilation(model.backbone, mode)
        compile_automatic(model)
        assert is_compiled(model) is (mode == "auto")
    eager = Embedder(tiny_bert(), wordpiece_tokenizer(), MeanPooling(32))
    eager.backbone.set_attn_implementation("eager")
    set_compilation(eager.backbone, "auto")
    with caplog.at_level("INFO"):
        compile_automatic(eager)
    assert not is_compiled(eager)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("backbone.compile: auto is off, because true does not support eager attention")
    assert "\n" not in line


def test_layers_run_without_a_compiler_that_fails(with_triton, caplog, monkeypatch):
    def fails(graph, inputs):
        raise RuntimeError("no code for this graph\nand a long trace")

    monkeypatch.setattr(compilation, "_COMPILER", {"backend": fails})
    plain, model = tiny_bert(), tiny_bert()
    set_compilation(model, "auto")
    compile_automatic(model)
    assert is_compiled(model)
    ids = torch.arange(5, 17).view(2, 6)
    with caplog.at_level("WARNING"):
        found, expected = model(ids).last_hidden_state, plain(ids).last_hidden_state
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert not is_compiled(model)
    lines = [record.getMessage() for record in caplog.records if "not compiled" in record.getMessage()]
    assert len(lines) == 1
    assert "no code for this graph" in lines[0]
    assert "\n" not in lines[0]
    torch.compiler.reset()


@pytest.mark.parametrize("own", [None, "/given"])
def test_compiled_code_is_kept_in_the_cache_folder_or_where_the_user_says(own, tmp_path, monkeypatch):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("EMBED_CACHE", str(tmp_path / "cache"))
    if own is not None:
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", own)
    compile_layers(tiny_bert())
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == (own or str(tmp_path / "cache" / "compiled"))


def test_a_long_encode_on_a_gpu_compiles_and_a_short_one_does_not(with_triton):
    encoder = Encoder(Embedder(tiny_bert(), wordpiece_tokenizer(), MeanPooling(32)))
    encoder.compile_for(compilation.COMPILED_TEXTS)
    assert not is_compiled(encoder.embedder)
    encoder.device = torch.device("cuda")
    encoder.compile_for(compilation.COMPILED_TEXTS - 1)
    assert not is_compiled(encoder.embedder)
    encoder.compile_for(compilation.COMPILED_TEXTS)
    assert is_compiled(encoder.embedder.backbone)
