"""Matryoshka: one contrastive loss at several widths, so that the first numbers of a vector are a vector too."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from embeddings.common import ContrastiveBatch, LossOutput, OptionError
from embeddings.losses.info_nce import InfoNCE


class MatryoshkaInfoNCE(InfoNCE):
    """The weighted mean of InfoNCE over widths: of each vector the first m numbers, compared as whole vectors are.

    loss = sum over m of  w_m · InfoNCE(q[:m], d[:m]) / sum over m of w_m. With the cosine that brings what is left of a
    vector to unit length again. Gathered facts and masks are those of all widths, and made once.

    Args:
        widths: Widths m, each from 1 to that of the vectors, none twice. The widest must be the model's: what lies
            beyond it would not be trained.
        weights: Weight w_m of each width, > 0; None for equal ones.
        options: What `InfoNCE` takes.

    Precision: as `InfoNCE`.
    Distributed: as `InfoNCE`; the candidates of each width are gathered, so sum(m) / D times as many numbers.
    Raises:
        OptionError: If a width or weight is impossible, or an option of `InfoNCE` is.
    Source: Kusupati et al. 2022, arXiv:2205.13147, Eq. 1; truncated, then normalised, with 768 and 256: Nussbaum and
        Duderstadt 2025 (Nomic Embed v2), arXiv:2502.07972, §4.5. Differs: the mean in place of the sum, so that the
        learning rate need not follow the number of widths.
    Related: `Encoder` takes one of the widths as `dimensions`.
    """

    def __init__(
        self, widths: Sequence[int] = (768, 256), weights: Sequence[float] | None = None, **options: Any
    ) -> None:
        super().__init__(**options)
        if not widths or min(widths) < 1:
            raise OptionError("widths", list(widths), "must each be >= 1", "768 and 256 are usual")
        if len(set(widths)) < len(widths):
            raise OptionError("widths", list(widths), "must differ", "give a width more weight instead")
        given = [1.0] * len(widths) if weights is None else list(weights)
        if len(given) != len(widths):
            rule = f"must be one for each of the {len(widths)} widths"
            raise OptionError("weights", given, rule, "leave them out for equal ones")
        if not all(0 < weight < math.inf for weight in given):
            raise OptionError("weights", given, "must each be > 0 and finite", "leave out a width without weight")
        self.widths = tuple(widths)
        self.weights = tuple(weight / sum(given) for weight in given)

    def check_width(self, embedding_dim: int) -> None:
        """Check that the widest width is that of a model's vectors.

        Raises:
            OptionError: If it is larger, or leaves a part of them untrained.
        """
        self._check_fits(embedding_dim)
        if max(self.widths) < embedding_dim:
            rule = f"leave the last of the model's {embedding_dim} numbers untrained"
            raise OptionError(
                "widths", list(self.widths), rule, f"add {embedding_dim}, or give the model a smaller head"
            )

    def forward(self, query_BD: Tensor, candidate_CD: Tensor, batch: ContrastiveBatch) -> LossOutput:
        """The loss of this rank's queries.

        Args:
            query_BD: Query embeddings, (B, D) float.
            candidate_CD: Candidate embeddings, (C, D) float, in the batch's order.
            batch: What is known of each text.

        Returns:
            LossOutput: `loss` () fp32 mean over B and the widths; terms `loss_m` and `accuracy_m` for each width m, and
            `InfoNCE`'s at the widest.

        Raises:
            OptionError: If a width is larger than D.
        """
        self._check_fits(query_BD.shape[1])
        scores = self.at_widths(query_BD, candidate_CD, batch, self.widths)
        terms = self._terms(scores, self.widths.index(max(self.widths)))
        for index, width in enumerate(self.widths):
            terms[f"loss_{width}"] = scores.loss_W.detach()[index]
            terms[f"accuracy_{width}"] = scores.accuracy_W[index]
        with torch.autocast(query_BD.device.type, enabled=False):
            return LossOutput(scores.loss_W @ scores.loss_W.new_tensor(self.weights), terms)

    def _check_fits(self, embedding_dim: int) -> None:
        """Check that vectors are as wide as the widest width."""
        if max(self.widths) > embedding_dim:
            rule = f"must not exceed the {embedding_dim} numbers of a vector"
            raise OptionError("widths", list(self.widths), rule, f"start from {embedding_dim}")
