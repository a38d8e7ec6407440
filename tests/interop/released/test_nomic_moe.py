import pytest
import torch

from embeddings.common import InputError
from embeddings.interop.released.nomic import load_moe as load
from embeddings.models import BackboneConfig, Embedder, RotaryMoeModel, load_backbone
from embeddings.modules import MoEEmbedModule
from tests.interop.released.nomic import EXPERTS, HIDDEN, INNER, MOE, nomic_folder, nomic_states
from tests.interop.released.published import TEXTS, assert_same, by_library, changed_config, describe, each, encoded
from tests.models.reading import random_tokens


def expected(state, tokenizer, prompt, max_length=2048):
    def vector(text):
        ids = tokenizer(prompt + text, truncation=True, max_length=max_length)["input_ids"]
        return nomic_states(state, MOE, torch.tensor(ids)).mean(0)

    return each(TEXTS, vector)


@pytest.mark.usefixtures("travelling_code")
def test_the_imported_model_gives_the_published_vectors(tmp_path):
    folder, state, tokenizer = nomic_folder(tmp_path / "published", MOE)
    made = load(folder)
    assert sorted(made.report.used) == sorted(state)
    assert made.report.left == []
    made.model.save_pretrained(tmp_path / "ours")
    for role in ("document", "query"):
        vectors = expected(state, tokenizer, f"search_{role}: ")
        assert_same(encoded(tmp_path / "ours", role=role), vectors)
        assert_same(by_library(tmp_path / "ours", role), vectors)
    backbone, _ = load_backbone(BackboneConfig(str(tmp_path / "ours")))
    assert isinstance(backbone, RotaryMoeModel)
    assert backbone.config.moe_layers == [1, 3]


def test_what_the_folder_says_of_texts_goes_along(tmp_path):
    folder, state, tokenizer = nomic_folder(tmp_path / "published", MOE)
    describe(folder, HIDDEN, prompts={"passage": "search_document: ", "query": "a query: "})
    load(folder).model.save_pretrained(tmp_path / "ours")
    text = Embedder.from_pretrained(tmp_path / "ours").text
    assert (text.query_max_length, text.document_max_length, text.pool_prompt) == (40, 40, True)
    assert (text.prompts["query"], text.prompts["document"]) == ("a query: ", "search_document: ")
    assert text.prompts["passage"] == text.prompts["document"]
    assert_same(encoded(tmp_path / "ours", role="query"), expected(state, tokenizer, "a query: ", 40))


def test_experts_keep_their_own_matrices(tmp_path):
    folder, state, _ = nomic_folder(tmp_path, MOE)
    experts = load(folder).model.backbone.layers[3].mlp.experts
    assert experts.w1.shape == (EXPERTS, INNER, HIDDEN)
    own = state["encoder.layers.3.mlp.experts.mlp.w2"][INNER : 2 * INNER]
    assert torch.equal(experts.w2[1].detach(), own)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"moe_normalize_expert_weights": True}, "moe_normalize_expert_weights True, and only False is known here"),
        ({"prenorm": True}, "has prenorm True, and only False is known here"),
        ({"num_experts": "four"}, "has num_experts 'four', expected a whole number >= 1"),
        ({"num_experts": 8}, "router.layer.weight has shape (4, 32), by config.json it has (8, 32)"),
        ({"n_layer": 6}, "lacks 24 of the 76 tensors"),
        ({"n_layer": 2}, "has 24 tensors that Nomic's encoder with experts has no place for, encoder.layers.2"),
    ],
)
def test_a_config_that_does_not_fit_is_one_line(fields, says, tmp_path):
    folder, _, _ = nomic_folder(tmp_path, MOE)
    changed_config(folder, **fields)
    with pytest.raises(InputError) as error:
        load(folder)
    assert says in str(error.value)


def test_the_imported_model_is_trained_with_its_experts(tmp_path):
    folder, state, _ = nomic_folder(tmp_path / "published", MOE)
    load(folder).model.save_pretrained(tmp_path / "ours")
    module = MoEEmbedModule(BackboneConfig(str(tmp_path / "ours")), initial_model=str(tmp_path / "ours"))
    assert module.moe_layers == [1, 3]
    router = module.embedder.backbone.layers[1].mlp.router.weight
    assert torch.equal(router.detach(), state["encoder.layers.1.mlp.router.layer.weight"])
    module.embedder(random_tokens(384, [5, 9]))[:, 0].sum().backward()
    assert router.grad.abs().max() > 0
