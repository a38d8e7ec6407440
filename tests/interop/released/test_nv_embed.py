"""NV-Embed: its vectors against a reference of its decoder, latent attention and pooling rule."""

import re
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from embeddings.common import InputError
from embeddings.inference import Encoder
from embeddings.interop.released.decoders import load_nv_embed as load
from embeddings.models import Embedder, check_bidirectional
from tests.helpers.tiny import sentencepiece_tokenizer
from tests.interop.released.decoder import FIELDS, HIDDEN, decoder_shapes, decoder_states
from tests.interop.released.published import (
    TEXTS,
    assert_same,
    by_library,
    changed_config,
    each,
    encoded,
    random_state,
    write_checkpoint,
)

LATENTS, HEADS, WIDTH = 6, 2, 12
PROMPT = "Instruct: Given a question, retrieve passages that answer the question\nQuery: "
LATENT_CONFIG = {
    "model_type": "latent_attention",
    "num_latents_value": LATENTS,
    "num_cross_heads": HEADS,
    "cross_dim_head": WIDTH,
    "hidden_dim": HIDDEN,
    "latent_dim": HIDDEN,
    "output_normalize": False,
}
CONFIG = {
    "model_type": "nvembed",
    "architectures": ["NVEmbedModel"],
    "auto_map": {"AutoModel": "modeling_nvembed.NVEmbedModel"},
    "text_config": {"model_type": "bidir_mistral", "_name_or_path": "nvidia/NV-Embed-v2", **FIELDS},
    "latent_attention_config": LATENT_CONFIG,
    "padding_side": "right",
    "is_mask_instruction": True,
    "add_eos": True,
    "add_pad_token": True,
    "mask_type": "b",
    "hidden_size": HIDDEN,
}
BLOCK = "latent_attention_model.cross_attend_blocks"
POOLING = {
    "latent_attention_model.latents": (LATENTS, HIDDEN),
    f"{BLOCK}.0.fn.to_q.weight": (HEADS * WIDTH, HIDDEN),
    f"{BLOCK}.0.fn.to_kv.weight": (2 * HEADS * WIDTH, HIDDEN),
    f"{BLOCK}.0.fn.to_out.weight": (HIDDEN, HEADS * WIDTH),
    f"{BLOCK}.1.fn.net.0.weight": (8 * HIDDEN, HIDDEN),
    f"{BLOCK}.1.fn.net.0.bias": (8 * HIDDEN,),
    f"{BLOCK}.1.fn.net.2.weight": (HIDDEN, 4 * HIDDEN),
    f"{BLOCK}.1.fn.net.2.bias": (HIDDEN,),
}
for norm in ("0.norm", "0.norm_context", "1.norm"):
    POOLING |= {f"{BLOCK}.{norm}.{kind}": (HIDDEN,) for kind in ("weight", "bias")}


def published(folder):
    state = random_state(decoder_shapes("embedding_model.") | POOLING)
    tokenizer = sentencepiece_tokenizer()
    return write_checkpoint(folder, CONFIG, state, tokenizer), state, tokenizer


def latent_block(state, x):
    """The states after the latent attention and the gated MLP."""

    def norm(value, name):
        return F.layer_norm(value, (HIDDEN,), state[f"{BLOCK}.{name}.weight"], state[f"{BLOCK}.{name}.bias"])

    context = norm(state["latent_attention_model.latents"], "0.norm_context")
    query = norm(x, "0.norm") @ state[f"{BLOCK}.0.fn.to_q.weight"].T
    key, value = (context @ state[f"{BLOCK}.0.fn.to_kv.weight"].T).chunk(2, -1)
    read = []
    for head in range(HEADS):
        own = slice(head * WIDTH, (head + 1) * WIDTH)
        weight = (query[:, own] @ key[:, own].T / WIDTH**0.5).softmax(-1)
        read.append(weight @ value[:, own])
    x = x + torch.cat(read, -1) @ state[f"{BLOCK}.0.fn.to_out.weight"].T
    net = {row: (state[f"{BLOCK}.1.fn.net.{row}.weight"], state[f"{BLOCK}.1.fn.net.{row}.bias"]) for row in (0, 2)}
    inner, gate = F.linear(norm(x, "1.norm"), *net[0]).chunk(2, -1)
    return x + F.linear(inner * F.gelu(gate), *net[2])


# Texts before which the prompt's last space may be a separate token (digits, unknown letters, empty), and a long one.
HARD_TEXTS = [
    "7 sums",
    "é 7",
    "東京 の",
    "🙂 smile",
    "",
    "Query: x",
    "the quick brown fox jumps over the lazy dog " * 9,
]


def released_vector(state, tokenizer, instruction, text, max_length=4096):
    """As released: EOS is appended to the text, and the number of tokens of the instruction alone is not pooled."""
    backbone = {name.removeprefix("embedding_model."): tensor for name, tensor in state.items()}
    text = instruction + text + tokenizer.eos_token
    ids = tokenizer(text, truncation=True, max_length=max_length)["input_ids"]
    skipped = len(tokenizer.tokenize(instruction)) if instruction else 0
    return latent_block(state, decoder_states(backbone, ids))[skipped:].mean(0)


@pytest.mark.usefixtures("remote_code")
@pytest.mark.parametrize("cut", [False, True])
def test_the_imported_model_gives_the_published_vectors(cut, tmp_path):
    """Includes truncated texts and texts that do not begin with a word."""
    folder, state, tokenizer = published(tmp_path / "published")
    made = load(folder)
    assert sorted(made.report.used) == sorted(state)
    lengths = {"query": 4096, "document": 4096}
    assert (made.model.text.query_max_length, made.model.text.document_max_length) == tuple(lengths.values())
    if cut:
        # Six tokens more than `<s>` and the instruction: truncated texts lose their EOS.
        lengths = {"query": len(tokenizer(PROMPT)["input_ids"]) + 6, "document": 9}
        options = {f"{role}_max_length": length for role, length in lengths.items()}
        made.model.text = replace(made.model.text, **options)
    made.model.save_pretrained(tmp_path / "ours")
    embedder = Embedder.from_pretrained(tmp_path / "ours")
    check_bidirectional(embedder.backbone)
    assert (embedder.tokenizer.padding_side, embedder.tokenizer.pad_token) == ("right", "</s>")
    for role, prompt in (("query", PROMPT), ("document", "")):
        texts = [text for text in HARD_TEXTS if text or prompt] if cut else TEXTS
        arguments = (state, tokenizer, prompt)
        expected = each(texts, lambda text, fixed=arguments, role=role: released_vector(*fixed, text, lengths[role]))
        assert_same(encoded(tmp_path / "ours", texts, role), expected)
        assert_same(by_library(tmp_path / "ours", role, texts=texts), expected)
        if cut:  # the exact pooling rule would give other vectors
            embedder.text = replace(embedder.text, pooling_rule="exact")
            found = torch.from_numpy(Encoder(embedder, precision="float32").encode(texts, role=role))
            assert ((found - expected).abs().amax(1) > 1e-3).sum() >= (3 if prompt else 1)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"padding_side": "left"}, "has padding_side 'left', but only 'right' is supported"),
        ({"text_config": CONFIG["text_config"] | {"rope_theta": "x"}}, "has text_config.rope_theta 'x', expected a"),
        ({"latent_attention_config": LATENT_CONFIG | {"latent_dim": 16}}, "has latent_attention_config.latent_dim 16"),
    ],
)
def test_an_unsupported_config_is_a_one_line_error(fields, says, tmp_path):
    folder, _, _ = published(tmp_path)
    changed_config(folder, **fields)
    with pytest.raises(InputError, match=re.escape(says)):
        load(folder)


def test_half_precision_weights_keep_their_dtype_and_a_bare_instruction_has_a_vector(tmp_path):
    folder, state, tokenizer = published(tmp_path / "published")
    write_checkpoint(folder, CONFIG, {name: tensor.to(torch.float16) for name, tensor in state.items()})
    model = load(folder).model
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float16}
    # Truncation leaves no token after the instruction.
    model.text = replace(model.text, query_max_length=len(tokenizer(PROMPT.rstrip())["input_ids"]) + 1)
    vector = Encoder(model.float(), precision="float32").encode(["x"], role="query", prompt=PROMPT.rstrip())
    assert float((vector**2).sum()) == pytest.approx(1.0)
