"""Similarities against a loop, tiles against the full matrix, and products of vectors rounded to bfloat16."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from embeddings.losses import InfoNCE, info_nce, tiled_cross_entropies
from embeddings.losses.info_nce import comparable, multiplies_rounded
from tests.helpers.contrastive import random_batch, relative_error
from tests.helpers.live_bytes import LiveBytes
from tests.losses.test_masks import DIRECTIONS


def test_the_cosine_divides_the_dot_product_by_the_norms() -> None:
    query, candidate = torch.tensor([[3.0, 4.0]]), torch.tensor([[2.0, 0.0], [0.0, 5.0]])
    assert (comparable(query, "dot") @ comparable(candidate, "dot").T).tolist() == [[6.0, 20.0]]
    assert (comparable(query) @ comparable(candidate).T).tolist()[0] == pytest.approx([0.6, 0.8])


def test_a_zero_vector_has_similarity_zero_and_no_gradient() -> None:
    zero = torch.zeros(1, 3, requires_grad=True)
    vector = comparable(zero)
    vector.sum().backward()
    assert vector.tolist() == [[0.0, 0.0, 0.0]]
    assert zero.grad.tolist() == [[0.0, 0.0, 0.0]]


@pytest.mark.parametrize(
    ("dtype", "computed"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_compared_vectors_are_float32_or_better(dtype: torch.dtype, computed: torch.dtype) -> None:
    found = comparable(torch.randn(4, 64).to(dtype))
    assert found.dtype == computed
    assert torch.allclose(found.norm(dim=1), torch.ones(4, dtype=computed), atol=1e-6)


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


def pairs_of(kind: str, num_pairs: int = 1024, width: int = 768) -> list[Tensor]:
    """Unit queries and documents in float64: random ones, trained ones, or pairs with one rival each."""
    noise = torch.randn(3, num_pairs, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    if kind == "random":
        return [F.normalize(side, dim=1) for side in noise[:2]]
    if kind == "trained":
        # Clusters of eight texts.
        query = F.normalize(F.normalize(noise[2, ::8], dim=1).repeat_interleave(8, 0) + 0.1 * noise[0], dim=1)
    else:
        query = F.normalize(noise[2, ::2].repeat_interleave(2, 0) + 0.2 * noise[0], dim=1)
    return [query, F.normalize(query + 0.05 * noise[1], dim=1)]


def loss_and_gradients(pairs: list[Tensor], scale: float, **options: Any) -> list[Tensor]:
    vectors = [each.detach().requires_grad_() for each in (*pairs, torch.tensor(scale, dtype=pairs[0].dtype))]
    target = torch.arange(len(pairs[0]))
    loss = tiled_cross_entropies([vectors[0]], [vectors[1]], vectors[2], target, **options).loss_W[0]
    return [loss.detach(), *torch.autograd.grad(loss, vectors)]


@pytest.mark.parametrize(
    ("kind", "scale", "limit"),
    [
        ("random", 20.0, 2e-4),
        ("random", 50.0, 1e-3),
        ("trained", 20.0, 3e-4),
        ("one rival", 20.0, 5e-3),
        ("one rival", 50.0, 5e-3),
    ],
)
def test_rounded_products_have_the_gradient_of_float64_within_a_thousandth(
    kind: str, scale: float, limit: float
) -> None:
    """Unlike a loss that rounds the targets too. With one rival each, its rounded score decides."""
    pairs = pairs_of(kind)
    expected = loss_and_gradients(pairs, scale)
    single = [side.float() for side in pairs]
    found = loss_and_gradients(single, scale, rounds=True, tile_size=300 * 1024)
    errors = [relative_error(*both) for both in zip(found, expected, strict=True)]
    assert 3e-5 < max(errors[1:3]) < limit
    assert errors[0] < 3e-4
    assert relative_error(all_rounded(single, scale), expected[1]) > 3 * errors[1]
    in_single = loss_and_gradients(single, scale, tile_size=300 * 1024)
    assert max(relative_error(*both) for both in zip(in_single[:3], expected, strict=False)) < 2e-5


def all_rounded(pairs: list[Tensor], scale: float) -> Tensor:
    """The gradient of the rows with everything rounded, as by a dense loss under autocast."""
    row, column = ((side * factor).bfloat16().float() for side, factor in zip(pairs, (scale, 1.0), strict=True))
    weight = (row @ column.T).bfloat16().float().softmax(1) - torch.eye(len(row))
    return weight.bfloat16().float() @ column * scale / len(row)


def test_rounded_products_are_those_of_the_rounded_matrices_by_hand() -> None:
    """With an excluded column, a duplicate target and a last tile of fewer rows."""
    generator = torch.Generator().manual_seed(0)
    row, column = (F.normalize(torch.randn(count, 16, generator=generator), dim=1) for count in (70, 80))
    target = torch.arange(70).clamp(max=68)

    def excluded(rows: slice) -> Tensor:
        return F.one_hot(target[rows] + 1, 80).bool()

    vectors = [side.clone().requires_grad_() for side in (row, column)]
    scores = tiled_cross_entropies(
        vectors[:1], vectors[1:], torch.tensor(8.0), target, excluded, tile_size=32 * 80, rounds=True
    )
    found, expected = torch.autograd.grad(scores.loss_W[0], vectors), [torch.zeros_like(row), torch.zeros_like(column)]
    rounded = [(row * 8).bfloat16().double(), column.bfloat16().double()]
    loss = 0.0
    for index in range(70):
        its = int(target[index])
        own = float(row[index].double() * 8 @ column[its].double())
        logits = {other: float(rounded[0][index] @ rounded[1][other]) for other in range(80)}
        del logits[its], logits[its + 1]
        highest = max(own, *logits.values())
        weights = {other: torch.tensor(logit - highest).exp() for other, logit in logits.items()}
        others = sum(weights.values())
        total = others + torch.tensor(own - highest).exp()
        loss += float(total.log() + highest - own) / 70
        for other, weight in weights.items():
            weight = float(weight.bfloat16())
            expected[0][index] += weight * column[other].bfloat16().float() / total * 8 / 70
            expected[1][other] += weight * (row[index] * 8 / total).bfloat16().float() / 70
        expected[0][index] -= others * column[its] / total * 8 / 70
        expected[1][its] -= others * row[index] * 8 / total / 70
    assert scores.loss_W[0].item() == pytest.approx(loss, rel=1e-5)
    for found_ND, expected_ND in zip(found, expected, strict=True):
        # A weight next to the middle of two values of bfloat16 may be rounded to the other one.
        assert relative_error(found_ND, expected_ND) < 1e-4


@pytest.mark.parametrize("directions", DIRECTIONS)
def test_info_nce_rounds_if_the_device_multiplies_so(directions: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, generator = random_batch(40, 2), torch.Generator().manual_seed(1)
    counts = (len(batch.query), len(batch.candidate))
    vectors = [torch.randn(count, 64, generator=generator).requires_grad_() for count in counts]
    results = []
    for rounds in (False, True):
        monkeypatch.setattr(info_nce, "multiplies_rounded", lambda _, rounds=rounds: rounds)
        loss = InfoNCE(0.05, learnable_temperature=True, directions=directions, tile_size=1)
        output = loss(*vectors, batch)
        results.append(torch.autograd.grad(output.loss, [*vectors, loss.log_temperature]))
    for single, rounded in zip(*results, strict=True):
        assert 0 < relative_error(rounded, single) < 2e-3


def test_only_cuda_rounds_vectors_in_bfloat16_or_under_its_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    half = {"on": False, "dtype": torch.bfloat16}
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda _: half["on"])
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda _: half["dtype"])
    monkeypatch.setattr(torch.version, "cuda", "13.0")

    def of(dtype: torch.dtype, device: str = "cuda") -> bool:
        return multiplies_rounded(SimpleNamespace(device=SimpleNamespace(type=device), dtype=dtype))

    assert [of(dtype) for dtype in (torch.bfloat16, torch.float32, torch.float64)] == [True, False, False]
    half["on"] = True
    assert [of(dtype) for dtype in (torch.bfloat16, torch.float32, torch.float64)] == [True, True, False]
    assert not of(torch.bfloat16, "cpu")
    half["dtype"] = torch.float16
    assert not of(torch.float32)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert not of(torch.bfloat16)


@pytest.mark.parametrize(("rounds", "gib"), [(False, 0.375), (True, 0.475)])
def test_a_loss_of_65_536_pairs_takes_half_a_gib_beside_its_gradients(rounds: bool, gib: float) -> None:
    """On a device that computes nothing, with the tiles of a GPU; an H200 took 0.375 GiB in float32."""
    row, column = (torch.empty(65_536, 768, device="meta", requires_grad=True) for _ in range(2))
    target = torch.empty(65_536, dtype=torch.int64, device="meta")
    with LiveBytes() as live:
        loss = tiled_cross_entropies([row], [column], torch.empty((), device="meta"), target, rounds=rounds).loss_W[0]
        gradients = torch.autograd.grad(loss, [row, column])
    size = sum(gradient.nbytes for gradient in gradients)
    assert size == 2 * 65_536 * 768 * 4
    assert (live.peak - size) / 2**30 == pytest.approx(gib, abs=0.001)
