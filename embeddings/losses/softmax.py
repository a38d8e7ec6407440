"""Softmax weights of a tile of scores, in place or rounded to bfloat16: on CUDA by one kernel that is checked first."""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from embeddings.common.process import logger


class Rivals(NamedTuple):
    """What the loss of a row needs of the scores that are not its target's."""

    largest_r1: Tensor  # the largest of these scores, minus infinity if all are excluded
    others_r1: Tensor  # the sum of exp(score - the largest score of the row, which may be the target's)


def softmax_weights(score_rC: Tensor, target_score_r1: Tensor, target_r1: Tensor) -> Rivals:
    """Replace scores with exp(score - the row's largest score), and the target's with 0."""
    rival_r1 = score_rC.scatter_(1, target_r1, -torch.inf).amax(1, keepdim=True)
    highest_r1 = torch.maximum(rival_r1, target_score_r1)
    return Rivals(rival_r1, score_rC.sub_(highest_r1).exp_().sum(1, keepdim=True))


# Scores, the targets' scores and the targets' columns → weights in bfloat16, and the rivals.
RoundedWeights = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Rivals]]


def rounded_weights(score_rC: Tensor, target_score_r1: Tensor, target_r1: Tensor) -> tuple[Tensor, Rivals]:
    """The weights of `softmax_weights` in bfloat16; overwrites the scores."""
    rivals = softmax_weights(score_rC, target_score_r1, target_r1)
    return score_rC.to(torch.bfloat16), rivals


def fastest_weights(device: torch.device) -> RoundedWeights:
    """The kernel on a CUDA device, which reads the scores once from memory; `rounded_weights` elsewhere."""
    return checked_weights(fused_weights, device) if device.type == "cuda" else rounded_weights


def fused_weights(score_rC: Tensor, target_score_r1: Tensor, target_r1: Tensor) -> tuple[Tensor, Rivals]:
    """`rounded_weights` by a Triton kernel, which leaves the scores as they are."""
    from embeddings.losses.softmax_kernel import weights_of_rows

    weight_rC = torch.empty_like(score_rC, dtype=torch.bfloat16)
    return weight_rC, Rivals(*weights_of_rows(score_rC, target_score_r1, target_r1, weight_rC))


@cache
def checked_weights(fused: RoundedWeights, device: torch.device) -> RoundedWeights:
    """`fused` if its results on small random scores equal those of `rounded_weights`, else `rounded_weights`."""
    try:
        error = _disagreement(fused, device)
    except Exception as failure:
        # Compilers raise many types of exceptions, none of which must stop the run.
        error = f"{type(failure).__name__}: {str(failure).splitlines()[0] if str(failure) else 'no message'}"
    if error is None:
        return fused
    line = "InfoNCE on %s computes its softmax in several passes: the fused kernel failed its check: %s"
    logger.warning(line, device, error)
    return rounded_weights


def _disagreement(fused: RoundedWeights, device: torch.device) -> str | None:
    """The difference between the fused and the other weights on a problem, or None if they agree."""
    generator, num_columns = torch.Generator().manual_seed(0), 5003
    score_rC = 20 * torch.randn(7, num_columns, generator=generator)
    score_rC[:, 1::3] = -torch.inf
    # A row without rivals, and rows whose target has the largest or the smallest score.
    score_rC[0] = -torch.inf
    target_r1 = torch.tensor([[5], [0], [5002], [4096], [7], [1024], [9]])
    target_score_r1 = torch.tensor([[3.0], [90.0], [-90.0], [0.0], [10.0], [-1e4], [1e4]])
    problem = [each.to(device) for each in (score_rC, target_score_r1, target_r1)]
    found, expected = (weights(problem[0].clone(), *problem[1:]) for weights in (fused, rounded_weights))
    pairs = zip(("weights", "largest scores", "sums"), (found[0], *found[1]), (expected[0], *expected[1]), strict=True)
    for name, ours, reference in pairs:
        # A weight next to the middle of two values of bfloat16 may be rounded to the other one.
        tolerance = 2**-7 if name == "weights" else 1e-5
        if not torch.allclose(ours.float(), reference.float(), rtol=tolerance, atol=1e-30):
            return f"{name} differ"
    return None
