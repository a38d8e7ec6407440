"""Matryoshka against a loop over widths written out, plain InfoNCE, and the plain step under GradCache."""

import math
from typing import Any

import pytest
import torch

from embeddings.common import OptionError
from embeddings.losses import InfoNCE, MatryoshkaInfoNCE, SurrogateFilter, info_nce
from embeddings.training import GradCache
from tests.helpers.contrastive import TinyStep, random_batch, relative_error
from tests.helpers.tiny import tiny_bert
from tests.losses import test_info_nce, test_surrogate_filter
from tests.training.test_gradcache import REPLAYED, TOLERANCE, cached_gradient, direct_gradient

WIDTHS = (6, 3, 1)
WEIGHTS = (1.0, 2.0, 0.5)


@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_the_loss_and_its_gradients_equal_a_loop_over_the_widths(weights: Any) -> None:
    batch = random_batch(40, 2)
    query, candidate = test_info_nce.vectors(batch)
    module = MatryoshkaInfoNCE(WIDTHS, weights, temperature=0.1, tile_size=1)
    output = module(query, candidate, batch)
    expected, total = torch.zeros((), dtype=torch.float64), 0.0
    for width, weight in zip(WIDTHS, weights or (1.0, 1.0, 1.0), strict=True):
        cut = [
            vector_ND[:, :width] / vector_ND[:, :width].norm(dim=1, keepdim=True) for vector_ND in (query, candidate)
        ]
        of_width = test_info_nce.dense_loss(*cut, batch, 0.1)
        assert output.terms[f"loss_{width}"].item() == pytest.approx(of_width.item(), rel=1e-12)
        expected, total = expected + weight * of_width, total + weight
    expected = expected / total
    assert output.loss.item() == pytest.approx(expected.item(), rel=1e-12)
    found = torch.autograd.grad(output.loss, [query, candidate])
    for found_ND, expected_ND in zip(found, torch.autograd.grad(expected, [query, candidate]), strict=True):
        assert relative_error(found_ND, expected_ND) <= 1e-12


@pytest.mark.parametrize("directions", ["query_to_document", "both"])
@pytest.mark.parametrize("surrogate", [False, True])
def test_filter_and_directions_hold_at_every_width(directions: Any, surrogate: bool) -> None:
    """InfoNCE of the cut vectors, one width after another, with the same options."""
    batch = test_surrogate_filter.with_surrogates(random_batch(40, 2))
    query, candidate = test_info_nce.vectors(batch)
    options: dict[str, Any] = {
        "temperature": 0.1,
        "directions": directions,
        "tile_size": 1,
        "learnable_temperature": True,
        "false_negative_filter": SurrogateFilter(margin=-0.2) if surrogate else None,
    }
    module, plain = MatryoshkaInfoNCE(WIDTHS, WEIGHTS, **options).double(), InfoNCE(**options).double()
    outputs = [plain(query[:, :width], candidate[:, :width], batch) for width in WIDTHS]
    output = module(query, candidate, batch)
    expected = sum(weight * one.loss for weight, one in zip(WEIGHTS, outputs, strict=True)) / sum(WEIGHTS)
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


@pytest.mark.parametrize("directions", ["query_to_document", "both"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_width_that_is_the_vectors_own_is_plain_info_nce_to_the_bit(directions: Any, dtype: torch.dtype) -> None:
    batch = random_batch(40, 2)
    results = []
    for loss in (MatryoshkaInfoNCE([6], directions=directions), InfoNCE(directions=directions)):
        query, candidate = test_info_nce.vectors(batch, dtype)
        output = loss(query, candidate, batch)
        results.append((output, torch.autograd.grad(output.loss, [query, candidate])))
    (found, found_gradients), (expected, expected_gradients) = results
    assert torch.equal(found.loss, expected.loss)
    assert all(map(torch.equal, found_gradients, expected_gradients))
    assert all(torch.equal(found.terms[name], value) for name, value in expected.terms.items())


def test_what_lies_beyond_the_widest_width_gets_no_gradient() -> None:
    batch = random_batch(5, 1)
    query, candidate = test_info_nce.vectors(batch)
    MatryoshkaInfoNCE((4, 2))(query, candidate, batch).loss.backward()
    assert query.grad is not None
    assert query.grad[:, 4:].abs().max() == 0
    assert query.grad[:, 3].abs().min() > 0


def test_the_masks_of_a_tile_are_made_once_for_all_widths(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    exclude_ = info_nce.exclude_candidates_
    monkeypatch.setattr(info_nce, "exclude_candidates_", lambda *facts: calls.append(1) or exclude_(*facts))
    batch = random_batch(40, 0)
    MatryoshkaInfoNCE(WIDTHS, tile_size=1)(*test_info_nce.vectors(batch), batch)
    assert len(calls) == 2


@pytest.mark.parametrize("options", REPLAYED.values(), ids=REPLAYED)
def test_gradcache_equals_the_plain_step_with_dropout(options: dict[str, Any]) -> None:
    step = TinyStep(tiny_bert(dropout=0.1).train(), MatryoshkaInfoNCE((32, 8), (1.0, 3.0), temperature=0.05))
    batch, engine = random_batch(6, 2), GradCache(**options)
    results = []
    for gradient in (cached_gradient, direct_gradient):
        torch.manual_seed(1)
        results.append(gradient(step, batch, engine))
    (loss, found), (direct_loss, direct) = results
    assert loss == pytest.approx(direct_loss, rel=TOLERANCE[torch.float32])
    assert relative_error(found, direct) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"widths": []}, r"widths must each be >= 1, got \[\]"),
        ({"widths": [6, 0]}, r"widths must each be >= 1, got \[6, 0\]"),
        ({"widths": [6, 3, 6]}, "widths must differ"),
        ({"widths": [6, 3], "weights": [1.0]}, "weights must be one for each of the 2 widths"),
        ({"widths": [6, 3], "weights": [1.0, 0.0]}, "weights must each be > 0 and finite"),
        ({"widths": [6, 3], "weights": [1.0, math.nan]}, "weights must each be > 0 and finite"),
        ({"temperature": 0.0}, "temperature must be > 0"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        MatryoshkaInfoNCE(**options)


def test_widths_must_fit_the_vectors_and_cover_those_of_the_model() -> None:
    batch = random_batch(3, 0)
    with pytest.raises(OptionError, match=r"widths must not exceed the 6 numbers of a vector, got \[8, 4\]"):
        MatryoshkaInfoNCE((8, 4))(*test_info_nce.vectors(batch), batch)
    loss = MatryoshkaInfoNCE((4, 8))
    loss.check_width(8)
    with pytest.raises(OptionError, match="must not exceed the 6 numbers"):
        loss.check_width(6)
    with pytest.raises(OptionError, match=r"leave the last of the model's 9 numbers untrained, got \[4, 8\]; add 9"):
        loss.check_width(9)


def test_the_default_is_the_papers() -> None:
    assert MatryoshkaInfoNCE().widths == (768, 256)
    assert MatryoshkaInfoNCE().weights == (0.5, 0.5)
