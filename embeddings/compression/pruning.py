"""Pruning of the weights of a linear layer by magnitude, Wanda and SparseGPT.

Every function takes one matrix, (O, I): O outputs, I inputs. The Gram matrix of its inputs, (I, I), is the sum of x xᵀ
over the calibration tokens x.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Self

import torch
from torch import Tensor

from embeddings.common import NumericError, OptionError
from embeddings.common.process import logger

PruningMethod = Literal["magnitude", "wanda", "sparsegpt"]
UNSTRUCTURED = "unstructured"
# Attempts with tenfold damping for a Gram matrix that is singular in float32.
_ATTEMPTS = 4

# Factor on the cost of weights whose input was always zero, for which only λ contributes to H.
_DEAD = 1e-9

# The new weights of one input, (O,), given its index and the current weights, (I, O).
ChooseColumn = Callable[[int, Tensor], Tensor]


@dataclass(frozen=True)
class Sparsity:
    """The fraction of weights that become zero, between 0 and 1, and the group size of an N:M pattern.

    Each group of `group` neighbouring inputs of an output has the same number of zeros; None for zeros anywhere.
    """

    fraction: float
    group: int | None = None

    @classmethod
    def parse(cls, pattern: str, fraction: float | None = None) -> Self:
        """The sparsity of a pattern: `N:M` keeps N of M neighbouring inputs; `unstructured` has a default of 0.5."""
        if pattern == UNSTRUCTURED:
            fraction = 0.5 if fraction is None else fraction
            if not 0 < fraction < 1:
                raise OptionError("sparsity", fraction, "must be between 0 and 1", "0.5 makes half of the weights zero")
            return cls(fraction)
        match = re.fullmatch(r"(\d{1,3}):(\d{1,3})", pattern)
        kept, group = map(int, match.groups()) if match else (0, 0)
        if not 0 < kept < group:
            rule = "must be N:M with 0 < N < M, to keep N of M weights, or unstructured"
            raise OptionError("pattern", pattern, rule, "try 2:4 or 4:8")
        if fraction is not None:
            rule = f"has no effect on {pattern}, which determines the number of zeros"
            raise OptionError("sparsity", fraction, rule, "leave it out, or use --pattern unstructured")
        return cls((group - kept) / group, group)

    def zeros_of(self, count: int) -> int:
        return round(self.fraction * count)

    def mask(self, score_OI: Tensor, per_output: bool = False) -> Tensor:
        """True at the weights that become zero, which have the lowest scores, (O, I) bool.

        Without groups, scores are compared over the matrix, or with `per_output` within each output.
        """
        if self.group is not None:
            score_OGM = score_OI.reshape(len(score_OI), -1, self.group)
            return lowest(score_OGM, self.zeros_of(self.group)).flatten(1)
        if per_output:
            return lowest(score_OI, self.zeros_of(score_OI.shape[1]))
        return lowest(score_OI.flatten(), self.zeros_of(score_OI.numel())).view_as(score_OI)


def lowest(score: Tensor, count: int) -> Tensor:
    """True at the `count` lowest numbers along the last dimension, equal numbers by position; same shape, bool."""
    if count == 0:
        return torch.zeros_like(score, dtype=torch.bool)
    threshold = score.kthvalue(count, dim=-1, keepdim=True).values
    below, equal = score < threshold, score == threshold
    num_equal = count - below.sum(dim=-1, keepdim=True)
    return below | (equal & (equal.cumsum(dim=-1) <= num_equal))


def prune_by_magnitude(weight_OI: Tensor, sparsity: Sparsity) -> Tensor:
    """Set the weights (O, I) with the smallest |w| to zero; without groups they are compared over the matrix.

    Source: Han et al. 2015, arXiv:1506.02626, one threshold for each matrix.
    """
    return weight_OI.masked_fill(sparsity.mask(weight_OI.abs()), 0)


def prune_by_wanda(weight_OI: Tensor, gram_II: Tensor, sparsity: Sparsity) -> Tensor:
    """Set the weights (O, I) with the smallest |w_ij| · ‖x_j‖₂ in each output to zero; same dtype.

    ‖x_j‖₂ is the norm of input j over the calibration tokens, the square root of the diagonal of the Gram matrix.

    Source: Sun et al. 2024 (Wanda), arXiv:2306.11695, Eq. 1.
    """
    return weight_OI.masked_fill(sparsity.mask(weight_OI.abs() * gram_II.diagonal().sqrt(), per_output=True), 0)


def prune_by_sparsegpt(
    weight_OI: Tensor, gram_II: Tensor, sparsity: Sparsity, damping: float = 0.01, block_size: int = 128
) -> Tensor:
    """Set the weights whose removal costs the least to zero, and update later weights to compensate.

    With H = Σ x xᵀ + λI and H⁻¹ = UᵀU, U upper triangular, inputs are visited from the first to the last. A weight
    w_j costs w_j² / U_jj². The cheapest of its group become zero, or without groups, the cheapest in `block_size`
    inputs of all outputs. The weights of an input that was zero for all tokens are pruned first.

    Args:
        weight_OI: Weights, (O, I) float; the result has their shape and dtype.
        gram_II: Gram matrix of the inputs, (I, I) float.
        sparsity: The fraction and pattern of zeros.
        damping: λ as a fraction of the mean of H's diagonal, > 0.
        block_size: Inputs whose masks are chosen together, and whose updates are applied to later inputs at once; a
            multiple of the pattern's group.

    Source: Frantar and Alistarh 2023 (SparseGPT), arXiv:2301.00774, Algorithm 1.
    """
    factor_II = inverse_factor(gram_II.to(weight_OI.dtype), damping)
    group = sparsity.group or block_size
    # Small enough to be pruned first, and still ordered by size.
    factor_I1 = torch.where(gram_II.diagonal() == 0, _DEAD, 1.0)[:, None]
    zero_IO = torch.zeros(weight_OI.shape[::-1], dtype=torch.bool, device=weight_OI.device)

    def choose(column: int, weight_IO: Tensor) -> Tensor:
        if column % group == 0:
            block = slice(column, column + group)
            cost_JO = (weight_IO[block] / factor_II.diagonal()[block, None]).square() * factor_I1[block]
            zero_IO[block] = sparsity.mask(cost_JO.T).T
        return weight_IO[column].masked_fill(zero_IO[column], 0)

    return sweep(weight_OI, factor_II, choose, block_size)


def inverse_factor(gram_II: Tensor, damping: float) -> Tensor:
    """U, upper triangular, with UᵀU = (H / h + damping · I)⁻¹, where h is the mean of the Gram matrix's diagonal.

    The scale h cancels in costs and updates. If H is singular in its precision, the damping is raised tenfold.
    """
    mean = gram_II.diagonal().mean()
    # If all inputs are zero, H is λI.
    scaled_II = torch.zeros_like(gram_II) if mean == 0 else gram_II / mean
    upper_II: Tensor
    for attempt in range(_ATTEMPTS):
        damped_II = scaled_II.clone()
        damped_II.diagonal().add_(damping * 10**attempt)
        lower_II, failed = torch.linalg.cholesky_ex(damped_II)
        if not failed:
            upper_II, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower_II), upper=True)
        if not failed and bool(torch.isfinite(upper_II.diagonal()).all()):
            return upper_II
        logger.warning("inputs of a layer are nearly dependent: damping raised to %g", damping * 10 ** (attempt + 1))
    raise NumericError("the inputs of a layer are not finite; check the model's weights and the calibration texts")


def sweep(weight_OI: Tensor, factor_II: Tensor, choose: ChooseColumn, block_size: int) -> Tensor:
    """Replace the weights of each input in turn, and update those of later inputs to compensate.

    The least-squares optimal weights of the inputs after j are w_k - (w_j - ŵ_j) U_jk / U_jj. They are updated at once
    within a block, and after it by one matrix product per block. `choose` returns ŵ_j, (O), given j and the current
    weights, (I, O); the weights of later blocks are current only at the first input of a block.

    Source: Frantar et al. 2023 (GPTQ), arXiv:2210.17323, Eqs. 2 and 3 and §3.3, steps 2 and 3; SparseGPT shares it.
    """
    weight_IO = weight_OI.T.contiguous().clone()
    num_inputs = len(weight_IO)
    for start in range(0, num_inputs, block_size):
        end = min(start + block_size, num_inputs)
        error_JO = torch.zeros_like(weight_IO[start:end])
        for column in range(start, end):
            chosen_O = choose(column, weight_IO)
            error_O = (weight_IO[column] - chosen_O) / factor_II[column, column]
            weight_IO[column + 1 : end] -= factor_II[column, column + 1 : end, None] * error_O
            weight_IO[column] = chosen_O
            error_JO[column - start] = error_O
        weight_IO[end:] -= factor_II[start:end, end:].T @ error_JO
    return weight_IO.T.contiguous()
