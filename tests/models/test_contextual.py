"""The two-stage model: its vectors by a loop, gradients, precision, limits, and the directory it is kept in."""

import json
import shutil

import pytest
import torch
from torch import nn

from embeddings.common import InputError, OptionError, TextSettings
from embeddings.models import (
    BackboneConfig,
    ContextualEmbedder,
    Embedder,
    LoraSettings,
    MeanPooling,
    add_lora,
    load_embedder,
)
from embeddings.models.context_layers import states_behind_context
from embeddings.models.directory import ContextForm, read_context_options, write_norm
from tests.helpers.tiny import tiny_bert, tiny_mistral, wordpiece_tokenizer
from tests.models.contextual_models import BACKBONES, tiny_contextual
from tests.models.reading import carried_code, random_tokens

LENGTHS = [7, 3, 30, 1]
TOKENS = random_tokens(384, LENGTHS)
DOCUMENTS = random_tokens(384, [4, 9, 3, 8, 2], seed=1)
OTHERS = random_tokens(384, [4, 9, 3, 8, 2], seed=2)


@pytest.mark.parametrize("kind", ["bert", "nomic"])
@torch.no_grad()
def test_vectors_equal_a_loop_that_pools_text_alone(kind):
    embedder, tokens = tiny_contextual(kind), random_tokens(384, [9, 6, 12], skip=2)
    context = embedder.embed_context(DOCUMENTS)
    vectors = embedder(tokens, context)
    first, last = embedder.residual.layers[0], embedder.residual.layers[2]
    whole = []
    handle = embedder.backbone.register_forward_hook(lambda _, __, output: whole.append(output.last_hidden_state))
    embedder(tokens, context)
    handle.remove()
    assert whole[0].shape[1] == 5 + 3 + 12
    for row, length in enumerate([9, 6, 12]):
        pooled = sum(whole[0][row, 5 + 3 + i] for i in range(2, length)) / (length - 2)
        vector = pooled + last.weight @ torch.relu(first.weight @ pooled + first.bias) + last.bias
        torch.testing.assert_close(vectors[row], vector / vector.norm(), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_without_soft_prompt_and_residual_it_is_the_papers_model():
    embedder = tiny_contextual(num_soft_prompts=0, residual_projection=False, normalize=False)
    assert embedder.residual is None
    context = embedder.embed_context(DOCUMENTS)
    states = states_behind_context(
        embedder.backbone, context.expand(4, -1, -1), torch.empty(0, 32), TOKENS.input_ids_NL, TOKENS.attention_mask_NL
    )
    for row, length in enumerate(LENGTHS):
        torch.testing.assert_close(embedder(TOKENS, context)[row], states[row, :length].mean(0), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_text_beyond_the_positions_and_a_context_beyond_the_slots_are_one_line():
    embedder = tiny_contextual("nomic")
    embedder(random_tokens(384, [120]))
    with pytest.raises(OptionError, match="document_max_length must leave texts of at most 120 tokens beside 8"):
        embedder(random_tokens(384, [121]))
    with pytest.raises(OptionError, match=r"context does not fit the model: .* at most 5 vectors .* got \(6, 32\)"):
        embedder(TOKENS, torch.zeros(6, 32))


def test_gradients_reach_every_weight_of_both_stages():
    embedder = tiny_contextual(context_dropout=0.2).train()
    embedder(TOKENS, embedder.embed_context(DOCUMENTS))[:, 0].sum().backward()
    without = [name for name, weight in embedder.named_parameters() if weight.grad is None]
    assert without == []
    zero = {name for name, weight in embedder.named_parameters() if weight.grad.abs().max() == 0}
    assert all("position_embeddings" not in name or "padding" in name for name in zero)
    assert not any(name.startswith(("slots", "soft_prompt", "residual", "first_stage.projection")) for name in zero)


def test_gradients_of_the_context_equal_differences():
    embedder = tiny_contextual("nomic", num_context=2, num_soft_prompts=1).double()
    context = embedder.embed_context(DOCUMENTS)[:2].detach().requires_grad_()
    tokens = random_tokens(384, [4, 2])
    assert torch.autograd.gradcheck(lambda leaf: embedder(tokens, leaf), (context,), fast_mode=True)


@torch.no_grad()
def test_autocast_and_bfloat16_weights_stay_near_float32():
    def vectors(embedder):
        context = embedder.embed_context(DOCUMENTS)
        return [context, embedder(TOKENS, context)]

    exact = vectors(tiny_contextual())
    assert (exact[0].norm(dim=1) - 1).abs().max() > 0.05
    with torch.autocast("cpu", torch.bfloat16):
        cast = vectors(tiny_contextual())
    for found in (cast, vectors(tiny_contextual().bfloat16())):
        for low, high in zip(found, exact, strict=True):
            assert low.dtype == torch.float32
            assert nn.functional.cosine_similarity(low, high).min() > 0.99


def test_a_saved_model_trains_on_with_both_stages_checkpointed_and_with_the_dropout_that_is_given(tmp_path):
    tiny_contextual(context_dropout=0.0).save_pretrained(tmp_path / "model")
    gradients = []
    for checkpointing in (False, True):
        config = BackboneConfig(str(tmp_path / "model"), gradient_checkpointing=checkpointing)
        embedder = ContextualEmbedder.from_config(config)
        assert embedder.training
        for backbone in (embedder.backbone, embedder.first_stage.backbone):
            on = any(getattr(module, "gradient_checkpointing", False) for module in backbone.modules())
            assert on is checkpointing
        embedder(TOKENS, embedder.embed_context(DOCUMENTS)).sum(0)[0].backward()
        gradients.append([weight.grad for weight in embedder.parameters()])
    assert gradients[0][0].abs().max() > 0
    torch.testing.assert_close(*gradients)
    for dropout in (0.25, None):
        again = ContextualEmbedder.from_config(BackboneConfig(str(tmp_path / "model"), dropout=dropout))
        for backbone in (again.backbone, again.first_stage.backbone):
            found = {part.p for part in backbone.modules() if isinstance(part, nn.Dropout)}
            assert found == {dropout or 0.0}


@torch.no_grad()
def test_adapters_of_both_stages_are_merged_into_what_is_saved(tmp_path):
    torch.manual_seed(0)
    settings = LoraSettings(rank=4, dropout=0.0)
    first, second = add_lora(tiny_bert(1), settings), add_lora(tiny_bert(), settings)
    for backbone in (first, second):
        for name, weight in backbone.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.1)
    embedder = ContextualEmbedder(first, second, wordpiece_tokenizer(), num_context=5, num_soft_prompts=3).eval()
    before = embedder(TOKENS, embedder.embed_context(DOCUMENTS))
    embedder.save_pretrained(tmp_path / "model")
    again = ContextualEmbedder.from_pretrained(tmp_path / "model")
    assert not any("lora_" in name for name in again.state_dict())
    assert (again(TOKENS, again.embed_context(DOCUMENTS)) - before).abs().max() <= 1e-5


BARE = {"num_soft_prompts": 0, "residual_projection": False, "normalize": False}


@pytest.mark.parametrize(("kind", "options"), [("bert", {}), ("modernbert", {}), ("decoder", BARE)])
@torch.no_grad()
def test_saving_and_loading_keeps_vectors_and_settings(tmp_path, kind, options):
    text = TextSettings(24, 40, prompts={"query": "search_query: ", "document": "search_document: "}, pool_prompt=True)
    embedder = tiny_contextual(kind, context_dropout=0.25, text=text, **options)
    embedder.save_pretrained(tmp_path / "model")
    again = load_embedder(tmp_path / "model")
    assert isinstance(again, ContextualEmbedder)
    assert (again.text, again.normalize) == (text, embedder.normalize)
    assert (again.num_context, again.slots.dropout_fraction) == (5, 0.25)
    assert not any(module.training for module in again.modules())
    for name, weight in embedder.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight)
    # Loaded weights lie at other addresses, which some kernels answer with another rounding.
    context = embedder.embed_context(DOCUMENTS)
    assert (again.embed_context(DOCUMENTS) - context).abs().max() <= 1e-6
    for given in (context, None):
        assert (again(TOKENS, given) - embedder(TOKENS, given)).abs().max() <= 1e-6


def test_each_loader_takes_its_own_kind_and_names_the_other(tmp_path):
    tiny_contextual().save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"is a contextual model; load it with embeddings\.models\.load_embedder"):
        Embedder.from_pretrained(tmp_path)
    # A plain model takes a contextual one's place with nothing of it left.
    Embedder(tiny_bert(), wordpiece_tokenizer(), MeanPooling(32)).save_pretrained(tmp_path)
    assert not list(tmp_path.glob("*.py"))
    assert type(load_embedder(tmp_path)) is Embedder
    with pytest.raises(InputError, match="is no contextual model"):
        ContextualEmbedder.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"num_context": 0}, "num_context must be >= 1, got 0"),
        ({"num_soft_prompts": -1}, "num_soft_prompts must be >= 0, got -1"),
        ({"context_dropout": 1.5}, r"context_dropout must be in \[0, 1\], got 1.5"),
        ({"context_max_length": 0}, "context_max_length must be >= 1, got 0"),
        ({"context_max_length": 129}, "context_max_length must be <= 128, the positions that the first stage has"),
    ],
)
def test_impossible_numbers_are_refused(options, says):
    with pytest.raises(OptionError, match=says):
        tiny_contextual(**options)


@pytest.mark.parametrize(
    ("kind", "num_positions", "max_length", "longest"),
    [
        ("bert", 24, None, 24),  # the first stage reads whole documents
        ("bert", 24, 20, 128),  # and no more than its limit
        ("bert", 200, None, 128),
        ("nomic", 200, None, 120),  # five context vectors and three soft prompts take the second stage's indices
        ("nomic", 119, None, 119),
    ],
)
def test_the_longest_document_is_what_both_stages_have_positions_for(kind, num_positions, max_length, longest):
    embedder = ContextualEmbedder(
        tiny_bert(num_positions=num_positions),
        BACKBONES[kind](),
        wordpiece_tokenizer(),
        num_context=5,
        num_soft_prompts=3,
        context_max_length=max_length,
    )
    embedder.check_lengths(TextSettings(query_max_length=40, document_max_length=longest))
    with pytest.raises(OptionError, match=rf"^mine\.document_max_length must be <= {longest}, the positions that the "):
        embedder.check_lengths(TextSettings(query_max_length=40, document_max_length=longest + 1), "mine")


def test_backbones_that_do_not_fit_are_refused():
    with pytest.raises(OptionError, match="backbone must read its context as a set, and sees its order"):
        ContextualEmbedder(tiny_bert(), tiny_mistral(), wordpiece_tokenizer())
    small = tiny_bert()
    small.resize_token_embeddings(8)
    with pytest.raises(OptionError, match="first_stage_backbone must read the tokens of the second stage's tokenizer"):
        ContextualEmbedder(small, tiny_bert(), wordpiece_tokenizer())
    with pytest.raises(OptionError, match="backbone must rotate by index where context vectors have positions"):
        tiny_contextual("bert", form=ContextForm(has_positions=True))


def edit(file, **changes):
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("contextual") / "model"
    tiny_contextual().save_pretrained(folder)
    return folder


def test_both_stages_lie_in_the_directory_with_their_code(written):
    code = {"context_layers", "pooling", "poolings", "portable", "portable_contextual"}
    assert carried_code(written) == code
    names = {"config.json", "config_sentence_transformers.json", "modules.json", "text_settings.json"}
    names |= {"model.safetensors", "tokenizer.json", "tokenizer_config.json", "1_Pooling/config.json"}
    names |= {f"0_Context/{name}" for name in ("config.json", "context.json", "context.safetensors")}
    names |= {"0_Context/model.safetensors", "2_ResidualHead/config.json", "2_ResidualHead/model.safetensors"}
    found = {str(path.relative_to(written)) for path in written.rglob("*") if path.is_file()}
    assert found == names | {f"{name}.py" for name in code}
    assert read_context_options(written) == {
        "num_context": 5,
        "num_soft_prompts": 3,
        "context_dropout": 0.005,
        "context_max_length": None,
        "residual_projection": True,
        "form": ContextForm(),
    }


def test_a_directory_that_does_not_say_a_documents_limit_has_none(tmp_path):
    tiny_contextual(context_max_length=4).save_pretrained(tmp_path / "model")
    assert ContextualEmbedder.from_pretrained(tmp_path / "model").first_stage.max_length == 4
    file = tmp_path / "model/0_Context/context.json"
    file.write_text(file.read_text().replace("context_max_length", "unknown"))
    assert ContextualEmbedder.from_pretrained(tmp_path / "model").first_stage.max_length is None


def insert_norm(folder):
    """Put a layer norm behind the pooling."""
    write_norm(folder / "3_LayerNorm", nn.LayerNorm(32))
    entries = json.loads((folder / "modules.json").read_text())
    entries.insert(2, {"type": "sentence_transformers.models.LayerNorm", "path": "3_LayerNorm"})
    (folder / "modules.json").write_text(json.dumps(entries))


DAMAGE = {
    "first stage gone": lambda d: (d / "0_Context/model.safetensors").unlink(),
    "first stage without a config": lambda d: (d / "0_Context/config.json").unlink(),
    "layers cut": lambda d: (d / "0_Context/context.safetensors").write_bytes(b"\x08"),
    "layers of another size": lambda d: edit(d / "0_Context/context.json", num_soft_prompts=4),
    "no size": lambda d: edit(d / "0_Context/context.json", num_context=None),
    "impossible limit": lambda d: edit(d / "0_Context/context.json", context_max_length=0),
    "a limit that is no number": lambda d: edit(d / "0_Context/context.json", context_max_length="8"),
    "impossible size": lambda d: edit(d / "0_Context/context.json", num_context=0),
    "settings no JSON": lambda d: (d / "0_Context/context.json").write_text("{"),
    "residual gone": lambda d: shutil.rmtree(d / "2_ResidualHead"),
    "residual without weights": lambda d: (d / "2_ResidualHead/model.safetensors").unlink(),
    "a layer norm": insert_norm,
    "another pooling": lambda d: edit(d / "1_Pooling/config.json", name="cls"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_directory_is_one_line(tmp_path, written, damage):
    shutil.copytree(written, tmp_path / "model")
    DAMAGE[damage](tmp_path / "model")
    with pytest.raises(InputError) as caught:
        ContextualEmbedder.from_pretrained(tmp_path / "model")
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)
