"""Learned positions to rotary ones: what stays, what turns, and who can read the result."""

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForMaskedLM, AutoTokenizer, BertConfig, BertModel

from embeddings.common import OptionError
from embeddings.models import BackboneConfig, load_backbone
from embeddings.models.embedder import num_positions
from embeddings.models.rotary import KINDS, to_rotary, write_rotary_model
from embeddings.modules import MaskedLMModule
from tests.helpers.tiny import tiny_mistral, wordpiece_tokenizer
from tests.models.language_models import language_model_folder
from tests.models.moe import padded_ids, tiny_rotary

ROWS = 370
SIZES = {
    "vocab_size": ROWS,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 66,
}


def source(kind, **settings):
    torch.manual_seed(0)
    made = AutoModelForMaskedLM.from_config(AutoConfig.for_model(kind, **SIZES | settings)).eval()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    made.tie_weights()
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_all_but_the_positions_stays(kind):
    """Without learned positions there, and with a rotation by nothing here, states and logits are equal."""
    model = source(kind)
    rotary = to_rotary(model)
    torch.nn.init.zeros_(model.base_model.embeddings.position_embeddings.weight)
    rotary.base_model.rotary_emb.inv_freq.zero_()
    ids, mask = padded_ids()
    ids = ids % ROWS
    expected, found = (one(input_ids=ids, attention_mask=mask.long()).logits[mask] for one in (model, rotary))
    assert expected.std() > 0.1
    torch.testing.assert_close(found[:, :ROWS], expected, rtol=1e-4, atol=1e-4)


def test_the_vocabulary_is_padded_to_a_multiple_of_64_by_rows_that_are_never_predicted():
    rotary = to_rotary(source("xlm-roberta"))
    words = rotary.get_input_embeddings().weight
    assert rotary.config.vocab_size == len(words) == 384
    assert not words[ROWS:].any()
    assert rotary.get_output_embeddings().weight is words
    ids, mask = padded_ids()
    shares = rotary(input_ids=ids % ROWS, attention_mask=mask.long()).logits[mask].softmax(-1)
    assert shares[:, ROWS:].max() < 1e-30


def rotated(x_HLd, base=10_000.0):
    """Each pair (i, i + d/2) of a head as a complex number, turned by position times base^(-2i/d)."""
    half = x_HLd.shape[-1] // 2
    angle = torch.arange(x_HLd.shape[1]).double()[:, None] * base ** (-torch.arange(half).double() * 2 / (2 * half))
    turned = torch.complex(x_HLd[..., :half], x_HLd[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag], dim=-1)


def test_a_layer_is_the_written_out_one():
    model = tiny_rotary(num_layers=1).double()
    layer, words = model.layers[0], model.embeddings
    ids = torch.randint(5, 300, (9,))
    state = words.LayerNorm(words.word_embeddings(ids) + words.token_type_embeddings.weight[0])
    heads = [getattr(layer.self_attn, f"{name}_proj")(state).view(9, 4, 8).transpose(0, 1) for name in ("q", "k", "v")]
    weights = (rotated(heads[0]) @ rotated(heads[1]).transpose(1, 2) / 8**0.5).softmax(-1)
    attended = layer.self_attn.o_proj((weights @ heads[2]).transpose(0, 1).reshape(9, 32))
    middle = layer.post_attention_layernorm(state + attended)
    expected = layer.post_mlp_layernorm(middle + layer.mlp.fc2(F.gelu(layer.mlp.fc1(middle))))
    # The library's angles are float32.
    torch.testing.assert_close(model(input_ids=ids[None]).last_hidden_state[0], expected, rtol=1e-5, atol=1e-5)


def test_a_written_model_is_read_as_a_backbone_and_as_a_masked_language_model(tmp_path):
    write_rotary_model(language_model_folder(tmp_path / "bert", "bert"), tmp_path / "rotary")
    backbone, tokenizer = load_backbone(BackboneConfig(str(tmp_path / "rotary")))
    assert type(backbone).__name__ == "JinaEmbeddingsV3Model"
    assert tokenizer.model_max_length == 2048
    module = MaskedLMModule("mlm", BackboneConfig(str(tmp_path / "rotary")), separate_documents=True)
    ids, mask = padded_ids()
    inner = module.language_model.eval().backbone(input_ids=ids, attention_mask=mask.long()).last_hidden_state
    alone = backbone(input_ids=ids, attention_mask=mask.long()).last_hidden_state
    torch.testing.assert_close(inner[mask], alone[mask])


def test_an_encoder_without_head_is_converted_and_written_alone(tmp_path):
    model = BertModel(BertConfig(**SIZES | {"vocab_size": 384}), add_pooling_layer=True).eval()
    model.save_pretrained(tmp_path / "bert")
    wordpiece_tokenizer().save_pretrained(tmp_path / "bert")
    write_rotary_model(str(tmp_path / "bert"), tmp_path / "rotary", num_positions=300, keep_head=False)
    backbone, _ = load_backbone(BackboneConfig(str(tmp_path / "rotary"), dropout=0.0))
    assert backbone.config.max_position_embeddings == 300
    assert AutoTokenizer.from_pretrained(tmp_path / "rotary").model_max_length == 300


@pytest.mark.parametrize(
    ("model", "options", "says"),
    [
        (tiny_mistral, {}, "model has no rotary form here, got 'mistral'; convert one of xlm-roberta, roberta, bert"),
        (lambda: source("bert"), {"num_positions": 0}, "num_positions must be >= 1, got 0"),
        (lambda: source("bert"), {"rope_theta": 1.0}, "rope_theta must be > 1, got 1.0"),
        (lambda: source("bert", hidden_act="relu"), {}, "hidden_act must be gelu"),
        (lambda: source("bert", num_attention_heads=32), {}, "cannot be rotated in halves, got 'heads of width 1'"),
    ],
)
def test_what_cannot_be_converted_is_named(model, options, says):
    with pytest.raises(OptionError, match=says):
        to_rotary(model(), **options)


def test_2048_tokens_run_where_the_original_has_66_positions():
    rotary, ids = to_rotary(source("xlm-roberta", num_hidden_layers=1)), torch.randint(5, ROWS, (1, 2048))
    assert rotary.base_model(input_ids=ids).last_hidden_state.isfinite().all()
    assert num_positions(rotary.base_model) is None
    assert rotary.config.max_position_embeddings == 2048
