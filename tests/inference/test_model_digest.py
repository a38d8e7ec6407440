import copy

import pytest
import torch
from tokenizers import normalizers, processors
from torch import nn

from embeddings.common import TextSettings
from embeddings.inference.encoder import Encoder, embedder_sha256
from embeddings.models import Embedder, LoraSettings, MeanPooling, add_lora, make_bidirectional
from embeddings.models.directory import ContextForm
from tests.helpers.tiny import sentencepiece_tokenizer, tiny_mistral
from tests.inference.models import tiny_embedder
from tests.models.contextual_models import tiny_contextual, tiny_nomic
from tests.models.moe import tiny_moe


def test_the_models_hash_follows_weights_and_settings_and_nothing_else():
    first, again = tiny_embedder(), tiny_embedder()
    base = embedder_sha256(Encoder(first))
    assert embedder_sha256(Encoder(again, precision="float32")) == base
    assert embedder_sha256(Encoder(tiny_embedder(normalize=False))) != base
    assert embedder_sha256(Encoder(tiny_embedder(document_max_length=32))) != base
    next(again.parameters()).data[0, 0] += 1e-3
    assert embedder_sha256(Encoder(again)) != base


def test_the_hash_of_a_contextual_model_follows_both_stages():
    base = embedder_sha256(Encoder(tiny_contextual()))
    assert embedder_sha256(Encoder(tiny_contextual(), precision="float32")) == base
    assert embedder_sha256(Encoder(tiny_contextual(num_context=4))) != base
    changed = tiny_contextual()
    next(changed.first_stage.parameters()).data[0, 0] += 1e-3
    assert embedder_sha256(Encoder(changed)) != base


def digest(embedder: Embedder) -> str:
    return embedder_sha256(Encoder(embedder))


def around(backbone: nn.Module, **config: object) -> Embedder:
    """The model of a backbone whose config says otherwise, and whose weights are the same."""
    backbone = copy.deepcopy(backbone)
    for name, value in config.items():
        assert getattr(backbone.config, name) != value
        setattr(backbone.config, name, value)
    return Embedder(backbone, tiny_embedder().tokenizer, MeanPooling(32), text=TextSettings(32, 32)).eval()


def test_a_model_that_was_written_and_read_has_the_hash_that_it_had(tmp_path):
    for name, model in (("plain", tiny_embedder()), ("sparse", around(tiny_moe())), ("contextual", tiny_contextual())):
        model.save_pretrained(tmp_path / name)
        again = Encoder.from_pretrained(str(tmp_path / name), precision="float32")
        first = embedder_sha256(again)
        again.embedder.save_pretrained(tmp_path / f"{name} again")
        assert embedder_sha256(Encoder.from_pretrained(str(tmp_path / f"{name} again"), precision="float32")) == first
        again.encode(["the quick brown fox", "a"])
        assert embedder_sha256(again) == first


def test_half_precision_weights_have_the_hash_that_they_have_as_float32(tmp_path):
    tiny_embedder().to(torch.bfloat16).save_pretrained(tmp_path / "half")
    half, whole = (Encoder.from_pretrained(str(tmp_path / "half"), precision=name) for name in ("bfloat16", "float32"))
    assert [encoder.embedder.backbone.dtype for encoder in (half, whole)] == [torch.bfloat16, torch.float32]
    assert embedder_sha256(half) == embedder_sha256(whole)
    # Rounding them is another model.
    assert embedder_sha256(half) != digest(tiny_embedder())


def test_the_mask_of_attention_is_part_of_it():
    causal, bidirectional = tiny_mistral(), tiny_mistral()
    make_bidirectional(bidirectional)
    tokenizer = sentencepiece_tokenizer()
    models = [Embedder(model, tokenizer, MeanPooling(32)).eval() for model in (causal, bidirectional)]
    assert digest(models[0]) != digest(models[1])
    assert repr(models[0]) == repr(models[1])


@pytest.mark.parametrize(
    ("backbone", "config"),
    [
        (tiny_mistral, {"sliding_window": 8}),
        (tiny_mistral, {"num_attention_heads": 2}),
        (tiny_nomic, {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
        (tiny_moe, {"experts_per_token": 1}),
    ],
)
def test_what_a_backbones_config_alone_says_is_part_of_it(backbone, config):
    base = around(backbone())
    assert digest(around(backbone())) == digest(base)
    assert digest(around(backbone(), **config)) != digest(base)


def test_the_scale_of_adapters_is_part_of_it():
    digests = set()
    for alpha in (2, 4):
        torch.manual_seed(0)
        digests.add(digest(around(add_lora(tiny_mistral(), LoraSettings(rank=2, alpha=alpha)))))
    assert len(digests) == 2


@pytest.mark.parametrize(
    "form", [{"adds_pooled": False}, {"has_positions": True}, {"pools_prompt": True}], ids=lambda form: next(iter(form))
)
def test_the_form_of_a_contextual_model_is_part_of_it(form):
    plain = tiny_contextual("nomic")
    other = tiny_contextual("nomic", form=ContextForm(**form))
    other.load_state_dict(plain.state_dict())
    assert digest(other) != digest(plain)


def test_how_a_tokenizer_cuts_texts_is_part_of_it_and_what_it_was_last_asked_is_not():
    digests = {digest(tiny_embedder())}
    for change in (
        {"normalizer": normalizers.BertNormalizer(lowercase=False)},
        {"post_processor": processors.TemplateProcessing(single="[CLS] $A", special_tokens=[("[CLS]", 2)])},
    ):
        embedder = tiny_embedder()
        embedder.tokenizer = copy.deepcopy(embedder.tokenizer)
        for name, value in change.items():
            setattr(embedder.tokenizer.backend_tokenizer, name, value)
        digests.add(digest(embedder))
    assert len(digests) == 3
    embedder = tiny_embedder()
    embedder.tokenizer = copy.deepcopy(embedder.tokenizer)
    embedder.tokenizer(["a", "the quick brown fox"], padding=True, truncation=True, max_length=3)
    assert digest(embedder) in digests
