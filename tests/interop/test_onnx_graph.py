from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

from embeddings.common import InputError, OptionError, TextSettings
from embeddings.interop import onnx_graph
from embeddings.interop.onnx_graph import check_onnx, write_onnx
from embeddings.models import ClsPooling, Embedder, LoraSettings, MeanPooling, Pooling, add_lora
from tests.helpers.tiny import tiny_bert, wordpiece_tokenizer
from tests.models.contextual_models import tiny_contextual, tiny_nomic, tiny_xlm_roberta
from tests.models.moe import tiny_moe
from tests.models.reading import random_tokens


def embedder(backbone: nn.Module, pooling: Pooling | None = None, **text: object) -> Embedder:
    settings = TextSettings(32, 32, **text)  # type: ignore[arg-type]
    return Embedder(backbone, wordpiece_tokenizer(), pooling or MeanPooling(32), text=settings).eval()


def adapted() -> nn.Module:
    backbone = add_lora(tiny_bert(), LoraSettings(rank=2))
    for name, parameter in backbone.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return backbone


@pytest.mark.parametrize("make", [adapted, tiny_xlm_roberta, tiny_nomic])
@torch.no_grad()
def test_a_graph_gives_the_models_states_at_any_length(tmp_path: Path, make: object) -> None:
    torch.manual_seed(0)
    model = embedder(make())  # type: ignore[operator]
    check_onnx(model)
    model.save_pretrained(tmp_path / "model")
    assert write_onnx(tmp_path / "model") <= 1e-5
    assert [path.name for path in (tmp_path / "model" / "onnx").iterdir()] == ["model.onnx"]
    session = onnxruntime.InferenceSession(str(tmp_path / "model" / "onnx" / "model.onnx"))
    for lengths in ([7, 3, 12], [1], [40, 2]):
        tokens = random_tokens(300, lengths)
        inputs = (tokens.input_ids_NL, tokens.attention_mask_NL.long())
        expected = model.backbone(*inputs).last_hidden_state.numpy()
        names = ("input_ids", "attention_mask")
        (found,) = session.run(None, {name: value.numpy() for name, value in zip(names, inputs, strict=True)})
        assert np.abs(found - expected)[tokens.attention_mask_NL.numpy()].max() <= 1e-5
    model.save_pretrained(tmp_path / "model")
    assert not (tmp_path / "model" / "onnx").exists()


def test_a_graph_that_differs_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    embedder(tiny_bert()).save_pretrained(tmp_path / "model")
    monkeypatch.setattr(onnx_graph, "_TOLERANCE", -1.0)
    with pytest.raises(InputError, match=r"the graph.s states differ by .* from torch.s; leave --format onnx out"):
        write_onnx(tmp_path / "model")
    assert list((tmp_path / "model" / "onnx").iterdir()) == []


def test_models_that_bring_code_are_refused_in_one_line() -> None:
    check_onnx(embedder(tiny_bert(), ClsPooling(32), prompts={"query": "q: "}))
    for model in (embedder(tiny_bert(), prompts={"query": "q: "}), tiny_contextual(), embedder(tiny_moe())):
        with pytest.raises(OptionError, match="format is for models that load without code of their own"):
            check_onnx(model)


def test_a_model_of_more_than_a_file_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_graph, "_MOST_BYTES", 1000)
    with pytest.raises(OptionError, match="format is for models below 2 GiB, this one has"):
        check_onnx(embedder(tiny_bert()))
