"""Masks of false negatives, computed per tile of scores: by text, by class, and by a surrogate model's scores."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from embeddings.common import ContrastiveBatch, OptionError
from embeddings.common.distributed import gather_rows, reduce_int
from embeddings.common.types import queues_work

# A class is encoded as one number: source * _LABELS_PER_SOURCE + label.
_LABELS_PER_SOURCE = 2**40
# Placeholder keys that never match the other side: for texts without a key, or if keys are not compared.
_NO_QUERY_KEY = -1
_NO_CANDIDATE_KEY = -2
# Inner products of the same two vectors may differ by this much in matrices of different shapes.
_ROUNDING = 1e-6


@dataclass(frozen=True, slots=True, eq=False)
class QueryKeys:
    """The keys of queries that the masks compare.

    Attributes:
        index_Q: Index of the query over all ranks, (Q,) int64.
        hash_Q: Hash of its text, (Q,) int64.
        class_Q: Its source and label in one number, negative without a label, (Q,) int64.
        in_batch_Q: Whether candidates of other queries may be its negatives, (Q,) bool.
        known_positive_hash_QP: Hashes of all its known positives, (Q, P) int64.
    """

    index_Q: Tensor
    hash_Q: Tensor
    class_Q: Tensor
    in_batch_Q: Tensor
    known_positive_hash_QP: Tensor

    @classmethod
    def of(cls, batch: ContrastiveBatch, index_B: Tensor, by_text: bool = True, by_class: bool = True) -> "QueryKeys":
        """The keys of this rank's queries, with `index_B` over all ranks; placeholders for what is not compared."""
        hash_B, known_BP = batch.query_hash_B, batch.known_positive_hash_BP
        if not by_text:
            hash_B, known_BP = (torch.full_like(keys, _NO_QUERY_KEY) for keys in (hash_B, known_BP))
        class_B = _class(batch.source_B, batch.query_label_B, _NO_QUERY_KEY, by_class)
        return cls(index_B, hash_B, class_B, batch.in_batch_B, known_BP)

    def __getitem__(self, rows: slice | Tensor) -> "QueryKeys":
        return QueryKeys(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))

    def gathered(self, counts: list[int]) -> "QueryKeys":
        """The keys of all ranks' queries; P may differ between ranks."""
        if len(counts) == 1:
            return self
        known_QP = self.known_positive_hash_QP
        width = reduce_int(known_QP.shape[1], "max", known_QP.device)
        known_QP = torch.cat([known_QP, known_QP[:, :1].expand(-1, width - known_QP.shape[1])], dim=1)
        keys_QF = torch.stack([self.index_Q, self.hash_Q, self.class_Q, self.in_batch_Q.long()], dim=1)
        keys_QF = gather_rows(torch.cat([keys_QF, known_QP], dim=1), counts)
        index_Q, hash_Q, class_Q, in_batch_Q = keys_QF[:, :4].unbind(1)
        return QueryKeys(index_Q, hash_Q, class_Q, in_batch_Q.bool(), keys_QF[:, 4:])


@dataclass(frozen=True, slots=True, eq=False)
class CandidateKeys:
    """The keys of candidates that the masks compare.

    Attributes:
        owner_C: Index over all ranks of the query it was drawn for, (C,) int64.
        hash_C: Hash of its text, (C,) int64.
        class_C: Its source and label in one number, negative without a label, (C,) int64.
        answers_C: Hash of the text of the query whose positive it is; a hard negative's own hash, (C,) int64.
    """

    owner_C: Tensor
    hash_C: Tensor
    class_C: Tensor
    answers_C: Tensor

    @classmethod
    def of(
        cls, batch: ContrastiveBatch, index_B: Tensor, by_text: bool = True, by_class: bool = True
    ) -> "CandidateKeys":
        """The keys of this rank's candidates, as in `QueryKeys.of`."""
        hash_C = batch.candidate_hash_C
        answers_C = hash_C.index_copy(0, batch.positive_index_B, batch.query_hash_B)
        if not by_text:
            hash_C, answers_C = (torch.full_like(keys, _NO_CANDIDATE_KEY) for keys in (hash_C, answers_C))
        class_C = _class(batch.source_B[batch.owner_C], batch.candidate_label_C, _NO_CANDIDATE_KEY, by_class)
        return cls(index_B[batch.owner_C], hash_C, class_C, answers_C)

    def __getitem__(self, rows: slice | Tensor) -> "CandidateKeys":
        return CandidateKeys(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))

    def gathered(self, counts: list[int]) -> "CandidateKeys":
        """The keys of all ranks' candidates."""
        keys_CF = torch.stack([getattr(self, name) for name in self.__dataclass_fields__], dim=1)
        return CandidateKeys(*(column_C.contiguous() for column_C in gather_rows(keys_CF, counts).unbind(1)))


def query_index(batch: ContrastiveBatch, counts: list[int], rank: int) -> Tensor:
    """Indices over all ranks of this rank's queries, (B,) int64."""
    start = sum(counts[:rank])
    return torch.arange(start, start + len(batch), device=batch.in_batch_B.device)


def false_negatives(query: QueryKeys, candidate: CandidateKeys) -> Tensor:
    """Candidates that may answer a query and so must not be its negatives, (Q, C) bool.

    A candidate is a false negative if its text is the query's or one of the query's known positives, if it is the
    positive of a query with the same text, or if both have the same label in the same source. The rule also selects the
    query's own positive, which the caller restores.
    """
    is_false_QC = candidate.hash_C == query.hash_Q[:, None]
    is_false_QC |= candidate.answers_C == query.hash_Q[:, None]
    is_false_QC |= candidate.class_C == query.class_Q[:, None]
    for known_Q in query.known_positive_hash_QP.unbind(1):
        is_false_QC |= candidate.hash_C == known_Q[:, None]
    return is_false_QC


def is_negative_mask(query: QueryKeys, candidate: CandidateKeys, positive_index_Q: Tensor) -> Tensor:
    """The negatives of each query: the reference definition of the exclusions in `InfoNCE`'s tiles.

    Args:
        query: Keys of Q queries.
        candidate: Keys of C candidates.
        positive_index_Q: Row of each query's positive among the candidates, (Q,) int64.

    Returns:
        is_negative_QC: (Q, C) bool. False for a query's own positive and for false negatives. If the query's source
        does not allow in-batch negatives, it is True only for candidates that were drawn for this query.
    """
    is_negative_QC = ~false_negatives(query, candidate)
    is_negative_QC &= query.in_batch_Q[:, None] | (candidate.owner_C == query.index_Q[:, None])
    return is_negative_QC.scatter_(1, positive_index_Q[:, None], False)


def exclude_candidates_(score_QC: Tensor, query: QueryKeys, candidate: CandidateKeys, positive_index_Q: Tensor) -> None:
    """Set the scores (Q, C) of candidates that are neither a negative nor the own positive to -inf, in place.

    Equal to filling where `is_negative_mask` is False. On a CPU only the few candidates that share a key with one of
    these queries are compared with them; a label that all texts share costs the full comparison. A GPU compares all,
    at one or two bytes per score: selecting them first would synchronise with the host.
    """
    suspect_S = None
    if not queues_work(score_QC.device):
        keys = torch.cat([query.hash_Q, query.known_positive_hash_QP.flatten()])
        is_suspect_C = torch.isin(candidate.hash_C, keys) | torch.isin(candidate.answers_C, query.hash_Q)
        is_suspect_C |= torch.isin(candidate.class_C, query.class_Q)
        suspect_S = is_suspect_C.nonzero().squeeze(1)
    is_false_QS = false_negatives(query, candidate if suspect_S is None else candidate[suspect_S])
    _fill_(score_QC, positive_index_Q, suspect_S, is_false_QS, ~query.in_batch_Q, query.index_Q, candidate.owner_C)


def exclude_queries_(score_CQ: Tensor, candidate: CandidateKeys, query: QueryKeys, own_index_C: Tensor) -> None:
    """The same for documents contrasted with queries, scores (C, Q); `own_index_C` is each document's own query.

    A query that a document may answer is not a negative of it. A document has no negatives if the source of its own
    query does not allow in-batch negatives.
    """
    suspect_S = None
    if not queues_work(score_CQ.device):
        is_suspect_Q = torch.isin(query.hash_Q, torch.cat([candidate.hash_C, candidate.answers_C]))
        is_suspect_Q |= torch.isin(query.known_positive_hash_QP, candidate.hash_C).any(1)
        is_suspect_Q |= torch.isin(query.class_Q, candidate.class_C)
        suspect_S = is_suspect_Q.nonzero().squeeze(1)
    is_false_CS = false_negatives(query if suspect_S is None else query[suspect_S], candidate).T
    is_restricted_C = ~query.in_batch_Q[own_index_C]
    _fill_(score_CQ, own_index_C, suspect_S, is_false_CS, is_restricted_C, candidate.owner_C, query.index_Q)


def _fill_(
    score_RC: Tensor,
    own_R: Tensor,
    suspect_S: Tensor | None,
    is_false_RS: Tensor,
    is_restricted_R: Tensor,
    query_R: Tensor,
    query_C: Tensor,
) -> None:
    """Set the scores of false negatives, and of other queries' columns in restricted rows, to -inf.

    Each row's own column `own_R` keeps its score. Restricted rows have no in-batch negatives. `is_false_RS` is about
    the columns `suspect_S`; if that is None, about all C columns, and no tensor's size depends on values.
    """
    if suspect_S is None:
        is_excluded_RC = is_false_RS | (is_restricted_R[:, None] & (query_C != query_R[:, None]))
        score_RC.masked_fill_(is_excluded_RC.scatter_(1, own_R[:, None], False), -torch.inf)
        return
    own_score_R1 = score_RC.gather(1, own_R[:, None])
    if suspect_S.numel():
        score_RS = score_RC[:, suspect_S].masked_fill_(is_false_RS, -torch.inf)
        score_RC.index_copy_(1, suspect_S, score_RS)
    restricted_R = is_restricted_R.nonzero().squeeze(1)
    if restricted_R.numel():
        is_foreign_RC = query_C != query_R[restricted_R, None]
        score_RC[restricted_R] = score_RC[restricted_R].masked_fill_(is_foreign_RC, -torch.inf)
    score_RC.scatter_(1, own_R[:, None], own_score_R1)


def _class(source_N: Tensor, label_N: Tensor, no_key: int, compared: bool) -> Tensor:
    return torch.where((label_N >= 0) & compared, source_N * _LABELS_PER_SOURCE + label_N, no_key)


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


class SurrogateQueries(NamedTuple):
    """The unit vectors of queries, (Q, S) float32 or NaN, and their cosines with their own positives, (Q,)."""

    vector_QS: Tensor
    own_score_Q: Tensor

    def rows(self, rows: slice) -> "SurrogateQueries":
        return SurrogateQueries(self.vector_QS[rows], self.own_score_Q[rows])

    def gathered(self, counts: list[int]) -> "SurrogateQueries":
        return SurrogateQueries(gather_rows(self.vector_QS, counts), gather_rows(self.own_score_Q, counts))


def surrogate_vectors(batch: ContrastiveBatch, loss: str = "InfoNCE") -> tuple[SurrogateQueries, Tensor]:
    """The surrogate's vectors of this rank's queries, and of its candidates, (C, S) float32 of unit length.

    `loss` is the class that needs them, for the error if the batch has none.
    """
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


def surrogate_false_negatives(
    rule: SurrogateFilter, query: QueryKeys, candidate: CandidateKeys, surrogate: SurrogateQueries, candidate_CS: Tensor
) -> Tensor:
    """Candidates that the surrogate's scores remove from each query's negatives, (Q, C) bool.

    `candidate_CS` are the candidates' unit vectors, NaN for a text without one. With a margin of 0 the rule also
    removes the own positive, which the caller restores.

    Precision: scores in float32. A score within 1e-6 of a bound counts as having reached it, so that rounding does not
        distinguish two copies of one vector.
    """
    score_QC = surrogate.vector_QS @ candidate_CS.T
    bound_Q1 = torch.full_like(surrogate.own_score_Q, torch.inf)[:, None]
    if rule.margin is not None:
        # Without a score of the positive the margin rule does not apply; NaN would also disable the threshold.
        bound_Q1 = (surrogate.own_score_Q + rule.margin).nan_to_num(nan=torch.inf)[:, None]
    if rule.threshold is not None:
        bound_Q1 = bound_Q1.clamp(max=rule.threshold)
    is_false_QC = score_QC >= bound_Q1 - _ROUNDING
    if rule.spare_own_negatives:
        is_false_QC &= ~(query.in_batch_Q[:, None] & (candidate.owner_C == query.index_Q[:, None]))
    return is_false_QC
