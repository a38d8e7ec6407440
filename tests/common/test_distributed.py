"""Collectives on two ranks, compared with one process that has the full batch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from embeddings.common.distributed import (
    gather_candidates,
    gather_counts,
    gather_rows,
    is_distributed,
    rank,
    reduce_int,
    sum_over_ranks,
    world_size,
)
from tests.helpers.ranks import run_on_two_ranks

NUM_PAIRS, WIDTH = 8, 6


def test_one_process_is_rank_0_of_1_and_returns_its_own_values() -> None:
    rows = torch.rand(3, 2, requires_grad=True)
    assert (rank(), world_size(), is_distributed()) == (0, 1, False)
    assert gather_counts(3) == [3]
    assert gather_candidates(rows, [3]) is rows
    assert gather_rows(rows, [3]) is rows
    assert reduce_int(4, "min") == 4
    assert sum_over_ranks(rows) is rows


def pairs() -> tuple[Tensor, Tensor, Tensor]:
    """Queries, documents, and the weight of a linear encoder of both, (NUM_PAIRS, WIDTH) and (WIDTH, WIDTH) float64."""
    generator = torch.Generator().manual_seed(0)
    draw = [torch.randn(shape, generator=generator).double() for shape in ((NUM_PAIRS, WIDTH), (NUM_PAIRS, WIDTH))]
    return draw[0], draw[1], torch.randn(WIDTH, WIDTH, generator=generator).double()


def contrast(query_BD: Tensor, document_CD: Tensor, first_target: int = 0) -> Tensor:
    targets = torch.arange(first_target, first_target + len(query_BD))
    return torch.nn.functional.cross_entropy(query_BD @ document_CD.T, targets)


def averaged_gradient(loss_of: Callable[[Tensor, Tensor], Tensor], rank: int) -> Tensor:
    """The encoder's gradient as DDP computes it: the mean of both ranks' gradients."""
    query, document, weight = pairs()
    own = slice(rank * NUM_PAIRS // 2, (rank + 1) * NUM_PAIRS // 2)
    weight.requires_grad_()
    loss_of(query[own] @ weight, document[own] @ weight).backward()
    assert weight.grad is not None
    dist.all_reduce(weight.grad)
    return weight.grad / 2


def cases(rank: int) -> dict[str, Any]:
    first, halves = rank * NUM_PAIRS // 2, [NUM_PAIRS // 2] * 2

    def loss_of(query: Tensor, document: Tensor) -> Tensor:
        return contrast(query, gather_candidates(document, halves), first)

    counts = gather_counts(rank + 2)
    numbers = torch.arange(rank + 2) + 10 * rank
    leaf = numbers.double()[:, None].requires_grad_()
    gathered = gather_candidates(leaf, counts)
    (gathered[:, 0] * torch.arange(1.0, 6.0) * (rank + 1)).sum().backward()
    share = torch.full((2, 3), rank + 1.0, dtype=torch.float64, requires_grad=True)
    total = sum_over_ranks(share)
    (total * (rank + 3)).sum().backward()
    return {
        "gradient": averaged_gradient(loss_of, rank),
        "sum": total.detach(),
        "sum of numbers": sum_over_ranks(torch.tensor([rank + 1, 2**40])),
        "share's gradient": share.grad,
        "counts": counts,
        "numbers": gather_rows(numbers, counts),
        "flags": gather_rows(numbers > 10, counts),
        "gathered": gathered.detach(),
        "leaf gradient": leaf.grad,
        "minimum and maximum": (reduce_int(rank + 5, "min"), reduce_int(rank + 5, "max")),
    }


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_on_two_ranks(cases)


def test_two_ranks_have_the_gradient_of_one_process(results: list[dict[str, Any]]) -> None:
    query, document, weight = pairs()
    weight.requires_grad_()
    contrast(query @ weight, document @ weight).backward()
    for result in results:
        torch.testing.assert_close(result["gradient"], weight.grad, rtol=1e-12, atol=1e-12)


def test_ranks_with_different_numbers_of_rows_gather_them_in_rank_order(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["counts"] == [2, 3]
        assert result["numbers"].tolist() == [0, 1, 10, 11, 12]
        assert result["flags"].tolist() == [False, False, False, True, True]
        assert result["gathered"][:, 0].tolist() == [0, 1, 10, 11, 12]
        assert result["minimum and maximum"] == (5, 6)


def test_gradients_of_both_ranks_add_up_on_the_rank_of_the_row(results: list[dict[str, Any]]) -> None:
    assert results[0]["leaf gradient"][:, 0].tolist() == [3, 6]
    assert results[1]["leaf gradient"][:, 0].tolist() == [9, 12, 15]


def test_a_sum_over_ranks_has_the_gradient_of_all_ranks_losses(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert (result["sum"] == 3).all()
        assert result["sum of numbers"].tolist() == [3, 2**41]
        assert (result["share's gradient"] == 7).all()
