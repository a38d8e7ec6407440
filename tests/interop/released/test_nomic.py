"""Nomic's dense and mixture-of-experts encoders: their vectors against a reference, prompts and configs."""

import json
import re

import pytest
import torch
from torch.nn import functional as F
from transformers import NomicBertModel

from embeddings.common import InputError
from embeddings.evaluation.mteb_library import load_mteb
from embeddings.inference import Encoder
from embeddings.interop.released import import_released
from embeddings.interop.released.checkpoint import ReleasedConfig
from embeddings.interop.released.nomic import PROMPTS, encoder_fields, load_dense, load_moe
from embeddings.models import BackboneConfig, Embedder, LanguageModel, RotaryMoeModel, load_backbone
from embeddings.models.language_model import load_language_model
from tests.helpers.tiny import wordpiece_tokenizer
from tests.interop.released.nomic import DENSE, HIDDEN, MOE, nomic_folder, nomic_states
from tests.interop.released.published import (
    TEXTS,
    assert_same,
    by_library,
    changed_config,
    describe,
    each,
    encoded,
    random_state,
    write_checkpoint,
)


def fields(folder, **changed):
    (folder / "config.json").write_text(json.dumps(DENSE | changed))
    return encoder_fields(ReleasedConfig(folder / "config.json"), wordpiece_tokenizer())


def test_vocabulary_and_positions_are_the_published_ones(tmp_path):
    assert [fields(tmp_path, vocab_size=rows)["vocab_size"] for rows in (383, 384, 385)] == [384, 384, 448]
    plain, scaled = (fields(tmp_path, n_positions=8192, rotary_scaling_factor=factor) for factor in (None, 2))
    assert (plain["max_position_embeddings"], scaled["max_position_embeddings"]) == (8192, 2048)
    assert plain["rope_parameters"] == scaled["rope_parameters"] == {"rope_type": "default", "rope_theta": 1000.0}
    with pytest.raises(InputError, match="n_head 5, but n_embd must be a multiple of 2"):
        fields(tmp_path, n_head=5)


def test_the_prompts_are_those_that_mteb_runs_these_models_with():
    load_mteb()
    from mteb.models.model_implementations.cde_models import cde_model_prompts
    from mteb.models.model_implementations.nomic_models import model_prompts

    assert (len(model_prompts), model_prompts["STS"]) == (9, "classification: ")
    assert model_prompts.items() <= PROMPTS.items()
    assert cde_model_prompts.items() <= PROMPTS.items()
    expected = {"classification": "classification: ", "clustering": "clustering: "}
    assert {name: PROMPTS[name] for name in PROMPTS.keys() - model_prompts.keys()} == expected


def means(state, config, tokenizer, prompt):
    return [nomic_states(state, config, torch.tensor(tokenizer(prompt + text)["input_ids"])).mean(0) for text in TEXTS]


@pytest.mark.usefixtures("remote_code")
@pytest.mark.parametrize(
    ("config", "load", "kind", "prefix"),
    [
        (DENSE, load_dense, NomicBertModel, ""),
        # An embedding model may have the tensor names of a language model.
        (DENSE, load_dense, NomicBertModel, "bert."),
        (MOE, load_moe, RotaryMoeModel, ""),
    ],
)
def test_the_imported_model_gives_the_published_vectors(config, load, kind, prefix, tmp_path):
    folder, state, tokenizer = nomic_folder(tmp_path / "published", config, prefix=prefix)
    head = {"cls.predictions.transform.dense.weight": torch.zeros(HIDDEN, HIDDEN)} if prefix else {}
    write_checkpoint(folder, config, state | head)
    made = load(folder)
    assert (sorted(made.report.used), made.report.left) == (sorted(state), sorted(head))
    made.model.save_pretrained(tmp_path / "ours")
    state = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
    for role in ("document", "query"):
        expected = F.normalize(torch.stack(means(state, config, tokenizer, f"search_{role}: ")), dim=-1)
        assert_same(encoded(tmp_path / "ours", role=role), expected)
        assert_same(by_library(tmp_path / "ours", role), expected)
    backbone, _ = load_backbone(BackboneConfig(str(tmp_path / "ours")))
    assert type(backbone) is kind
    assert getattr(backbone.config, "moe_layers", [1, 3]) == [1, 3]


def test_a_text_longer_than_in_training_is_truncated_and_does_not_change_others(tmp_path, caplog):
    config = DENSE | {"max_trained_positions": 24, "rotary_scaling_factor": 2}
    folder, state, tokenizer = nomic_folder(tmp_path / "published", config)
    describe(folder, HIDDEN)
    load_dense(folder).model.save_pretrained(tmp_path / "ours")
    assert "rotary_scaling_factor is ignored, so texts are truncated to 24 tokens" in caplog.text
    words = "the quick brown fox jumps over the lazy dog 1 2 3 4 5 6 7 8 9"
    texts = [words, words[:40], "a b c"]
    ids = [tokenizer(f"search_document: {text}", truncation=True, max_length=40)["input_ids"] for text in texts]
    assert [len(row) > 24 for row in ids] == [True, True, False]
    cut = [tokenizer(f"search_document: {text}", truncation=True, max_length=24)["input_ids"] for text in texts]
    expected = each(texts, lambda text: nomic_states(state, config, torch.tensor(cut[texts.index(text)])).mean(0))
    encoder = Encoder.from_pretrained(str(tmp_path / "ours"), precision="float32", device="cpu")
    for chosen in ([0], [1], [2], [0, 2], [1], [2]):
        found = torch.from_numpy(encoder.encode([texts[row] for row in chosen]))
        torch.testing.assert_close(found, expected[chosen], rtol=1e-5, atol=1e-5)


def test_the_masked_language_model_comes_with_its_head_and_a_record_but_no_card(tmp_path):
    config = DENSE | {"architectures": ["NomicBertForPreTraining"]}
    folder, state, tokenizer = nomic_folder(tmp_path / "published", config, prefix="bert.")
    transform = "cls.predictions.transform."
    shapes = {"dense.weight": (HIDDEN, HIDDEN), "layer_norm.weight": (HIDDEN,), "layer_norm.bias": (HIDDEN,)}
    head = random_state({f"{transform}{name}": shape for name, shape in shapes.items()}, seed=1)
    words = state["bert.embeddings.word_embeddings.weight"]
    write_checkpoint(folder, config, state | head | {"cls.predictions.decoder.weight": words.clone()})
    made = import_released(str(folder), tmp_path / "ours")
    assert isinstance(made.model, LanguageModel)
    assert made.report.left == ["cls.predictions.decoder.weight"]
    assert (tmp_path / "ours" / "import.json").is_file()
    assert not (tmp_path / "ours" / "README.md").exists()
    model, _ = load_language_model(BackboneConfig(str(tmp_path / "ours")), "masked")
    ids = torch.tensor(tokenizer("the quick brown fox")["input_ids"])
    bare = {name.removeprefix("bert."): tensor for name, tensor in state.items()}
    states = nomic_states(bare, config, ids)
    inner = F.silu(states @ head[f"{transform}dense.weight"].T)
    norm = (head[f"{transform}layer_norm.{kind}"] for kind in ("weight", "bias"))
    expected = F.layer_norm(inner, (HIDDEN,), *norm, eps=1e-12) @ words.T
    torch.testing.assert_close(model(input_ids=ids[None]).logits[0].detach(), expected, rtol=1e-5, atol=1e-4)
    backbone, _ = load_backbone(BackboneConfig(str(tmp_path / "ours")))
    found = backbone(input_ids=ids[None]).last_hidden_state[0].detach()
    torch.testing.assert_close(found, states, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"activation_function": "gelu"}, "has activation_function 'gelu', supported are swiglu, geglu, glu"),
        ({"qkv_proj_bias": True}, "has qkv_proj_bias True, but only False is supported"),
        ({"n_inner": 300}, "fc12.weight has shape (256, 32), but (512, 32) in config.json"),
    ],
)
def test_an_unsupported_config_is_a_one_line_error(fields, says, tmp_path):
    folder, _, _ = nomic_folder(tmp_path, DENSE)
    changed_config(folder, **fields)
    with pytest.raises(InputError, match=re.escape(says)):
        load_dense(folder)


def test_prompts_and_lengths_of_the_folder_are_imported(tmp_path):
    folder, state, tokenizer = nomic_folder(tmp_path / "published", MOE)
    describe(folder, HIDDEN, normalize=False, prompts={"passage": "search_document: ", "query": "a query: "})
    load_moe(folder).model.save_pretrained(tmp_path / "ours")
    text = Embedder.from_pretrained(tmp_path / "ours").text
    assert (text.query_max_length, text.document_max_length, text.pool_prompt) == (40, 40, True)
    assert text.prompts["passage"] == text.prompts["document"] == "search_document: "
    # Without a Normalize module vectors are not normalised.
    assert_same(encoded(tmp_path / "ours", role="query"), torch.stack(means(state, MOE, tokenizer, "a query: ")))
