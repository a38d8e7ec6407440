"""InfoNCE and its Matryoshka form against loops, dense matrices and finite differences."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from embeddings.common import ContrastiveBatch, OptionError
from embeddings.losses import InfoNCE, MatryoshkaInfoNCE, SurrogateFilter
from tests.helpers.contrastive import Record, batch_of, random_batch, relative_error
from tests.losses import test_masks
from tests.losses.test_masks import dense_loss, is_negative_mask


def loop_reference(query: Tensor, candidate: Tensor, batch: ContrastiveBatch, temperature: float) -> float:
    score = (F.normalize(query) @ F.normalize(candidate).T).tolist()
    mask, total = is_negative_mask(batch).tolist(), 0.0
    for row in range(len(batch)):
        positive = math.exp(score[row][row] / temperature)
        others = [math.exp(score[row][column] / temperature) for column, used in enumerate(mask[row]) if used]
        total -= math.log(positive / (positive + sum(others)))
    return total / len(batch)


def vectors(batch: ContrastiveBatch, dtype: torch.dtype = torch.float64, width: int = 6) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    counts = (len(batch.query), len(batch.candidate))
    return [torch.randn(count, width, generator=generator).to(dtype).requires_grad_() for count in counts]


def test_a_positive_that_does_not_score_highest_counts_as_an_error() -> None:
    batch = batch_of([Record([1], [2]), Record([3], [4]), Record([5], [6])])
    query = torch.eye(3)
    candidate = torch.tensor([[1.0, 0.0, 0.0], [0.6, 0.0, 0.8], [0.6, 0.0, 0.8]])
    output = InfoNCE(temperature=0.5)(query, candidate, batch)
    assert output.terms["accuracy"].item() == pytest.approx(1 / 3)
    assert output.terms["positive_score"].item() == pytest.approx((1 + 0 + 0.8) / 3)


def test_a_query_without_negatives_has_zero_loss() -> None:
    batch = batch_of([Record([1], [2], in_batch=False), Record([3], [4], in_batch=False)])
    query, candidate = vectors(batch)
    output = InfoNCE()(query, candidate, batch)
    loss, terms = output
    loss.backward()
    assert terms["no_negative_fraction"].item() == terms["accuracy"].item() == 1
    assert loss.item() == pytest.approx(0, abs=1e-12)
    assert query.grad.abs().max() < 1e-12


@pytest.mark.parametrize(("num_queries", "num_negatives"), [(1, 0), (1, 3), (5, 0), (7, 2), (70, 1)])
def test_the_loss_equals_a_loop_and_its_gradients_the_dense_path(num_queries: int, num_negatives: int) -> None:
    batch = random_batch(num_queries, num_negatives)
    query, candidate = vectors(batch)
    loss = InfoNCE(temperature=0.1, tile_size=1)(query, candidate, batch).loss
    assert loss.item() == pytest.approx(loop_reference(query, candidate, batch, 0.1), rel=1e-12)
    if num_queries * (num_negatives + 1) == 1:
        return
    found = torch.autograd.grad(loss, [query, candidate])
    expected = torch.autograd.grad(dense_loss(query, candidate, batch), [query, candidate])
    for found_ND, expected_ND in zip(found, expected, strict=True):
        assert relative_error(found_ND, expected_ND) <= 1e-12


@pytest.mark.parametrize("directions", test_masks.DIRECTIONS)
def test_gradients_equal_finite_differences(directions: Any) -> None:
    batch = random_batch(6, 2)
    query, candidate = vectors(batch, width=3)
    module = InfoNCE(temperature=0.3, learnable_temperature=True, directions=directions).double()

    def loss(query: Tensor, candidate: Tensor, _: Tensor) -> Tensor:
        return module(query, candidate, batch).loss

    assert torch.autograd.gradcheck(loss, (query, candidate, module.log_temperature))
    assert module(query, candidate, batch).terms["temperature"].item() == pytest.approx(0.3)


@pytest.mark.parametrize("temperature", [0.02, 1e-4])
@pytest.mark.parametrize("tile_size", [1, 2**21])
def test_the_share_of_queries_without_a_negative_is_reported(tile_size: int, temperature: float) -> None:
    """Queries without hard negatives, with masked ones only, or with candidates of their own class only."""
    records = [Record([row], [row + 100], [[row + 200]], in_batch=False) for row in range(40)]
    for row in range(0, 40, 4):
        records[row].negatives = []
    records[1].negatives = [records[1].positive]
    batch = batch_of(records)
    query, candidate = vectors(batch)
    output = InfoNCE(temperature=temperature, tile_size=tile_size)(query, candidate, batch)
    assert output.terms["no_negative_fraction"].item() == pytest.approx(11 / 40)
    one_class = batch_of([Record([row], [row + 100], label=3) for row in range(4)])
    query, candidate = vectors(one_class)
    for mask, expected in ((True, 1.0), (False, 0.0)):
        terms = InfoNCE(mask_same_class=mask)(query, candidate, one_class).terms
        assert terms["no_negative_fraction"].item() == expected


@pytest.mark.parametrize("forced", ["on", "off"])
def test_in_batch_negatives_can_be_forced(forced: Any) -> None:
    batch = random_batch(6, 2)
    query, candidate = vectors(batch)
    same = [Record([row], [row + 50], [[row + 100], [row + 150]], in_batch=forced == "on") for row in range(6)]
    batch, reference = batch_of([Record(**{**vars(r), "in_batch": not r.in_batch}) for r in same]), batch_of(same)
    found = InfoNCE(in_batch_negatives=forced)(query, candidate, batch).loss
    assert found.item() == pytest.approx(loop_reference(query, candidate, reference, 0.02), rel=1e-12)
    assert found.item() != pytest.approx(InfoNCE()(query, candidate, batch).loss.item(), rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_half_precision_vectors_are_scored_in_float32_even_under_autocast(dtype: torch.dtype) -> None:
    batch = random_batch(6, 2)
    query, candidate = vectors(batch, dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = InfoNCE()(query, candidate, batch).loss
    loss.backward()
    expected = dense_loss(query.detach().float(), candidate.detach().float(), batch, temperature=0.02)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert query.grad.dtype == dtype


def test_gradients_are_precise_when_the_loss_is_almost_zero() -> None:
    batch = batch_of([Record([1], [2]), Record([3], [4]), Record([5], [6])])
    drawn = torch.eye(3) + 0.1 * torch.randn(2, 3, 3, generator=torch.Generator().manual_seed(0))
    found, expected = [], []
    for dtype, results in ((torch.float32, found), (torch.float64, expected)):
        query, candidate = (side.to(dtype).requires_grad_() for side in drawn)
        loss = InfoNCE(temperature=0.05)(query, candidate, batch).loss
        results += [loss.detach(), *torch.autograd.grad(loss, [query, candidate])]
    assert 0 < expected[0].item() < 1e-6
    for single, double in zip(found, expected, strict=True):
        assert relative_error(single, double) < 1e-4


def test_large_scores_do_not_overflow() -> None:
    batch = batch_of([Record([1], [2]), Record([3], [4])])
    query = torch.tensor([[1e4, 0.0], [0.0, 1e4]], requires_grad=True)
    loss = InfoNCE(similarity="dot")(query, torch.eye(2).flip(0), batch).loss
    loss.backward()
    assert loss.item() == pytest.approx(5e5)
    assert query.grad.isfinite().all()


WIDTHS = (6, 3, 1)
WEIGHTS = (1.0, 2.0, 0.5)


@pytest.mark.parametrize("directions", test_masks.DIRECTIONS)
@pytest.mark.parametrize(("surrogate", "weights"), [(False, None), (False, WEIGHTS), (True, WEIGHTS)])
def test_the_loss_and_its_gradients_are_the_mean_of_info_nce_over_the_widths(
    directions: Any, surrogate: bool, weights: Any
) -> None:
    batch = test_masks.with_surrogates(random_batch(40, 2))
    query, candidate = vectors(batch)
    options: dict[str, Any] = {
        "temperature": 0.1,
        "directions": directions,
        "tile_size": 1,
        "learnable_temperature": True,
        "false_negative_filter": SurrogateFilter(margin=-0.2) if surrogate else None,
    }
    module, plain = MatryoshkaInfoNCE(WIDTHS, weights, **options).double(), InfoNCE(**options).double()
    outputs = [plain(query[:, :width], candidate[:, :width], batch) for width in WIDTHS]
    output = module(query, candidate, batch)
    weights = weights or (1.0, 1.0, 1.0)
    expected = sum(weight * one.loss for weight, one in zip(weights, outputs, strict=True)) / sum(weights)
    assert output.loss.item() == pytest.approx(expected.item(), rel=1e-12)
    found = torch.autograd.grad(output.loss, [query, candidate, module.log_temperature])
    loop = torch.autograd.grad(expected, [query, candidate, plain.log_temperature])
    for found_ND, expected_ND in zip(found, loop, strict=True):
        assert relative_error(found_ND, expected_ND) <= 1e-12
    for width, one in zip(WIDTHS, outputs, strict=True):
        assert output.terms[f"loss_{width}"].item() == pytest.approx(one.loss.item(), rel=1e-12)
        assert output.terms[f"accuracy_{width}"].item() == one.terms["accuracy"].item()
    assert set(outputs[0].terms) == {"accuracy", "positive_score", "no_negative_fraction", "temperature"}
    for name, value in outputs[0].terms.items():
        assert output.terms[name].item() == pytest.approx(value.item(), rel=1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(
            ({"temperature": value}, "temperature must be > 0, got .*; see ")
            for value in (0.0, -1.0, math.nan, math.inf)
        ),
        ({"directions": "both", "in_batch_negatives": "off"}, "directions has no effect with in_batch_negatives: off"),
        ({"widths": []}, r"widths must be distinct and >= 1, got \[\]"),
        ({"widths": [6, 0]}, r"widths must be distinct and >= 1"),
        ({"widths": [6, 3, 6]}, "widths must be distinct and >= 1"),
        ({"widths": [6, 3], "weights": [1.0]}, "weights must be 2 finite numbers > 0"),
        ({"widths": [6, 3], "weights": [1.0, math.nan]}, "weights must be 2 finite numbers > 0"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        MatryoshkaInfoNCE(**options)


def test_the_largest_width_must_be_that_of_the_vectors() -> None:
    batch, loss = random_batch(3, 0), MatryoshkaInfoNCE((4, 8))
    loss.check_width(8)
    with pytest.raises(OptionError, match=r"widths must have the width .* as largest, got \[4, 8\]; add 9"):
        loss.check_width(9)
    with pytest.raises(OptionError, match="add 6"):
        loss(*vectors(batch), batch)
