import json
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModel,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from embeddings.common import OptionError
from embeddings.models import check_bidirectional, make_bidirectional
from embeddings.models.backbone import load_model
from embeddings.models.bidirectional import check_causal
from tests.helpers.tiny import tiny_bert, tiny_mistral

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
WINDOW = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
CONFIGS = {
    "mistral": MistralConfig(**SHAPE, sliding_window=4),
    "llama": LlamaConfig(**SHAPE),
    "qwen2": Qwen2Config(**SHAPE, **WINDOW),
    "qwen3": Qwen3Config(**SHAPE, **WINDOW, head_dim=8),
}


def build(config: PretrainedConfig, attention: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModel.from_config(type(config).from_dict(config.to_dict()), attn_implementation=attention)
    assert isinstance(model, PreTrainedModel)
    return model.eval()


@torch.no_grad()
def reach(model: PreTrainedModel, length: int = 20) -> float:
    """How much the last token changes the first one's state; one layer's window of 4 cannot carry it there."""
    ids = torch.arange(length)[None] % 60 + 1
    changed = ids.clone()
    changed[0, -1] = 63
    return float((model(ids).last_hidden_state - model(changed).last_hidden_state)[0, 0].abs().max())


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_first_token_sees_the_last_once_the_mask_and_the_window_are_off(name: str, attention: str) -> None:
    model = build(CONFIGS[name], attention)
    assert reach(model) == 0.0
    with pytest.raises(OptionError, match="does not see the last one"):
        check_bidirectional(model)
    make_bidirectional(model)
    check_bidirectional(model)
    assert reach(model) > 1e-3
    # Flash attention, which cannot run here, reads the window from the layers.
    assert not [module for module in model.modules() if isinstance(getattr(module, "sliding_window", None), int)]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", CONFIGS)
def test_saving_and_loading_keeps_both_directions(tmp_path: Path, name: str, attention: str) -> None:
    model = build(CONFIGS[name], attention)
    make_bidirectional(model)
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["is_causal"] is False
    assert saved.get("sliding_window") is None
    again = load_model(tmp_path, attn_implementation=attention)
    check_bidirectional(again)
    ids = torch.arange(1, 30)[None]
    with torch.no_grad():
        assert torch.equal(again(ids).last_hidden_state, model(ids).last_hidden_state)


@pytest.mark.parametrize("name", CONFIGS)
def test_switching_before_and_after_building_gives_the_same_states(tmp_path: Path, name: str) -> None:
    after = build(CONFIGS[name], "sdpa")
    after.save_pretrained(tmp_path)
    make_bidirectional(after)
    before = load_model(tmp_path, attn_implementation="sdpa", make_bidirectional=True)
    ids = torch.arange(1, 30)[None]
    with torch.no_grad():
        assert torch.equal(before(ids).last_hidden_state, after(ids).last_hidden_state)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_setting_only_the_flags_of_layers_is_caught(attention: str) -> None:
    model = build(CONFIGS["mistral"], attention)
    for layer in model.layers:  # type: ignore[union-attr]
        layer.self_attn.is_causal = False
    with pytest.raises(OptionError, match=r"backbone\.bidirectional"):
        check_bidirectional(model)


def test_padding_that_leaks_into_states_is_caught() -> None:
    model = build(CONFIGS["mistral"], "sdpa")
    make_bidirectional(model)
    forward = model.forward
    model.forward = lambda input_ids, attention_mask: forward(input_ids=input_ids)  # type: ignore[method-assign]
    with pytest.raises(OptionError, match="padding"):
        check_bidirectional(model)


def test_a_window_with_a_rotary_base_of_its_own_stays() -> None:
    model = build(Gemma3TextConfig(**SHAPE, head_dim=8, sliding_window=8, sliding_window_pattern=2), "sdpa")
    make_bidirectional(model)
    check_bidirectional(model)
    assert model.config.layer_types == ["sliding_attention", "full_attention"]
    assert model.config.sliding_window == 8


def test_encoders_pass_the_check_as_they_are() -> None:
    check_bidirectional(tiny_bert())


def test_the_check_leaves_the_mode_alone() -> None:
    model = tiny_mistral().train()
    make_bidirectional(model)
    check_bidirectional(model)
    assert model.training


def test_a_mask_that_is_off_is_no_causal_mask() -> None:
    check_causal(tiny_mistral())
    model = tiny_mistral()
    make_bidirectional(model)
    with pytest.raises(OptionError, match=r"model\.objective needs a causal mask: here the first token sees the last"):
        check_causal(model)
    with pytest.raises(OptionError, match="needs a causal mask"):
        check_causal(tiny_bert())
