"""InfoNCE, the masks of its false negatives, and its scores in tiles: the full B x C matrix is never in memory."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from embeddings.common import ContrastiveBatch, LossOutput, OptionError
from embeddings.common.distributed import gather_candidates, gather_counts, gather_rows, rank, reduce_int
from embeddings.common.protocols import KeepsArguments
from embeddings.common.text import Similarity
from embeddings.common.types import queues_work
from embeddings.losses.surrogates import (
    SurrogateFilter,
    Surrogates,
    missing_surrogates_error,
    missing_teacher_error,
    surrogate_vectors,
)

# A class is encoded as one number: source * _LABELS_PER_SOURCE + label.
_LABELS_PER_SOURCE = 2**40
# Placeholder keys that never match the other side: for texts without a key, or if keys are not compared.
_NO_QUERY_KEY, _NO_CANDIDATE_KEY = -1, -2
# Matrix products of fewer rows are slow.
_MIN_TILE_ROWS = 32
# Default scores per tile: 8 MB on a CPU, about its cache; 256 MB on a GPU, where each tile launches kernels.
_TILE_SIZE_OF_HOST, _TILE_SIZE_OF_DEVICE = 2**21, 2**26
# (tile of scores, its rows) → None: sets excluded scores to minus infinity, in place.
ExcludeInPlace = Callable[[Tensor, slice], None]


class InfoNCE(KeepsArguments, nn.Module):
    """The contrastive loss: each query's positive against its negatives.

    loss = mean over B of  -log( exp(s(q, d+)/t) / (exp(s(q, d+)/t) + sum over negatives exp(s(q, d)/t)) ), with s the
    similarity and t the temperature. Negatives are the query's hard negatives and, if its source allows in-batch
    negatives, the candidates of all other queries of all ranks. Candidates that may answer the query are masked (see
    `false_negatives`). Scores are computed in tiles of whole rows. Each tile adds its share of the gradient
    before the next tile is computed, so nothing is computed twice and memory grows with B + C.

    Args:
        temperature: Softmax temperature t, > 0. NV-Embed states none; 0.02 is usual for similar models.
        learnable_temperature: Whether log t is a trained parameter.
        in_batch_negatives: `source` uses the setting of each query's source; `on` and `off` override it for all.
        directions: `query_to_document`, or `both` for the mean of it and the loss of documents against queries.
        gather_across_devices: Whether the candidates of all ranks are negatives, or only this rank's.
        similarity: `cosine` or `dot`.
        tile_size: Scores in memory at once, at least 32 rows of them; None for 2^21 (8 MB) on a CPU, 2^26 on a GPU.
        false_negative_filter: Masks candidates to which another model, by its vectors in the batch, assigns a high
            score; None for no filter. It needs a second matrix product and tile of the size of the scores.
        mask_same_text: Whether to mask a candidate whose text is the query's or one of its known positives, or that
            is the positive of a query with the same text. NV-Embed's paper has no such mask.
        mask_same_class: Whether to mask a candidate that has the query's label in the query's source. Without it
            in-batch negatives push texts of one class apart, so NV-Embed's second stage uses none (§3.3).

    Precision: scores, softmax and their gradients in float32 (float64 for float64 input), with or without autocast.
    Distributed: each rank scores its own queries; gradients cross ranks without a world-size factor (see
        `gather_candidates`).
    Raises:
        OptionError: If `temperature` is not > 0 or `tile_size` is not >= 1.
    Source: van den Oord 2018, arXiv:1807.03748, Eq. 4; in-batch negatives switched per source: Lee 2024 (NV-Embed),
        arXiv:2405.17428, §3.3.
    """

    # Widths to which the trained vectors may be truncated; empty if the loss uses the full width only.
    widths: tuple[int, ...] = ()
    # Whether the loss distils a teacher, and whether the records' `scores` can replace the teacher's vectors.
    has_teacher = takes_scores = False
    # Whether only hard negatives have an effect.
    only_hard_negatives = False
    # Teacher model that computes its vectors in each step; None if the batches carry them.
    teacher: str | None = None

    def __init__(
        self,
        temperature: float = 0.02,
        learnable_temperature: bool = False,
        in_batch_negatives: Literal["source", "on", "off"] = "source",
        directions: Literal["query_to_document", "both"] = "query_to_document",
        gather_across_devices: bool = True,
        similarity: Similarity = "cosine",
        tile_size: int | None = None,
        false_negative_filter: SurrogateFilter | None = None,
        mask_same_text: bool = True,
        mask_same_class: bool = True,
    ) -> None:
        super().__init__()
        if not 0 < temperature < math.inf:
            fix = "see lightning_configs/methods/nv_embed_stage1.yaml for a value that trains"
            raise OptionError("temperature", temperature, "must be > 0", fix)
        if tile_size is not None and tile_size < 1:
            raise OptionError("tile_size", tile_size, "must be >= 1", "leave it out for the default")
        self.in_batch_negatives = in_batch_negatives
        self.directions = directions
        self.gather_across_devices = gather_across_devices
        self.similarity: Similarity = similarity
        self.tile_size = tile_size
        self.false_negative_filter = false_negative_filter
        self.mask_same_text, self.mask_same_class = mask_same_text, mask_same_class
        self.log_temperature = nn.Parameter(torch.tensor(math.log(temperature))) if learnable_temperature else None
        self.temperature = temperature

    def forward(self, query_BD: Tensor, candidate_CD: Tensor, batch: ContrastiveBatch) -> LossOutput:
        """The loss of this rank's queries, (B, D), against its candidates, (C, D), both float and in the batch's order.

        Returns:
            LossOutput: `loss` () fp32 mean over B; terms `accuracy` (share of queries whose positive scores above all
            negatives; a tie is an error), `positive_score` (mean similarity of query and positive),
            `no_negative_fraction` (share of queries without a negative: loss 0, accuracy 1) and `temperature` if it is
            learned.
        """
        scores = self.at_widths(query_BD, candidate_CD, batch, (query_BD.shape[1],))
        return LossOutput(scores.loss_W[0], self._terms(scores, 0))

    @property
    def needs_surrogates(self) -> bool:
        """Whether each batch must carry vectors of another model."""
        return (self.has_teacher and not self.takes_scores) or self.false_negative_filter is not None

    def check_teacher(self, has_surrogates: bool, has_scores: bool | None) -> None:
        """Raise an `OptionError` if batches lack the vectors or scores (None: not known yet) that the loss needs."""
        if self.needs_surrogates and not has_surrogates:
            raise missing_surrogates_error(type(self).__name__)
        if self.has_teacher and not has_surrogates and has_scores is False:
            raise missing_teacher_error(type(self).__name__)

    def check_width(self, embedding_dim: int) -> None:
        """Check that the loss supports vectors of this width; InfoNCE supports any."""

    @torch.no_grad()
    def masked_counts(self, batch: ContrastiveBatch) -> Tensor:
        """Numbers of this rank's in-batch negatives, (2,) float32: those that the masks remove, and all."""
        masking = self._masking(batch)
        query, owner_C, device = masking.query, masking.candidate.owner_C, batch.in_batch_B.device
        counts = torch.zeros(2, device=device)
        for rows in row_tiles(len(batch), len(owner_C), scores_at_once(self.tile_size, device)):
            is_in_batch_rC = query.in_batch_Q[rows, None] & (owner_C != query.index_Q[rows, None])
            score_rC = torch.zeros(is_in_batch_rC.shape, device=device)
            masking.exclude_candidates_(score_rC, rows)
            counts += torch.stack([(score_rC.isneginf() & is_in_batch_rC).sum(), is_in_batch_rC.sum()])
        return counts

    def at_widths(
        self, query_BD: Tensor, candidate_CD: Tensor, batch: ContrastiveBatch, widths: Sequence[int]
    ) -> "WidthScores":
        """The loss at W widths: vectors are truncated to their first dimensions before they are compared."""
        with torch.autocast(query_BD.device.type, enabled=False):
            query_WBD = [comparable(query_BD[:, :width], self.similarity) for width in widths]
            candidate_WCD = [comparable(candidate_CD[:, :width], self.similarity) for width in widths]
            scale = self._scale(query_WBD[0])
            masking = self._masking(batch)
            all_WCD = [gather_candidates(own_CD, masking.candidate_counts) for own_CD in candidate_WCD]
            scores = tiled_cross_entropies(
                query_WBD, all_WCD, scale, masking.positive_index_B, masking.exclude_candidates_, self.tile_size
            )
            if self.directions == "query_to_document":
                return scores
            all_WQD = [gather_candidates(own_BD, masking.query_counts) for own_BD in query_WBD]
            positive_WBD = [own_CD[batch.positive_index_B] for own_CD in candidate_WCD]
            exclude_ = masking.queries_excluder(batch)
            documents = tiled_cross_entropies(
                positive_WBD, all_WQD, scale, masking.query.index_Q, exclude_, self.tile_size
            )
            return scores._replace(loss_W=(scores.loss_W + documents.loss_W) / 2)

    def _terms(self, scores: "WidthScores", index: int) -> dict[str, Tensor]:
        terms = {"accuracy": scores.accuracy_W[index], "positive_score": scores.positive_score_W[index]}
        terms["no_negative_fraction"] = scores.alone_W[index]
        if self.log_temperature is not None:
            terms["temperature"] = self.log_temperature.detach().exp()
        return terms

    def _scale(self, like: Tensor) -> Tensor:
        """1 / temperature, () in the working dtype."""
        if self.log_temperature is None:
            # Filled on the device: `torch.tensor` would copy from the host and synchronise.
            return like.new_full((), 1.0 / self.temperature)
        return torch.exp(-self.log_temperature.to(like.dtype))

    def _masking(self, batch: ContrastiveBatch) -> "_Masking":
        gather = self.gather_across_devices and self.in_batch_negatives != "off"
        device = batch.in_batch_B.device
        query_counts = gather_counts(len(batch), device) if gather else [len(batch)]
        candidate_counts = gather_counts(len(batch.candidate), device) if gather else [len(batch.candidate)]
        rank_index = rank() if gather else 0
        masked = self.mask_same_text, self.mask_same_class
        first = sum(query_counts[:rank_index])
        index_B = torch.arange(first, first + len(batch), device=device)
        query = QueryKeys.of(batch, index_B, *masked)
        if self.in_batch_negatives != "source":
            query = replace(query, in_batch_Q=torch.full_like(batch.in_batch_B, self.in_batch_negatives == "on"))
        own_candidate = CandidateKeys.of(batch, query.index_Q, *masked)
        positive_index_B = batch.positive_index_B + sum(candidate_counts[:rank_index])
        candidate = own_candidate.gathered(candidate_counts)
        surrogate = None
        if self.false_negative_filter is not None:
            queries, own_CS = surrogate_vectors(batch, type(self).__name__)
            surrogate = Surrogates(self.false_negative_filter, queries, own_CS, gather_rows(own_CS, candidate_counts))
        return _Masking(query_counts, candidate_counts, positive_index_B, query, own_candidate, candidate, surrogate)


@dataclass(frozen=True, slots=True, eq=False)
class QueryKeys:
    """The keys of queries that the masks compare, int64."""

    index_Q: Tensor  # index over all ranks
    hash_Q: Tensor  # hash of the text
    class_Q: Tensor  # source and label in one number, negative without a label
    in_batch_Q: Tensor  # whether candidates of other queries may be negatives, bool
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

    def own(self, candidate: "CandidateKeys") -> Tensor:
        """Candidates drawn for a query that also has in-batch negatives, (Q, C) bool."""
        return self.in_batch_Q[:, None] & (candidate.owner_C == self.index_Q[:, None])

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
    """The keys of candidates that the masks compare, int64."""

    owner_C: Tensor  # index over all ranks of the query that it was drawn for
    hash_C: Tensor  # hash of the text
    class_C: Tensor  # source and label in one number, negative without a label
    answers_C: Tensor  # hash of the text of the query whose positive it is; a hard negative's own hash

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


def exclude_candidates_(score_QC: Tensor, query: QueryKeys, candidate: CandidateKeys, positive_index_Q: Tensor) -> None:
    """Set the scores (Q, C) of candidates that are neither a negative nor the own positive to -inf, in place.

    On a CPU only the candidates that share a key with one of these queries are compared with them. A GPU compares all:
    selecting them first would synchronise with the host.
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


@dataclass(frozen=True, slots=True, eq=False)
class _Masking:
    """Keys and vectors that the masks of a batch compare; counts are per rank."""

    query_counts: list[int]
    candidate_counts: list[int]
    positive_index_B: Tensor
    query: QueryKeys
    own_candidate: CandidateKeys
    candidate: CandidateKeys
    surrogate: Surrogates | None

    def exclude_candidates_(self, score_rC: Tensor, rows: slice) -> None:
        """Set the scores of candidates that may answer these queries to minus infinity."""
        query, positive_index_r = self.query[rows], self.positive_index_B[rows]
        exclude_candidates_(score_rC, query, self.candidate, positive_index_r)
        if self.surrogate is not None:
            vectors, own_rC = self.surrogate.query.rows(rows), query.own(self.candidate)
            is_false_rC = self.surrogate.rule.false_negatives(vectors, self.surrogate.candidate_CS, own_rC)
            score_rC.masked_fill_(is_false_rC.scatter_(1, positive_index_r[:, None], False), -torch.inf)

    def queries_excluder(self, batch: ContrastiveBatch) -> ExcludeInPlace:
        """The same exclusion for tiles of positives against the queries of all ranks."""
        all_queries, positive = self.query.gathered(self.query_counts), self.own_candidate[batch.positive_index_B]
        own_index_B, surrogate = self.query.index_Q, self.surrogate
        all_surrogates = None if surrogate is None else surrogate.query.gathered(self.query_counts)

        def exclude_(score_rQ: Tensor, rows: slice) -> None:
            exclude_queries_(score_rQ, positive[rows], all_queries, own_index_B[rows])
            if surrogate is not None and all_surrogates is not None:
                vector_rS = surrogate.own_candidate_CS[batch.positive_index_B[rows]]
                own_Qr = all_queries.own(positive[rows])
                is_false_rQ = surrogate.rule.false_negatives(all_surrogates, vector_rS, own_Qr).T.contiguous()
                score_rQ.masked_fill_(is_false_rQ.scatter_(1, own_index_B[rows, None], False), -torch.inf)

        return exclude_


def working_dtype(vector_ND: Tensor) -> torch.dtype:
    """The dtype of similarities and softmaxes: float64 for float64 vectors, else float32."""
    return torch.float64 if vector_ND.dtype == torch.float64 else torch.float32


def comparable(vector_ND: Tensor, similarity: Similarity = "cosine") -> Tensor:
    """Vectors (N, D) whose inner products are the similarities: of unit norm for `cosine`, unchanged for `dot`.

    A zero vector stays zero. The result is float32 (float64 for float64 input), with or without autocast.
    """
    vector_ND = vector_ND.to(working_dtype(vector_ND))
    if similarity == "dot":
        return vector_ND
    unit_ND: Tensor = _UnitNorm.apply(vector_ND)  # type: ignore[no-untyped-call]
    return unit_ND


def similarity_matrix(query_BD: Tensor, candidate_CD: Tensor, similarity: Similarity = "cosine") -> Tensor:
    """The full matrix of similarities of queries and candidates, for small sets (evaluation, tests).

    Args:
        query_BD: (B, D) float.
        candidate_CD: (C, D) float.
        similarity: `cosine` or `dot`.

    Returns:
        score_BC: (B, C) float32 (float64 for float64 input).
    """
    with torch.autocast(query_BD.device.type, enabled=False):
        return comparable(query_BD, similarity) @ comparable(candidate_CD, similarity).T


class _UnitNorm(torch.autograd.Function):
    """v / |v|; a zero vector stays zero and gets no gradient."""

    @staticmethod
    def forward(ctx: Any, vector_ND: Tensor) -> Tensor:
        norm_N1 = torch.linalg.vector_norm(vector_ND, dim=-1, keepdim=True)
        inverse_N1 = torch.where(norm_N1 > 1e-12, 1 / norm_N1, 0)
        unit_ND = vector_ND * inverse_N1
        ctx.save_for_backward(unit_ND, inverse_N1)
        return unit_ND

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_ND: Tensor) -> Tensor:
        """(g - (g . u) u) / |v|: the gradient along the vector is removed."""
        unit_ND, inverse_N1 = ctx.saved_tensors
        along_N1 = torch.linalg.vecdot(gradient_ND, unit_ND)[:, None]
        return torch.addcmul(gradient_ND, unit_ND, along_N1, value=-1).mul_(inverse_N1)


def scores_at_once(tile_size: int | None, device: torch.device | str) -> int:
    """Scores per tile: `tile_size` or, if it is None, 2^21 on a CPU and 2^26 on other devices."""
    if tile_size is not None:
        return tile_size
    return _TILE_SIZE_OF_DEVICE if queues_work(device) else _TILE_SIZE_OF_HOST


class WidthScores(NamedTuple):
    """The results of `tiled_cross_entropies` for W widths; only the loss has a gradient."""

    loss_W: Tensor  # mean cross-entropies
    accuracy_W: Tensor  # shares of rows whose target scores above all others
    positive_score_W: Tensor  # mean unscaled scores of the targets
    alone_W: Tensor  # shares of rows in which all scores but the target's are excluded


def tiled_cross_entropies(
    row_WRD: Sequence[Tensor],
    column_WCD: Sequence[Tensor],
    scale: Tensor,
    target_R: Tensor,
    exclude_: ExcludeInPlace | None = None,
    tile_size: int | None = None,
) -> WidthScores:
    """The mean cross-entropies of scaled inner products at W widths, computed in tiles of whole rows.

    loss = mean over R of  -log softmax(scale * row @ column^T)[target]. Each tile adds its share of the gradient before
    it is freed, in three matrix products, as many as without tiles. The widths share targets and exclusions.

    Args:
        row_WRD: (R, D) float32 or float64 for each width.
        column_WCD: (C, D) for each width, same dtype.
        scale: Factor of all products, (), same dtype; may require a gradient.
        target_R: Column of each row's target, (R,) int64.
        exclude_: Sets scores of a tile to minus infinity in place, never a target's.
        tile_size: Scores in memory at once, at least 32 rows of them; None for the device's default.

    Precision: the dtype of the inputs; call it outside autocast.
    """
    vectors = [*row_WRD, *column_WCD]
    if not torch.is_grad_enabled():
        vectors, scale = [vector_ND.detach() for vector_ND in vectors], scale.detach()
    size = scores_at_once(tile_size, target_R.device)
    outputs = _TiledCrossEntropy.apply(scale, target_R, exclude_, size, *vectors)  # type: ignore[no-untyped-call]
    return WidthScores(*outputs)


class _Width:
    """The vectors of one width, and the sums over its tiles."""

    def __init__(self, row_RD: Tensor, column_CD: Tensor, needs_row: bool, needs_column: bool) -> None:
        self.row_RD, self.column_CD = row_RD, column_CD
        self.row_gradient_RD = torch.empty_like(row_RD) if needs_row else None
        self.column_gradient_CD = torch.zeros_like(column_CD) if needs_column else None
        self.loss, self.num_right, self.target_score, self.num_alone = (row_RD.new_zeros(()) for _ in range(4))

    def add_tile(self, rows: slice, scale: Tensor, target_r1: Tensor, exclude_: Callable[[Tensor], None]) -> None:
        """Add the losses and gradients of one tile of rows."""
        row_rD = self.row_RD[rows] * scale
        weight_rC = row_rD @ self.column_CD.T
        exclude_(weight_rC)
        target_score_r1 = weight_rC.gather(1, target_r1)
        rival_r1 = weight_rC.scatter_(1, target_r1, -torch.inf).amax(1, keepdim=True)
        highest_r1 = torch.maximum(rival_r1, target_score_r1)
        others_r1 = weight_rC.sub_(highest_r1).exp_().sum(1, keepdim=True)
        total_r1 = others_r1 + (target_score_r1 - highest_r1).exp()
        # The target's softmax minus one, as minus the sum of the others: exact even if the softmax is close to 1.
        weight_rC.scatter_(1, target_r1, -others_r1)
        is_right_r1 = target_score_r1 > rival_r1
        loss_r1 = torch.where(is_right_r1, others_r1.log1p(), total_r1.log() + highest_r1 - target_score_r1)
        self.loss += loss_r1.sum()
        self.num_right += is_right_r1.sum()
        self.target_score += target_score_r1.sum()
        self.num_alone += rival_r1.isneginf().sum()
        if self.row_gradient_RD is not None:
            self.row_gradient_RD[rows] = (weight_rC @ self.column_CD).div_(total_r1)
        if self.column_gradient_CD is not None:
            self.column_gradient_CD.addmm_(weight_rC.T, row_rD / total_r1)

    def scale_gradient(self, num_rows: int) -> Tensor:
        """The gradient of the scale, (); call it before `finish`."""
        assert self.row_gradient_RD is not None
        # d(loss)/d(scale) = sum over rows of row . d(loss)/d(scale * row).
        gradient: Tensor = torch.linalg.vecdot(self.row_RD, self.row_gradient_RD).sum() / num_rows
        return gradient

    def finish(self, scale: Tensor, num_rows: int) -> None:
        """Convert the gradient sums to the gradients of the mean loss."""
        if self.row_gradient_RD is not None:
            self.row_gradient_RD *= scale / num_rows
        if self.column_gradient_CD is not None:
            self.column_gradient_CD /= num_rows


class _TiledCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, scale: Tensor, target_R: Tensor, exclude_: ExcludeInPlace | None, tile_size: int, *vectors: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Compute losses and gradients of each tile while its scores are in memory."""
        num_rows, num_widths = max(1, len(target_R)), len(vectors) // 2
        needs_scale, needs = ctx.needs_input_grad[0], ctx.needs_input_grad[4:]
        widths = [
            _Width(vectors[w], vectors[num_widths + w], needs[w] or needs_scale, needs[num_widths + w])
            for w in range(num_widths)
        ]
        for rows in row_tiles(len(target_R), len(vectors[-1]), tile_size):
            exclude_in_tile_ = _tile_exclusion(exclude_, rows, store=num_widths > 1)
            for width in widths:
                width.add_tile(rows, scale, target_R[rows, None], exclude_in_tile_)
        scale_gradient_W = torch.stack([width.scale_gradient(num_rows) for width in widths]) if needs_scale else None
        for width in widths:
            width.finish(scale, num_rows)
        row_gradients = [width.row_gradient_RD if needs[w] else None for w, width in enumerate(widths)]
        ctx.save_for_backward(scale_gradient_W, *row_gradients, *(width.column_gradient_CD for width in widths))
        accuracy_W = torch.stack([width.num_right for width in widths]) / num_rows
        mean_score_W = torch.stack([width.target_score for width in widths]) / (scale * num_rows)
        alone_W = torch.stack([width.num_alone for width in widths]) / num_rows
        ctx.mark_non_differentiable(accuracy_W, mean_score_W, alone_W)
        return torch.stack([width.loss for width in widths]) / num_rows, accuracy_W, mean_score_W, alone_W

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor_W: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        scale_gradient_W, *gradients = ctx.saved_tensors
        # The factor is usually 1, and on a CPU the gradients are then returned without a copy. On a GPU, reading the
        # factor would cost more than the copy.
        factors = list(factor_W.unbind()) if queues_work(factor_W.device) else factor_W.tolist()
        scaled = (
            gradient if gradient is None or (isinstance(factor, float) and factor == 1.0) else gradient * factor
            for gradient, factor in zip(gradients, factors * 2, strict=True)
        )
        return (None if scale_gradient_W is None else scale_gradient_W @ factor_W, None, None, None, *scaled)


def row_tiles(num_rows: int, num_columns: int, tile_size: int) -> Iterator[slice]:
    """Slices of whole rows, each of about `tile_size` scores and at least 32 rows."""
    height = max(_MIN_TILE_ROWS, tile_size // max(1, num_columns))
    return (slice(start, start + height) for start in range(0, num_rows, height))


def _tile_exclusion(exclude_: ExcludeInPlace | None, rows: slice, store: bool) -> Callable[[Tensor], None]:
    """A function that excludes scores of one tile; with `store` later widths reuse the first width's exclusions."""
    stored: list[Tensor] = []

    def apply_(score_rC: Tensor) -> None:
        if stored:
            score_rC.masked_fill_(stored[0], -torch.inf)
        elif exclude_ is not None:
            exclude_(score_rC, rows)
            stored.extend([score_rC.isneginf()] if store else [])

    return apply_
