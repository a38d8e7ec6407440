"""Loading a backbone: options and errors; adapters; students with fewer layers; tokenizers; quantised weights."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModel, MambaConfig, MambaModel, PreTrainedTokenizerFast

from embeddings.common import InputError, OptionError
from embeddings.models import (
    BackboneConfig,
    LoraSettings,
    Upcycling,
    add_lora,
    keep_layers,
    load_backbone,
    upcycle,
)
from embeddings.models import backbone as backbone_module
from embeddings.models.backbone import read_tokenizer
from embeddings.models.bidirectional import layers
from embeddings.models.lora import merged_state_dict
from embeddings.models.model_files import dequantised
from tests.helpers.interrupts import interrupted_at
from tests.helpers.tiny import (
    bpe_tokenizer,
    save_backbone,
    sentencepiece_tokenizer,
    tiny_bert,
    tiny_mistral,
    wordpiece_tokenizer,
)
from tests.models.moe import tiny_rotary
from tests.models.reading import random_tokens
from tests.models.test_bidirectional import FAMILIES, build


@pytest.fixture
def bert(tmp_path):
    return Path(save_backbone(str(tmp_path / "bert"), tiny_bert(), wordpiece_tokenizer()))


@pytest.fixture
def mistral(tmp_path):
    return Path(save_backbone(str(tmp_path / "mistral"), tiny_mistral(), sentencepiece_tokenizer()))


def test_an_encoder_loads_unchanged_without_its_pooling_layer(bert):
    model, tokenizer = load_backbone(BackboneConfig(str(bert), bidirectional=True))
    assert model.pooler is None
    assert model.dtype == torch.float32
    ids = tokenizer("how do I pad", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        assert torch.equal(model(ids).last_hidden_state, tiny_bert()(ids).last_hidden_state)


def test_a_tokenizer_without_a_pad_token_pads_on_the_right_with_its_end_token(tmp_path):
    backend = bpe_tokenizer().backend_tokenizer
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>", padding_side="left")
    folder = save_backbone(str(tmp_path), tiny_mistral(), tokenizer)
    _, loaded = load_backbone(BackboneConfig(folder))
    assert loaded.pad_token_id == loaded.eos_token_id
    assert loaded.padding_side == "right"


def add_tokens(folder):
    tokenizer = wordpiece_tokenizer()
    tokenizer.add_tokens([f"<extra_{i}>" for i in range(400)])
    tokenizer.save_pretrained(folder)


def drop_special_tokens(folder):
    PreTrainedTokenizerFast(tokenizer_object=bpe_tokenizer().backend_tokenizer).save_pretrained(folder)


def drop_weights(folder):
    state = load_file(folder / "model.safetensors")
    dropped = {name: tensor for name, tensor in state.items() if "layer.1.output.dense" not in name}
    save_file(dropped, folder / "model.safetensors", metadata={"format": "pt"})


def pickle_weights(folder):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def widen(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 128}))


def drop_tokenizer(folder):
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.txt").write_text('{"[PAD]": 0}')


def make_tokenizer_a_folder(folder):
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").mkdir()


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (add_tokens, "the model has 384 embeddings"),
        (drop_special_tokens, "neither a pad nor an eos token"),
        (drop_weights, "2 weights of BertModel are missing"),
        (pickle_weights, "cannot be loaded"),
        (widen, r"has shape .*, config\.json expects"),
        (drop_tokenizer, r"contains vocab.txt but no tokenizer\.json; use a complete copy"),
        (make_tokenizer_a_folder, r"tokenizer\.json: is a directory; use a complete copy"),
    ],
)
def test_a_damaged_folder_is_refused_in_one_line(bert, damage, says):
    damage(bert)
    with pytest.raises(InputError, match=says):
        load_backbone(BackboneConfig(str(bert)))


def test_dropout_is_that_of_the_checkpoint_unless_the_option_is_set(tmp_path):
    folder = save_backbone(str(tmp_path / "bert"), tiny_bert(dropout=0.3), wordpiece_tokenizer())
    ids = torch.arange(3, 23)[None]
    for dropout, is_random in ((None, True), (0.2, True), (0.0, False)):
        model, _ = load_backbone(BackboneConfig(folder, dropout=dropout))
        probabilities = {module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)}
        assert probabilities == {0.3 if dropout is None else dropout}
        with torch.no_grad():
            states = [model.train()(ids).last_hidden_state for _ in range(2)]
        assert torch.equal(*states) is not is_random


@torch.no_grad()
@pytest.mark.parametrize("name", ["bert", "nomic_bert", "qwen2"])
def test_num_layers_keeps_and_saves_the_first_layers(tmp_path, name):
    """CDE's small setting uses six layers of NomicBERT; the config of a decoder lists the type of each layer."""
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
    seen = []
    list(layers(model))[2].register_forward_hook(lambda *call: seen.append(call[2]))
    found = model(ids).last_hidden_state
    last, expected = (value[0] if isinstance(value, tuple) else value for value in (seen[0], states[0]))
    assert torch.equal(last, expected)
    again, _ = load_backbone(BackboneConfig(save_backbone(str(tmp_path / "again"), model, tokenizer)))
    assert torch.equal(again(ids).last_hidden_state, found)


@pytest.mark.parametrize(
    ("part", "value", "says"),
    [
        ("model", {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": [["a", "b"]]}, "range end index 2 out of range"),
        ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "AAAAAAAA"}, "index out of bounds"),
        ("pre_tokenizer", {"type": "FixedLength", "length": 0}, "chunk size must be non-zero"),
    ],
)
def test_a_tokenizer_that_panics_is_refused_in_one_line(bert, part, value, says):
    file = bert / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {part: value}))
    with pytest.raises(InputError, match=f"tokenizer cannot be read: {says}"):
        load_backbone(BackboneConfig(str(bert)))


def test_ctrl_c_is_no_damage_of_a_tokenizer(bert, monkeypatch):
    monkeypatch.setattr(backbone_module, "load_tokenizer_files", interrupted_at(print))
    with pytest.raises(KeyboardInterrupt):
        read_tokenizer(bert)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"dropout": 1.0}, r"backbone\.dropout must be >= 0 and < 1, got 1\.0"),
        ({"num_layers": 0}, r"backbone\.num_layers must be >= 1, got 0"),
        ({"num_layers": 3}, r"backbone\.num_layers must be <= 2, the model's, got 3"),
        (
            {"attn_implementation": "flash_attention_2"},
            r"backbone\.attn_implementation is not available: .*, got 'flash_attention_2'; set it to sdpa",
        ),
    ],
)
def test_invalid_options_are_refused(bert, options, says):
    with pytest.raises(OptionError, match=f"^{says}"):
        load_backbone(BackboneConfig(str(bert), **options))


def test_dropout_applies_to_a_decoders_attention_and_is_refused_for_models_without_dropout(mistral, tmp_path):
    model, _ = load_backbone(BackboneConfig(str(mistral), dropout=0.5))
    assert model.config.attention_dropout == 0.5
    mamba = MambaModel(MambaConfig(vocab_size=384, hidden_size=16, state_size=4, num_hidden_layers=1))
    folder = save_backbone(str(tmp_path / "mamba"), mamba, wordpiece_tokenizer())
    with pytest.raises(OptionError, match=r"backbone\.dropout does not exist in mamba, got 0\.1"):
        load_backbone(BackboneConfig(folder, dropout=0.1))


TOKENS = random_tokens(384, [5, 9, 3])


def trained(backbone):
    """A backbone whose adapters are not zero."""
    with torch.no_grad():
        for name, parameter in backbone.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return backbone.eval()


def states(backbone):
    with torch.no_grad():
        output = backbone(input_ids=TOKENS.input_ids_NL, attention_mask=TOKENS.attention_mask_NL.long())
    return output.last_hidden_state * TOKENS.attention_mask_NL[..., None]


@pytest.mark.parametrize("settings", [LoraSettings(rank=4), LoraSettings(rank=4, target_modules=["query", "value"])])
def test_merged_weights_have_the_adapted_states_and_the_trained_backbone_is_unchanged(settings):
    backbone = trained(add_lora(tiny_bert(), settings))
    before = {name: tensor.clone() for name, tensor in backbone.state_dict().items()}
    plain = tiny_bert(seed=1)
    plain.load_state_dict(merged_state_dict(backbone))
    assert not torch.allclose(states(backbone), states(tiny_bert()), atol=1e-3)
    torch.testing.assert_close(states(plain), states(backbone), rtol=1e-5, atol=1e-5)
    assert all(torch.equal(tensor, before[name]) for name, tensor in backbone.state_dict().items())


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("rank", 0, ".* got 0"),
        ("alpha", 0, ".* got 0"),
        ("dropout", 1.0, ".* got 1.0"),
        ("target_modules", ["no_such_layer"], ".* q_proj"),
    ],
)
def test_invalid_lora_settings_are_refused(name, value, says):
    with pytest.raises(OptionError, match=rf"lora\.{name} {says}"):
        add_lora(tiny_mistral(), LoraSettings(**{name: value}))


@pytest.mark.parametrize("name", [*FAMILIES, "bert", "modernbert", "rotary, sparse"])
@torch.no_grad()
def test_a_student_has_evenly_spread_layers_and_equals_itself_after_loading(tmp_path, name):
    if name in FAMILIES:
        model = build(name)
    elif name == "rotary, sparse":
        model = upcycle(tiny_rotary(num_layers=4), Upcycling(num_experts=2))
    else:
        config = AutoConfig.for_model(name, vocab_size=90, hidden_size=32, num_hidden_layers=4, num_attention_heads=4)
        config.update({"intermediate_size": 64, "pad_token_id": 0, "local_attention": 8})
        model = AutoModel.from_config(config)
    model.eval()
    before = [layer.state_dict() for layer in layers(model)]
    assert keep_layers(model, 2) == (0, 3)
    assert len(list(layers(model))) == model.config.num_hidden_layers == 2
    for old, layer in zip((0, 3), layers(model), strict=True):
        assert all(torch.equal(value, before[old][key]) for key, value in layer.state_dict().items())
    model.save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path).eval()
    ids = torch.arange(3, 40)[None]
    expected, found = (one(ids).last_hidden_state for one in (model, loaded))
    torch.testing.assert_close(found, expected)


def test_layers_are_spread_evenly_from_the_first_to_the_last():
    assert keep_layers(build("llama"), 3) == (0, 2, 3)
    assert keep_layers(build("llama"), 4) == (0, 1, 2, 3)
    assert keep_layers(build("llama"), 1) == (0,)
    for number in (0, 5):
        with pytest.raises(OptionError, match=rf"layers must be from 1 to 4, the model's, got {number}"):
            keep_layers(build("llama"), number)


SPECIAL = ["<unk>", "<pad>", "</s>"]
LIBRARYS = {
    "BPE": (models.BPE(unk_token="<unk>"), trainers.BpeTrainer(vocab_size=80, special_tokens=SPECIAL)),
    "Unigram": (
        models.Unigram(),
        trainers.UnigramTrainer(vocab_size=80, unk_token="<unk>", special_tokens=SPECIAL, show_progress=False),
    ),
    "WordLevel": (models.WordLevel(unk_token="<unk>"), trainers.WordLevelTrainer(special_tokens=SPECIAL)),
}


@pytest.mark.parametrize("kind", LIBRARYS)
def test_a_tokenizer_of_the_tokenizers_library_is_used_as_its_file_describes_it(kind, tmp_path):
    """transformers would build WordPiece from its vocabulary, because the model is a BERT."""
    model, trainer = LIBRARYS[kind]
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    text = "the quick brown fox jumps over the lazy dog"
    tokenizer.train_from_iterator([text, "pad sequences to one length"] * 5, trainer)
    tiny_bert().save_pretrained(tmp_path)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(InputError, match="has neither a pad nor an eos token"):
        read_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"unk_token": "<unk>", "pad_token": "<pad>"}))
    found = read_tokenizer(tmp_path)
    for words in (text, "zebra é 1", ""):
        assert found(words)["input_ids"] == tokenizer.encode(words).ids
    assert found.pad_token_id == 1


def test_a_tokenizer_without_a_token_for_unknown_text_is_refused(tmp_path):
    tokenizer = Tokenizer(models.WordPiece({"[PAD]": 0, "the": 1}, unk_token="[UNK]"))
    tiny_bert().save_pretrained(tmp_path)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]").save_pretrained(tmp_path)
    with pytest.raises(InputError, match="tokenizer cannot be read: WordPiece error: Missing"):
        read_tokenizer(tmp_path)


SCALES = {
    "a tensor": ((1,), "tensor"),
    "outputs": ((4, 1), "channel"),
    "groups": ((4, 2), "group"),
    "blocks": ((2, 2), "block"),
}


@pytest.mark.parametrize("has_zero_points", [False, True])
@pytest.mark.parametrize("name", SCALES)
def test_quantised_weights_are_those_of_compressed_tensors(name, has_zero_points):
    library = pytest.importorskip("compressed_tensors.quantization")
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    (shape, strategy), generator = SCALES[name], torch.Generator().manual_seed(0)
    code = torch.randint(-128, 128, (4, 6), generator=generator, dtype=torch.int8)
    stored = {"a.weight": code, "a.weight_scale": torch.rand(shape, generator=generator)}
    if has_zero_points:
        stored["a.weight_zero_point"] = torch.randint(-9, 9, shape, generator=generator, dtype=torch.int8)
    options = {"group_size": 3} if strategy == "group" else {"block_structure": [2, 3]} if strategy == "block" else {}
    arguments = library.QuantizationArgs(num_bits=8, strategy=strategy, symmetric=not has_zero_points, **options)
    expected = dequantize(code, stored["a.weight_scale"], stored.get("a.weight_zero_point"), arguments)
    found = dequantised(stored)
    assert found.keys() == {"a.weight"}
    torch.testing.assert_close(found["a.weight"], expected)


def test_scales_that_do_not_fit_a_matrix_are_refused():
    stored = {"a.weight": torch.zeros(4, 6, dtype=torch.int8), "a.weight_scale": torch.ones(4, 4)}
    with pytest.raises(InputError, match=r"a\.weight: has scales .* of shape \(4, 4\) for a matrix of shape \(4, 6\)"):
        dequantised(stored)
