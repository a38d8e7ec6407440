"""InfoNCE at several widths, so that truncated vectors are useful embeddings too."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from embeddings.common import ContrastiveBatch, LossOutput, OptionError
from embeddings.common.types import moved
from embeddings.losses.info_nce import InfoNCE


class MatryoshkaInfoNCE(InfoNCE):
    """The weighted mean of InfoNCE over several widths, so that truncated vectors are useful embeddings too.

    loss = sum over m of  w_m · InfoNCE(q[:m], d[:m]) / sum over m of w_m. The cosine normalises truncated vectors.

    Args:
        widths: Distinct widths m, each from 1 to D. The largest must equal the model's D: dimensions beyond it would
            not be trained.
        weights: Weight w_m of each width, > 0; None for equal weights.
        options: Options of `InfoNCE`.

    Precision: as `InfoNCE`.
    Distributed: as `InfoNCE`; candidates are gathered at each width, which sends sum(m) / D times as much data.
    Raises:
        OptionError: If a width, a weight or an option of `InfoNCE` is invalid.
    Source: Kusupati et al. 2022, arXiv:2205.13147, Eq. 1; truncation before normalisation, with 768 and 256: Nussbaum
        and Duderstadt 2025 (Nomic Embed v2), arXiv:2502.07972, §4.5. Differs: the mean instead of the sum, so that the
        learning rate does not depend on the number of widths.
    Related: `Encoder` accepts one of the widths as `dimensions`.
    """

    def __init__(
        self, widths: Sequence[int] = (768, 256), weights: Sequence[float] | None = None, **options: Any
    ) -> None:
        super().__init__(**options)
        if not widths or min(widths) < 1:
            raise OptionError("widths", list(widths), "must each be >= 1", "768 and 256 are usual")
        if len(set(widths)) < len(widths):
            raise OptionError("widths", list(widths), "must be distinct", "use weights instead")
        weights = [1.0] * len(widths) if weights is None else list(weights)
        if len(weights) != len(widths):
            rule = f"must be one for each of the {len(widths)} widths"
            raise OptionError("weights", weights, rule, "leave them out for equal weights")
        if not all(0 < weight < math.inf for weight in weights):
            raise OptionError("weights", weights, "must each be > 0 and finite", "remove the width instead")
        self.widths = tuple(widths)
        self.weights = tuple(weight / sum(weights) for weight in weights)

    def check_width(self, embedding_dim: int) -> None:
        """Check that the largest width equals that of the model's vectors."""
        self._check_fits(embedding_dim)
        if max(self.widths) < embedding_dim:
            rule = f"leave the last of the model's {embedding_dim} dimensions untrained"
            fix = f"add {embedding_dim}, or use a smaller head"
            raise OptionError("widths", list(self.widths), rule, fix)

    def forward(self, query_BD: Tensor, candidate_CD: Tensor, batch: ContrastiveBatch) -> LossOutput:
        """The loss of this rank's queries, as in `InfoNCE`.

        Returns:
            LossOutput: `loss` () fp32 mean over B and the widths; terms `loss_m` and `accuracy_m` for each width m, and
            `InfoNCE`'s terms at the largest width.
        """
        self._check_fits(query_BD.shape[1])
        scores = self.at_widths(query_BD, candidate_CD, batch, self.widths)
        terms = self._terms(scores, self.widths.index(max(self.widths)))
        for index, width in enumerate(self.widths):
            terms[f"loss_{width}"] = scores.loss_W.detach()[index]
            terms[f"accuracy_{width}"] = scores.accuracy_W[index]
        with torch.autocast(query_BD.device.type, enabled=False):
            weight_W = torch.tensor(self.weights, dtype=scores.loss_W.dtype)
            return LossOutput(scores.loss_W @ moved(weight_W, scores.loss_W.device), terms)

    def _check_fits(self, embedding_dim: int) -> None:
        if max(self.widths) > embedding_dim:
            rule = f"must not exceed the {embedding_dim} dimensions of a vector"
            raise OptionError("widths", list(self.widths), rule, f"use at most {embedding_dim}")
