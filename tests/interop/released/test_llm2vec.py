"""LLM2Vec: adapters merged into their decoder, one after another, with the published vectors."""

import json
import re

import pytest
import torch

from embeddings.common import InputError, OptionError
from embeddings.interop.released import import_released
from embeddings.interop.released.decoders import adapter_chain
from embeddings.interop.released.decoders import load_llm2vec as load
from embeddings.models import BackboneConfig, Embedder
from tests.helpers.tiny import sentencepiece_tokenizer
from tests.interop.released.decoder import FIELDS, HIDDEN, LAYERS, ROWS, decoder_shapes, decoder_states
from tests.interop.released.published import (
    TEXTS,
    assert_same,
    by_library,
    each,
    encoded,
    random_state,
    write_checkpoint,
)

RANK, ALPHA = 3, 12
TARGETS = ["q_proj", "v_proj", "down_proj"]
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query:"
MISTRAL = "mistralai/Mistral-7B-Instruct-v0.2"


def decoder(folder):
    """A decoder with its language-model head, as chat models are published."""
    state = random_state({**decoder_shapes("model."), "lm_head.weight": (ROWS, HIDDEN)})
    config = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], **FIELDS}
    write_checkpoint(folder, config, state, sentencepiece_tokenizer())
    return {name.removeprefix("model."): tensor for name, tensor in state.items()}


def adapter(folder, base, seed, prefix="base_model.model.", **changed):
    """Write an adapter; returns its update of each weight."""
    shapes = {}
    for name, (rows, columns) in [(name, shape) for name, shape in decoder_shapes().items() if len(shape) == 2]:
        if name.split(".")[-2] in TARGETS:
            layer = name.removesuffix(".weight")
            shapes[f"{layer}.lora_A.weight"] = (RANK, columns)
            shapes[f"{layer}.lora_B.weight"] = (rows, RANK)
    state = random_state(shapes, seed=seed, std=0.2)
    folder.mkdir()
    write_checkpoint(folder, {}, {f"{prefix}{name}": tensor for name, tensor in state.items()})
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    (folder / "config.json").unlink()
    config = {"peft_type": "LORA", "bias": "none", "r": RANK, "lora_alpha": ALPHA, "target_modules": TARGETS}
    config |= {"base_model_name_or_path": base, "modules_to_save": None, "use_rslora": False}
    (folder / "adapter_config.json").write_text(json.dumps(config | changed))
    layers = [name.removesuffix(".lora_A.weight") for name in state if name.endswith("lora_A.weight")]
    assert len(layers) == LAYERS * len(TARGETS)
    return {
        f"{layer}.weight": ALPHA / RANK * state[f"{layer}.lora_B.weight"] @ state[f"{layer}.lora_A.weight"]
        for layer in layers
    }


def merged(state, *updates):
    made = dict(state)
    for update in updates:
        made |= {name: made[name] + delta for name, delta in update.items()}
    return made


def released_vector(state, tokenizer, text, instruction, before, behind):
    """As released: pools the last tokens, as many as text and suffix have when tokenised alone."""
    joined = f"{before}{instruction} {text}{behind}" if instruction else f"{before}{text}{behind}"
    ids = tokenizer(joined)["input_ids"]
    pooled = len(tokenizer(f"{text}{behind}", add_special_tokens=False)["input_ids"])
    return decoder_states(state, ids)[-pooled:].mean(0)


@pytest.mark.usefixtures("remote_code")
@pytest.mark.parametrize(("named", "before", "behind"), [(MISTRAL, "[INST] ", " [/INST]"), ("someone/s-model", "", "")])
def test_the_imported_model_gives_the_published_vectors(named, before, behind, tmp_path):
    state, tokenizer = decoder(tmp_path / "decoder"), sentencepiece_tokenizer()
    update = adapter(tmp_path / "adapter", named, seed=1)
    made = load(tmp_path / "adapter", [str(tmp_path / "decoder")])
    assert made.report.left == ["lm_head.weight"]
    for side in "AB":
        name = f"{tmp_path}/adapter/base_model.model.layers.0.self_attn.q_proj.lora_{side}.weight"
        assert made.report.used[name] == ["layers.0.self_attn.q_proj.weight"]
    assert made.report.used["model.embed_tokens.weight"] == ["embed_tokens.weight"]
    made.model.save_pretrained(tmp_path / "ours")
    whole = merged(state, update)
    for role, instruction in (("document", ""), ("query", INSTRUCTION)):
        around = (instruction, before, behind)
        expected = each(TEXTS, lambda text, around=around: released_vector(whole, tokenizer, text, *around))
        assert_same(encoded(tmp_path / "ours", role=role), expected)
        assert_same(by_library(tmp_path / "ours", role), expected)
    embedder = Embedder.from_config(BackboneConfig(str(tmp_path / "ours")))
    assert (embedder.text.pool_prompt, embedder.text.pool_start, embedder.text.suffix) == (False, False, behind)
    assert embedder.text.query_max_length == 512


def test_an_adapter_of_an_adapter_is_merged_after_it(tmp_path):
    state, tokenizer = decoder(tmp_path / "decoder"), sentencepiece_tokenizer()
    inner = adapter(tmp_path / "inner", str(tmp_path / "decoder"), seed=1, prefix="base_model.model.model.")
    outer = adapter(tmp_path / "outer", MISTRAL, seed=2)
    made = load(tmp_path / "outer", [str(tmp_path / "inner")])
    made.model.save_pretrained(tmp_path / "ours")
    whole = merged(state, inner, outer)
    expected = each(TEXTS, lambda text: released_vector(whole, tokenizer, text, "", "", ""))
    assert_same(encoded(tmp_path / "ours"), expected)
    named = {name.rpartition("/")[0] for name in made.report.used if "lora" in name}
    assert named == {str(tmp_path / "inner"), str(tmp_path / "outer")}


def test_rslora_has_its_own_scale(tmp_path):
    state = decoder(tmp_path / "decoder")
    update = adapter(tmp_path / "adapter", str(tmp_path / "decoder"), seed=1, use_rslora=True)
    model = load(tmp_path / "adapter").model.backbone
    name = "layers.1.self_attn.q_proj.weight"
    found = model.state_dict()[name] - state[name]
    torch.testing.assert_close(found, update[name] * RANK**0.5, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"use_dora": True}, "has use_dora True, but only False is supported"),
        ({"target_modules": ["q_proj", "v_proj"]}, "has 4 tensors that LLM2Vec's adapters does not have"),
        ({"target_modules": ["Wqkv"]}, "matches no layer of MistralModel (target_modules)"),
        ({"base_model_name_or_path": None}, "does not name its base model; set --base"),
    ],
)
def test_a_mismatched_adapter_is_a_one_line_error(changed, says, tmp_path):
    decoder(tmp_path / "decoder")
    adapter(tmp_path / "adapter", str(tmp_path / "decoder"), seed=1, **changed)
    with pytest.raises(InputError, match=re.escape(says)):
        load(tmp_path / "adapter")


def test_invalid_bases_are_refused(tmp_path):
    decoder(tmp_path / "decoder")
    adapter(tmp_path / "adapter", str(tmp_path / "adapter"), seed=1)
    with pytest.raises(InputError, match="names itself as base model"):
        load(tmp_path / "adapter")
    for folder, base in (("adapter", [str(tmp_path / "decoder"), "more"]), ("decoder", ["more"])):
        with pytest.raises(OptionError, match="base has more models than there are adapters"):
            adapter_chain(tmp_path / folder, base)


def test_no_source_folder_is_written(tmp_path):
    decoder(tmp_path / "decoder")
    adapter(tmp_path / "inner", str(tmp_path / "decoder"), seed=1)
    adapter(tmp_path / "outer", str(tmp_path / "inner"), seed=2)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    (tmp_path / "link").symlink_to(tmp_path / "decoder")
    for name in ("decoder", "inner", "outer", "link"):
        with pytest.raises(OptionError, match="output must not be the source or its base, which it would replace"):
            import_released(str(tmp_path / "outer"), tmp_path / name)
    assert all(path.read_bytes() == content for path, content in before.items())
    import_released(str(tmp_path / "outer"), tmp_path / "ours")
    record = json.loads((tmp_path / "ours" / "import.json").read_text())
    assert record["base"] == [{"name": str(tmp_path / name), "commit": None} for name in ("inner", "decoder")]


def test_settings_in_the_adapters_folder_are_used(tmp_path):
    decoder(tmp_path / "decoder")
    adapter(tmp_path / "adapter", str(tmp_path / "decoder"), seed=1)
    settings = tmp_path / "adapter" / "llm2vec_config.json"
    settings.write_text('{"pooling_mode": "mean", "max_length": 100, "skip_instruction": false}')
    text = load(tmp_path / "adapter").model.text
    assert (text.document_max_length, text.pool_prompt, text.pool_start) == (100, True, True)
    settings.write_text('{"pooling_mode": "weighted_mean"}')
    with pytest.raises(InputError, match="has pooling_mode 'weighted_mean', but only 'mean' is supported"):
        load(tmp_path / "adapter")
