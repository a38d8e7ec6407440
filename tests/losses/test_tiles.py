"""Similarities against a loop, and tiles against the full matrix at one width and at several."""

import pytest
import torch
from torch import Tensor

from embeddings.losses import similarity_matrix, tiled_cross_entropies
from embeddings.losses.info_nce import comparable
from tests.helpers.contrastive import relative_error


def test_the_cosine_divides_the_dot_product_by_the_norms() -> None:
    pair = torch.tensor([[3.0, 4.0]]), torch.tensor([[2.0, 0.0], [0.0, 5.0]])
    assert similarity_matrix(*pair, "dot").tolist() == [[6.0, 20.0]]
    assert similarity_matrix(*pair).tolist()[0] == pytest.approx([0.6, 0.8])


def test_a_zero_vector_has_similarity_zero_and_no_gradient() -> None:
    zero = torch.zeros(1, 3, requires_grad=True)
    score = similarity_matrix(zero, torch.ones(2, 3))
    score.sum().backward()
    assert score.tolist() == [[0.0, 0.0]]
    assert zero.grad.tolist() == [[0.0, 0.0, 0.0]]


def test_gradients_of_the_cosine_equal_finite_differences() -> None:
    vectors = [torch.randn(3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    assert torch.autograd.gradcheck(similarity_matrix, vectors)


@pytest.mark.parametrize(
    ("dtype", "computed"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_similarities_are_float32_or_better_even_under_autocast(dtype: torch.dtype, computed: torch.dtype) -> None:
    query = torch.randn(4, 64).to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = similarity_matrix(query, query)
    assert found.dtype == computed == comparable(query).dtype
    assert torch.allclose(found.diagonal(), torch.ones(4, dtype=computed), atol=1e-6)


def next_column(rows: slice) -> Tensor:
    """Exclude the column after each row's target; the target of row i is column i."""
    row_r = torch.arange(70)[rows]
    return torch.nn.functional.one_hot(row_r + 1, 80).bool()


@pytest.mark.parametrize("tile_size", [1, 10_000])
def test_widths_share_targets_and_exclusions_and_have_separate_gradients(tile_size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(count, 5, generator=generator, dtype=torch.float64) for count in (70, 80)]
    row, column = (vector_ND.requires_grad_() for vector_ND in drawn)
    scale = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    target, factor = torch.arange(70), torch.tensor([1.0, -2.0], dtype=torch.float64)
    pairs = [(row, column), (row[:, :2], column[:, :2])]
    rows, columns = zip(*pairs, strict=True)
    scores = tiled_cross_entropies(rows, columns, scale, target, next_column, tile_size)
    losses = []
    for index, (row_RD, column_CD) in enumerate(pairs):
        score = row_RD @ column_CD.T
        competing = (scale * score).scatter(1, target[:, None] + 1, -torch.inf)
        losses.append(torch.nn.functional.cross_entropy(competing, target))
        is_best = competing.argmax(1) == target
        assert scores.loss_W[index].item() == pytest.approx(losses[-1].item(), rel=1e-12)
        assert scores.accuracy_W[index].item() == pytest.approx(is_best.double().mean().item())
        assert scores.positive_score_W[index].item() == pytest.approx(score.diagonal().mean().item(), rel=1e-12)
    found = torch.autograd.grad(scores.loss_W @ factor, [row, column, scale])
    expected = torch.autograd.grad(losses[0] - 2 * losses[1], [row, column, scale])
    for found_ND, expected_ND in zip(found, expected, strict=True):
        assert relative_error(found_ND, expected_ND) <= 1e-12
