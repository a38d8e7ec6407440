"""Tests that need a CUDA device; without one they are skipped."""

import copy
import re
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from embeddings.compression.layerwise import LayerwiseJob, LayerwiseModel
from embeddings.losses import InfoNCE
from embeddings.models import check_bidirectional, make_bidirectional
from embeddings.models.bidirectional import layers
from embeddings.models.compilation import compile_layers
from embeddings.training.gradcache import GradCache, plain_step
from tests.compression.models import build
from tests.compression.test_layerwise import Pruned, some_tokens
from tests.helpers.contrastive import (
    TinyStep,
    batch_of,
    gradient_vector,
    random_batch,
    random_records,
    relative_error,
)
from tests.helpers.tiny import tiny_bert, tiny_mistral
from tests.helpers.waits import declared
from tests.models.test_unpadded import BACKBONES, embedder_of, texts
from tests.strategies.fits import batches, methods, write_models
from tests.training.test_unpadded import EmbedderStep

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_the_causal_mask_is_off_on_the_device(attention):
    model = tiny_mistral()
    model.set_attn_implementation(attention)
    make_bidirectional(model)
    check_bidirectional(model.cuda())


def test_gradcache_under_bf16_autocast_leaves_no_parameter_without_its_gradient():
    """The pass with a graph must not reuse weight casts of the pass without a graph."""
    plain = TinyStep(tiny_bert(), InfoNCE(0.1)).cuda()
    cached = copy.deepcopy(plain)
    batch = random_batch(6, 2).to("cuda")
    with torch.autocast("cuda", torch.bfloat16):
        loss = plain_step(plain, batch).loss
        output = GradCache(mini_batch_tokens=16).forward_backward(cached, batch)
    loss.backward()
    output.loss.backward()
    compared = 0
    for expected, actual in zip(plain.parameters(), cached.parameters(), strict=True):
        if expected.grad is not None and expected.grad.norm() > 0:
            assert actual.grad is not None
            cosine = torch.nn.functional.cosine_similarity(expected.grad.flatten(), actual.grad.flatten(), dim=0)
            assert cosine > 0.99
            compared += 1
    assert compared > 5


def test_info_nce_multiplies_in_bfloat16_under_autocast_with_the_gradient_of_float64():
    batch, generator = random_batch(300, 2).to("cuda"), torch.Generator().manual_seed(1)
    counts, results = (len(batch.query), len(batch.candidate)), []
    drawn = [torch.randn(count, 768, generator=generator).to("cuda") for count in counts]
    for dtype, half in ((torch.float64, False), (torch.float32, False), (torch.float32, True)):
        vectors = [side.to(dtype).requires_grad_() for side in drawn]
        with torch.autocast("cuda", torch.bfloat16, enabled=half):
            loss = InfoNCE(0.05).to(dtype)(*vectors, batch).loss
        results.append(torch.autograd.grad(loss, vectors))
    for expected, single, rounded in zip(*results, strict=True):
        assert relative_error(single, expected) < 1e-4
        assert 2e-5 < relative_error(rounded, expected) < 1e-3


@pytest.mark.parametrize("method", ["nv-embed", "mgh", "moe"])
def test_a_step_synchronises_with_the_gpu_only_at_documented_places(method, tmp_path):
    """Under bfloat16, because torch's grouped product of float32 matrices waits for the sizes of the groups."""
    write_models(tmp_path)
    module, batch = methods(tmp_path)[method]().train().cuda(), batches(method, None)[0].to("cuda")
    engine = GradCache(mini_batch_tokens=60, kept_fraction=0.4)
    with torch.autocast("cuda", torch.bfloat16):
        # Loading, compiling and checking at the first use may synchronise.
        engine.step(module, batch)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                engine.step(module, batch)
            finally:
                torch.cuda.set_sync_debug_mode("default")
    # torch also warns, once, that this mode is a prototype.
    files = {Path(each.filename).name for each in caught if "called a synchronizing" in str(each.message)}
    assert files <= {re.findall(r"\w+\.py", place)[-1] for place in declared(method)}


@pytest.mark.parametrize("name", ["bert", "modernbert", "qwen3"])
def test_a_gpu_prunes_nearly_the_same_weights(tmp_path, name):
    build(name).save_pretrained(tmp_path / "model")
    weights = {}
    for device in ("cpu", "cuda"):
        model = LayerwiseModel(tmp_path / "model", torch.device(device))
        job = LayerwiseJob(model, tmp_path / device, {}, Pruned(), some_tokens(64))
        job.run()
        weights[device] = {key: tensor for file in job.files for key, tensor in load_file(file).items()}
    same = [(weights["cpu"][key] == 0) == (weights["cuda"][key] == 0) for key in weights["cpu"]]
    assert float(torch.cat([equal.flatten() for equal in same]).float().mean()) > 0.99


@pytest.mark.parametrize("name", ["bert", "mistral", "mistral, both ways", "modernbert", "gemma3, both ways"])
def test_texts_without_padding_have_nearly_the_vectors_and_gradients_of_padded_ones(name):
    """With torch's kernel, which `auto` uses in half precision."""
    embedder, tokens = embedder_of(BACKBONES[name]()).cuda(), texts().to("cuda")
    results = []
    for mode in (False, "auto"):
        embedder.unpad(mode)
        embedder.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            is_unpadded = embedder.unpadding is not None and embedder.unpadding.applies_to(embedder.backbone, tokens)
            assert is_unpadded is bool(mode)
            vectors = embedder(tokens)
        (vectors[:-1] * vectors[1:].detach()).sum().backward()
        results.append((vectors.detach().flatten(), gradient_vector(embedder)))
    for padded, unpadded in zip(*results, strict=True):
        assert torch.nn.functional.cosine_similarity(padded, unpadded, dim=0) > 0.99


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", ["bert", "mistral, both ways", "nomic"])
def test_compiled_layers_have_nearly_the_gradient_of_plain_ones_and_few_graphs(name):
    """Texts without padding under GradCache in bfloat16, by inductor and Triton."""
    steps = [EmbedderStep(embedder_of(BACKBONES[name]()).train()).cuda() for _ in range(2)]
    steps[1].load_state_dict(steps[0].state_dict())
    for step in steps:
        step.embedder.unpad("auto")
    compile_layers(steps[1].embedder.backbone)
    torch._dynamo.utils.counters.clear()
    engine, found = GradCache(mini_batch_tokens=60, kept_fraction=0.5), []
    for num_queries, seed in ((5, 0), (9, 1), (4, 2)):
        batch = batch_of(random_records(num_queries, 2, seed, vocabulary=60)).to("cuda")
        for step in steps:
            step.zero_grad()
            with torch.autocast("cuda", torch.bfloat16):
                engine.step(step, batch)
        found.append(relative_error(*(gradient_vector(step).cpu() for step in steps)))
    assert max(found) < 5e-2
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    torch.compiler.reset()


def test_the_states_of_a_backbone_stay_in_bfloat16_under_autocast():
    embedder, tokens = embedder_of(tiny_bert()).cuda(), texts().to("cuda")
    dtypes = []
    for layer in layers(embedder.backbone):
        layer.register_forward_pre_hook(lambda module, inputs: dtypes.append(inputs[0].dtype))
    with torch.autocast("cuda", torch.bfloat16):
        embedder(tokens)
    assert dtypes == [torch.bfloat16] * 2
