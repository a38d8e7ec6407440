import pytest
import torch

from embeddings.models.context_layers import ContextSlots, ResidualProjection, SoftPrompt


def slots(num_context: int = 5, dropout_fraction: float = 0.0) -> ContextSlots:
    torch.manual_seed(0)
    return ContextSlots(num_context, 8, dropout_fraction)


def test_every_text_has_the_same_context_and_empty_slots_are_null() -> None:
    layer, context = slots().eval(), torch.randn(3, 8)
    filled = layer(context, 4)
    assert filled.shape == (4, 5, 8)
    for row in range(4):
        assert torch.equal(filled[row], torch.stack([*context, layer.null_H, layer.null_H]))


def test_no_context_is_a_null_vector_in_every_slot() -> None:
    layer = slots().eval()
    for given in (None, torch.empty(0, 8), layer.null_H.expand(5, 8)):
        assert torch.equal(layer(given, 2), layer.null_H.expand(2, 5, 8))


@pytest.mark.parametrize("shape", [(6, 8), (5, 9), (1, 5, 8), (8,)])
def test_a_context_that_does_not_fit_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="at most 5 vectors of width 8"):
        slots()(torch.zeros(shape), 2)


def test_dropout_replaces_single_slots_of_single_texts_at_its_rate() -> None:
    layer, context = slots(50, 0.25).train(), torch.randn(50, 8)
    dropped = (layer(context, 200) == layer.null_H).all(-1)
    kept = ~dropped
    expected = context.expand(200, 50, 8)
    assert torch.equal(layer.eval()(context, 200), expected)
    torch.manual_seed(1)
    again = layer.train()(context, 200)
    assert torch.equal(again[(again != layer.null_H).any(-1)], expected[(again != layer.null_H).any(-1)])
    assert abs(float(dropped.float().mean()) - 0.25) < 0.02
    assert dropped.any(0).all()
    assert kept.any(1).all()


def test_dropout_of_everything_is_no_context_and_of_nothing_the_whole() -> None:
    context = torch.randn(5, 8)
    layer = slots(dropout_fraction=1.0).train()
    assert torch.equal(layer(context, 3), layer(None, 3))
    layer = slots(dropout_fraction=0.0).train()
    assert torch.equal(layer(context, 3), context.expand(3, 5, 8))


def test_the_null_vector_is_in_every_training_graph() -> None:
    layer = slots(dropout_fraction=0.0).train()
    layer(torch.randn(5, 8), 3).sum().backward()
    assert layer.null_H.grad is not None
    assert torch.equal(layer.null_H.grad, torch.zeros(8))


def test_the_null_vector_starts_small() -> None:
    torch.manual_seed(0)
    assert abs(float(ContextSlots(1, 4096).null_H.detach().std()) - 0.01) < 1e-3


@torch.no_grad()
def test_soft_prompts_are_the_projection_of_ones() -> None:
    torch.manual_seed(0)
    prompt = SoftPrompt(3, 8)
    first, second = prompt.layers[0], prompt.layers[2]
    hidden = [max(0.0, float(first.weight[i].sum() + first.bias[i])) for i in range(8)]
    flat = second.weight @ torch.tensor(hidden) + second.bias
    torch.testing.assert_close(prompt(), torch.stack([flat[8 * i : 8 * i + 8] for i in range(3)]))
    assert SoftPrompt(0, 8)().shape == (0, 8)
    assert list(SoftPrompt(0, 8).parameters()) == []
    assert "ones_H" not in prompt.state_dict()


def test_the_residual_projection_starts_as_the_identity_and_learns() -> None:
    torch.manual_seed(0)
    layer, vectors = ResidualProjection(8), torch.randn(4, 8)
    assert torch.equal(layer(vectors), vectors)
    layer(vectors).square().sum().backward()
    assert layer.layers[2].weight.grad.abs().max() > 0
    torch.nn.init.normal_(layer.layers[2].weight)
    hidden = torch.relu(vectors @ layer.layers[0].weight.T + layer.layers[0].bias)
    torch.testing.assert_close(layer(vectors), vectors + hidden @ layer.layers[2].weight.T)


def test_without_the_pooled_states_the_projection_is_all_there_is() -> None:
    torch.manual_seed(0)
    layer, vectors = ResidualProjection(8, adds_pooled=False), torch.randn(4, 8)
    first, last = layer.layers[0], layer.layers[2]
    assert torch.equal(layer(vectors), last(torch.relu(first(vectors))))
    # It starts at random: at zero every text would have the zero vector.
    assert layer(vectors).abs().min() > 0
