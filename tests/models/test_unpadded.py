"""Texts without padding: vectors and gradients equal those of padded texts, for every type of backbone."""

from functools import partial

import pytest
import torch
from torch.nn.attention import varlen

from embeddings.common import OptionError, TokenBatch
from embeddings.models import BackboneConfig, Embedder, MeanPooling, make_bidirectional, poolings, unpadded
from embeddings.models.attention_capture import attention_layers
from embeddings.modules import CDEModule, NVEmbedModule
from tests.helpers.tiny import save_backbone, tiny_bert, tiny_t5, wordpiece_tokenizer
from tests.models.contextual_models import tiny_contextual, tiny_modernbert, tiny_nomic, tiny_xlm_roberta
from tests.models.moe import tiny_rotary
from tests.models.test_bidirectional import build

LENGTHS = (12, 5, 5, 1, 9)


def both_ways(name, **options):
    model = build(name, **options)
    make_bidirectional(model)
    return model


def modernbert_without_causal_mask():
    """As loaded from a folder that was saved after `make_bidirectional`: its layers get `is_causal` from the config."""
    model = tiny_modernbert()
    model.config.is_causal = False
    return model


DECODERS = ("mistral", "llama", "qwen3", "gemma")
GEMMA3 = {"head_dim": 8, "sliding_window": 4}


# A window of four tokens wherever an architecture has one; two heads share a key in every decoder.
BACKBONES = {
    "bert": tiny_bert,
    "xlm_roberta": tiny_xlm_roberta,
    "rotary": tiny_rotary,
    "nomic": tiny_nomic,
    "modernbert": tiny_modernbert,
    "modernbert, eager": lambda: tiny_modernbert("eager"),
    "modernbert, saved both ways": modernbert_without_causal_mask,
    **{name: partial(build, name) for name in DECODERS},
    **{f"{name}, both ways": partial(both_ways, name) for name in DECODERS},
    "mistral, eager": lambda: build("mistral", "eager"),
    "gemma3": lambda: build("gemma3_text", **GEMMA3),
    "gemma3, both ways": lambda: both_ways("gemma3_text", **GEMMA3),
    "gemma3, made both ways": lambda: build("gemma3_text", **GEMMA3, use_bidirectional_attention=True),
}
# Options that make a pooling small.
SIZES = {"latent_attention": {"num_latents": 6, "num_heads": 4}, "self_attention": {"num_heads": 4}}
POOLINGS = {name: partial(kind, **SIZES.get(name, {})) for name, kind in poolings.POOLINGS.items()}


def texts(lengths=LENGTHS, seed=0, skip=2):
    """Random tokens; the first two of each text are not pooled, so one text has no pooled token."""
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(5, 60, (length,), generator=generator).tolist() for length in lengths]
    return TokenBatch.from_lists(ids, [[position >= skip for position in range(length)] for length in lengths])


def embedder_of(backbone, pooling=MeanPooling):
    torch.manual_seed(1)
    return Embedder(backbone, wordpiece_tokenizer(), pooling(32)).eval()


@torch.no_grad()
def both_vectors(embedder, tokens):
    """Vectors of padded and of unpadded texts."""
    padded = embedder(tokens)
    embedder.unpad(True)
    return padded, embedder(tokens)


@pytest.fixture
def loops(monkeypatch):
    """The number of tokens in each call of the loop attention."""
    calls, loop = [], unpadded._by_loop

    def counted(query, *arguments):
        calls.append(query.shape[2])
        return loop(query, *arguments)

    monkeypatch.setattr(unpadded, "_by_loop", counted)
    return calls


@pytest.mark.parametrize("name", BACKBONES)
def test_the_vectors_of_every_backbone_are_those_of_padded_texts(name, loops):
    backbone = BACKBONES[name]()
    tokens = texts()
    expected, found = both_vectors(embedder_of(backbone), tokens)
    assert loops.count(tokens.num_tokens) == backbone.config.num_hidden_layers
    assert float((found - expected).abs().max()) <= 1e-6
    assert float((found[:1] - found[1:]).abs().max()) > 1e-3


@pytest.mark.parametrize("kind", ["bert", "mistral, both ways"])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_the_vectors_of_every_pooling_are_those_of_padded_texts(pooling, kind):
    expected, found = both_vectors(embedder_of(BACKBONES[kind](), POOLINGS[pooling]), texts())
    assert float((found - expected).abs().max()) <= 1e-6
    assert float(expected.norm(dim=1).max()) > 0.9


def test_an_unsupported_model_is_refused_in_one_line_and_padded_by_auto(monkeypatch):
    for backbone, reason in ((tiny_t5(), "T5EncoderModel"), (build("gemma2", head_dim=8), "attention with softcap")):
        embedder = embedder_of(backbone)
        with pytest.raises(
            OptionError, match=rf"backbone.unpadded is not supported: .*{reason}.*leave it out"
        ) as refused:
            embedder.unpad(True)
        assert "\n" not in str(refused.value)
        with monkeypatch.context() as patched:
            patched.setattr(torch.cuda, "is_available", lambda: True)
            embedder.unpad("auto")
        assert embedder.unpadding is None
        assert embedder(texts()).isfinite().all()


def test_attention_across_texts_and_flex_attention_are_refused(monkeypatch):
    loop, embedder = unpadded._by_loop, embedder_of(tiny_bert())
    monkeypatch.setattr(unpadded, "_by_loop", lambda *args: loop(*args[:3], args[3][[0, -1]], *args[4:]))
    with pytest.raises(OptionError, match="BertModel has other states for unpadded texts, by"):
        embedder.unpad(True)
    embedder.backbone.config._attn_implementation_internal = "flex_attention"
    with pytest.raises(OptionError, match="flex_attention supports only padded texts"):
        embedder.unpad(True)


@torch.no_grad()
def test_a_prepared_backbone_has_the_same_vectors_for_padded_texts():
    for name in ("bert", "mistral, eager", "modernbert"):
        embedder, tokens = embedder_of(BACKBONES[name]()), texts().padded()
        before, attention = embedder(tokens), embedder.backbone.config._attn_implementation
        embedder.unpad(True)
        assert torch.equal(embedder(tokens), before)
        assert embedder.backbone.config._attn_implementation == attention


def test_an_embedder_pads_unless_unpad_is_on_and_with_an_empty_text(loops):
    embedder = embedder_of(tiny_bert())
    assert embedder.unpadding is None
    before = [module.config for module in attention_layers(embedder.backbone)]
    for mode, lengths in ((True, (3, 0)), (False, LENGTHS)):
        embedder.unpad(mode)
        loops.clear()
        assert embedder(texts(lengths)).shape == (len(lengths), 32)
        assert loops == []
    after = [module.config for module in attention_layers(embedder.backbone)]
    assert len(before) == 2
    assert all(old is new for old, new in zip(before, after, strict=True))


def kernel(query, key, value, start, other, longest, longest_key, *, scale, window_size, enable_gqa=False):
    """torch's `varlen_attn` as documented, by a loop over tokens."""
    assert (longest, len(query), enable_gqa) == (longest_key, int(start[-1]), query.shape[1] > key.shape[1])
    assert start is other
    assert start.dtype == torch.int32
    shared = query.shape[1] // key.shape[1]
    key, value = (side.repeat_interleave(shared, dim=1) for side in (key, value))
    left, right = (len(query) if size < 0 else size for size in window_size)
    rows = []
    for begin, end in zip(start[:-1].tolist(), start[1:].tolist(), strict=True):
        for index in range(begin, end):
            seen = slice(max(begin, index - left), min(end, index + right + 1))
            score = torch.einsum("ae,tae->at", query[index], key[seen]) * scale
            rows.append(torch.einsum("at,tae->ae", score.softmax(-1), value[seen]))
    return torch.stack(rows)


@pytest.mark.parametrize("name", BACKBONES)
def test_the_kernel_gets_the_window_the_scale_and_the_shared_keys(name, monkeypatch):
    """The kernel, which needs a GPU, is replaced by a loop."""
    monkeypatch.setattr(unpadded, "_kernel_supports", lambda *_: True)
    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    expected, found = both_vectors(embedder_of(BACKBONES[name]()), texts())
    assert float((found - expected).abs().max()) <= 1e-6


@pytest.mark.parametrize(
    ("dtype", "longest", "num_prefix", "expected"),
    [
        (torch.bfloat16, None, 0, 16),
        (torch.bfloat16, None, 5, 19),
        (torch.bfloat16, 14, 0, 14),
        (torch.bfloat16, 10, 0, 12),
        (torch.float32, None, 0, None),
    ],
)
def test_half_precision_pads_to_a_multiple_of_8_within_the_positions(dtype, longest, num_prefix, expected):
    assert unpadded.padded_length(tiny_bert().to(dtype), texts(), longest, num_prefix) == expected


def test_windows_after_a_context_are_refused_and_padded_by_auto():
    embedder = tiny_contextual("modernbert")
    with pytest.raises(OptionError, match=r"backbone\.unpadded is not supported: layers with a window"):
        embedder.unpad(True)
    embedder.unpad("auto", first_stage=True)
    assert embedder.unpadding is None
    assert embedder.first_unpadding is not None


def test_a_loaded_model_is_unpadded_by_default_if_there_is_a_gpu(tmp_path, monkeypatch):
    embedder_of(tiny_bert()).save_pretrained(tmp_path)
    assert Embedder.from_pretrained(tmp_path).unpadding is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert Embedder.from_pretrained(tmp_path).unpadding is not None


def test_methods_use_the_unpadded_option_of_their_backbone(tmp_path):
    folder = save_backbone(str(tmp_path), tiny_bert(), wordpiece_tokenizer())
    for mode, expected in ((True, True), ("auto", False), (False, False)):
        backbone = BackboneConfig(folder, unpadded=mode)
        for module in (NVEmbedModule(backbone, MeanPooling), CDEModule(backbone)):
            assert (module.embedder.unpadding is not None) is expected
