"""ONNX graphs of backbones in float32 and int8: the accuracy of their states, and unsupported models."""

import numpy as np
import onnx as onnx_library
import pytest
import torch
from torch import nn
from transformers import NomicBertConfig

from embeddings.common import OptionError, TextSettings
from embeddings.interop import onnx
from embeddings.interop.onnx import GRAPH_FILE, INT8_GRAPH_FILE, check_onnx, open_graph, write_int8_onnx, write_onnx
from embeddings.models import ClsPooling, Embedder, LoraSettings, MeanPooling, add_lora
from tests.helpers.tiny import tiny_bert, wordpiece_tokenizer
from tests.models.contextual_models import tiny_contextual, tiny_modernbert, tiny_nomic, tiny_xlm_roberta
from tests.models.moe import tiny_moe
from tests.models.reading import random_tokens


def embedder(backbone, pooling=None, **text):
    return Embedder(
        backbone, wordpiece_tokenizer(), pooling or MeanPooling(32), text=TextSettings(32, 32, **text)
    ).eval()


def adapted():
    backbone = add_lora(tiny_bert(), LoraSettings(rank=2))
    for name, parameter in backbone.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return backbone


@torch.no_grad()
def differences(graph, backbone):
    """Maximum differences of the states, relative to the largest state, of batches with different lengths."""
    states_of = open_graph(graph)
    for lengths in ([7, 3, 12], [1], [40, 2]):
        tokens = random_tokens(300, lengths)
        inputs = (tokens.input_ids_NL, tokens.attention_mask_NL.long())
        expected = backbone(*inputs).last_hidden_state.numpy()
        difference = np.abs(states_of(inputs) - expected)[tokens.attention_mask_NL.numpy()].max()
        yield difference / np.abs(expected).max()


@pytest.mark.slow
@pytest.mark.parametrize("make", [adapted, tiny_xlm_roberta, tiny_nomic])
def test_a_graph_has_the_models_states_at_any_length(tmp_path, make):
    torch.manual_seed(0)
    model = embedder(make())
    check_onnx(model)
    model.save_pretrained(tmp_path / "model")
    assert write_onnx(tmp_path / "model").difference <= 1e-5
    assert [path.name for path in (tmp_path / "model" / "onnx").iterdir()] == ["model.onnx"]
    assert max(differences(tmp_path / "model" / GRAPH_FILE, model.backbone)) <= 1e-5
    model.save_pretrained(tmp_path / "model")
    assert not (tmp_path / "model" / "onnx").exists()


@pytest.mark.slow
def test_a_graph_with_different_states_is_deleted(tmp_path, monkeypatch):
    embedder(tiny_bert()).save_pretrained(tmp_path / "model")
    export = onnx._export

    def altered(model, *places):
        export(model, *places)
        with torch.no_grad():
            model.get_parameter("encoder.layer.1.output.dense.weight")[3, 5] += 1e-2

    monkeypatch.setattr(onnx, "_export", altered)
    with pytest.raises(
        OptionError, match=r"format must match torch's states to .*; this graph's differ by .*; leave it"
    ):
        write_onnx(tmp_path / "model")
    assert list((tmp_path / "model" / "onnx").iterdir()) == []


@pytest.mark.slow
def test_graphs_are_compared_above_the_window_and_the_limit_of_rotary_scaling(tmp_path, monkeypatch):
    """On texts shorter than the window, a graph without any window would also have the right states."""
    assert onnx._length_limits(tiny_bert().config) == []
    assert onnx._length_limits(tiny_modernbert().config) == [3, 6]
    dynamic = {"rope_type": "dynamic", "rope_theta": 1000.0, "factor": 2.0}
    config = NomicBertConfig(max_position_embeddings=24, rope_parameters=dynamic)
    assert onnx._length_limits(config) == [24]
    compared, example = [], onnx.example_inputs

    def spy(config, *shape):
        compared.append(shape)
        return example(config, *shape)

    monkeypatch.setattr(onnx, "example_inputs", spy)
    embedder(tiny_modernbert()).save_pretrained(tmp_path / "model")
    found = write_onnx(tmp_path / "model")
    assert found.difference <= 1e-5
    assert found.longest == 33
    assert compared[1:] == [*onnx.CHECKED_SHAPES, (1, 5), (1, 8)]


def test_models_with_custom_code_or_above_2_gib_are_refused(monkeypatch):
    check_onnx(embedder(tiny_bert(), ClsPooling(32), prompts={"query": "q: "}))
    for model in (embedder(tiny_bert(), prompts={"query": "q:"}), tiny_contextual(), embedder(tiny_moe())):
        with pytest.raises(OptionError, match="format needs a model that loads without custom code"):
            check_onnx(model)
    monkeypatch.setattr(onnx, "_MAX_BYTES", 1000)
    with pytest.raises(OptionError, match="format needs a model smaller than 2 GiB; this one has"):
        check_onnx(embedder(tiny_bert()))


@pytest.mark.slow
def test_an_int8_graph_is_close_and_its_matrices_have_8_bits(tmp_path, monkeypatch):
    torch.manual_seed(0)
    model = embedder(tiny_bert())
    model.save_pretrained(tmp_path)
    write_onnx(tmp_path)
    assert 0.99 < write_int8_onnx(tmp_path) < 1
    graph = onnx_library.load(tmp_path / INT8_GRAPH_FILE).graph
    matrices = [tensor for tensor in graph.initializer if len(tensor.dims) == 2 and tensor.dims[0] in (32, 64)]
    rounded = [tensor for tensor in matrices if tensor.data_type == onnx_library.TensorProto.INT8]
    assert len(rounded) == 6 * model.backbone.config.num_hidden_layers
    assert all(1e-4 < difference < 0.1 for difference in differences(tmp_path / INT8_GRAPH_FILE, model.backbone))
    # A graph with NaN states is refused, and the earlier file is not changed.
    before = (tmp_path / INT8_GRAPH_FILE).read_bytes()
    monkeypatch.setattr(onnx, "open_graph", lambda _: lambda _: np.full((1, 1, 32), np.nan, np.float32))
    with pytest.raises(OptionError, match=r"^format must produce finite states: .*, got 'onnx-int8'; use onnx$"):
        write_int8_onnx(tmp_path)
    assert (tmp_path / INT8_GRAPH_FILE).read_bytes() == before
