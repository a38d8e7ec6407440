"""Similarities against a loop, and tiles against the full matrix at one width and at several."""

import pytest
import torch
from torch import Tensor

from embeddings.losses import info_nce, similarity_matrix, tiled_cross_entropies
from embeddings.losses.info_nce import comparable, row_tiles, scores_at_once
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


def exclude_next_(score_rC: Tensor, rows: slice) -> None:
    """Exclude the column after each row's target; the target of row i is column i."""
    row_r1 = torch.arange(rows.start, rows.start + len(score_rC))[:, None]
    score_rC.scatter_(1, row_r1 + 1, -torch.inf)


@pytest.mark.parametrize("tile_size", [1, 10_000])
def test_widths_share_targets_and_exclusions_and_have_separate_gradients(tile_size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(count, 5, generator=generator, dtype=torch.float64) for count in (70, 80)]
    row, column = (vector_ND.requires_grad_() for vector_ND in drawn)
    scale = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    target, factor = torch.arange(70), torch.tensor([1.0, -2.0], dtype=torch.float64)
    pairs = [(row, column), (row[:, :2], column[:, :2])]
    rows, columns = zip(*pairs, strict=True)
    scores = tiled_cross_entropies(rows, columns, scale, target, exclude_next_, tile_size)
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


def test_tiles_cover_every_row_once() -> None:
    for num_rows, num_columns, tile_size in [(1, 1, 1), (100, 7, 1), (100, 7, 350), (64, 10, 640), (3, 10**9, 8)]:
        tiles = list(row_tiles(num_rows, num_columns, tile_size))
        assert [row for rows in tiles for row in range(num_rows)[rows]] == list(range(num_rows))
    assert [scores_at_once(None, device) for device in ("cpu", "cuda", "cuda:1")] == [2**21, 2**26, 2**26]
    assert [scores_at_once(7, device) for device in ("cpu", "cuda")] == [7, 7]


@pytest.mark.parametrize("factor", [1.0, -2.0])
def test_gradients_on_a_device_equal_those_of_a_cpu_without_synchronisation(
    factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    row, column = torch.randn(40, 5, requires_grad=True), torch.randn(50, 5, requires_grad=True)

    def gradients() -> list[Tensor]:
        loss = tiled_cross_entropies([row], [column], torch.tensor(3.0), torch.arange(40)).loss_W[0]
        return list(torch.autograd.grad(loss * factor, [row, column]))

    expected = gradients()
    monkeypatch.setattr(info_nce, "queues_work", lambda device: True)
    monkeypatch.setattr(Tensor, "tolist", lambda *_: pytest.fail("the host synchronises"))
    assert all(map(torch.equal, gradients(), expected))


def test_no_gradients_are_computed_under_no_grad(monkeypatch: pytest.MonkeyPatch) -> None:
    row, column = torch.randn(4, 3, requires_grad=True), torch.randn(5, 3, requires_grad=True)
    monkeypatch.setattr(Tensor, "addmm_", lambda *_: pytest.fail("a gradient was computed"))
    with torch.no_grad():
        loss = tiled_cross_entropies([row], [column], torch.tensor(2.0), torch.arange(4)).loss_W[0]
    assert not loss.requires_grad
