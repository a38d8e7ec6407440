"""Another model's vectors in the batch: their use as a filter of false negatives."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from embeddings.common import ContrastiveBatch, OptionError
from embeddings.common.distributed import gather_rows

# Inner products of the same two vectors may differ by this much in matrices of different shapes.
_ROUNDING = 1e-6


@dataclass(frozen=True)
class SurrogateFilter:
    """Rules that remove candidates from a query's negatives by the scores of a surrogate model.

    With f the cosine of the surrogate's vectors, candidate d' is removed from the negatives of query q with positive d
    if f(q, d') >= f(q, d) + margin or f(q, d') >= threshold. Hard negatives are treated like other candidates (but see
    `spare_own_negatives`). A text without a surrogate vector is never removed; if the positive has none, the margin
    has no effect.

    Args:
        margin: The paper's boundary term, relative to the positive's score; None for no such rule. Released: 0.
        threshold: Absolute score, -1 to 1; None for no such rule.
        spare_own_negatives: Whether a query keeps its own hard negatives, as released, if its source allows in-batch
            negatives.

    Raises:
        OptionError: If margin and threshold are both None, or either is out of range.
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
        if self.margin is not None and not math.isfinite(self.margin):
            raise OptionError("false_negative_filter.margin", self.margin, "must be finite", "the released code uses 0")
        if self.threshold is not None and not -1.0 <= self.threshold <= 1.0:
            fix = "it is a cosine: 0.9 removes near-duplicates"
            raise OptionError("false_negative_filter.threshold", self.threshold, "must be between -1 and 1", fix)

    def false_negatives(self, query: "SurrogateQueries", candidate_CS: Tensor, own_QC: Tensor) -> Tensor:
        """Candidates to remove from each query's negatives, (Q, C) bool; the caller restores the own positive.

        `own_QC` are the candidates that `spare_own_negatives` is about. Scores are float32; one within 1e-6 of a bound
        counts as having reached it, so that rounding does not distinguish two copies of one vector.
        """
        score_QC = query.vector_QS @ candidate_CS.T
        bound_Q1 = torch.full_like(query.own_score_Q, torch.inf)[:, None]
        if self.margin is not None:
            # Without a score of the positive the margin rule does not apply; NaN would also disable the threshold.
            bound_Q1 = (query.own_score_Q + self.margin).nan_to_num(nan=torch.inf)[:, None]
        if self.threshold is not None:
            bound_Q1 = bound_Q1.clamp(max=self.threshold)
        is_false_QC = score_QC >= bound_Q1 - _ROUNDING
        return is_false_QC & ~own_QC if self.spare_own_negatives else is_false_QC


class SurrogateQueries(NamedTuple):
    """The unit vectors of queries, (Q, S) float32 or NaN, and their cosines with their own positives, (Q,)."""

    vector_QS: Tensor
    own_score_Q: Tensor

    def rows(self, rows: slice) -> "SurrogateQueries":
        return SurrogateQueries(self.vector_QS[rows], self.own_score_Q[rows])

    def gathered(self, counts: list[int]) -> "SurrogateQueries":
        return SurrogateQueries(gather_rows(self.vector_QS, counts), gather_rows(self.own_score_Q, counts))


@dataclass(frozen=True, slots=True, eq=False)
class Surrogates:
    """The filter, and the unit vectors of this rank's queries, its candidates, and all ranks' candidates."""

    rule: SurrogateFilter
    query: SurrogateQueries
    own_candidate_CS: Tensor
    candidate_CS: Tensor


def surrogate_vectors(batch: ContrastiveBatch, loss: str = "InfoNCE") -> tuple[SurrogateQueries, Tensor]:
    """The surrogate's vectors of this rank's queries, and of its candidates, (C, S) float32 of unit length."""
    if batch.surrogate_query_BS is None or batch.surrogate_candidate_CS is None:
        raise missing_surrogates_error(loss)
    query_BS = F.normalize(batch.surrogate_query_BS.float(), dim=-1)
    candidate_CS = F.normalize(batch.surrogate_candidate_CS.float(), dim=-1)
    own_score_B = torch.linalg.vecdot(query_BS, candidate_CS[batch.positive_index_B])
    return SurrogateQueries(query_BS, own_score_B), candidate_CS


def missing_surrogates_error(loss: str) -> OptionError:
    """The error of a distillation loss, or one with a filter, whose data have no surrogate vectors."""
    rule = "needs a source with surrogate_vectors, but no source has them"
    fix = "set it in data.sources, or set model.loss.teacher, or leave model.loss.false_negative_filter out"
    return OptionError("model.loss", loss, rule, fix)


def missing_teacher_error(loss: str) -> OptionError:
    """The error of a distillation loss whose data have neither a teacher's scores nor its vectors."""
    rule = "needs a source with `scores` in its records, or with surrogate_vectors, but no source has either"
    fix = "write scores with `mine --reranker`, or set data.sources[].surrogate_vectors or model.loss.teacher"
    return OptionError("model.loss", loss, rule, fix)
