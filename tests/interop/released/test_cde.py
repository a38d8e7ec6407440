"""cde-small, both versions: their vectors against a reference, and the numbers that no file contains."""

import json
import sys

import pytest
import torch
from torch.nn import functional as F

from embeddings.cli.main import main
from embeddings.common import InputError, OptionError
from embeddings.interop.released.cde import load
from embeddings.models import BackboneConfig
from embeddings.models.contextual import load_embedder
from embeddings.modules import CDEModule
from embeddings.modules.cde import ContextSettings
from tests.helpers.tiny import wordpiece_tokenizer
from tests.interop.released import nomic
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
from tests.models.reading import random_tokens

HIDDEN, HEADS, LAYERS, INNER, ROWS = 128, 2, 4, 96, 384
SOFT = 8
CONFIG = {"architectures": ["ContextualDocumentEmbeddingTransformer"], "pooling_strategy": "mean"}
V1 = CONFIG | {"embedder": "nomic-ai/nomic-bert-2048", "dataset_backbone": None, "transductive_corpus_size": 5}
V2 = CONFIG | {"embedder": "answerdotai/ModernBERT-base", "transductive_corpus_size": 70}
V2 |= {"transductive_sequence_dropout_prob": 0.005, "max_seq_length": 64}
DOCUMENTS = ["the quick brown fox", "sum of two numbers", "pad", "a lazy dog jumps over 7", "東京 café"]


def stages(width, backbone):
    """The names and shapes of all tensors, with two such backbones."""
    shapes = {}
    for prefix in ("first_stage_model.embedder.", "second_stage_model.backbone."):
        shapes |= {f"{prefix}{name}": shape for name, shape in backbone.items()}
    second = "second_stage_model."
    outputs = {"first_stage_model.mlp": 1, f"{second}output_projection": 1, f"{second}prompt_projection": SOFT}
    for name, times in outputs.items():
        shapes |= {f"{name}.0.weight": (width, width), f"{name}.0.bias": (width,)}
        shapes |= {f"{name}.2.weight": (times * width, width), f"{name}.2.bias": (times * width,)}
    return shapes


def of_stage(state, prefix):
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}


def two_layers(state, name, x, between):
    x = between(F.linear(x, state[f"{name}.0.weight"], state[f"{name}.0.bias"]))
    return F.linear(x, state[f"{name}.2.weight"], state[f"{name}.2.bias"])


def prefix_of(state, documents, states_of, tokenizer):
    """Context vectors, then soft prompts."""
    pooled = []
    for document in documents:
        ids = torch.tensor(tokenizer("search_document: " + document)["input_ids"])
        pooled.append(states_of(of_stage(state, "first_stage_model.embedder."), ids).mean(0))
    width = len(pooled[0])
    context = two_layers(state, "first_stage_model.mlp", torch.stack(pooled), F.gelu)
    soft = two_layers(state, "second_stage_model.prompt_projection", torch.ones(width), F.relu)
    return torch.cat([context, soft.view(SOFT, width)])


# --- version 1: Nomic's encoder ---------------------------------------------------------------------------------------


def published_v1(folder, monkeypatch, **config):
    # Heads have width 64 in both published backbones.
    monkeypatch.setattr(nomic, "HIDDEN", HIDDEN)
    monkeypatch.setattr(nomic, "HEADS", HEADS)
    backbone = {name: tuple(tensor.shape) for name, tensor in nomic.nomic_state(nomic.DENSE, layers=2).items()}
    state = random_state(stages(HIDDEN, backbone), std=0.1)
    tokenizer = wordpiece_tokenizer()
    return write_checkpoint(folder, V1 | config, state, tokenizer), state, tokenizer


def vector_v1(state, prefix, ids):
    """As trained: the token type is added to words only, and all context vectors are at position 0."""
    second = of_stage(state, "second_stage_model.backbone.")
    kind = second["embeddings.token_type_embeddings.weight"][0]
    assert kind.norm() > 0.5
    inputs = torch.cat([prefix, second["embeddings.word_embeddings.weight"][ids] + kind])
    position = torch.arange(len(inputs))
    position[: len(prefix) - SOFT] = 0
    states = nomic.encoder_states(second, nomic.DENSE, inputs, position, layers=2)
    return two_layers(state, "second_stage_model.output_projection", states[len(prefix) :].mean(0), F.relu)


def states_v1(state, ids):
    words = state["embeddings.word_embeddings.weight"][ids] + state["embeddings.token_type_embeddings.weight"][0]
    return nomic.encoder_states(state, nomic.DENSE, words, layers=2)


@pytest.mark.usefixtures("remote_code")
def test_version_1_has_the_vectors_of_its_training_code(tmp_path, monkeypatch):
    folder, state, tokenizer = published_v1(tmp_path / "published", monkeypatch)
    made = load(folder)
    assert sorted(made.report.used) == sorted(state)
    made.model.save_pretrained(tmp_path / "ours")
    prefix = prefix_of(state, DOCUMENTS, states_v1, tokenizer)
    for role in ("query", "document"):

        def vector(text, role=role):
            return vector_v1(state, prefix, torch.tensor(tokenizer(f"search_{role}: {text}")["input_ids"]))

        assert_same(encoded(tmp_path / "ours", role=role, context=DOCUMENTS), each(TEXTS, vector))
        assert_same(by_library(tmp_path / "ours", role, DOCUMENTS), each(TEXTS, vector))
    turned = encoded(tmp_path / "ours", context=DOCUMENTS[::-1])
    assert (turned - encoded(tmp_path / "ours", context=DOCUMENTS)).abs().max() < 1e-5


# --- version 2: ModernBERT --------------------------------------------------------------------------------------------


def published_v2(folder, has_null=True):
    backbone = {"embeddings.tok_embeddings.weight": (ROWS, HIDDEN), "embeddings.norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        names = {"attn.Wqkv": (3 * HIDDEN, HIDDEN), "attn.Wo": (HIDDEN, HIDDEN)}
        names |= {"mlp.Wi": (2 * INNER, HIDDEN), "mlp.Wo": (HIDDEN, INNER), "mlp_norm": (HIDDEN,)}
        names |= {"attn_norm": (HIDDEN,)} if layer else {}
        backbone |= {f"layers.{layer}.{name}.weight": shape for name, shape in names.items()}
    backbone["final_norm.weight"] = (HIDDEN,)
    state = random_state(stages(HIDDEN, backbone), std=0.1)
    if has_null:
        state["second_stage_model.sequence_dropout_null_embedding"] = torch.randn(HIDDEN)
    tokenizer = wordpiece_tokenizer()
    return write_checkpoint(folder, V2, state, tokenizer), state, tokenizer


def modernbert_states(state, inputs):
    """The states for input embeddings: every third layer has full attention, the others 64 tokens to each side."""

    def norm(x, name):
        return F.layer_norm(x, (HIDDEN,), state[f"{name}.weight"], eps=1e-5)

    position = torch.arange(len(inputs))
    is_near = (position[:, None] - position).abs() <= 64
    x = norm(inputs, "embeddings.norm")
    for layer in range(LAYERS):
        name = f"layers.{layer}"
        config = {"rotary_emb_base": 10000.0 if layer % 3 else 160000.0}
        config |= {"max_trained_positions": 8192, "rotary_scaling_factor": None}
        y = norm(x, f"{name}.attn_norm") if layer else x
        query, key, value = (y @ state[f"{name}.attn.Wqkv.weight"].T).view(len(y), 3, HEADS, 64).unbind(1)
        query, key = (nomic.rotated(part, position, config) for part in (query, key))
        score = torch.einsum("iae,jae->aij", query, key) / 8
        if layer % 3:
            score = score.masked_fill(~is_near, float("-inf"))
        read = torch.einsum("aij,jae->iae", score.softmax(-1), value).flatten(1)
        x = x + read @ state[f"{name}.attn.Wo.weight"].T
        inner, gate = (norm(x, f"{name}.mlp_norm") @ state[f"{name}.mlp.Wi.weight"].T).chunk(2, -1)
        x = x + (F.gelu(inner) * gate) @ state[f"{name}.mlp.Wo.weight"].T
    return norm(x, "final_norm")


def states_v2(state, ids):
    return modernbert_states(state, state["embeddings.tok_embeddings.weight"][ids])


def vector_v2(state, prefix, ids, colon):
    """Words are normalised before and in the encoder; tokens after the first colon are pooled, or else all."""
    second = of_stage(state, "second_stage_model.backbone.")
    words = second["embeddings.tok_embeddings.weight"][ids]
    normed = F.layer_norm(words, (HIDDEN,), second["embeddings.norm.weight"], eps=1e-5)
    states = modernbert_states(second, torch.cat([prefix, normed]))[len(prefix) :]
    is_colon = (ids == colon).nonzero()
    pooled = (states[int(is_colon[0]) + 1 :] if len(is_colon) else states).mean(0)
    return pooled + two_layers(state, "second_stage_model.output_projection", pooled, F.relu)


@pytest.mark.usefixtures("remote_code")
def test_version_2_has_the_published_vectors(tmp_path):
    folder, state, tokenizer = published_v2(tmp_path / "published")
    made = load(folder)
    assert sorted(made.report.used) == sorted(state)
    made.model.save_pretrained(tmp_path / "ours")
    documents = [f"{DOCUMENTS[row % 5]} {row}" for row in range(70)]
    prefix = prefix_of(state, documents, states_v2, tokenizer)
    # Longer than the attention window of 64 tokens.
    assert len(prefix) == 78
    colon = tokenizer.convert_tokens_to_ids(":")
    for role in ("query", "document"):

        def vector(text, role=role):
            ids = torch.tensor(tokenizer(f"search_{role}: {text}")["input_ids"])
            return vector_v2(state, prefix, ids, colon)

        assert_same(encoded(tmp_path / "ours", role=role, context=documents), each(TEXTS, vector))
        assert_same(by_library(tmp_path / "ours", role, documents), each(TEXTS, vector))
    # Without a prompt the text's own first colon counts, after truncation.
    texts = ["the fox", "sum: the fox: 7", "a:", ": b", "the lazy dog " * 40 + ": 7", "fox: " + "the lazy dog " * 40]

    def bare_vector(text):
        ids = torch.tensor(tokenizer(text, truncation=True, max_length=64)["input_ids"])
        return vector_v2(state, prefix, ids, colon)

    expected = each(texts, bare_vector)
    assert_same(encoded(tmp_path / "ours", texts, context=documents, prompt=""), expected)
    assert_same(by_library(tmp_path / "ours", "document", documents, texts, prompt=""), expected)
    turned = encoded(tmp_path / "ours", context=documents[::-1])
    assert (turned - encoded(tmp_path / "ours", context=documents)).abs().max() > 1e-4
    # The imported model can be an initial model.
    settings = ContextSettings(num_context=70, num_soft_prompts=SOFT)
    ours = str(tmp_path / "ours")
    embedder = CDEModule(BackboneConfig(ours), context=settings, initial_model=ours).embedder
    null = state["second_stage_model.sequence_dropout_null_embedding"]
    assert torch.equal(embedder.slots.null_H.detach(), null)
    assert load_embedder(ours).slots.dropout_fraction == 0.005
    embedder(random_tokens(384, [5, 9]))[:, 0].sum().backward()
    assert embedder.slots.null_H.grad.abs().max() > 0


@pytest.mark.usefixtures("remote_code")
@pytest.mark.parametrize(("version", "num_documents"), [(1, 0), (1, 3), (2, 3)])
def test_without_a_null_vector_a_smaller_context_makes_the_input_shorter(version, num_documents, tmp_path, monkeypatch):
    if version == 1:
        (folder, state, tokenizer), states_of = published_v1(tmp_path / "published", monkeypatch), states_v1
    else:
        (folder, state, tokenizer), states_of = published_v2(tmp_path / "published", has_null=False), states_v2
    load(folder).model.save_pretrained(tmp_path / "ours")
    documents = DOCUMENTS[:num_documents] or None
    prefix = prefix_of(state, DOCUMENTS[: num_documents or 1], states_of, tokenizer)[0 if documents else 1 :]
    colon = tokenizer.convert_tokens_to_ids(":")

    def vector(text):
        ids = torch.tensor(tokenizer(f"search_document: {text}")["input_ids"])
        return vector_v1(state, prefix, ids) if version == 1 else vector_v2(state, prefix, ids, colon)

    assert len(prefix) == num_documents + SOFT
    assert_same(encoded(tmp_path / "ours", context=documents), each(TEXTS, vector))
    assert_same(by_library(tmp_path / "ours", context=documents), each(TEXTS, vector))
    again = load_embedder(tmp_path / "ours")
    again.save_pretrained(tmp_path / "again")
    assert_same(encoded(tmp_path / "again", context=documents), each(TEXTS, vector))
    settings = ContextSettings(num_context=again.num_context, num_soft_prompts=SOFT)
    with pytest.raises(OptionError, match=r"model\.context\.dropout_fraction must be 0: the model has no null vector"):
        CDEModule(BackboneConfig("unused"), context=settings, initial_model=str(tmp_path / "ours"))


def test_missing_numbers_are_printed_and_recorded(tmp_path, capsys):
    folder, _, _ = published_v2(tmp_path / "published")
    assert main(["import", "--source", str(folder), "--output", str(tmp_path / "ours")]) == 0
    usual = {"num_attention_heads": 2, "global_attn_every_n_layers": 3, "global_rope_theta": 160000.0}
    usual |= {"local_rope_theta": 10000.0, "max_position_embeddings": 8192, "norm_eps": 1e-5, "local_attention": 128}
    assert json.loads((tmp_path / "ours" / "import.json").read_text())["assumed"] == usual
    assert "no file states it: num_attention_heads 2, global_attn_every_n_layers 3" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"embedder": "bert-base-uncased"}, "names the backbones bert-base-uncased and bert-base-uncased; supp"),
        ({"transductive_tokens_per_document": 2}, "has transductive_tokens_per_document 2, but only 1 is supported"),
        ({"transductive_corpus_size": 0}, "has transductive_corpus_size 0, expected an integer >= 1"),
    ],
)
def test_an_unsupported_config_is_a_one_line_error(fields, says, tmp_path, monkeypatch):
    folder, _, _ = published_v1(tmp_path, monkeypatch)
    changed_config(folder, **fields)
    with pytest.raises(InputError, match=says):
        load(folder)


def test_a_missing_stage_and_an_indivisible_hidden_size_are_one_line_errors(tmp_path, monkeypatch):
    folder, _, _ = published_v1(tmp_path / "v1", monkeypatch)
    write_checkpoint(folder, V1, {"first_stage_model.mlp.0.bias": torch.zeros(4)})
    with pytest.raises(InputError, match=r"lacks the tensor first_stage_model\.embedder\.embeddings\.word_emb"):
        load(folder)
    monkeypatch.setattr(sys.modules[__name__], "HIDDEN", 96)
    folder, _, _ = published_v2(tmp_path / "v2")
    with pytest.raises(InputError, match="heads of width 64 cannot divide a hidden size of 96"):
        load(folder)
