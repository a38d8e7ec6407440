"""Language models: states, the head on selected states, adapters, directories, new models, separate documents."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
)
from transformers.trainer_utils import set_seed

from embeddings.common import InputError, OptionError
from embeddings.losses.prediction import token_cross_entropy
from embeddings.models import BackboneConfig, LanguageModel, LoraSettings, language_model, load_backbone
from embeddings.models.language_model import (
    FromScratch,
    check_separation,
    document_inputs,
    load_language_model,
    new_model,
)
from tests.helpers.tiny import (
    bpe_tokenizer,
    save_backbone,
    sentencepiece_tokenizer,
    tiny_bert,
    tiny_mistral,
    wordpiece_tokenizer,
)
from tests.models.language_models import causal_mistral, language_model_folder, masked_bert

IDS_NL = torch.randint(5, 200, (3, 12), generator=torch.Generator().manual_seed(0))
DOCUMENT_NL = torch.zeros_like(IDS_NL)
SIZES = {"vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"intermediate_size": 64}
GEMMA2 = SIZES | {"num_key_value_heads": 2, "head_dim": 8, "final_logit_softcapping": 0.5}
# Heads with capped logits, with several layers, and with parts that are attributes of the model.
OTHERS = {
    "xlm-roberta": (AutoModelForMaskedLM, SIZES),
    "gemma2": (AutoModelForCausalLM, GEMMA2),
    "modernbert": (AutoModelForMaskedLM, SIZES | {"pad_token_id": 0, "global_attn_every_n_layers": 2}),
    "distilbert": (AutoModelForMaskedLM, {"vocab_size": 256, "dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 4}),
}


def model_of(kind):
    if kind not in OTHERS:
        return masked_bert() if kind == "bert" else causal_mistral(tied=kind == "tied")
    auto_class, fields = OTHERS[kind]
    torch.manual_seed(0)
    return auto_class.from_config(AutoConfig.for_model(kind, **fields)).eval()


@pytest.mark.parametrize("kind", ["bert", "mistral", "tied", *OTHERS])
def test_the_head_on_some_states_has_the_loss_and_gradients_of_the_whole_model(kind):
    model = model_of(kind)
    position_P = torch.tensor([0, 3, 3, 17, 35])
    label_P = torch.tensor([7, 8, 9, 10, 11])

    whole = F.cross_entropy(model(input_ids=IDS_NL).logits.flatten(0, 1)[position_P], label_P)
    whole.backward()
    expected = {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}
    model.zero_grad()

    language_model = LanguageModel(model, sentencepiece_tokenizer(), causal=False).eval()
    state_PH = language_model(IDS_NL, DOCUMENT_NL, False, False).flatten(0, 1)[position_P]
    logits_PV = language_model.head(state_PH)
    assert logits_PV.shape == (5, language_model.vocab_size)
    parts = token_cross_entropy(state_PH, label_P, language_model.head, tile_positions=2)
    assert parts.loss.item() == pytest.approx(whole.item(), rel=1e-5)
    parts.loss.backward()
    found = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    assert len(expected) > 10
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


def test_logits_are_never_computed_for_all_positions():
    model, seen = causal_mistral(), []
    language_model = LanguageModel(model, sentencepiece_tokenizer(), causal=True)
    model.lm_head.register_forward_hook(lambda *call: seen.append(call[2].numel() // call[2].shape[-1]))
    state_PH = language_model(IDS_NL, DOCUMENT_NL, False, False).flatten(0, 1)[:4]
    assert seen == []
    language_model.head(state_PH)
    assert seen == [4]
    # A batch may have nothing to predict.
    assert language_model.head(state_PH[:0]).shape == (0, model.config.vocab_size)


def test_padding_and_other_documents_are_masked_on_request():
    language_model = LanguageModel(masked_bert(), wordpiece_tokenizer(), causal=False).eval()
    padded_NL, two_NL = DOCUMENT_NL.clone(), DOCUMENT_NL.clone()
    padded_NL[:, 8:], two_NL[:, 8:] = -1, 1
    with torch.no_grad():
        alone = language_model(IDS_NL[:, :8], DOCUMENT_NL[:, :8], False, False)
        for found in (language_model(IDS_NL, padded_NL, False, True), language_model(IDS_NL, two_NL, True, False)):
            torch.testing.assert_close(found[:, :8], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["mistral", "tied", "bert"])
def test_a_saved_directory_has_merged_adapters_and_equal_logits(kind, tmp_path):
    tokenizer = wordpiece_tokenizer() if kind == "bert" else sentencepiece_tokenizer()
    language_model = LanguageModel(model_of(kind), tokenizer, kind != "bert", LoraSettings(rank=4, dropout=0.0)).eval()
    torch.manual_seed(1)
    for name, weight in language_model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    with torch.no_grad():
        adapted = language_model.model(input_ids=IDS_NL).logits
    before = {name: value.clone() for name, value in language_model.state_dict().items()}
    language_model.save_pretrained(tmp_path / "model")
    # The model that is being trained does not change.
    after = language_model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())

    config = BackboneConfig(str(tmp_path / "model"))
    saved, _ = load_language_model(config, "masked" if kind == "bert" else "causal")
    with torch.no_grad():
        torch.testing.assert_close(saved(input_ids=IDS_NL).logits, adapted, rtol=1e-4, atol=1e-5)
        plain = model_of(kind)(input_ids=IDS_NL).logits
        assert (plain - adapted).abs().max() > 1e-3
        backbone, loaded = load_backbone(config)
        states = language_model(IDS_NL, DOCUMENT_NL, False, False)
        torch.testing.assert_close(backbone(input_ids=IDS_NL).last_hidden_state, states, rtol=1e-4, atol=1e-5)
    assert loaded.get_vocab() == tokenizer.get_vocab()
    assert not any("lora" in name or "base_layer" in name for name in load_file(tmp_path / "model/model.safetensors"))


@pytest.mark.parametrize("kind", ["bert", "mistral"])
def test_a_missing_head_is_refused_unless_a_new_one_is_requested(kind, tmp_path):
    bert = kind == "bert"
    backbone, tokenizer = (tiny_bert(), wordpiece_tokenizer()) if bert else (tiny_mistral(), sentencepiece_tokenizer())
    folder = Path(save_backbone(str(tmp_path), backbone, tokenizer))
    head = "masked" if bert else "causal"
    with pytest.raises(InputError, match="are missing"):
        load_language_model(BackboneConfig(str(folder)), head)
    model, _ = load_language_model(BackboneConfig(str(folder)), head, new_head=True)
    with torch.no_grad():
        states = model.base_model(input_ids=IDS_NL).last_hidden_state
        assert torch.equal(states, backbone(input_ids=IDS_NL).last_hidden_state)
    weights = load_file(folder / "model.safetensors")
    lost = ("layers.1.mlp", "layer.1.output")
    kept = {name: value for name, value in weights.items() if not any(part in name for part in lost)}
    assert len(kept) < len(weights)
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match="are missing"):
        load_language_model(BackboneConfig(str(folder)), head, new_head=True)


def test_an_architecture_without_a_head_for_the_objective_is_refused(tmp_path):
    mistral, bert = (language_model_folder(tmp_path / kind, kind) for kind in ("mistral", "bert"))
    with pytest.raises(OptionError, match=r"model\.objective does not fit: mistral needs mntp or causal, got 'mlm'"):
        load_language_model(BackboneConfig(mistral), "masked")
    with pytest.raises(OptionError, match=r"model\.objective does not fit: bert needs mlm, got 'mntp or causal'"):
        load_language_model(BackboneConfig(bert), "causal")
    with pytest.raises(OptionError, match="does not fit: llama needs mntp or causal"):
        load_language_model(FromScratch(mistral, "llama"), "masked")
    with pytest.raises(InputError, match=r"config\.json"):
        load_language_model(BackboneConfig(str(tmp_path)), "masked")


SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def tokenizer_folder(tmp_path, tokenizer):
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    return str(tmp_path / "tokenizer")


def make(tmp_path, tokenizer, **fields):
    settings = {**SMALL, "num_key_value_heads": 2, **fields.pop("settings", {})}
    scratch = FromScratch(tokenizer_folder(tmp_path, tokenizer), settings=settings, **fields)
    torch.manual_seed(3)
    return new_model(scratch, AutoModelForCausalLM)


@pytest.mark.parametrize(
    ("tokenizer", "pad"), [(wordpiece_tokenizer(), 0), (sentencepiece_tokenizer(), None), (bpe_tokenizer(), None)]
)
def test_the_tokenizer_decides_vocabulary_and_special_tokens(tokenizer, pad, tmp_path):
    """A pad token that is also the separator would never be trained, so the config has no pad token then."""
    model, loaded = make(tmp_path, tokenizer)
    rows = model.get_input_embeddings().weight.shape[0]
    assert rows % 64 == 0
    assert max(tokenizer.get_vocab().values()) < rows <= len(tokenizer) + 64
    assert model.config.pad_token_id == pad
    eos = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id
    assert model.config.eos_token_id == eos
    model(torch.tensor([[5, eos, 6, 7]])).logits.sum().backward()
    assert model.get_input_embeddings().weight.grad[eos].abs().max() > 0
    assert loaded.padding_side == "right"


def test_settings_decide_the_model(tmp_path):
    one, _ = make(tmp_path, wordpiece_tokenizer(), settings={"tie_word_embeddings": True}, bidirectional=True)
    assert len(one.model.layers) == 2
    assert one.lm_head.weight is one.model.embed_tokens.weight
    assert one.config.is_causal is False
    assert not one.training
    scratch = FromScratch(tokenizer_folder(tmp_path, wordpiece_tokenizer()), "bert", dict(SMALL))
    encoder, _ = new_model(scratch, AutoModelForMaskedLM)
    assert type(encoder).__name__ == "BertForMaskedLM"


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"model_type": "mistrall"}, "model_type is not an architecture of transformers"),
        ({"settings": {"hiden_size": 3}}, "is not a setting of mistral, got 'hiden_size'"),
        ({"settings": {"vocab_size": 3}}, "is not a setting of mistral"),
    ],
)
def test_invalid_fields_are_refused_before_a_model_is_built(fields, says):
    with pytest.raises(OptionError, match=re.escape(says)):
        FromScratch("nowhere", **fields)


def test_inconsistent_settings_are_refused(tmp_path):
    with pytest.raises(OptionError, match="cannot build a model"):
        make(tmp_path, wordpiece_tokenizer(), model_type="llama", settings={"hidden_size": 33})


DOCUMENT_NL_MASK = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2], [0, 0, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1]])


def model(kind, attention="sdpa"):
    set_seed(0)
    # Positions of XLM-R start after the padding index.
    options = {**SIZES, "pad_token_id": 1}
    name = kind if kind in ("bert", "xlm-roberta") else "mistral"
    if name == "mistral":
        options |= {"num_key_value_heads": 2, "sliding_window": None, "is_causal": kind == "causal"}
    config = AutoConfig.for_model(name, **options)
    return AutoModel.from_config(config, attn_implementation=attention).eval()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["causal", "bidirectional", "bert", "xlm-roberta"])
def test_each_packed_document_has_the_states_of_the_document_alone(kind, attention):
    backbone = model(kind, attention)
    ids_NL = torch.randint(3, 200, DOCUMENT_NL_MASK.shape)
    with torch.no_grad():
        inputs = document_inputs(backbone, DOCUMENT_NL_MASK, kind == "causal")
        packed_NLH = backbone(input_ids=ids_NL, **inputs).last_hidden_state
        together_NLH = backbone(input_ids=ids_NL).last_hidden_state
        for row, document in ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1)):
            own_L = DOCUMENT_NL_MASK[row] == document
            alone_LH = backbone(input_ids=ids_NL[row][own_L][None]).last_hidden_state[0]
            torch.testing.assert_close(packed_NLH[row][own_L], alone_LH, rtol=1e-4, atol=1e-5)
            # Without separation the states differ, except for the first document of a causal row.
            if (kind, document) != ("causal", 0):
                assert (together_NLH[row][own_L] - alone_LH).abs().max() > 1e-3
    assert torch.isfinite(packed_NLH).all()
    check_separation(backbone, kind == "causal")


def test_a_model_that_cannot_separate_documents_is_refused(monkeypatch):
    def open_to_all(backbone, document_NL, causal):
        inputs = document_inputs(backbone, document_NL, causal)
        return {**inputs, "attention_mask": torch.ones_like(inputs["attention_mask"])}

    monkeypatch.setattr(language_model, "document_inputs", open_to_all)
    backbone = model("bidirectional")
    with pytest.raises(OptionError, match="does not separate documents"):
        check_separation(backbone, False)
    backbone.config._attn_implementation = "flash_attention_2"
    with pytest.raises(OptionError, match=r"model\.separate_documents cannot take effect"):
        check_separation(backbone, False)
