"""The Triton kernel of `softmax`: a program reads a row of scores twice, the second time from the chip's cache."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# Scores of a row that a program reads at once.
BLOCK = 4096


def weights_of_rows(score_rC: Tensor, target_score_r1: Tensor, target_r1: Tensor, weight_rC: Tensor) -> Any:
    """Write the weights of `softmax_weights`; returns the largest scores of the rivals and the sums, (r, 1) each."""
    assert score_rC.is_contiguous()
    assert weight_rC.is_contiguous()
    rival_r1, others_r1 = torch.empty_like(target_score_r1), torch.empty_like(target_score_r1)
    target_score_r1, target_r1 = target_score_r1.contiguous(), target_r1.contiguous()
    num_rows, num_columns = score_rC.shape
    if num_rows:
        arguments = (score_rC, weight_rC, target_r1, target_score_r1, rival_r1, others_r1, num_columns)
        _weights[(num_rows,)](*arguments, BLOCK=BLOCK, num_warps=8)
    return rival_r1, others_r1


@triton.jit
def _weights(scores, weights, targets, target_scores, rivals, sums, num_columns, BLOCK: tl.constexpr):
    """One row: the largest score of the rivals, the sum of all weights in float32, and the rounded weights."""
    row = tl.program_id(0).to(tl.int64)
    scores += row * num_columns
    weights += row * num_columns
    target = tl.load(targets + row)
    most = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, num_columns, BLOCK):
        column = first + tl.arange(0, BLOCK)
        score = tl.load(scores + column, mask=column < num_columns, other=float("-inf"))
        score = tl.where(column == target, float("-inf"), score)
        larger = tl.maximum(most, score)
        origin = tl.where(larger == float("-inf"), 0.0, larger)
        total = total * tl.exp(most - origin) + tl.exp(score - origin)
        most = larger
    rival = tl.max(most, axis=0)
    highest = tl.maximum(rival, tl.load(target_scores + row))
    tl.store(rivals + row, rival)
    tl.store(sums + row, tl.sum(total * tl.exp(most - highest), axis=0))
    for first in range(0, num_columns, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < num_columns
        weight = tl.exp(tl.load(scores + column, mask=inside, other=float("-inf")) - highest)
        weight = tl.where(column == target, 0.0, weight)
        tl.store(weights + column, weight.to(weights.dtype.element_ty), mask=inside)
