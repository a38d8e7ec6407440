"""Rotary encoders: conversion from learned positions, experts, Hugging Face models and model directories."""

import math

import pytest
import torch
from sentence_transformers import SentenceTransformer
from transformers import (
    AutoConfig,
    AutoModelForMaskedLM,
    AutoTokenizer,
    BertConfig,
    BertModel,
    XLMRobertaConfig,
    XLMRobertaModel,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from embeddings.common import OptionError, TextSettings
from embeddings.models import BackboneConfig, Embedder, MeanPooling, load_backbone
from embeddings.models.backbone import enable_checkpointing
from embeddings.models.moe.rotary_moe import MoeMlp, RotaryMoeConfig, RotaryMoeLayer
from embeddings.models.moe.upcycling import (
    KINDS,
    Upcycling,
    load_metrics,
    moe_layers,
    parameter_counts,
    read_routing,
    routing_metrics,
    to_rotary,
    upcycle,
    write_rotary_model,
)
from embeddings.modules import MaskedLMModule
from tests.helpers.contrastive import gradient_vector
from tests.helpers.tiny import tiny_bert, tiny_mistral, wordpiece_tokenizer
from tests.models.language_models import language_model_folder
from tests.models.moe import padded_ids, stirred, tiny_moe, tiny_nomic, tiny_rotary
from tests.models.reading import carried_code, tokenised


def states(model, ids, mask):
    found = model(input_ids=ids, attention_mask=mask.long()).last_hidden_state
    return found.detach()


def test_padding_changes_no_state_and_is_not_counted():
    model, (ids, mask) = tiny_moe(), padded_ids()
    output = model(input_ids=ids, attention_mask=mask.long())
    parts = [model(input_ids=row[keep][None]) for row, keep in zip(ids, mask, strict=True)]
    alone = torch.cat([part.last_hidden_state[0] for part in parts])
    assert (output.last_hidden_state[mask] - alone).abs().max() <= 1e-5
    assert torch.equal(output.expert_counts, sum(part.expert_counts for part in parts))
    assert output.expert_counts.sum(1).tolist() == [2 * 18]
    for name in ("expert_probabilities", "router_squared_logsumexp"):
        torch.testing.assert_close(getattr(output, name), sum(getattr(part, name) for part in parts))


def test_embeddings_instead_of_ids_and_a_mask_of_pairs_are_accepted():
    model, (ids, mask) = tiny_moe(), padded_ids()
    expected, words = states(model, ids, mask)[mask], model.get_input_embeddings()(ids)
    assert torch.equal(model(inputs_embeds=words, attention_mask=mask.long()).last_hidden_state[mask], expected)
    output = model(input_ids=ids, attention_mask=(mask[:, :, None] == mask[:, None, :])[:, None])
    torch.testing.assert_close(output.last_hidden_state[mask], expected, rtol=1e-5, atol=1e-5)
    # With such a mask padding is counted too.
    assert output.expert_counts.sum().item() == 2 * mask.numel()


def test_a_recomputed_layer_has_the_same_gradients_and_counts_once():
    ids, mask = padded_ids()
    found = []
    for checkpointed in (False, True):
        model = tiny_moe(dropout=0.1).train()
        if checkpointed:
            enable_checkpointing(model)
        torch.manual_seed(3)
        output = model(input_ids=ids, attention_mask=mask.long())
        loss = output.last_hidden_state[mask].square().sum() + output.expert_probabilities[:, 0].sum()
        loss.backward()
        found.append((output.expert_counts, gradient_vector(model)))
    (counts, gradient), again = found
    assert counts.sum().item() == 2 * 18
    assert gradient.norm() > 0
    assert torch.equal(counts, again[0])
    assert torch.equal(gradient, again[1])


def test_a_directory_contains_its_code_until_a_model_without_experts_replaces_it(tmp_path):
    for backbone, code in ((tiny_moe(), {"experts", "rotary_moe"}), (tiny_bert(), set())):
        embedder = Embedder(backbone, wordpiece_tokenizer(), MeanPooling(32)).eval()
        embedder.save_pretrained(tmp_path / "model")
        assert carried_code(tmp_path / "model") == code
        tokens = tokenised(embedder.tokenizer, ["pad the fox", "z"])
        assert torch.equal(Embedder.from_pretrained(tmp_path / "model")(tokens), embedder(tokens))


@pytest.fixture
def forget(remote_code, monkeypatch):
    """A function that removes our architecture from transformers' tables, as if this library were not installed."""

    def unregister():
        for mapping, known in ((CONFIG_MAPPING, "rotary_moe"), (MODEL_MAPPING, RotaryMoeConfig)):
            others = {name: kind for name, kind in mapping._extra_content.items() if name != known}
            assert len(others) == len(mapping._extra_content) - 1
            monkeypatch.setattr(mapping, "_extra_content", others)

    return unregister


@pytest.mark.parametrize("text", [TextSettings(24, 32, prompts={"query": "a query:"}), None])
@pytest.mark.parametrize("mode", ["preserving", "release", "gated"])
def test_sentence_transformers_computes_equal_vectors_with_an_upcycled_model(mode, text, tmp_path, forget):
    tokenizer, prompted = wordpiece_tokenizer(), text is not None
    text = text or TextSettings(24, 32)
    gated = stirred(upcycle(tiny_nomic(num_layers=4), Upcycling(num_experts=4)))
    sparse = gated if mode == "gated" else tiny_moe(num_layers=4, mode=mode)
    embedder = Embedder(sparse, tokenizer, MeanPooling(32), text=text).eval()
    embedder.save_pretrained(tmp_path / "model")
    again, tokens = Embedder.from_pretrained(tmp_path / "model"), tokenised(tokenizer, ["pad the fox", "z"], "", 32)
    torch.testing.assert_close(again(tokens), embedder(tokens))
    assert again.text == text
    assert (tmp_path / "model" / "portable.py").exists() == prompted
    texts = ["pad the fox", "two numbers " * 20, "7 jumps over", "", "z"]
    prompt = text.prompts.get("query", "")
    queries, documents = (
        embedder(tokenised(tokenizer, texts, before, length)) for before, length in ((prompt, 24), ("", 32))
    )
    assert len(torch.unique(documents.detach(), dim=0)) == len(texts)
    forget()
    for options in ({}, {"local_files_only": True}):
        theirs = SentenceTransformer(str(tmp_path / "model"), device="cpu", trust_remote_code=True, **options)
        (kind,) = {type(module) for module in theirs.modules() if type(module).__name__ == "RotaryMoeModel"}
        assert kind.__module__.startswith("transformers_modules.")
        assert (torch.from_numpy(theirs.encode_query(texts)) - queries.detach()).abs().max() <= 1e-5
        assert (torch.from_numpy(theirs.encode_document(texts)) - documents.detach()).abs().max() <= 1e-5


def test_routing_metrics_with_one_expert_with_even_and_uneven_loads_and_without_tokens():
    one = routing_metrics(torch.tensor([[7]]), torch.tensor([[7.0]]), [1])
    assert one["routing/load_entropy"] == one["routing/probability_entropy_layer_1"] == 1.0
    none = load_metrics(torch.zeros(1, 4, dtype=torch.int64))
    assert [value.tolist() for value in none] == [[0.0], [0.0], [4]]
    counts = torch.tensor([[5, 5, 5, 5], [20, 0, 0, 0]])
    probabilities = torch.tensor([[4.0, 4.0, 1.0, 1.0], [2.5, 2.5, 2.5, 2.5]])
    found = routing_metrics(counts, probabilities, [1, 3])
    shares = [0.4, 0.4, 0.1, 0.1]
    assert found == pytest.approx(
        {
            "routing/load_entropy_layer_1": 1.0,
            "routing/load_entropy_layer_3": 0.0,
            "routing/probability_entropy_layer_1": -sum(p * math.log(p) for p in shares) / math.log(4),
            "routing/probability_entropy_layer_3": 1.0,
            "routing/highest_load_layer_1": 1.0,
            "routing/highest_load_layer_3": 4.0,
            "routing/idle_experts_layer_1": 0.0,
            "routing/idle_experts_layer_3": 3.0,
            "routing/load_entropy": 0.5,
            "routing/idle_experts": 3.0,
        }
    )


def test_read_routing_sums_only_the_forwards_inside_its_block():
    model, (ids, mask) = tiny_moe(num_layers=4), padded_ids()
    output = model(input_ids=ids, attention_mask=mask.long())
    with read_routing(model) as sums:
        for rows in (slice(0, 1), slice(1, 3)):
            model(input_ids=ids[rows], attention_mask=mask[rows].long())
        found = sums()
    model(input_ids=ids)
    assert set(found) == {"expert_counts", "expert_probabilities", "router_squared_logsumexp"}
    assert found == sums()
    for name, value in found.items():
        torch.testing.assert_close(value, getattr(output, name))
    assert found["expert_probabilities"].requires_grad
    assert moe_layers(model) == [1, 3]
    with read_routing(tiny_rotary()) as sums:
        assert sums() == {}
    assert moe_layers(tiny_rotary()) == []


@pytest.mark.parametrize(
    ("settings", "layers"),
    [
        (Upcycling(), [1, 3, 5]),
        (Upcycling(num_experts=3, top_k=1), [1, 3, 5]),
        (Upcycling(num_experts=4, top_k=4, first=0, every=1), [0, 1, 2, 3, 4, 5]),
        (Upcycling(first=2, every=3), [2, 5]),
    ],
)
def test_preserving_keeps_the_dense_output(settings, layers):
    dense, (ids, mask) = tiny_rotary(num_layers=6), padded_ids()
    expected = dense(input_ids=ids, attention_mask=mask.long()).last_hidden_state[mask]
    sparse = upcycle(dense, settings)
    output = sparse(input_ids=ids, attention_mask=mask.long())
    assert (output.last_hidden_state[mask] - expected).abs().max() <= 1e-5
    assert sparse.config.moe_layers == layers
    routers = torch.cat([sparse.layers[layer].mlp.router.weight.detach() for layer in layers])
    assert float(routers.std()) == pytest.approx(0.02, rel=0.2)
    assert [index for index, layer in enumerate(sparse.layers) if isinstance(layer, RotaryMoeLayer)] == layers
    assert output.expert_counts.sum(1).tolist() == [settings.top_k * 18] * len(layers)
    assert len(sparse.layers[layers[0]].mlp.experts.w1) == settings.num_experts


def test_release_mode_drops_the_biases_and_does_not_renormalise_the_weights():
    dense, (ids, mask) = tiny_rotary(num_layers=4), padded_ids()
    first, second = (dense.layers[1].mlp.fc1.weight.clone(), dense.layers[1].mlp.fc2.weight.clone())
    expected = dense(input_ids=ids, attention_mask=mask.long()).last_hidden_state[mask]
    sparse = upcycle(dense, Upcycling("release"))
    mlp = sparse.layers[1].mlp
    assert isinstance(mlp, MoeMlp)
    assert mlp.experts.bias1 is None
    assert not mlp.experts.bias2.any()
    assert (mlp.experts.w1 == first).all()
    assert (mlp.experts.w2 == second.T).all()
    tokens = torch.randn(5, 32)
    share_T1 = mlp.router(tokens).weight_TK.sum(1, keepdim=True)
    assert (share_T1 - 0.28).abs().max() < 0.05
    alone = torch.nn.functional.gelu(tokens @ first.T) @ second.T
    torch.testing.assert_close(mlp(tokens[None])[0][0], share_T1 * alone, rtol=1e-5, atol=1e-6)
    found = sparse(input_ids=ids, attention_mask=mask.long()).last_hidden_state[mask]
    assert (found - expected).abs().max() > 1e-2


def test_upcycled_experts_share_no_memory_and_mode_dtype_dropout_and_checkpointing_are_kept():
    dense = tiny_rotary(dropout=0.3).to(torch.bfloat16).train()
    enable_checkpointing(dense)
    before = dense.layers[1].mlp.fc1.weight.clone()
    sparse = upcycle(dense, Upcycling(noise=0.25))
    experts = sparse.layers[1].mlp.experts
    with torch.no_grad():
        experts.w1[0] += 1
    assert torch.equal(experts.w1[1], before)
    assert torch.equal(dense.layers[1].mlp.fc1.weight, before)
    assert all(parameter.requires_grad for parameter in sparse.parameters())
    assert (sparse.training, sparse.dtype) == (True, torch.bfloat16)
    assert all(layer.gradient_checkpointing for layer in sparse.layers)
    assert (sparse.layers[1].post_mlp_dropout.p, sparse.layers[1].mlp.router.noise) == (0.3, 0.25)
    assert not any(value.is_meta for value in (*sparse.parameters(), *sparse.buffers()))


@pytest.mark.parametrize("top_k", [1, 2])
def test_a_gated_mlp_keeps_the_dense_output(top_k):
    """NomicBert, as in §7.1; in float64 to exclude rounding errors."""
    dense, (ids, mask) = tiny_nomic(num_layers=4).double(), padded_ids()
    gate, up, down = (getattr(dense.layers[1].mlp, f"{name}_proj").weight.clone() for name in ("gate", "up", "down"))
    expected = dense(input_ids=ids, attention_mask=mask.long()).last_hidden_state[mask]
    sparse = upcycle(dense, Upcycling(num_experts=4, top_k=top_k))
    output = sparse(input_ids=ids, attention_mask=mask.long())
    assert (output.last_hidden_state[mask] - expected).abs().max() <= 1e-12
    assert sparse.config.moe_layers == [1, 3]
    assert not any(name.endswith("bias1") for name in sparse.state_dict())
    experts = sparse.layers[1].mlp.experts
    assert (experts.w1 == torch.cat([gate, up])).all()
    assert (experts.w2 == down.T).all()
    counts = parameter_counts(sparse)
    assert counts.total - counts.active == 2 * (4 - top_k) * 3 * 32 * 64


def test_the_papers_model_has_475_million_parameters_of_which_305_are_active():
    config = XLMRobertaConfig(vocab_size=250_002, max_position_embeddings=514, type_vocab_size=1, layer_norm_eps=1e-5)
    with torch.device("meta"):
        dense = to_rotary(XLMRobertaModel(config, add_pooling_layer=False))
        assert dense.config.vocab_size == 250_048
        twin = parameter_counts(dense)
        released, preserving = (parameter_counts(upcycle(dense, Upcycling(mode))) for mode in ("release", "preserving"))
    assert twin.total == twin.active
    assert (round(released.total / 1e6, 2), round(released.active / 1e6, 2)) == (475.29, 305.42)
    assert preserving.total - released.total == 6 * 8 * 3072
    assert preserving.active - released.active == 6 * 2 * 3072


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"top_k": 9}, "upcycling.top_k must be at most the number of experts, 8, got 9"),
        ({"every": 0}, "upcycling.every must be >= 1, got 0"),
        ({"first": -1}, "upcycling.first must be >= 0, got -1"),
        ({"noise": 1.0}, "upcycling.noise must be < 1, got 1.0"),
        ({"first": 2}, "upcycling.first must be < 2, the model's number of layers, got 2"),
    ],
)
def test_invalid_upcycling_settings_are_refused(options, says):
    with pytest.raises(OptionError, match=says):
        upcycle(tiny_rotary(), Upcycling(**options))


def test_only_a_dense_rotary_encoder_is_upcycled():
    says = "upcycling needs rotary positions, got 'a bert backbone'; take NomicBert, or convert XLM-R or BERT with"
    with pytest.raises(OptionError, match=says):
        upcycle(tiny_bert(), Upcycling())
    with pytest.raises(OptionError, match="needs a dense backbone, and this one has experts, got 'a rotary_moe"):
        upcycle(tiny_moe(), Upcycling())


ROWS = 370
SIZES = {"vocab_size": ROWS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"intermediate_size": 64, "max_position_embeddings": 66}


def source(kind, **settings):
    torch.manual_seed(0)
    model = AutoModelForMaskedLM.from_config(AutoConfig.for_model(kind, **SIZES | settings)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.tie_weights()
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_conversion_changes_only_the_positions(kind):
    """With zero position embeddings and a rotation by zero, states and logits are equal."""
    model = source(kind)
    rotary = to_rotary(model)
    torch.nn.init.zeros_(model.base_model.embeddings.position_embeddings.weight)
    rotary.base_model.rotary_emb.inv_freq.zero_()
    ids, mask = padded_ids()
    ids = ids % ROWS
    expected, found = (one(input_ids=ids, attention_mask=mask.long()).logits[mask] for one in (model, rotary))
    assert expected.std() > 0.1
    torch.testing.assert_close(found[:, :ROWS], expected, rtol=1e-4, atol=1e-4)


def test_the_vocabulary_is_padded_to_a_multiple_of_64_with_rows_that_are_never_predicted():
    rotary = to_rotary(source("xlm-roberta"))
    words = rotary.get_input_embeddings().weight
    assert rotary.config.vocab_size == len(words) == 384
    assert not words[ROWS:].any()
    assert rotary.get_output_embeddings().weight is words
    ids, mask = padded_ids()
    shares = rotary(input_ids=ids % ROWS, attention_mask=mask.long()).logits[mask].softmax(-1)
    assert shares[:, ROWS:].max() < 1e-30


def test_a_written_model_loads_as_a_backbone_and_as_a_masked_language_model(tmp_path):
    write_rotary_model(language_model_folder(tmp_path / "bert", "bert"), tmp_path / "rotary")
    backbone, tokenizer = load_backbone(BackboneConfig(str(tmp_path / "rotary")))
    assert type(backbone).__name__ == "JinaEmbeddingsV3Model"
    assert tokenizer.model_max_length == 2048
    module = MaskedLMModule("mlm", BackboneConfig(str(tmp_path / "rotary")), separate_documents=True)
    ids, mask = padded_ids()
    inner = module.language_model.eval().backbone(input_ids=ids, attention_mask=mask.long()).last_hidden_state
    alone = backbone(input_ids=ids, attention_mask=mask.long()).last_hidden_state
    torch.testing.assert_close(inner[mask], alone[mask])


def test_an_encoder_without_a_head_is_converted_and_written(tmp_path):
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
        (tiny_mistral, {}, "model cannot be converted, got 'mistral'; convert one of xlm-roberta, roberta, bert"),
        (lambda: source("bert"), {"rope_theta": 1.0}, "rope_theta must be > 1, got 1.0"),
        (lambda: source("bert", hidden_act="relu"), {}, "hidden_act must be gelu"),
        (lambda: source("bert", num_attention_heads=32), {}, "must have heads of even width, got 'heads of width 1'"),
    ],
)
def test_models_and_options_that_cannot_be_converted_are_refused(model, options, says):
    with pytest.raises(OptionError, match=says):
        to_rotary(model(), **options)
