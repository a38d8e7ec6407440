import json
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonargparse import ArgumentParser
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, MambaConfig, MambaModel, PreTrainedTokenizerFast

from embeddings.common import InputError, OptionError
from embeddings.models import BackboneConfig, FromScratch, load_backbone
from embeddings.models.bidirectional import layers
from embeddings.models.language_model import new_model
from tests.helpers.tiny import (
    bpe_tokenizer,
    save_backbone,
    sentencepiece_tokenizer,
    tiny_bert,
    tiny_mistral,
    wordpiece_tokenizer,
)


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    return Path(save_backbone(str(tmp_path / "bert"), tiny_bert(), wordpiece_tokenizer()))


@pytest.fixture
def mistral(tmp_path: Path) -> Path:
    return Path(save_backbone(str(tmp_path / "mistral"), tiny_mistral(), sentencepiece_tokenizer()))


def test_an_encoder_loads_without_a_pooling_layer_of_its_own(bert: Path) -> None:
    model, tokenizer = load_backbone(BackboneConfig(str(bert)))
    assert model.pooler is None
    assert model.dtype == torch.float32
    ids = tokenizer("how do I pad", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        assert torch.equal(model(ids).last_hidden_state, tiny_bert()(ids).last_hidden_state)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_decoder_loads_in_both_directions(mistral: Path, attention: str) -> None:
    model, _ = load_backbone(BackboneConfig(str(mistral), bidirectional=True, attn_implementation=attention))
    assert model.config.is_causal is False
    assert model.config.sliding_window is None
    assert model.config._attn_implementation == attention
    ids = torch.arange(3, 23)[None]
    changed = ids.clone()
    changed[0, -1] = 40
    with torch.no_grad():
        moved = (model(ids).last_hidden_state - model(changed).last_hidden_state)[0, 0].abs().max()
    assert moved > 1e-3


def test_a_decoder_stays_causal_unless_asked(mistral: Path) -> None:
    model, _ = load_backbone(BackboneConfig(str(mistral)))
    assert getattr(model.config, "is_causal", True) is True


@pytest.mark.parametrize(("dtype", "expected"), [("bfloat16", torch.bfloat16), ("auto", torch.float32)])
def test_weights_come_in_the_dtype_asked_for(mistral: Path, dtype: str, expected: torch.dtype) -> None:
    config = BackboneConfig(str(mistral), dtype=dtype, bidirectional=True)  # type: ignore[arg-type]
    assert load_backbone(config)[0].dtype == expected


def test_gradient_checkpointing_gives_equal_gradients(mistral: Path) -> None:
    grads = []
    for checkpointing in (False, True):
        model, _ = load_backbone(BackboneConfig(str(mistral), gradient_checkpointing=checkpointing))
        assert any(getattr(m, "gradient_checkpointing", False) for m in model.modules()) is checkpointing
        model.train()(torch.arange(3, 12)[None]).last_hidden_state.square().sum().backward()
        grads.append([parameter.grad for parameter in model.parameters()])
    assert len(grads[0]) > 10
    for plain, recomputed in zip(*grads, strict=True):
        torch.testing.assert_close(plain, recomputed)


def test_a_tokenizer_without_a_pad_token_pads_on_the_right_with_its_end_token(tmp_path: Path) -> None:
    backend = bpe_tokenizer().backend_tokenizer
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>", padding_side="left")
    folder = save_backbone(str(tmp_path), tiny_mistral(), tokenizer)
    _, loaded = load_backbone(BackboneConfig(folder))
    assert loaded.pad_token_id == loaded.eos_token_id
    assert loaded.padding_side == "right"


def test_a_tokenizer_with_neither_pad_nor_end_token_is_refused(tmp_path: Path) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe_tokenizer().backend_tokenizer)
    folder = save_backbone(str(tmp_path), tiny_mistral(), tokenizer)
    with pytest.raises(InputError, match="no pad and no eos token"):
        load_backbone(BackboneConfig(folder))


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    tokenizer = wordpiece_tokenizer()
    tokenizer.add_tokens([f"<extra_{i}>" for i in range(400)])
    folder = save_backbone(str(tmp_path), tiny_bert(), tokenizer)
    with pytest.raises(InputError, match="the model has 384 embeddings"):
        load_backbone(BackboneConfig(folder))


def one_line(error: pytest.ExceptionInfo[InputError]) -> bool:
    return "\n" not in str(error.value) and len(str(error.value)) < 400


def test_a_directory_without_a_model_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"config\.json") as caught:
        load_backbone(BackboneConfig(str(tmp_path)))
    assert one_line(caught)


def test_a_directory_without_a_tokenizer_is_one_line(tmp_path: Path) -> None:
    tiny_bert().save_pretrained(tmp_path)
    with pytest.raises(InputError, match="holds no tokenizer") as caught:
        load_backbone(BackboneConfig(str(tmp_path)))
    assert one_line(caught)


def test_a_tokenizer_json_that_is_a_folder_or_missing_beside_a_vocabulary_is_one_line(bert: Path) -> None:
    file = bert / "tokenizer.json"
    for name in ("vocab.txt", "vocab.json"):
        (bert / name).write_text('{"[PAD]": 0}')
        load_backbone(BackboneConfig(str(bert)))
        kept = file.read_text()
        file.unlink()
        with pytest.raises(InputError, match=rf"holds {name} and no tokenizer\.json; take a whole copy"):
            load_backbone(BackboneConfig(str(bert)))
        file.mkdir()
        with pytest.raises(InputError, match=r"tokenizer\.json: is a folder; take a whole copy"):
            load_backbone(BackboneConfig(str(bert)))
        file.rmdir()
        (bert / name).unlink()
        file.write_text(kept)


def test_a_damaged_tokenizer_is_one_line(bert: Path) -> None:
    (bert / "tokenizer.json").write_text("{")
    with pytest.raises(InputError, match="tokenizer cannot be read") as caught:
        load_backbone(BackboneConfig(str(bert)))
    assert one_line(caught)


def test_truncated_weights_are_one_line(bert: Path) -> None:
    whole = (bert / "model.safetensors").read_bytes()
    (bert / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match="cannot be loaded") as caught:
        load_backbone(BackboneConfig(str(bert)))
    assert one_line(caught)


def test_weights_of_another_shape_are_one_line(bert: Path) -> None:
    config = json.loads((bert / "config.json").read_text())
    (bert / "config.json").write_text(json.dumps({**config, "intermediate_size": 128}))
    with pytest.raises(InputError, match=r"has shape .*, by config\.json it has") as caught:
        load_backbone(BackboneConfig(str(bert)))
    assert one_line(caught)


def test_weights_that_are_missing_are_refused_and_not_left_random(bert: Path) -> None:
    state = load_file(bert / "model.safetensors")
    dropped = {name: tensor for name, tensor in state.items() if "layer.1.output.dense" not in name}
    save_file(dropped, bert / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match="2 weights of BertModel are missing"):
        load_backbone(BackboneConfig(str(bert)))


def test_pickled_weights_are_refused(bert: Path) -> None:
    state = load_file(bert / "model.safetensors")
    (bert / "model.safetensors").unlink()
    torch.save(state, bert / "pytorch_model.bin")
    with pytest.raises(InputError, match="cannot be loaded"):
        load_backbone(BackboneConfig(str(bert)))


def test_the_config_is_read_from_arguments() -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--backbone", type=BackboneConfig)
    given = parser.parse_args(["--backbone.name=somewhere", "--backbone.bidirectional=true"])
    config = parser.instantiate(given).backbone
    assert config == BackboneConfig("somewhere", bidirectional=True)


def test_dropout_is_the_checkpoints_own_unless_given(tmp_path: Path) -> None:
    folder = save_backbone(str(tmp_path / "bert"), tiny_bert(dropout=0.3), wordpiece_tokenizer())
    ids = torch.arange(3, 23)[None]
    for given, is_random in ((None, True), (0.2, True), (0.0, False)):
        model, _ = load_backbone(BackboneConfig(folder, dropout=given))
        probabilities = {module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)}
        assert probabilities == {0.3 if given is None else given}
        with torch.no_grad():
            states = [model.train()(ids).last_hidden_state for _ in range(2)]
        assert torch.equal(*states) is not is_random


def test_a_decoders_attention_has_the_dropout_it_is_given(mistral: Path) -> None:
    model, _ = load_backbone(BackboneConfig(str(mistral), dropout=0.5))
    ids = torch.arange(3, 23)[None]
    with torch.no_grad():
        assert not torch.equal(model.train()(ids).last_hidden_state, model(ids).last_hidden_state)


def test_dropout_that_cannot_be_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"backbone\.dropout must be >= 0 and < 1, got 1\.0"):
        BackboneConfig("a", dropout=1.0)
    # A Mamba has no dropout at all.
    backbone = MambaModel(MambaConfig(vocab_size=64, hidden_size=16, state_size=4, num_hidden_layers=1))
    folder = save_backbone(str(tmp_path / "mamba"), backbone, wordpiece_tokenizer())
    with pytest.raises(OptionError, match=r"backbone\.dropout does not exist in mamba, got 0\.1"):
        load_backbone(BackboneConfig(folder, dropout=0.1))


def test_flex_attention_with_dropout_is_one_line(tmp_path: Path) -> None:
    folder = save_backbone(str(tmp_path / "bert"), tiny_bert(dropout=0.1), wordpiece_tokenizer())
    says = r"attn_implementation has no dropout, and the model's attention_probs_dropout_prob is 0\.1.*set dropout to 0"
    with pytest.raises(OptionError, match=says):
        load_backbone(BackboneConfig(folder, attn_implementation="flex_attention"))
    load_backbone(BackboneConfig(folder, attn_implementation="flex_attention", dropout=0.0))
    settings = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1, "intermediate_size": 32}
    scratch = FromScratch(folder, "bert", settings, attn_implementation="flex_attention")
    with pytest.raises(OptionError, match="has no dropout"):
        new_model(scratch, AutoModel)


@pytest.mark.parametrize("name", ["flash_attention_2", "sonic"])
def test_an_attention_that_is_not_installed_is_one_line_of_its_option(bert: Path, name: str) -> None:
    with pytest.raises(
        OptionError, match=rf"^backbone\.attn_implementation cannot be had: .*, got '{name}'; set it to sdpa"
    ):
        load_backbone(BackboneConfig(str(bert), attn_implementation=name))


@torch.no_grad()
@pytest.mark.parametrize("name", ["bert", "nomic_bert", "qwen2"])
def test_the_first_layers_are_taken_and_saved(tmp_path: Path, name: str) -> None:
    """The six layers of NomicBERT that CDE's small setting has; a decoder lists what each of its layers is."""
    options = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1} if name == "qwen2" else {}
    sizes = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 64}
    if name == "qwen2":
        sizes["num_key_value_heads"] = 2
    torch.manual_seed(0)
    whole = AutoModel.from_config(AutoConfig.for_model(name, vocab_size=384, pad_token_id=0, **sizes, **options))
    folder = save_backbone(str(tmp_path / "whole"), whole.eval(), wordpiece_tokenizer())
    model, tokenizer = load_backbone(BackboneConfig(folder, num_layers=3))
    assert len(list(layers(model))) == model.config.num_hidden_layers == 3
    ids = torch.arange(3, 23)[None]
    states = []
    list(layers(whole))[2].register_forward_hook(lambda *call: states.append(call[2]))
    whole(ids)
    seen: list[Any] = []
    list(layers(model))[2].register_forward_hook(lambda *call: seen.append(call[2]))
    found = model(ids).last_hidden_state
    last, expected = (value[0] if isinstance(value, tuple) else value for value in (seen[0], states[0]))
    assert torch.equal(last, expected)
    again, _ = load_backbone(BackboneConfig(save_backbone(str(tmp_path / "again"), model, tokenizer)))
    assert torch.equal(again(ids).last_hidden_state, found)


def test_a_number_of_layers_that_cannot_be_is_one_line(bert: Path) -> None:
    with pytest.raises(OptionError, match=r"backbone\.num_layers must be >= 1, got 0"):
        BackboneConfig("a", num_layers=0)
    with pytest.raises(OptionError, match=r"backbone\.num_layers must be <= 2, the model's, got 3"):
        load_backbone(BackboneConfig(str(bert), num_layers=3))


@pytest.mark.parametrize(
    ("part", "value", "says"),
    [
        ("model", {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": [["a", "b"]]}, "range end index 2 out of range"),
        ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "AAAAAAAA"}, "index out of bounds"),
        ("pre_tokenizer", {"type": "FixedLength", "length": 0}, "chunk size must be non-zero"),
    ],
)
def test_a_tokenizer_that_panics_is_one_line(
    bert: Path, capfd: pytest.CaptureFixture[str], part: str, value: object, says: str
) -> None:
    file = bert / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {part: value}))
    with pytest.raises(InputError, match=f"tokenizer cannot be read: {says}"):
        load_backbone(BackboneConfig(str(bert)))
    assert "panicked" not in capfd.readouterr().err
