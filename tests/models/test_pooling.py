from collections.abc import Callable

import pytest
import torch
from jsonargparse import ArgumentParser
from torch import Tensor

from embeddings.models import (
    ClsPooling,
    LastTokenPooling,
    LatentAttentionPooling,
    MeanPooling,
    Pooling,
    SelfAttentionPooling,
    WeightedMeanPooling,
)

SIMPLE = [MeanPooling, ClsPooling, LastTokenPooling, WeightedMeanPooling]
# Nothing left out, a prompt left out, padding, a hole in the middle, one token.
MASK = torch.tensor(
    [[1, 1, 1, 1, 1], [0, 0, 1, 1, 1], [1, 1, 0, 0, 0], [1, 0, 1, 1, 0], [1, 0, 0, 0, 0]], dtype=torch.bool
)


def states(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(5, 5, 8, generator=torch.Generator().manual_seed(0)).to(dtype)


def by_hand(kind: type[Pooling], hidden: Tensor, mask: Tensor) -> Tensor:
    vectors = []
    for text, pooled in zip(hidden.double(), mask.tolist(), strict=True):
        chosen = [position for position, is_pooled in enumerate(pooled) if is_pooled]
        if kind is ClsPooling:
            vectors.append(text[0])
        elif kind is LastTokenPooling:
            vectors.append(text[chosen[-1]])
        else:
            weights = [position + 1 if kind is WeightedMeanPooling else 1 for position in chosen]
            total = torch.zeros(text.shape[1], dtype=torch.float64)
            for position, weight in zip(chosen, weights, strict=True):
                total += weight * text[position]
            vectors.append(total / sum(weights))
    return torch.stack(vectors)


@pytest.mark.parametrize("kind", SIMPLE)
def test_poolings_equal_a_loop(kind: type[Pooling]) -> None:
    vector = kind(8)(states(), MASK)
    assert vector.dtype == torch.float32
    torch.testing.assert_close(vector.double(), by_hand(kind, states(), MASK), rtol=1e-6, atol=1e-6)


def test_the_mean_of_numbers_to_verify_by_eye() -> None:
    hidden = torch.tensor([[[1.0], [3.0], [100.0]]])
    mask = torch.tensor([[True, True, False]])
    assert MeanPooling(1)(hidden, mask).item() == 2.0
    assert WeightedMeanPooling(1)(hidden, mask).item() == pytest.approx((1 * 1 + 2 * 3) / 3)


@pytest.mark.parametrize("kind", [*SIMPLE, LatentAttentionPooling, SelfAttentionPooling])
def test_a_text_without_a_pooled_token_gets_a_finite_vector_and_gradient(kind: type[Pooling]) -> None:
    hidden = states().requires_grad_()
    mask = MASK.clone()
    mask[2] = False
    vector = kind(8)(hidden, mask)
    vector.square().sum().backward()
    assert torch.isfinite(vector).all()
    assert hidden.grad is not None
    assert torch.isfinite(hidden.grad).all()
    if kind not in (ClsPooling, LastTokenPooling):
        assert (vector[2] == 0).all()


@pytest.mark.parametrize("kind", [*SIMPLE, LatentAttentionPooling, SelfAttentionPooling])
def test_what_stands_in_the_padding_never_reaches_a_vector(kind: type[Pooling]) -> None:
    torch.manual_seed(0)
    pooling, mask = kind(8), torch.tensor([[1, 1, 1, 0, 0]] * 5, dtype=torch.bool)
    spoiled = states()
    spoiled[:, 3:] = float("nan")
    torch.testing.assert_close(pooling(spoiled, mask), pooling(states()[:, :3], mask[:, :3]), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", [*SIMPLE, LatentAttentionPooling, SelfAttentionPooling])
def test_vectors_are_float32_for_low_precision_states_and_under_autocast(kind: type[Pooling]) -> None:
    pooling = kind(8)
    assert pooling(states(torch.bfloat16), MASK).dtype == torch.float32
    assert pooling.double()(states(torch.float64), MASK).dtype == torch.float64
    with torch.autocast("cpu", torch.bfloat16):
        assert pooling.float()(states(torch.bfloat16), MASK).dtype == torch.float32


@pytest.mark.parametrize("kind", [MeanPooling, WeightedMeanPooling])
def test_sums_keep_float32_precision_under_autocast(kind: type[Pooling]) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        vector = kind(8)(states(), MASK)
    torch.testing.assert_close(vector.double(), by_hand(kind, states(), MASK), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", SIMPLE)
def test_gradients_of_poolings_are_right(kind: type[Pooling]) -> None:
    hidden = states(torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: kind(8)(x, MASK), (hidden,))


class Method:
    """Stands for a module of a method: the pooling's width is known only once the backbone is there."""

    def __init__(self, pooling: Callable[[int], Pooling] = MeanPooling) -> None:
        self.pooling = pooling(16)


@pytest.mark.parametrize(
    ("given", "kind", "latents"),
    [
        ({}, MeanPooling, None),
        ({"pooling": "embeddings.models.SelfAttentionPooling"}, SelfAttentionPooling, None),
        (
            {"pooling": {"class_path": "embeddings.models.LatentAttentionPooling", "init_args": {"num_latents": 3}}},
            LatentAttentionPooling,
            3,
        ),
    ],
)
def test_a_config_names_a_pooling_by_class_and_remaining_arguments(
    given: dict[str, object], kind: type[Pooling], latents: int | None
) -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(Method, "method")
    method = parser.instantiate(parser.parse_object({"method": given})).method
    assert type(method.pooling) is kind
    assert method.pooling.hidden_size == 16
    if latents is not None:
        assert method.pooling.arguments()["num_latents"] == latents
