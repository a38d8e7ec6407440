"""Architectures by name, and their tiny stand-ins with random weights."""

import pytest
import torch
from transformers import Qwen3Config

from embeddings.common import InputError
from embeddings.models import BackboneConfig, load_backbone
from embeddings.models.backbone import model_without_weights
from embeddings.models.moe.rotary_moe import RotaryMoeConfig
from embeddings.models.stand_in import ARCHITECTURES, architecture, tiny_architecture, write_stand_in
from tests.helpers.tiny import save_backbone, tiny_bert, wordpiece_tokenizer

# Parameters of the published models without a head: from Mistral's card, XLM-R's and NomicBERT's tables, MiniLM's and
# SmolLM2's.
SIZES = {
    "mistralai/Mistral-7B-v0.1": 7_110_660_096,
    "all-MiniLM-L6-v2": 22_565_376,
    "SmolLM2-135M": 134_515_008,
    "checkpoints/nomic-bert-2048": 136_731_648,
    "Qwen/Qwen3-Embedding-0.6B": 595_776_512,
    "answerdotai/ModernBERT-base": 149_014_272,
    "answerdotai/ModernBERT-large": 394_781_696,
}


@pytest.mark.parametrize("name", SIZES)
def test_a_known_architecture_has_the_published_number_of_weights(name, tmp_path):
    architecture(name).save_pretrained(tmp_path)
    assert sum(weight.numel() for weight in model_without_weights(tmp_path).parameters()) == SIZES[name]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_stand_in_is_tiny_and_loads_as_the_type_of_its_model(name, tmp_path):
    found = architecture(name)
    write_stand_in(tmp_path / "tiny", tiny_architecture(found))
    model, tokenizer = load_backbone(BackboneConfig(str(tmp_path / "tiny")))
    assert model.config.model_type == found.model_type
    assert sum(weight.numel() for weight in model.parameters()) < 400_000
    assert (getattr(found, "num_key_value_heads", None) is None) == (tokenizer.cls_token is not None)
    states = model(**tokenizer(["the quick fox", "a"], padding=True, return_tensors="pt")).last_hidden_state
    assert states.shape[2] == 64
    assert torch.isfinite(states).all()
    if isinstance(found, RotaryMoeConfig):
        assert (model.config.moe_layers, model.config.num_experts) == ([1], found.num_experts)


def test_a_stand_in_is_the_same_each_time(tmp_path):
    config = tiny_architecture(architecture("checkpoints/mntp"))
    for folder in ("first", "second"):
        write_stand_in(tmp_path / folder, config)
        torch.rand(1)
    first, second = ((tmp_path / folder / "model.safetensors").read_bytes() for folder in ("first", "second"))
    assert first == second


def test_a_directory_takes_precedence_over_a_known_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_backbone("checkpoints/mntp", tiny_bert(), wordpiece_tokenizer())
    assert architecture("checkpoints/mntp").model_type == "bert"
    with pytest.raises(InputError, match=r"nobody/nothing: is not on this machine, .* --model-config"):
        architecture("nobody/nothing")
    config = Qwen3Config(num_hidden_layers=3, layer_types=["full_attention"] * 3)
    assert isinstance(tiny_architecture(config), Qwen3Config)
    assert tiny_architecture(config).num_hidden_layers == 2
