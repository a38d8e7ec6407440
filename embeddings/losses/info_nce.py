"""InfoNCE and its Matryoshka form, computed in tiles: the full B x C score matrix is never in memory."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from embeddings.common import ContrastiveBatch, LossOutput, OptionError
from embeddings.common.distributed import gather_candidates, gather_counts, gather_rows, rank
from embeddings.common.protocols import KeepsArguments
from embeddings.common.text import Similarity
from embeddings.common.types import moved
from embeddings.losses.masks import (
    CandidateKeys,
    QueryKeys,
    SurrogateFilter,
    SurrogateQueries,
    exclude_candidates_,
    exclude_queries_,
    missing_surrogates_error,
    missing_teacher_error,
    query_index,
    surrogate_false_negatives,
    surrogate_vectors,
)
from embeddings.losses.tiles import (
    ExcludeInPlace,
    WidthScores,
    comparable,
    row_tiles,
    scores_at_once,
    tiled_cross_entropies,
)


class InfoNCE(KeepsArguments, nn.Module):
    """The contrastive loss: each query's positive against its negatives.

    loss = mean over B of  -log( exp(s(q, d+)/t) / (exp(s(q, d+)/t) + sum over negatives exp(s(q, d)/t)) ), with s the
    similarity and t the temperature. Negatives are the query's hard negatives and, if its source allows in-batch
    negatives, the candidates of all other queries of all ranks. Candidates that may answer the query are masked (see
    `masks.false_negatives`). Scores are computed in tiles of whole rows. Each tile adds its share of the gradient
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
        """Check that batches carry the teacher or surrogate data that the loss needs.

        Args:
            has_surrogates: Whether batches carry another model's vectors.
            has_scores: Whether batches carry a teacher's scores; None if not known yet.

        Raises:
            OptionError: If they are missing.
        """
        if self.needs_surrogates and not has_surrogates:
            raise missing_surrogates_error(type(self).__name__)
        if self.has_teacher and not has_surrogates and has_scores is False:
            raise missing_teacher_error(type(self).__name__)

    def check_width(self, embedding_dim: int) -> None:
        """Check that the loss supports vectors of this width; InfoNCE supports any."""

    @torch.no_grad()
    def masked_counts(self, batch: ContrastiveBatch) -> Tensor:
        """Numbers of this rank's in-batch negatives, (2,) float32: those that the masks remove, and all.

        Distributed: the gathers of the keys, as in the loss.
        """
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
    ) -> WidthScores:
        """The loss at W widths: vectors are truncated to their first dimensions before they are compared.

        Keys are gathered once, and each tile's masks are computed once for all widths.

        Distributed: one gather of the truncated candidates per width.
        """
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

    def _terms(self, scores: WidthScores, index: int) -> dict[str, Tensor]:
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
        query = QueryKeys.of(batch, query_index(batch, query_counts, rank_index), *masked)
        if self.in_batch_negatives != "source":
            query = replace(query, in_batch_Q=torch.full_like(batch.in_batch_B, self.in_batch_negatives == "on"))
        own_candidate = CandidateKeys.of(batch, query.index_Q, *masked)
        positive_index_B = batch.positive_index_B + sum(candidate_counts[:rank_index])
        candidate = own_candidate.gathered(candidate_counts)
        surrogate = None
        if self.false_negative_filter is not None:
            queries, own_CS = surrogate_vectors(batch, type(self).__name__)
            surrogate = _Surrogate(self.false_negative_filter, queries, own_CS, gather_rows(own_CS, candidate_counts))
        return _Masking(query_counts, candidate_counts, positive_index_B, query, own_candidate, candidate, surrogate)


@dataclass(frozen=True, slots=True, eq=False)
class _Surrogate:
    """The filter, and the surrogate's vectors of this rank's queries, its candidates, and all ranks' candidates."""

    rule: SurrogateFilter
    query: SurrogateQueries
    own_candidate_CS: Tensor
    candidate_CS: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class _Masking:
    """Keys and vectors that the masks of a batch compare; counts are per rank."""

    query_counts: list[int]
    candidate_counts: list[int]
    positive_index_B: Tensor
    query: QueryKeys
    own_candidate: CandidateKeys
    candidate: CandidateKeys
    surrogate: _Surrogate | None

    def exclude_candidates_(self, score_rC: Tensor, rows: slice) -> None:
        """Set the scores of candidates that may answer these queries to minus infinity."""
        query, positive_index_r = self.query[rows], self.positive_index_B[rows]
        exclude_candidates_(score_rC, query, self.candidate, positive_index_r)
        if self.surrogate is not None:
            vectors, all_CS = self.surrogate.query.rows(rows), self.surrogate.candidate_CS
            is_false_rC = surrogate_false_negatives(self.surrogate.rule, query, self.candidate, vectors, all_CS)
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
                is_false_rQ = surrogate_false_negatives(
                    surrogate.rule, all_queries, positive[rows], all_surrogates, vector_rS
                ).T.contiguous()
                score_rQ.masked_fill_(is_false_rQ.scatter_(1, own_index_B[rows, None], False), -torch.inf)

        return exclude_


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
