"""Decoders without a causal mask: every layer of every family, also after saving and loading, and errors."""

import copy
import json
import re
from itertools import product

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModel, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from embeddings.common import OptionError
from embeddings.models import check_bidirectional, make_bidirectional
from embeddings.models.backbone import load_model
from embeddings.models.bidirectional import require_bidirectional

SHAPE = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 4, "intermediate_size": 64}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
SHAPE |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
HEAD, WINDOW = {"head_dim": 8}, {"sliding_window": 4}
QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
# Config fields that make each family small, with a window if it has one.
FAMILIES = {
    "cohere2": HEAD | WINDOW,
    "gemma": HEAD,
    "gemma2": HEAD | WINDOW | {"query_pre_attn_scalar": 8},
    "gpt_oss": HEAD | WINDOW | {"num_local_experts": 4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "llama": {},
    "ministral": HEAD | WINDOW,
    "mistral": WINDOW,
    "mixtral": WINDOW | {"num_local_experts": 4},
    "olmo": {},
    "olmo2": {},
    "phi": {},
    "phi3": WINDOW,
    "qwen2": QWEN_WINDOW,
    "qwen3": QWEN_WINDOW | HEAD,
    "qwen3_moe": HEAD | EXPERTS,
    "smollm3": {"use_sliding_window": True, "sliding_window": 4},
}
# Their layers with a window have a different rotary base, so the window is kept.
WINDOWED = {"gemma3_text": HEAD, "olmo3": {}}
LINEAR = {f"linear_{name}": 2 for name in ("num_key_heads", "num_value_heads")}
LINEAR |= {f"linear_{name}": 8 for name in ("key_head_dim", "value_head_dim")}
HYBRID = {
    "qwen3_next": (HEAD | LINEAR | EXPERTS | {"shared_expert_intermediate_size": 16}, [0, 1, 2]),
    "qwen3_5_text": (HEAD | LINEAR | {"num_hidden_layers": 8}, [0, 1, 2, 4, 5, 6]),
    "lfm2": ({"layer_types": ["conv", "full_attention", "conv", "full_attention"]}, [0, 2]),
    # Attention and a state-space mixer side by side in each layer.
    "falcon_h1": ({"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8}, [0, 1, 2, 3]),
}
# One family for each path through `make_bidirectional_config`.
CONFIGS = ("cohere2", "llama", "mistral", "qwen2", "qwen3")


def build(name, attention=None, **options):
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **{**SHAPE, **FAMILIES.get(name, {}), **options})
    keywords = {} if attention is None else {"attn_implementation": attention}
    model = AutoModel.from_config(config, **keywords)
    assert isinstance(model, PreTrainedModel)
    return model.eval()


@torch.no_grad()
def reach(model, length=20):
    """Maximum change of the first token's final state by the last token, which is outside a layer's window of 4."""
    ids = torch.arange(length)[None] % 60 + 1
    changed = ids.clone()
    changed[0, -1] = 63
    return float((model(ids).last_hidden_state - model(changed).last_hidden_state)[0, 0].abs().max())


def test_padding_that_changes_states_is_caught():
    model = build("mistral", "sdpa")
    make_bidirectional(model)
    forward = model.forward
    model.forward = lambda input_ids, attention_mask, **_: forward(input_ids=input_ids)
    with pytest.raises(OptionError, match="padding"):
        check_bidirectional(model)


@pytest.mark.parametrize("name", WINDOWED)
def test_a_window_with_its_own_rotary_base_is_kept(name):
    kinds = ["sliding_attention", "full_attention"] * 2
    model = build(name, "sdpa", layer_types=kinds, sliding_window=4, **WINDOWED[name])
    make_bidirectional(model)
    check_bidirectional(model)
    assert (model.config.layer_types, model.config.sliding_window) == (kinds, 4)


@torch.no_grad()
def test_a_decoder_whose_config_is_bidirectional_already_keeps_its_states_and_its_window():
    model = build("gemma3_text", **HEAD, sliding_window=8, use_bidirectional_attention=True)
    ids = torch.arange(30)[None]
    before = model(ids).last_hidden_state
    make_bidirectional(model)
    check_bidirectional(model)
    assert torch.equal(model(ids).last_hidden_state, before)


def test_disabling_a_window_does_not_change_the_states_of_short_texts():
    """Cohere 2 rotates queries and keys only in layers with a window: they must keep their type."""
    wide, off = build("cohere2", sliding_window=64), build("cohere2")
    wide.config.is_causal = False
    make_bidirectional(off)
    ids = torch.arange(1, 30)[None]
    with torch.no_grad():
        assert torch.equal(off(ids).last_hidden_state, wide(ids).last_hidden_state)


@torch.no_grad()
def layers_that_see_the_last_token(model):
    """For each layer, whether the last token's input state changes the first one's output."""
    ids, found, calls = torch.arange(20)[None] + 3, [], []
    layers = model.layers
    handles = [layer.register_forward_hook(lambda *call: calls.append(call), with_kwargs=True) for layer in layers]
    model(ids, use_cache=False)
    for handle in handles:
        handle.remove()
    for layer, (states, *rest), options, output in calls:
        changed = states.clone()
        changed[:, -1] *= -1
        both = [value[0] if isinstance(value, tuple) else value for value in (output, layer(changed, *rest, **options))]
        found.append(bool((both[0] - both[1])[0, 0].abs().max() > 1e-6))  # experts round differently in other groups
    return found


@pytest.mark.parametrize(("name", "attention"), [*product(FAMILIES, [None]), *product(CONFIGS, ["eager"])])
def test_every_layer_sees_beyond_its_window_without_the_mask_also_after_loading(tmp_path, name, attention):
    model, ids = build(name, attention), torch.arange(1, 30)[None]
    assert layers_that_see_the_last_token(model) == [False] * 4
    with pytest.raises(OptionError, match="does not see the last one"):
        check_bidirectional(model)
    model.save_pretrained(tmp_path / "causal")
    make_bidirectional(model)
    # Flash attention, which cannot run here, uses the window in the layers.
    windows = {getattr(module, "sliding_window", None) for module in model.modules()} - {None}
    assert all(window > 1_000_000 for window in windows)
    model.save_pretrained(tmp_path / "bidirectional")
    saved = json.loads((tmp_path / "bidirectional" / "config.json").read_text())
    assert saved["is_causal"] is False
    assert bool(windows) is (saved.get("sliding_window") is not None)
    assert not windows or name not in CONFIGS or name == "cohere2"  # its windows are widened, not removed
    for folder, is_causal in (("causal", True), ("bidirectional", False)):
        loaded = load_model(tmp_path / folder, attn_implementation=attention, make_bidirectional=is_causal)
        check_bidirectional(loaded)
        assert layers_that_see_the_last_token(loaded) == [True] * 4
        with torch.no_grad():
            torch.testing.assert_close(loaded(ids).last_hidden_state, model(ids).last_hidden_state)


@pytest.mark.parametrize("name", HYBRID)
def test_a_layer_that_stays_causal_is_refused_by_name(name):
    options, causal = HYBRID[name]
    model = build(name, **options)
    make_bidirectional(model)
    assert reach(model) > 0, "the final state of the first token alone does not show it"
    with pytest.raises(OptionError, match=re.escape(f"layers {causal} (")):
        check_bidirectional(model)


def test_a_single_layer_that_keeps_its_causal_mask_is_caught():
    model = build("llama", "sdpa")
    make_bidirectional(model)
    layers = model.layers
    forward, mask = layers[2].forward, torch.ones(12, 12, dtype=torch.bool).tril()
    layers[2].forward = lambda *args, **options: forward(
        *args, **options | {"attention_mask": mask[: args[0].shape[1], : args[0].shape[1]]}
    )
    with pytest.raises(OptionError, match=r"layers \[2\] \(LlamaDecoderLayer\) read from left to right"):
        check_bidirectional(model)


@pytest.fixture
def only_on_a_gpu():
    """An attention that fails until `has_gpu` is set."""
    state = {"has_gpu": False}

    def forward(*args, **options):
        if not state["has_gpu"]:
            raise RuntimeError("FlashAttention only supports CUDA tensors\nand more")
        return sdpa_attention_forward(*args, **options)

    AttentionInterface.register("only_gpu", forward)
    AttentionMaskInterface.register("only_gpu", sdpa_mask)
    yield state
    del AttentionInterface._global_mapping["only_gpu"], AttentionMaskInterface._global_mapping["only_gpu"]


def test_attention_for_gpus_is_refused_without_a_gpu_and_checked_in_the_first_forward_with_one(
    only_on_a_gpu, monkeypatch
):
    ids = torch.arange(1, 30)[None]
    still_causal, made = build("mistral", "only_gpu"), build("mistral", "only_gpu")
    make_bidirectional(made)
    says = r"does not run here \(FlashAttention only supports CUDA tensors.*\), got 'only_gpu'; set it to sdpa"
    with pytest.raises(OptionError, match=says):
        require_bidirectional(made)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for model in (still_causal, made):
        require_bidirectional(model)
    with pytest.raises(RuntimeError, match="only supports CUDA tensors"):
        copy.deepcopy(made)(ids)
    only_on_a_gpu["has_gpu"] = True
    with pytest.raises(OptionError, match="does not see the last one"):
        still_causal(ids)
    expected = build("mistral", "sdpa")
    make_bidirectional(expected)
    with torch.no_grad():
        assert torch.equal(made.train()(ids).last_hidden_state, expected(ids).last_hidden_state)
    assert made.training
    assert not made._forward_pre_hooks
