"""Another model's vectors in the batch: their use as a filter of false negatives."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from embeddings.common import ContrastiveBatch, OptionError

# Inner products of the same two vectors may differ by this much in matrices of different shapes.
_ROUNDING = 1e-6


@dataclass(frozen=True)
class SurrogateFilter:
    """Rules that remove candidates from a query's negatives by the scores of a surrogate model.

    With f the cosine of the surrogate's vectors, candidate d' is removed from the negatives of query q with positive d
    if f(q, d') >= f(q, d) + margin or f(q, d') >= threshold. A text without a surrogate vector is never removed; if the
    positive has none, the margin has no effect.

    Args:
        margin: The paper's boundary term, relative to the positive's score; None for no such rule. Released: 0.
        threshold: Absolute score, -1 to 1; None for no such rule.
        spare_own_negatives: Whether a query keeps its own hard negatives, as released, if its source allows in-batch
            negatives.

    Source: Morris and Rush 2024, arXiv:2410.02525, §4.1, Eq. 4, which removes any document of the batch, including
        hard negatives; `threshold` and `spare_own_negatives` as in the released code.
    """

    margin: float | None = 0.0
    threshold: float | None = None
    spare_own_negatives: bool = True

    def __post_init__(self) -> None:
        if self.margin is None and self.threshold is None:
            fix = "set margin or threshold, or leave the filter out"
            raise OptionError("false_negative_filter.margin", None, "must be set if threshold is not", fix)
        if self.threshold is not None and not -1.0 <= self.threshold <= 1.0:
            fix = "it is a cosine: 0.9 removes near-duplicates"
            raise OptionError("false_negative_filter.threshold", self.threshold, "must be between -1 and 1", fix)

    def false_negatives(self, surrogates: "Surrogates", rows: slice, columns: slice, own_rc: Tensor) -> Tensor:
        """Candidates to remove from these queries' negatives, (r, c) bool; the caller restores the own positive.

        `own_rc` are the candidates that `spare_own_negatives` is about.
        """
        score_rc = surrogates.query_QS[rows] @ surrogates.candidate_CS[columns].T
        own_score_r1 = surrogates.own_score_Q[rows, None]
        bound_r1 = torch.full_like(own_score_r1, torch.inf)
        if self.margin is not None:
            # Without a score of the positive the margin rule does not apply; NaN would also disable the threshold.
            bound_r1 = (own_score_r1 + self.margin).nan_to_num(nan=torch.inf)
        if self.threshold is not None:
            bound_r1 = bound_r1.clamp(max=self.threshold)
        is_false_rc = score_rc >= bound_r1 - _ROUNDING
        return is_false_rc & ~own_rc if self.spare_own_negatives else is_false_rc


class Surrogates(NamedTuple):
    """Unit vectors of queries, (Q, S) float32 or NaN, and candidates, (C, S); cosines with own positives, (Q,)."""

    query_QS: Tensor
    own_score_Q: Tensor
    candidate_CS: Tensor


def surrogate_vectors(batch: ContrastiveBatch, loss: str = "InfoNCE") -> Surrogates:
    """The surrogate's vectors of this rank's queries and candidates."""
    if batch.surrogate_query_BS is None or batch.surrogate_candidate_CS is None:
        raise missing_teacher_error(loss)
    query_BS = F.normalize(batch.surrogate_query_BS.float(), dim=-1)
    candidate_CS = F.normalize(batch.surrogate_candidate_CS.float(), dim=-1)
    own_score_B = torch.linalg.vecdot(query_BS, candidate_CS[batch.positive_index_B])
    return Surrogates(query_BS, own_score_B, candidate_CS)


def missing_teacher_error(loss: str) -> OptionError:
    rule = "needs a source with surrogate_vectors (MarginMSE: or with `scores` in its records), but no source has them"
    fix = (
        "set data.sources[].surrogate_vectors or model.loss.teacher, write scores with `mine --reranker`, or leave "
        "model.loss.false_negative_filter out"
    )
    return OptionError("model.loss", loss, rule, fix)
