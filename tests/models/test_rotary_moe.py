"""The sparse encoder as a Hugging Face model: padding, precision, checkpointing, and the directory it lives in."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor
from transformers import AutoModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from embeddings.common import TextSettings
from embeddings.models import Embedder, MeanPooling
from embeddings.models.backbone import enable_checkpointing
from embeddings.models.moe.rotary_moe import RotaryMoeConfig, RotaryMoeModel
from embeddings.models.moe.upcycling import Upcycling, upcycle
from tests.helpers.contrastive import gradient_vector
from tests.helpers.tiny import tiny_bert, wordpiece_tokenizer
from tests.models.moe import padded_ids, stirred, tiny_moe, tiny_nomic
from tests.models.reading import carried_code, read


def states(model: RotaryMoeModel, ids: Tensor, mask: Tensor) -> Tensor:
    found: Tensor = model(input_ids=ids, attention_mask=mask.long()).last_hidden_state
    return found.detach()


def test_padding_changes_no_state_and_is_not_counted() -> None:
    model, (ids, mask) = tiny_moe(), padded_ids()
    output = model(input_ids=ids, attention_mask=mask.long())
    parts = [model(input_ids=row[keep][None]) for row, keep in zip(ids, mask, strict=True)]
    alone = torch.cat([part.last_hidden_state[0] for part in parts])
    assert (output.last_hidden_state[mask] - alone).abs().max() <= 1e-5
    assert torch.equal(output.expert_counts, sum(part.expert_counts for part in parts))
    assert output.expert_counts.sum(1).tolist() == [2 * 18]
    for name in ("expert_probabilities", "router_squared_logsumexp"):
        torch.testing.assert_close(getattr(output, name), sum(getattr(part, name) for part in parts))


def test_positions_are_relative() -> None:
    model = tiny_moe()
    ids = torch.randint(5, 300, (1, 20))
    moved = model(input_ids=ids, position_ids=torch.arange(20)[None] + 100).last_hidden_state
    assert (moved - model(input_ids=ids).last_hidden_state).abs().max() <= 1e-5


def test_embeddings_in_place_of_ids_and_a_mask_of_pairs_are_taken() -> None:
    model, (ids, mask) = tiny_moe(), padded_ids()
    expected = states(model, ids, mask)[mask]
    words = model.get_input_embeddings()(ids)
    assert torch.equal(model(inputs_embeds=words, attention_mask=mask.long()).last_hidden_state[mask], expected)
    pairs = (mask[:, :, None] == mask[:, None, :])[:, None]
    output = model(input_ids=ids, attention_mask=pairs)
    torch.testing.assert_close(output.last_hidden_state[mask], expected, rtol=1e-5, atol=1e-5)
    assert output.expert_counts.sum().item() == 2 * mask.numel()
    with pytest.raises(ValueError, match="give either input_ids or inputs_embeds"):
        model(input_ids=ids, inputs_embeds=words)


def test_a_recomputed_layer_has_the_same_gradients_and_counts_once() -> None:
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
    assert found[0][0].sum().item() == 2 * 18
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1].norm() > 0
    assert torch.equal(found[0][1], found[1][1])


def test_bfloat16_and_autocast_are_near_float32() -> None:
    model, (ids, mask) = tiny_moe(), padded_ids()
    exact = states(model, ids, mask)[mask]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under_autocast = states(model, ids, mask)[mask].float()
    in_bfloat16 = states(model.to(torch.bfloat16), ids, mask)[mask].float()
    for found in (under_autocast, in_bfloat16):
        # A token near a tie between experts may go elsewhere.
        assert 1e-5 < float((found - exact).norm() / exact.norm()) < 0.1


def test_a_model_directory_gives_the_same_vectors(tmp_path: Path) -> None:
    embedder = Embedder(tiny_moe(), wordpiece_tokenizer(), MeanPooling(32), text=TextSettings(16, 32)).eval()
    embedder.save_pretrained(tmp_path / "model")
    again = Embedder.from_pretrained(tmp_path / "model")
    assert isinstance(again.backbone, RotaryMoeModel)
    tokens = read(embedder.tokenizer, ["pad the fox", "two numbers", "z"], "", 32, False)
    assert torch.equal(again(tokens), embedder(tokens))
    assert again.text == embedder.text
    assert carried_code(tmp_path / "model") == {"experts", "rotary_moe"}
    Embedder(tiny_bert(), wordpiece_tokenizer(), MeanPooling(32)).save_pretrained(tmp_path / "model")
    assert not list((tmp_path / "model").glob("*.py"))


@pytest.mark.usefixtures("travelling_code")
def test_the_code_in_the_directory_gives_the_same_states(tmp_path: Path) -> None:
    model, (ids, mask) = tiny_moe(), padded_ids()
    model.save_pretrained(tmp_path / "model")
    kind = get_class_from_dynamic_module("rotary_moe.RotaryMoeModel", str(tmp_path / "model"))
    assert kind is not RotaryMoeModel
    config = kind.config_class.from_pretrained(tmp_path / "model")
    theirs = kind.from_pretrained(tmp_path / "model", config=config).eval()
    assert torch.equal(states(theirs, ids, mask), states(model, ids, mask))
    assert type(AutoModel.from_pretrained(tmp_path / "model", trust_remote_code=False)) is RotaryMoeModel


@pytest.fixture
def forget(travelling_code: None, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes transformers forget our architecture, as wherever this library is not installed."""

    def in_place() -> None:
        for mapping, known in ((CONFIG_MAPPING, "rotary_moe"), (MODEL_MAPPING, RotaryMoeConfig)):
            others = {name: kind for name, kind in mapping._extra_content.items() if name != known}
            assert len(others) == len(mapping._extra_content) - 1
            monkeypatch.setattr(mapping, "_extra_content", others)

    return in_place


@pytest.mark.parametrize("text", [TextSettings(24, 32, prompts={"query": "a query: "}), None])
@pytest.mark.parametrize("mode", ["preserving", "release", "gated"])
def test_sentence_transformers_gives_equal_vectors_of_an_upcycled_model(
    mode: str, text: TextSettings | None, tmp_path: Path, forget: Callable[[], None]
) -> None:
    tokenizer, prompted = wordpiece_tokenizer(), text is not None
    text = text or TextSettings(24, 32)
    gated = stirred(upcycle(tiny_nomic(num_layers=4), Upcycling(num_experts=4)))
    sparse = gated if mode == "gated" else tiny_moe(num_layers=4, mode=mode)
    embedder = Embedder(sparse, tokenizer, MeanPooling(32), text=text).eval()
    embedder.save_pretrained(tmp_path / "model")
    again = Embedder.from_pretrained(tmp_path / "model")
    torch.testing.assert_close(*(one(read(tokenizer, ["pad the fox", "z"], "", 32)) for one in (again, embedder)))
    assert (tmp_path / "model" / "portable.py").exists() == prompted
    texts = ["pad the fox", "two numbers " * 20, "7 jumps over", "", "z"]
    prompt = text.prompts.get("query", "")
    queries, documents = (
        embedder(read(tokenizer, texts, before, length)) for before, length in ((prompt, 24), ("", 32))
    )
    assert len(torch.unique(documents.detach(), dim=0)) == len(texts)
    forget()
    for options in ({}, {"local_files_only": True}):
        theirs = SentenceTransformer(str(tmp_path / "model"), device="cpu", trust_remote_code=True, **options)
        (kind,) = {type(module) for module in theirs.modules() if type(module).__name__ == "RotaryMoeModel"}
        assert kind.__module__.startswith("transformers_modules.")
        assert (torch.from_numpy(theirs.encode_query(texts)) - queries.detach()).abs().max() <= 1e-5
        assert (torch.from_numpy(theirs.encode_document(texts)) - documents.detach()).abs().max() <= 1e-5


def test_the_code_of_a_directory_does_not_run_unasked(tmp_path: Path, forget: Callable[[], None]) -> None:
    Embedder(tiny_moe(), wordpiece_tokenizer(), MeanPooling(32)).save_pretrained(tmp_path / "model")
    forget()
    with pytest.raises(ValueError, match="trust_remote_code"):
        SentenceTransformer(str(tmp_path / "model"), device="cpu", trust_remote_code=False)


@pytest.mark.parametrize("layers", [[], [2], [-1]])
def test_layers_that_are_not_there_are_named(layers: list[int]) -> None:
    config = RotaryMoeConfig(num_hidden_layers=2, hidden_size=32, num_attention_heads=4, moe_layers=layers)
    with torch.device("meta"), pytest.raises(ValueError, match="moe_layers must be some of the 2 layers from 0, got"):
        RotaryMoeModel(config)


def test_new_weights_are_drawn_as_the_config_says() -> None:
    config = RotaryMoeConfig(
        vocab_size=64,
        num_hidden_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        intermediate_size=64,
        moe_layers=[1],
        initializer_range=0.5,
        expert_bias=True,
    )
    mlp = RotaryMoeModel(config).layers[1].mlp
    for weight in (mlp.router.weight, mlp.experts.w1, mlp.experts.w2):
        assert float(weight.detach().std()) == pytest.approx(0.5, rel=0.15)
    assert not mlp.experts.bias1.any()
    assert not mlp.experts.bias2.any()
