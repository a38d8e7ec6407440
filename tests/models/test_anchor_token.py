"""AnchorTokenPooling through real backbones: against their own attention matrices, and wherever a pooling is used."""

from pathlib import Path

import pytest
import torch
from sentence_transformers import SentenceTransformer

from embeddings.common import OptionError, PaddedTokens, TextSettings
from embeddings.models import (
    AnchorTokenPooling,
    BackboneConfig,
    Embedder,
    LoraSettings,
    MeanPooling,
    add_lora,
    load_backbone,
    make_bidirectional,
)
from embeddings.models.anchor_weights import CapturedAttention
from tests.helpers.tiny import save_backbone, sentencepiece_tokenizer, tiny_bert, tiny_mistral, wordpiece_tokenizer
from tests.models.reading import random_tokens, read

TOKENS = random_tokens(384, [7, 3, 12, 5], skip=2)


def backbone_of(kind, attn="sdpa", causal=False):
    backbone = tiny_bert() if kind == "bert" else tiny_mistral()
    if kind == "mistral" and not causal:
        make_bidirectional(backbone)
    backbone.set_attn_implementation(attn)
    return backbone


def embedder_of(kind="bert", attn="sdpa", causal=False, **options):
    tokenizer = wordpiece_tokenizer() if kind == "bert" else sentencepiece_tokenizer()
    return Embedder(backbone_of(kind, attn, causal), tokenizer, AnchorTokenPooling(32, **options)).eval()


def expected_vectors(kind, causal=False, layers=(-1,), by_visible=False, backbone=None, tokens=TOKENS):
    """From the attention matrices that an eager backbone returns, text by text without padding."""
    backbone = backbone or backbone_of(kind, "eager", causal)
    vectors = []
    for row, length in enumerate(tokens.attention_mask_NL.sum(1).tolist()):
        ids = tokens.input_ids_NL[row : row + 1, :length]
        output = backbone(input_ids=ids, attention_mask=torch.ones_like(ids), output_attentions=True)
        pooled = tokens.pooling_mask_NL[row, :length]
        shares = []
        for layer in layers:
            weight = (output.attentions[layer][0] * length + 1).log().sum(dim=(0, 1))
            if by_visible:
                weight = weight / torch.arange(length, 0, -1)
            weight = weight * pooled
            shares.append(weight / weight.sum())
        vectors.append(torch.stack(shares).mean(0) @ output.last_hidden_state[0])
    return torch.nn.functional.normalize(torch.stack(vectors), dim=-1)


@torch.no_grad()
@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", ["bert", "mistral"])
def test_vectors_equal_those_from_the_backbones_own_attention_matrices(kind, attn):
    torch.testing.assert_close(embedder_of(kind, attn)(TOKENS), expected_vectors(kind), rtol=0, atol=1e-6)


@torch.no_grad()
def test_several_layers_are_averaged():
    layers = (-1, 0)
    torch.testing.assert_close(
        embedder_of("mistral", layers=layers)(TOKENS), expected_vectors("mistral", layers=layers), rtol=0, atol=1e-6
    )


@torch.no_grad()
@pytest.mark.parametrize("attn", ["eager", "sdpa"])
def test_a_causal_mask_is_respected_where_it_is_allowed(attn):
    found = embedder_of("mistral", attn, causal=True, by_visible_queries=True)(TOKENS)
    expected = expected_vectors("mistral", causal=True, by_visible=True)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_the_key_axis_under_a_causal_mask_is_refused_with_its_two_ways_out():
    for attn in ("eager", "sdpa"):
        with pytest.raises(OptionError, match=r"bidirectional: true .* by_visible_queries: true"):
            embedder_of("mistral", attn, causal=True)
    embedder_of("mistral", causal=True, axis="query")


def test_a_backbone_that_was_refused_is_left_without_a_tap():
    backbone = backbone_of("mistral", causal=True)
    with pytest.raises(OptionError, match="causal mask"):
        Embedder(backbone, sentencepiece_tokenizer(), AnchorTokenPooling(32))
    Embedder(backbone, sentencepiece_tokenizer(), AnchorTokenPooling(32, by_visible_queries=True))


@torch.no_grad()
def test_the_tap_changes_no_state_of_the_backbone_and_its_config_stays():
    for kind in ("bert", "mistral"):
        with_tap, without = embedder_of(kind), backbone_of(kind)
        arguments = {"input_ids": TOKENS.input_ids_NL, "attention_mask": TOKENS.attention_mask_NL.long()}
        found, expected = (model(**arguments).last_hidden_state for model in (with_tap.backbone, without))
        assert torch.equal(found, expected)
        assert with_tap.backbone.config.to_dict() == without.config.to_dict()
        assert with_tap.backbone.config._attn_implementation == "sdpa"
        assert with_tap.backbone.state_dict().keys() == without.state_dict().keys()


@torch.no_grad()
def test_weights_sum_to_one_over_the_pooled_tokens_whatever_the_padding():
    embedder = embedder_of("mistral")
    assert embedder.capture is not None
    found = []
    for extra in (0, 9):
        padded = PaddedTokens(
            *(torch.nn.functional.pad(part, (0, extra)) for part in (
                TOKENS.input_ids_NL, TOKENS.attention_mask_NL, TOKENS.pooling_mask_NL,
            ))
        )  # fmt: skip
        with embedder.capture.open() as tapped:
            embedder.backbone(input_ids=padded.input_ids_NL, attention_mask=padded.attention_mask_NL.long())
        weight = embedder.pooling.weights(padded.pooling_mask_NL, padded.attention_mask_NL, tapped())
        torch.testing.assert_close(weight.sum(1), torch.ones(4))
        assert weight.masked_select(~padded.pooling_mask_NL).eq(0).all()
        found.append(weight[:, :12])
    torch.testing.assert_close(*found, rtol=0, atol=1e-6)


def test_a_text_with_nothing_but_its_first_token_keeps_it():
    mask = torch.tensor([[True, False, False], [True, True, False]])
    pooling = AnchorTokenPooling(4, include_first=False)
    states = torch.zeros(2, 1, 3, 4)
    weight = pooling.weights(mask, mask, [CapturedAttention(states, states, None, False, 1.0)])
    assert weight.tolist() == [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]


def gradients(embedder, tokens=TOKENS):
    embedder.zero_grad()
    target = torch.randn(4, 32, generator=torch.Generator().manual_seed(0)).to(next(embedder.parameters()).dtype)
    (embedder(tokens) * target).sum().backward()
    return torch.cat([p.grad.flatten() for p in embedder.parameters() if p.grad is not None])


@pytest.mark.parametrize("kind", ["bert", "mistral"])
def test_the_gradient_passes_through_the_weights_unless_they_are_detached(kind):
    backbone = backbone_of(kind, "eager").double()
    target = torch.randn(4, 32, generator=torch.Generator().manual_seed(0)).double()
    (expected_vectors(kind, backbone=backbone) * target).sum().backward()
    expected = torch.cat([p.grad.flatten() for p in backbone.parameters() if p.grad is not None])
    found = gradients(embedder_of(kind).double())
    # Mistral's norms are in float32 whatever the weights.
    assert float((found - expected).norm() / expected.norm()) <= (1e-12 if kind == "bert" else 1e-6)
    attached, detached = gradients(embedder_of(kind).double()), gradients(embedder_of(kind, detach=True).double())
    assert float((attached - detached).norm() / attached.norm()) > 1e-4


def test_gradient_checkpointing_gives_the_same_gradient(tmp_path):
    found = []
    for checkpointing in (False, True):
        folder = save_backbone(str(tmp_path / "backbone"), tiny_bert(), wordpiece_tokenizer())
        backbone, tokenizer = load_backbone(BackboneConfig(folder, gradient_checkpointing=checkpointing, dropout=0.0))
        embedder = Embedder(backbone.double(), tokenizer, AnchorTokenPooling(32)).train()
        found.append(gradients(embedder))
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


def test_it_reads_a_backbone_with_adapters():
    backbone = backbone_of("mistral")
    embedder = Embedder(
        add_lora(backbone, LoraSettings(rank=2, dropout=0.0)), sentencepiece_tokenizer(), AnchorTokenPooling(32)
    )
    with torch.no_grad():
        torch.testing.assert_close(embedder.eval()(TOKENS), expected_vectors("mistral"), rtol=0, atol=1e-6)
    assert gradients(embedder).norm() > 0


def test_layers_that_are_not_there_are_refused():
    with pytest.raises(OptionError, match=r"layers \[5\] must be among the 2 attention layers"):
        embedder_of("bert", layers=(5,))
    with pytest.raises(ValueError, match=r"pooling\.axis must be key or query"):
        AnchorTokenPooling(32, axis="row")
    with pytest.raises(ValueError, match="must name a layer"):
        AnchorTokenPooling(32, layers=())


@pytest.mark.usefixtures("travelling_code")
@pytest.mark.parametrize("kind", ["bert", "mistral"])
def test_the_directory_gives_equal_vectors_here_and_in_sentence_transformers(kind, tmp_path: Path):
    options = {"layers": (-1, 0), "per_head": True, "include_first": False}
    embedder = embedder_of(kind, **options)
    embedder.text = TextSettings(query_max_length=32, document_max_length=32, prompts={"query": "find "})
    embedder.save_pretrained(tmp_path / "model")
    again = Embedder.from_pretrained(tmp_path / "model")
    assert again.pooling.arguments() == embedder.pooling.arguments()
    assert again.text == embedder.text
    theirs = SentenceTransformer(str(tmp_path / "model"), device="cpu", trust_remote_code=True)
    texts = ["how do I pad sequences", "the quick brown fox", "z"]
    with torch.no_grad():
        expected = embedder(read(embedder.tokenizer, texts, "find ", 32))
        assert torch.equal(again(read(again.tokenizer, texts, "find ", 32)), expected)
    assert (torch.from_numpy(theirs.encode_query(texts)) - expected).abs().max() <= 1e-5
    mean = Embedder(embedder.backbone, embedder.tokenizer, MeanPooling(32), text=embedder.text).eval()
    with torch.no_grad():
        assert (mean(read(mean.tokenizer, texts, "find ", 32)) - expected).abs().max() > 1e-5
