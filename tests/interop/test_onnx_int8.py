from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from transformers import PreTrainedModel

from embeddings.common import OptionError
from embeddings.interop.onnx import GRAPH_FILE, INT8_GRAPH_FILE, write_int8_onnx, write_onnx
from embeddings.models import Embedder, MeanPooling
from tests.helpers.tiny import tiny_bert, wordpiece_tokenizer
from tests.models.reading import random_tokens


def exported(backbone: PreTrainedModel, folder: Path) -> Embedder:
    model = Embedder(backbone, wordpiece_tokenizer(), MeanPooling(32)).eval()
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def test_a_graph_in_int8_lies_near_and_its_matrices_have_8_bits(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = exported(tiny_bert(), tmp_path)
    write_onnx(tmp_path)
    assert 0.99 < write_int8_onnx(tmp_path) < 1
    graph = onnx.load(tmp_path / INT8_GRAPH_FILE).graph
    matrices = [tensor for tensor in graph.initializer if len(tensor.dims) == 2 and tensor.dims[0] in (32, 64)]
    rounded = [tensor for tensor in matrices if tensor.data_type == onnx.TensorProto.INT8]
    assert len(rounded) == 6 * model.backbone.config.num_hidden_layers
    session = onnxruntime.InferenceSession(str(tmp_path / INT8_GRAPH_FILE))
    for lengths in ([7, 3, 12], [1], [40, 2]):
        tokens = random_tokens(300, lengths)
        inputs = {"input_ids": tokens.input_ids_NL.numpy(), "attention_mask": tokens.attention_mask_NL.long().numpy()}
        (state_NLH,) = session.run(None, inputs)
        expected_NLH = model.backbone(**{name: torch.from_numpy(value) for name, value in inputs.items()})[0].numpy()
        is_text = inputs["attention_mask"].astype(bool)
        difference = np.abs(state_NLH - expected_NLH)[is_text].max() / np.abs(expected_NLH).max()
        assert 1e-4 < difference < 0.1


def test_a_graph_whose_numbers_no_scale_holds_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exported(tiny_bert(), tmp_path)
    write_onnx(tmp_path)
    states = np.full((1, 1, 32), np.nan, np.float32)
    monkeypatch.setattr("embeddings.interop.onnx.open_graph", lambda _: lambda _: states)
    with pytest.raises(OptionError, match=r"^format must give finite states: .*, got 'onnx-int8'; use onnx$"):
        write_int8_onnx(tmp_path)
    assert [path.name for path in (tmp_path / GRAPH_FILE).parent.iterdir()] == ["model.onnx"]
