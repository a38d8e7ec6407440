from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from embeddings.common import InputError, OptionError, PaddedTokens, TextSettings
from embeddings.models import (
    BackboneConfig,
    ContextualEmbedder,
    Embedder,
    LoraSettings,
    MeanPooling,
    add_lora,
    load_embedder,
)
from embeddings.models.backbone import enable_checkpointing
from embeddings.models.context_layers import states_behind_context
from embeddings.models.directory import ContextForm
from tests.helpers.tiny import tiny_bert, tiny_mistral, wordpiece_tokenizer
from tests.models.contextual_models import BACKBONES, tiny_contextual
from tests.models.reading import random_tokens

LENGTHS = [7, 3, 30, 1]
TOKENS = random_tokens(384, LENGTHS)
DOCUMENTS = random_tokens(384, [4, 9, 3, 8, 2], seed=1)
OTHERS = random_tokens(384, [4, 9, 3, 8, 2], seed=2)


@pytest.mark.parametrize("kind", BACKBONES)
@torch.no_grad()
def test_the_order_of_the_context_changes_no_vector(kind: str) -> None:
    embedder = tiny_contextual(kind)
    context = embedder.embed_context(DOCUMENTS)
    vectors = embedder(TOKENS, context)
    for order in ([4, 3, 2, 1, 0], [2, 0, 4, 1, 3]):
        assert (embedder(TOKENS, context[order]) - vectors).abs().max() <= 1e-5


@pytest.mark.parametrize("kind", BACKBONES)
@torch.no_grad()
def test_another_context_changes_every_vector(kind: str) -> None:
    embedder = tiny_contextual(kind)
    first, second = (embedder.embed_context(documents) for documents in (DOCUMENTS, OTHERS))
    for a, b in ((first, second), (first, None)):
        assert (embedder(TOKENS, a) - embedder(TOKENS, b)).abs().amax(1).min() > 1e-5


def test_dropout_of_a_config_holds_in_both_stages(tmp_path: Path) -> None:
    embedder = tiny_contextual()
    embedder.save_pretrained(tmp_path / "model")
    for dropout in (0.25, None):
        again = ContextualEmbedder.from_config(BackboneConfig(str(tmp_path / "model"), dropout=dropout))
        for backbone in (again.backbone, again.first_stage.backbone):
            found = {part.p for part in backbone.modules() if isinstance(part, torch.nn.Dropout)}
            assert found == {dropout or 0.0}


@torch.no_grad()
def test_a_context_of_null_vectors_is_no_context() -> None:
    embedder = tiny_contextual()
    null_JH = embedder.slots.null_H.expand(5, -1)
    assert torch.equal(embedder(TOKENS, null_JH), embedder(TOKENS))
    context = embedder.embed_context(DOCUMENTS)[:2]
    assert torch.equal(embedder(TOKENS, context), embedder(TOKENS, torch.cat([context, null_JH[:3]])))


@torch.no_grad()
def test_dropping_the_whole_context_in_training_is_no_context() -> None:
    embedder = tiny_contextual(context_dropout=1.0)
    without = embedder(TOKENS)
    embedder.train()
    assert torch.equal(embedder(TOKENS, embedder.embed_context(DOCUMENTS)), without)


@pytest.mark.parametrize("kind", ["bert", "nomic"])
@torch.no_grad()
def test_vectors_equal_a_loop_that_pools_text_alone(kind: str) -> None:
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
def test_the_states_of_context_and_soft_prompt_never_enter_the_pooling() -> None:
    embedder = tiny_contextual()
    context = embedder.embed_context(DOCUMENTS)
    vectors = embedder(TOKENS, context)

    def spoil(_: object, __: object, output: object) -> None:
        output.last_hidden_state[:, :8] += 100.0  # type: ignore[attr-defined]

    embedder.backbone.register_forward_hook(spoil)
    assert torch.equal(embedder(TOKENS, context), vectors)


@pytest.mark.parametrize(("num_context", "num_soft_prompts"), [(1, 0), (1, 8), (4, 0), (12, 2)])
@torch.no_grad()
def test_every_text_stands_behind_all_slots_and_soft_prompts(num_context: int, num_soft_prompts: int) -> None:
    embedder = tiny_contextual(num_context=num_context, num_soft_prompts=num_soft_prompts)
    assert (embedder.num_context, embedder.num_extra_tokens) == (num_context, num_context + num_soft_prompts)
    lengths = []
    embedder.backbone.encoder.register_forward_pre_hook(lambda _, inputs: lengths.append(inputs[0].shape))
    vectors = embedder(TOKENS, embedder.embed_context(DOCUMENTS)[:1])
    assert lengths == [(4, num_context + num_soft_prompts + 30, 32)]
    assert torch.allclose(vectors.norm(dim=1), torch.ones(4), atol=1e-6)


@torch.no_grad()
def test_without_soft_prompt_and_residual_it_is_the_papers_model() -> None:
    embedder = tiny_contextual(num_soft_prompts=0, residual_projection=False, normalize=False)
    assert embedder.residual is None
    context = embedder.embed_context(DOCUMENTS)
    states = states_behind_context(
        embedder.backbone, context.expand(4, -1, -1), torch.empty(0, 32), TOKENS.input_ids_NL, TOKENS.attention_mask_NL
    )
    for row, length in enumerate(LENGTHS):
        torch.testing.assert_close(embedder(TOKENS, context)[row], states[row, :length].mean(0), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_new_residual_projection_keeps_the_pooled_states_to_the_bit() -> None:
    torch.manual_seed(0)
    new = ContextualEmbedder(tiny_bert(1), tiny_bert(), wordpiece_tokenizer(), num_context=5).eval()
    vectors = new(TOKENS)
    new.residual = None
    assert torch.equal(new(TOKENS), vectors)


@pytest.mark.parametrize("kind", ["bert", "xlm_roberta"])
@torch.no_grad()
def test_context_takes_no_room_from_a_text_with_learned_positions(kind: str) -> None:
    embedder = tiny_contextual(kind, num_context=100, text=TextSettings(query_max_length=128, document_max_length=128))
    tokens = random_tokens(384, [128])
    vectors = embedder(tokens)
    shorter = PaddedTokens(*(tensor[:, :127] for tensor in tokens))
    assert (embedder(shorter) - vectors).abs().max() > 1e-6


@torch.no_grad()
def test_a_text_beyond_the_positions_is_one_line() -> None:
    embedder = tiny_contextual("nomic")
    embedder(random_tokens(384, [120]))
    with pytest.raises(OptionError, match="document_max_length must leave texts of at most 120 tokens beside 8"):
        embedder(random_tokens(384, [121]))


def test_gradients_reach_every_weight_of_both_stages() -> None:
    embedder = tiny_contextual(context_dropout=0.2).train()
    embedder(TOKENS, embedder.embed_context(DOCUMENTS))[:, 0].sum().backward()
    without = [name for name, weight in embedder.named_parameters() if weight.grad is None]
    assert without == []
    zero = {name for name, weight in embedder.named_parameters() if weight.grad.abs().max() == 0}
    assert all("position_embeddings" not in name or "padding" in name for name in zero)
    assert not any(name.startswith(("slots", "soft_prompt", "residual", "first_stage.projection")) for name in zero)


def test_gradients_of_the_context_equal_differences() -> None:
    embedder = tiny_contextual("nomic", num_context=2, num_soft_prompts=1).double()
    context = embedder.embed_context(DOCUMENTS)[:2].detach().requires_grad_()
    tokens = random_tokens(384, [4, 2])
    assert torch.autograd.gradcheck(lambda leaf: embedder(tokens, leaf), (context,), fast_mode=True)


@torch.no_grad()
def test_autocast_and_bfloat16_weights_stay_near_float32() -> None:
    embedder = tiny_contextual()
    exact = embedder(TOKENS, embedder.embed_context(DOCUMENTS))
    with torch.autocast("cpu", torch.bfloat16):
        cast = embedder(TOKENS, embedder.embed_context(DOCUMENTS))
    low = tiny_contextual().bfloat16()
    for vectors in (cast, low(TOKENS, low.embed_context(DOCUMENTS))):
        assert vectors.dtype == torch.float32
        assert (vectors * exact).sum(1).min() > 0.99


def test_gradient_checkpointing_gives_the_same_gradients() -> None:
    gradients = []
    for checkpointing in (False, True):
        embedder = tiny_contextual().train()
        if checkpointing:
            enable_checkpointing(embedder.backbone)
        torch.manual_seed(0)
        embedder(TOKENS, embedder.embed_context(DOCUMENTS)).sum(0)[0].backward()
        gradients.append(embedder.first_stage.projection[0].weight.grad)
    assert gradients[0].abs().max() > 0
    torch.testing.assert_close(gradients[0], gradients[1])


@torch.no_grad()
def test_adapters_of_both_stages_are_merged_into_what_is_saved(tmp_path: Path) -> None:
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
def test_saving_and_loading_keeps_vectors_and_settings(tmp_path: Path, kind: str, options: dict[str, object]) -> None:
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
    context = embedder.embed_context(DOCUMENTS)
    # Loaded weights lie at other addresses, which some kernels answer with another rounding.
    for ours, theirs in (
        (again.embed_context(DOCUMENTS), context),
        (again(TOKENS, context), embedder(TOKENS, context)),
    ):
        assert (ours - theirs).abs().max() <= 1e-6
    assert (again(TOKENS) - embedder(TOKENS)).abs().max() <= 1e-6


def test_a_saved_model_is_trained_on_with_both_stages_checkpointed(tmp_path: Path) -> None:
    tiny_contextual().save_pretrained(tmp_path / "model")
    config = BackboneConfig(str(tmp_path / "model"), gradient_checkpointing=True)
    embedder = ContextualEmbedder.from_config(config)
    assert embedder.training
    for backbone in (embedder.backbone, embedder.first_stage.backbone):
        assert any(getattr(module, "gradient_checkpointing", False) for module in backbone.modules())
    embedder(TOKENS, embedder.embed_context(DOCUMENTS)).sum().backward()
    assert all(weight.grad is not None for weight in embedder.parameters())


def test_each_loader_takes_its_own_kind_and_names_the_other(tmp_path: Path) -> None:
    tiny_contextual().save_pretrained(tmp_path / "contextual")
    Embedder(tiny_bert(), wordpiece_tokenizer(), MeanPooling(32)).save_pretrained(tmp_path / "plain")
    assert type(load_embedder(tmp_path / "plain")) is Embedder
    with pytest.raises(InputError, match=r"is a contextual model; load it with embeddings\.models\.load_embedder"):
        Embedder.from_pretrained(tmp_path / "contextual")
    with pytest.raises(InputError, match="is no contextual model"):
        ContextualEmbedder.from_pretrained(tmp_path / "plain")


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
def test_impossible_numbers_are_refused(options: dict[str, object], says: str) -> None:
    with pytest.raises(OptionError, match=says):
        tiny_contextual(**options)  # type: ignore[arg-type]


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
def test_the_longest_document_is_what_both_stages_have_positions_for(
    kind: str, num_positions: int, max_length: int | None, longest: int
) -> None:
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


def test_backbones_that_do_not_fit_are_refused() -> None:
    with pytest.raises(OptionError, match="backbone must read its context as a set, and sees its order"):
        ContextualEmbedder(tiny_bert(), tiny_mistral(), wordpiece_tokenizer())
    small = tiny_bert()
    small.resize_token_embeddings(8)
    with pytest.raises(OptionError, match="first_stage_backbone must read the tokens of the second stage's tokenizer"):
        ContextualEmbedder(small, tiny_bert(), wordpiece_tokenizer())


def test_a_context_that_does_not_fit_is_one_line() -> None:
    with pytest.raises(OptionError, match=r"context does not fit the model: .* at most 5 vectors .* got \(6, 32\)"):
        tiny_contextual()(TOKENS, torch.zeros(6, 32))


def test_unit_length_is_the_direction_of_the_unnormalised_vector() -> None:
    raw, unit = tiny_contextual(normalize=False)(TOKENS), tiny_contextual()(TOKENS)
    torch.testing.assert_close(F.normalize(raw, dim=-1), unit)


def test_a_context_has_positions_only_where_the_backbone_rotates_by_them() -> None:
    form = ContextForm(has_positions=True)
    assert tiny_contextual("modernbert", form=form).has_positions
    with pytest.raises(OptionError, match="backbone must rotate by index where context vectors have positions"):
        tiny_contextual("bert", form=form)
