"""False negatives that another model finds: a candidate that it scores as high as the own positive is no negative."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from embeddings.common import ContrastiveBatch, OptionError
from embeddings.common.distributed import gather_rows
from embeddings.losses.masks import CandidateFacts, QueryFacts

# Two products of one pair of vectors may differ by this where they come from matrices of different shapes.
_ROUNDING = 1e-6


@dataclass(frozen=True)
class SurrogateFilter:
    """Which candidates a surrogate's scores take out of a query's negatives.

    With f the cosine of the surrogate's vectors, candidate d' is no negative of query q with the positive d if
    f(q, d') >= f(q, d) + margin or f(q, d') >= threshold. Hard negatives of any query are candidates like all others
    (but see `spare_own_negatives`). A text without a vector is never taken out, and where the own positive has none,
    the margin takes nothing out.

    Args:
        margin: The boundary term of the paper, relative to the own positive's score, no unit; None for no such rule.
            The released code uses 0.
        threshold: Absolute score, -1 to 1; None for no such rule.
        spare_own_negatives: Whether the hard negatives drawn for a query stay its negatives, as released, where its
            source allows in-batch negatives.

    Raises:
        OptionError: If there is no rule at all, or a bound that is no cosine's.
    Source: Morris and Rush 2024, arXiv:2410.02525, §4.1, Eq. 4, which takes any document of the batch out, hard
        negatives too; threshold and the sparing of the query's own hard negatives as released.
    """

    margin: float | None = 0.0
    threshold: float | None = None
    spare_own_negatives: bool = True

    def __post_init__(self) -> None:
        if self.margin is None and self.threshold is None:
            fix = "give a margin or a threshold, or leave the filter out"
            raise OptionError("false_negative_filter.margin", None, "leaves no rule without a threshold", fix)
        if self.margin is not None and not math.isfinite(self.margin):
            raise OptionError("false_negative_filter.margin", self.margin, "must be finite", "the released code uses 0")
        if self.threshold is not None and not -1.0 <= self.threshold <= 1.0:
            fix = "it is a cosine: 0.9 takes out near-duplicates"
            raise OptionError("false_negative_filter.threshold", self.threshold, "must be within -1 and 1", fix)


@dataclass(frozen=True, slots=True, eq=False)
class SurrogateQueries:
    """What the filter must know of each query.

    Attributes:
        vector_QS: Its unit vector, (Q, S) float32; NaN where it has none.
        own_score_Q: Its cosine with its own positive, (Q,) float32.
    """

    vector_QS: Tensor
    own_score_Q: Tensor

    def __getitem__(self, rows: slice) -> "SurrogateQueries":
        """Some of the queries."""
        return SurrogateQueries(self.vector_QS[rows], self.own_score_Q[rows])

    def gathered(self, counts: list[int]) -> "SurrogateQueries":
        """The queries of all ranks."""
        return SurrogateQueries(gather_rows(self.vector_QS, counts), gather_rows(self.own_score_Q, counts))


def surrogate_vectors(batch: ContrastiveBatch) -> tuple[SurrogateQueries, Tensor]:
    """The surrogate's vectors of this rank's queries, and of its candidates, (C, S) float32 of unit length.

    Raises:
        OptionError: If the batch has none, so that the filter could not take effect.
    """
    if batch.surrogate_query_BS is None or batch.surrogate_candidate_CS is None:
        raise without_surrogates()
    query_BS = F.normalize(batch.surrogate_query_BS.float(), dim=-1)
    candidate_CS = F.normalize(batch.surrogate_candidate_CS.float(), dim=-1)
    own_score_B = torch.linalg.vecdot(query_BS, candidate_CS[batch.positive_index_B])
    return SurrogateQueries(query_BS, own_score_B), candidate_CS


def without_surrogates() -> OptionError:
    """The error of a filter that cannot take effect."""
    rule = "needs a source with surrogate_vectors, and none has them"
    fix = "set data.sources[].surrogate_vectors, or leave the filter out"
    return OptionError("model.loss.false_negative_filter", "on", rule, fix)


def surrogate_false_negatives(
    rule: SurrogateFilter,
    query: QueryFacts,
    candidate: CandidateFacts,
    surrogate: SurrogateQueries,
    candidate_CS: Tensor,
) -> Tensor:
    """Candidates that the surrogate's scores take out of each query's negatives.

    The own positive is one of them by this rule where the margin is 0: whoever masks puts it back.

    Args:
        rule: The margins.
        query: Facts of Q queries.
        candidate: Facts of C candidates.
        surrogate: The queries' vectors and own scores.
        candidate_CS: The candidates' unit vectors, (C, S) float32, NaN where there is none.

    Returns:
        is_false_QC: (Q, C) bool.

    Precision: scores in float32; one within 1e-6 of a bound counts as having reached it, so that two copies of one
        vector are equal.
    """
    score_QC = surrogate.vector_QS @ candidate_CS.T
    bound_Q1 = torch.full_like(surrogate.own_score_Q, torch.inf)[:, None]
    if rule.margin is not None:
        # An own positive without a score sets no bound, rather than one that nothing reaches.
        bound_Q1 = (surrogate.own_score_Q + rule.margin).nan_to_num(nan=torch.inf)[:, None]
    if rule.threshold is not None:
        bound_Q1 = bound_Q1.clamp(max=rule.threshold)
    is_false_QC = score_QC >= bound_Q1 - _ROUNDING
    if rule.spare_own_negatives:
        is_false_QC &= ~(query.in_batch_Q[:, None] & (candidate.owner_C == query.index_Q[:, None]))
    return is_false_QC
