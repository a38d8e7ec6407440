"""The two-stage model and its layers: vectors against a loop, states after a context, limits, and its directory."""

import json
import shutil

import pytest
import torch
from torch import nn
from transformers import MPNetConfig, MPNetModel

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
from embeddings.models.context_layers import (
    ContextSlots,
    FirstStage,
    ResidualProjection,
    SoftPrompt,
    states_behind_context,
)
from embeddings.models.contextual import broken_rule
from embeddings.models.directory import ContextForm, read_context_options, write_norm
from embeddings.models.pooling import first_position, learned_positions
from tests.helpers.tiny import tiny_bert, tiny_mistral, wordpiece_tokenizer
from tests.models.contextual_models import (
    BACKBONES,
    SMALL,
    tiny_contextual,
    tiny_modernbert,
    tiny_nomic,
    tiny_xlm_roberta,
)
from tests.models.reading import carried_code, random_tokens
from tests.models.test_directory import edit

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
def test_without_soft_prompts_and_residual_projection_it_is_the_papers_model():
    embedder = tiny_contextual(num_soft_prompts=0, residual_projection=False, normalize=False)
    assert embedder.residual is None
    context = embedder.embed_context(DOCUMENTS)
    states = states_behind_context(
        embedder.backbone, context.expand(4, -1, -1), torch.empty(0, 32), TOKENS.input_ids_NL, TOKENS.attention_mask_NL
    )
    for row, length in enumerate(LENGTHS):
        torch.testing.assert_close(embedder(TOKENS, context)[row], states[row, :length].mean(0), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_text_beyond_the_positions_is_refused():
    embedder = tiny_contextual("nomic")
    embedder(random_tokens(384, [120]))
    with pytest.raises(OptionError, match="document_max_length must leave texts of at most 120 tokens beside 8"):
        embedder(random_tokens(384, [121]))


def test_gradients_of_the_context_equal_finite_differences():
    embedder = tiny_contextual("nomic", num_context=2, num_soft_prompts=1).double()
    context = embedder.embed_context(DOCUMENTS)[:2].detach().requires_grad_()
    tokens = random_tokens(384, [4, 2])
    assert torch.autograd.gradcheck(lambda leaf: embedder(tokens, leaf), (context,), fast_mode=True)


def test_checkpointing_and_dropout_apply_to_both_stages_of_a_loaded_model(tmp_path):
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
def test_adapters_of_both_stages_are_merged_into_the_saved_weights(tmp_path):
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


def test_each_loader_refuses_the_other_kind_of_model(tmp_path):
    tiny_contextual().save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"is a contextual model; load it with embeddings\.models\.load_embedder"):
        Embedder.from_pretrained(tmp_path)
    # A plain model replaces a contextual one completely.
    Embedder(tiny_bert(), wordpiece_tokenizer(), MeanPooling(32)).save_pretrained(tmp_path)
    assert not list(tmp_path.glob("*.py"))
    assert type(load_embedder(tmp_path)) is Embedder
    with pytest.raises(InputError, match="is not a contextual model"):
        ContextualEmbedder.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"num_context": 0}, "num_context must be >= 1, got 0"),
        ({"num_soft_prompts": -1}, "num_soft_prompts must be >= 0, got -1"),
        ({"context_dropout": 1.5}, r"context_dropout must be in \[0, 1\], got 1.5"),
        ({"form": ContextForm(has_null=False)}, "context_dropout must be 0: the model has no null vector, which"),
        ({"context_max_length": 0}, "context_max_length must be >= 1, got 0"),
        ({"context_max_length": 129}, "context_max_length must be <= 128, the positions that the first stage has"),
    ],
)
def test_invalid_options_are_refused(options, says):
    with pytest.raises(OptionError, match=says):
        tiny_contextual(**options)


@pytest.mark.parametrize(
    ("kind", "num_positions", "max_length", "longest"),
    [
        ("bert", 24, None, 24),  # the first stage does not truncate documents
        ("bert", 24, 20, 128),  # the first stage truncates documents
        ("nomic", 200, None, 120),  # five context vectors and three soft prompts use indices of the second stage
    ],
)
def test_documents_must_fit_the_positions_of_both_stages(kind, num_positions, max_length, longest):
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
    with pytest.raises(OptionError, match="backbone must not depend on the order of its context"):
        ContextualEmbedder(tiny_bert(), tiny_mistral(), wordpiece_tokenizer())
    small = tiny_bert()
    small.resize_token_embeddings(8)
    with pytest.raises(OptionError, match="first_stage_backbone must have embeddings for the second stage's tokenizer"):
        ContextualEmbedder(small, tiny_bert(), wordpiece_tokenizer())
    with pytest.raises(OptionError, match="backbone must have rotary positions if context vectors have positions"):
        tiny_contextual("bert", form=ContextForm(has_positions=True))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("contextual") / "model"
    tiny_contextual().save_pretrained(folder)
    return folder


def test_the_directory_contains_both_stages_and_their_code(written):
    code = {"context_layers", "pooling", "poolings", "portable"}
    assert carried_code(written) == code
    names = {"config.json", "config_sentence_transformers.json", "manifest.json", "modules.json", "text_settings.json"}
    names |= {"README.md", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "1_Pooling/config.json"}
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


def insert_norm(folder):
    """Insert a layer norm after the pooling."""
    write_norm(folder / "3_LayerNorm", nn.LayerNorm(32))
    entries = json.loads((folder / "modules.json").read_text())
    entries.insert(2, {"type": "sentence_transformers.models.LayerNorm", "path": "3_LayerNorm"})
    (folder / "modules.json").write_text(json.dumps(entries))


DAMAGE = {
    "layers truncated": lambda d: (d / "0_Context/context.safetensors").write_bytes(b"\x08"),
    "layers with another size": lambda d: edit(d / "0_Context/context.json", num_soft_prompts=4),
    "no number of documents": lambda d: edit(d / "0_Context/context.json", num_context=None),
    "a limit that is not a number": lambda d: edit(d / "0_Context/context.json", context_max_length="8"),
    "no residual": lambda d: shutil.rmtree(d / "2_ResidualHead"),
    "a layer norm": insert_norm,
    "another pooling": lambda d: edit(d / "1_Pooling/config.json", name="cls"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_directory_is_refused_in_one_line(tmp_path, written, damage):
    shutil.copytree(written, tmp_path / "model")
    (tmp_path / "model/manifest.json").unlink()
    DAMAGE[damage](tmp_path / "model")
    with pytest.raises(InputError) as caught:
        ContextualEmbedder.from_pretrained(tmp_path / "model")
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def stage(width=24):
    torch.manual_seed(0)
    return FirstStage(tiny_bert(), 32, width).eval()


@torch.no_grad()
def test_vectors_equal_a_loop_over_documents():
    tokens, first = random_tokens(384, LENGTHS, skip=2), stage()
    vectors = first(*tokens)
    assert vectors.shape == (4, 24)
    inner, outer = first.projection[0], first.projection[2]
    for row, length in enumerate(LENGTHS):
        states = tiny_bert()(tokens.input_ids_NL[row : row + 1, :length]).last_hidden_state[0]
        pooled = [state for state, kept in zip(states, tokens.pooling_mask_NL[row], strict=False) if kept]
        mean = sum(pooled) / max(1, len(pooled)) if pooled else torch.zeros(32)
        hidden = torch.nn.functional.gelu(inner.weight @ mean + inner.bias)
        torch.testing.assert_close(vectors[row], outer.weight @ hidden + outer.bias, rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("skip", [0, 2, 6])
def test_max_length_truncates_documents_and_pools_the_last_remaining_token(skip):
    tokens, first = random_tokens(384, LENGTHS, skip=skip), stage()
    truncated = [tensor[:, :5].clone() for tensor in tokens]
    for row, length in enumerate(LENGTHS):
        truncated[2][row, min(length, 5) - 1] = True
    expected, whole = first(*truncated), first(*tokens)
    first.max_length = 5
    torch.testing.assert_close(first(*tokens), expected)
    assert (whole - expected)[[0, 2]].abs().max() > 1e-4


def test_pools_prompt_includes_the_prompt_as_in_the_released_model():
    layer, tokens = stage(), random_tokens(384, LENGTHS, skip=2)
    everything = tokens._replace(pooling_mask_NL=tokens.attention_mask_NL)
    with torch.no_grad():
        plain, whole = layer(*tokens), layer(*everything)
        layer.pools_prompt = True
        assert torch.equal(layer(*tokens), whole)
    assert (plain - whole).abs().max() > 1e-3


def slots(num_context=5, dropout_fraction=0.0):
    torch.manual_seed(0)
    return ContextSlots(num_context, 8, dropout_fraction)


def test_every_text_has_the_same_context_and_empty_slots_are_null():
    layer, context = slots().eval(), torch.randn(3, 8)
    assert torch.equal(layer(context, 4), torch.stack([*context, layer.null_H, layer.null_H]).expand(4, 5, 8))
    for no_context in (None, torch.empty(0, 8), layer.null_H.expand(5, 8)):
        assert torch.equal(layer(no_context, 2), layer.null_H.expand(2, 5, 8))


def test_without_a_null_vector_there_are_as_many_slots_as_vectors():
    layer, context = ContextSlots(5, 8, 0.0, has_null=False).train(), torch.randn(3, 8)
    assert torch.equal(layer(context, 4), context.expand(4, 3, 8))
    assert layer(None, 2).shape == (2, 0, 8)
    assert not layer.state_dict()


@pytest.mark.parametrize("shape", [(6, 8), (5, 9), (1, 5, 8), (8,)])
def test_a_context_that_does_not_fit_is_refused(shape):
    with pytest.raises(ValueError, match="at most 5 vectors of width 8"):
        slots()(torch.zeros(shape), 2)


def test_full_dropout_removes_the_context_and_no_dropout_keeps_it_with_the_null_vector_in_the_graph():
    """The null vector must be in every rank's graph, or the reduction of gradients would hang."""
    context = torch.randn(5, 8)
    layer = slots(dropout_fraction=1.0).train()
    assert torch.equal(layer(context, 3), layer(None, 3))
    layer = slots(dropout_fraction=0.0).train()
    filled = layer(context, 3)
    assert torch.equal(filled, context.expand(3, 5, 8))
    filled.sum().backward()
    assert torch.equal(layer.null_H.grad, torch.zeros(8))
    assert abs(float(ContextSlots(1, 4096).null_H.detach().std()) - 0.01) < 1e-3


def test_dropout_replaces_slots_of_each_text_independently_at_its_rate():
    layer, context = slots(50, 0.25).train(), torch.randn(50, 8)
    expected = context.expand(200, 50, 8)
    found = layer(context, 200)
    dropped = (found == layer.null_H).all(-1)
    assert torch.equal(found[~dropped], expected[~dropped])
    assert abs(float(dropped.float().mean()) - 0.25) < 0.02
    assert dropped.any(0).all()
    assert (~dropped).any(1).all()
    assert torch.equal(layer.eval()(context, 200), expected)


@torch.no_grad()
def test_soft_prompts_are_the_projection_of_ones():
    torch.manual_seed(0)
    prompt = SoftPrompt(3, 8)
    first, second = prompt.layers[0], prompt.layers[2]
    hidden = [max(0.0, float(first.weight[i].sum() + first.bias[i])) for i in range(8)]
    flat = second.weight @ torch.tensor(hidden) + second.bias
    torch.testing.assert_close(prompt(), torch.stack([flat[8 * i : 8 * i + 8] for i in range(3)]))
    assert SoftPrompt(0, 8)().shape == (0, 8)
    assert list(SoftPrompt(0, 8).parameters()) == []
    assert "ones_H" not in prompt.state_dict()


def test_the_residual_projection_starts_as_the_identity_and_learns():
    torch.manual_seed(0)
    layer, vectors = ResidualProjection(8), torch.randn(4, 8)
    assert torch.equal(layer(vectors), vectors)
    layer(vectors).square().sum().backward()
    assert layer.layers[2].weight.grad.abs().max() > 0
    torch.nn.init.normal_(layer.layers[2].weight)
    hidden = torch.relu(vectors @ layer.layers[0].weight.T + layer.layers[0].bias)
    torch.testing.assert_close(layer(vectors), vectors + hidden @ layer.layers[2].weight.T)
    # Without the pooled states it is initialised at random: with zeros every text would have the zero vector.
    assert ResidualProjection(8, adds_pooled=False)(vectors).abs().min() > 0


IDS, SEEN = TOKENS.input_ids_NL, TOKENS.attention_mask_NL


def prefix(num_context=6, num_soft_prompts=3):
    torch.manual_seed(5)
    return torch.randn(4, num_context, 32), torch.randn(num_soft_prompts, 32)


def largest_difference(first, second):
    return float((first - second)[SEEN].abs().max())


@pytest.mark.parametrize("kind", BACKBONES)
@torch.no_grad()
def test_the_order_of_the_context_changes_nothing_and_its_content_does(kind):
    backbone, (context, soft) = BACKBONES[kind](), prefix()
    states = states_behind_context(backbone, context, soft, IDS, SEEN)
    permuted = states_behind_context(backbone, context[:, [3, 5, 0, 1, 4, 2]], soft, IDS, SEEN)
    assert largest_difference(states, permuted) <= 1e-5
    assert largest_difference(states, states_behind_context(backbone, context.roll(1, 2), soft, IDS, SEEN)) > 1e-3


@pytest.mark.parametrize("kind", BACKBONES)
@torch.no_grad()
def test_an_empty_prefix_changes_no_states_of_the_backbone_and_neither_does_padding(kind):
    backbone = BACKBONES[kind]()
    states = states_behind_context(backbone, *prefix(0, 0), IDS, SEEN)
    assert largest_difference(states, backbone(input_ids=IDS, attention_mask=SEEN.long()).last_hidden_state) <= 1e-5
    context, soft = prefix()
    together = states_behind_context(backbone, context, soft, IDS, SEEN)
    for row, length in enumerate(LENGTHS):
        own = slice(row, row + 1)
        alone = states_behind_context(backbone, context[own], soft, IDS[own, :length], SEEN[own, :length])
        assert (alone[0] - together[row, :length]).abs().max() <= 1e-5


@pytest.mark.parametrize("make", [tiny_bert, tiny_xlm_roberta])
@torch.no_grad()
def test_learned_positions_are_added_only_to_the_text(make):
    backbone = make()
    context, soft = prefix()
    table = learned_positions(backbone)
    assert table is not None
    first = 0 if make is tiny_bert else 2
    assert first_position(table) == first
    seen = []
    handle = backbone.embeddings.LayerNorm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    states_behind_context(backbone, context, soft, IDS, SEEN)
    handle.remove()
    words, kind = backbone.get_input_embeddings()(IDS), backbone.embeddings.token_type_embeddings.weight[0]
    for row in range(4):
        rows = [vector + kind for vector in (*context[row], *soft)]
        rows += [words[row, i] + kind + table.weight[first + i] for i in range(IDS.shape[1])]
        torch.testing.assert_close(seen[0][row], torch.stack(rows), rtol=0, atol=1e-6)


@torch.no_grad()
def test_rotary_context_vectors_have_index_0_and_the_text_follows_the_soft_prompts():
    backbone, (context, soft) = tiny_nomic(), prefix()
    seen = []
    backbone.rotary_emb.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[1]))
    states_behind_context(backbone, context, soft, IDS, SEEN)
    assert seen[0].tolist() == [[0] * 6 + list(range(6, 6 + 3 + 30))]


@torch.no_grad()
def test_a_window_applies_only_between_tokens_of_the_text():
    backbone, (context, soft) = tiny_modernbert(), prefix()
    seen = []
    layer = next(layer for layer in backbone.layers if layer.attention_type == "sliding_attention")
    layer.register_forward_pre_hook(lambda _, inputs, options: seen.append(options["attention_mask"]), with_kwargs=True)
    states_behind_context(backbone, context, soft, IDS, SEEN)
    total = 6 + 3 + IDS.shape[1]
    assert seen[0].shape == (4, 1, total, total)
    for row in range(4):
        for i in range(total):
            for j in range(total):
                near = i < 9 or j < 9 or abs(i - j) <= 3
                is_token = j < 9 or bool(SEEN[row, j - 9])
                assert bool(seen[0][row, 0, i, j]) == (near and is_token)


def test_backbones_that_depend_on_the_order_of_the_context_break_the_rule():
    assert broken_rule(tiny_mistral()) == "must not depend on the order of its context"
    config = MPNetConfig(**SMALL, max_position_embeddings=130)
    assert "not use relative positions" in broken_rule(MPNetModel(config, add_pooling_layer=False))
    packed = tiny_bert()
    packed.config._attn_implementation = "flash_attention_2"
    assert broken_rule(packed) == "must be loaded with eager or sdpa attention, not flash_attention_2"


@torch.no_grad()
@pytest.mark.parametrize("kind", ["nomic", "modernbert", "decoder"])
def test_a_context_with_positions_equals_a_prefix_of_tokens(kind):
    backbone, ids_NL = BACKBONES[kind](), torch.arange(4, 24).view(2, 10)
    mask_NL = torch.ones_like(ids_NL, dtype=torch.bool)
    mask_NL[1, 7:] = False
    words = backbone.get_input_embeddings()
    prefix_ids = torch.arange(30, 36)
    context, soft = words(prefix_ids[:4]).expand(2, -1, -1), words(prefix_ids[4:])
    states = states_behind_context(backbone, context, soft, ids_NL, mask_NL, has_positions=True)
    whole = torch.cat([prefix_ids.expand(2, -1), ids_NL], dim=1)
    seen = torch.cat([torch.ones(2, 6, dtype=torch.int64), mask_NL.long()], dim=1)
    expected = backbone(input_ids=whole, attention_mask=seen).last_hidden_state[:, 6:]
    torch.testing.assert_close(states[mask_NL], expected[mask_NL], rtol=1e-4, atol=1e-5)
    turned = states_behind_context(backbone, context.flip(1), soft, ids_NL, mask_NL, has_positions=True)
    assert (turned - states)[mask_NL].abs().max() > 1e-5
