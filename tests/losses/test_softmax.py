"""Softmax weights of a tile against a loop, by passes of torch and by the Triton kernel; what is done if that fails."""

import logging
import math

import pytest
import torch
from torch import Tensor

from embeddings.losses import softmax
from embeddings.losses.softmax import checked_weights, fastest_weights, fused_weights, rounded_weights, softmax_weights
from tests.helpers.triton_interpreter import require_interpreter

CPU = torch.device("cpu")


def tile(num_rows: int = 6, num_columns: int = 11) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    score_rC = 5 * torch.randn(num_rows, num_columns, generator=generator)
    score_rC[:, 1::3] = -torch.inf
    score_rC[0] = -torch.inf
    return score_rC, torch.linspace(-90, 90, num_rows)[:, None], torch.arange(num_rows)[:, None]


def loop(score_rC: Tensor, target_score_r1: Tensor, target_r1: Tensor) -> list[tuple[float, float, list[float]]]:
    rows = []
    for scores, own, target in zip(
        score_rC.tolist(), target_score_r1[:, 0].tolist(), target_r1[:, 0].tolist(), strict=True
    ):
        rivals = [score for column, score in enumerate(scores) if column != target]
        largest = max(rivals)
        weights = [math.exp(score - max(largest, own)) for score in scores]
        weights[target] = 0.0
        rows.append((largest, sum(weights), weights))
    return rows


@pytest.mark.parametrize("rounds", [False, True])
def test_weights_equal_a_loop(rounds: bool) -> None:
    score_rC, own_r1, target_r1 = tile()
    expected, weight_rC = loop(score_rC, own_r1, target_r1), score_rC.clone()
    if rounds:
        weight_rC, rivals = rounded_weights(weight_rC, own_r1, target_r1)
        assert weight_rC.dtype == torch.bfloat16
    else:
        rivals = softmax_weights(weight_rC, own_r1, target_r1)
    for row, (largest, others, weights) in enumerate(expected):
        assert rivals.largest_r1[row].item() == pytest.approx(largest)
        assert rivals.others_r1[row].item() == pytest.approx(others, rel=1e-5, abs=1e-30)
        assert weight_rC[row].tolist() == pytest.approx(weights, rel=2**-8 if rounds else 1e-5, abs=1e-37)


def test_a_kernel_that_fails_or_differs_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    def failing(*_: Tensor) -> tuple[Tensor, softmax.Rivals]:
        raise RuntimeError("no such instruction\nsecond line")

    def wrong(score_rC: Tensor, own_r1: Tensor, target_r1: Tensor) -> tuple[Tensor, softmax.Rivals]:
        weight_rC, rivals = rounded_weights(score_rC, own_r1, target_r1)
        return weight_rC, rivals._replace(others_r1=rivals.others_r1 * 1.001)

    with caplog.at_level(logging.WARNING, "embeddings"):
        assert checked_weights(failing, CPU) is checked_weights(wrong, CPU) is rounded_weights
    assert [line.rpartition("check: ")[2] for line in caplog.messages] == [
        "RuntimeError: no such instruction",
        "sums differ",
    ]
    same = lambda *problem: rounded_weights(*problem)  # noqa: E731
    assert checked_weights(same, CPU) is same
    assert fastest_weights(CPU) is rounded_weights


def test_the_kernel_equals_the_passes() -> None:
    require_interpreter()
    assert softmax._disagreement(fused_weights, CPU) is None
    score_rC, own_r1, target_r1 = tile()
    (found, found_rivals), (expected, rivals) = (
        weights(score_rC.clone(), own_r1, target_r1) for weights in (fused_weights, rounded_weights)
    )
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(tuple(found_rivals), tuple(rivals))
    score_rC[2, 3] = torch.nan
    assert fused_weights(score_rC, own_r1, target_r1)[1].others_r1.isnan().tolist() == [[row == 2] for row in range(6)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_uses_the_kernel() -> None:
    assert fastest_weights(torch.device("cuda")) is fused_weights
