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
from embeddings.common.types import moved, queues_work
from embeddings.losses.softmax import Rivals, fastest_weights, softmax_weights
from embeddings.losses.surrogates import SurrogateFilter, Surrogates, missing_teacher_error, surrogate_vectors

# A class is encoded as one number: source * _LABELS_PER_SOURCE + label.
_LABELS_PER_SOURCE = 2**40
# Classes of texts without a label, which match no class of the other side.
_NO_QUERY_CLASS, _NO_CANDIDATE_CLASS = -1, -2
# Matrix products of fewer rows are slow.
_MIN_TILE_ROWS = 32
# Default scores per tile: 8 MB on a CPU, about its cache; 256 MB on a GPU, where each tile launches kernels.
_TILE_SIZE_OF_HOST, _TILE_SIZE_OF_DEVICE = 2**21, 2**26
# Rows of a tile → the scores that are excluded, (r, C) bool.
Excluded = Callable[[slice], Tensor]


class InfoNCE(KeepsArguments, nn.Module):
    """The contrastive loss: each query's positive against its negatives.

    loss = mean over B of  -log( exp(s(q, d+)/t) / (exp(s(q, d+)/t) + sum over negatives exp(s(q, d)/t)) ), with s the
    similarity and t the temperature. Negatives are the query's hard negatives and, if its source allows in-batch
    negatives, the candidates of all other queries of all ranks. Candidates that may answer the query are masked (see
    `Masks`). Scores are computed in tiles of whole rows, so memory grows with B + C.

    Args:
        temperature: Softmax temperature t, > 0. NV-Embed states none; 0.02 is usual for similar models.
        learnable_temperature: Whether log t is a trained parameter.
        in_batch_negatives: `source` uses the setting of each query's source; `on` and `off` override it for all.
        directions: `query_to_document`, or `both` for the mean of it and the loss of documents against queries. A pair
            whose source has no in-batch negatives has only the first.
        gather_across_devices: Whether the candidates of all ranks are negatives, or only this rank's.
        similarity: `cosine` or `dot`.
        tile_size: Scores in memory at once, at least 32 rows of them; None for 2^21 (8 MB) on a CPU, 2^26 on a GPU.
        false_negative_filter: Masks candidates to which another model, by its vectors in the batch, assigns a high
            score; None for no filter.
        mask_same_text: Whether to mask a candidate whose text is the query's or one of its known positives, or that
            is the positive of a query with the same text. NV-Embed's paper has no such mask.
        mask_same_class: Whether to mask a candidate that has the query's label in the query's source. Without it
            in-batch negatives push texts of one class apart, so NV-Embed's second stage uses none (§3.3).

    Precision: scores, softmax and their gradients in float32 (float64 for float64 input), with or without autocast. On
        CUDA, vectors in bfloat16 or under its autocast are rounded to bfloat16 for the products (see
        `tiled_cross_entropies`).
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
        if directions == "both" and in_batch_negatives == "off":
            fix = "set query_to_document, or allow in-batch negatives"
            raise OptionError("directions", directions, "has no effect with in_batch_negatives: off", fix)
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
        """The loss of this rank's queries, (B, D), against its candidates, (C, D), in the batch's order.

        Terms: `accuracy` (share of queries whose positive scores above all negatives), `positive_score` (mean
        similarity of query and positive), `no_negative_fraction` (share of queries without a negative) and a learned
        `temperature`.
        """
        scores = self.at_widths(query_BD, candidate_CD, batch, (query_BD.shape[1],))
        return LossOutput(scores.loss_W[0], self._terms(scores, 0))

    def check_teacher(self, has_surrogates: bool, has_scores: bool | None) -> None:
        """Raise an `OptionError` if batches lack the vectors or scores (None: not known yet) that the loss needs."""
        may_use_scores = self.takes_scores and has_scores is not False
        needs_vectors = self.false_negative_filter is not None or (self.has_teacher and not may_use_scores)
        if needs_vectors and not has_surrogates:
            raise missing_teacher_error(type(self).__name__)

    def check_width(self, embedding_dim: int) -> None:
        """Check that the loss supports vectors of this width."""

    def at_widths(
        self, query_BD: Tensor, candidate_CD: Tensor, batch: ContrastiveBatch, widths: Sequence[int]
    ) -> "WidthScores":
        """The loss at W widths: vectors are truncated to their first dimensions before they are compared."""
        rounds = multiplies_rounded(query_BD)
        with torch.autocast(query_BD.device.type, enabled=False):
            query_WBD = [comparable(query_BD[:, :width], self.similarity) for width in widths]
            candidate_WCD = [comparable(candidate_CD[:, :width], self.similarity) for width in widths]
            scale, masks = self._scale(query_WBD[0]), self.masks(batch)
            all_WCD = [gather_candidates(own_CD, masks.candidate_counts) for own_CD in candidate_WCD]
            of_both = self.directions == "both"
            weight_B = torch.where(masks.in_batch_B, 0.5, 1.0).to(scale.dtype) if of_both else None
            options = self.tile_size, rounds, weight_B
            scores = tiled_cross_entropies(query_WBD, all_WCD, scale, masks.positive_index_B, masks.excluded, *options)
            if not of_both:
                return scores
            all_WQD = [gather_candidates(own_BD, masks.query_counts) for own_BD in query_WBD]
            positive_WBD = [own_CD[batch.positive_index_B] for own_CD in candidate_WCD]
            excluded = masks.of_positives().excluded_queries
            documents = tiled_cross_entropies(positive_WBD, all_WQD, scale, masks.index_B, excluded, *options)
            return scores._replace(loss_W=scores.loss_W + documents.loss_W)

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

    def masks(self, batch: ContrastiveBatch) -> "Masks":
        """The masks of this rank's queries against the candidates of all ranks."""
        gather = self.gather_across_devices and self.in_batch_negatives != "off"
        device = batch.in_batch_B.device
        query_counts = gather_counts(len(batch), device) if gather else [len(batch)]
        candidate_counts = gather_counts(len(batch.candidate), device) if gather else [len(batch.candidate)]
        rank_index = rank() if gather else 0
        first = sum(query_counts[:rank_index])
        index_B = torch.arange(first, first + len(batch), device=device)
        in_batch_B = batch.in_batch_B
        if self.in_batch_negatives != "source":
            in_batch_B = torch.full_like(in_batch_B, self.in_batch_negatives == "on")
        hash_C = batch.candidate_hash_C
        answers_C = hash_C.index_copy(0, batch.positive_index_B, batch.query_hash_B)
        class_C = _class(batch.source_B[batch.owner_C], batch.candidate_label_C, _NO_CANDIDATE_CLASS)
        keys_CF = torch.stack([index_B[batch.owner_C], hash_C, class_C, answers_C], dim=1)
        owner_C, hash_C, class_C, answers_C = (
            key_C.contiguous() for key_C in gather_rows(keys_CF, candidate_counts).unbind(1)
        )
        surrogates = None
        if self.false_negative_filter is not None:
            own = surrogate_vectors(batch, type(self).__name__)
            surrogates = own._replace(candidate_CS=gather_rows(own.candidate_CS, candidate_counts))
        return Masks(
            query_counts=query_counts,
            candidate_counts=candidate_counts,
            positive_index_B=batch.positive_index_B + sum(candidate_counts[:rank_index]),
            index_B=index_B,
            in_batch_B=in_batch_B,
            text_BK=torch.cat([batch.query_hash_B[:, None], batch.known_positive_hash_BP], dim=1),
            class_B=_class(batch.source_B, batch.query_label_B, _NO_QUERY_CLASS),
            owner_C=owner_C,
            text_C=hash_C,
            answers_C=answers_C,
            class_C=class_C,
            by_text=self.mask_same_text,
            by_class=self.mask_same_class,
            rule=self.false_negative_filter,
            surrogates=surrogates,
        )


class MatryoshkaInfoNCE(InfoNCE):
    """The weighted mean of InfoNCE over several widths, so that truncated vectors are useful embeddings too.

    loss = sum over m of  w_m · InfoNCE(q[:m], d[:m]) / sum over m of w_m. The cosine normalises truncated vectors.

    Args:
        widths: Distinct widths m, each from 1 to D. The largest must equal the model's D: dimensions beyond it would
            not be trained.
        weights: Weight w_m of each width, > 0; None for equal weights.
        options: Options of `InfoNCE`.

    Source: Kusupati et al. 2022, arXiv:2205.13147, Eq. 1; truncation before normalisation, with 768 and 256: Nussbaum
        and Duderstadt 2025 (Nomic Embed v2), arXiv:2502.07972, §4.5. Differs: the mean instead of the sum, so that the
        learning rate does not depend on the number of widths.
    """

    def __init__(
        self, widths: Sequence[int] = (768, 256), weights: Sequence[float] | None = None, **options: Any
    ) -> None:
        super().__init__(**options)
        if not widths or min(widths) < 1 or len(set(widths)) < len(widths):
            raise OptionError("widths", list(widths), "must be distinct and >= 1", "768 and 256 are usual")
        weights = [1.0] * len(widths) if weights is None else list(weights)
        if len(weights) != len(widths) or not all(0 < weight < math.inf for weight in weights):
            rule = f"must be {len(widths)} finite numbers > 0, one for each width"
            raise OptionError("weights", weights, rule, "leave them out for equal weights")
        self.widths = tuple(widths)
        self.weights = tuple(weight / sum(weights) for weight in weights)

    def check_width(self, embedding_dim: int) -> None:
        if max(self.widths) != embedding_dim:
            rule, fix = "must have the width of the model's vectors as largest", f"add {embedding_dim}"
            raise OptionError("widths", list(self.widths), rule, fix)

    def forward(self, query_BD: Tensor, candidate_CD: Tensor, batch: ContrastiveBatch) -> LossOutput:
        """As in `InfoNCE`, with the terms `loss_m` and `accuracy_m` of each width m; the rest at the largest."""
        self.check_width(query_BD.shape[1])
        scores = self.at_widths(query_BD, candidate_CD, batch, self.widths)
        terms = self._terms(scores, self.widths.index(max(self.widths)))
        for index, width in enumerate(self.widths):
            terms[f"loss_{width}"] = scores.loss_W.detach()[index]
            terms[f"accuracy_{width}"] = scores.accuracy_W[index]
        with torch.autocast(query_BD.device.type, enabled=False):
            weight_W = torch.tensor(self.weights, dtype=scores.loss_W.dtype)
            return LossOutput(scores.loss_W @ moved(weight_W, scores.loss_W.device), terms)


@dataclass(frozen=True, slots=True, eq=False)
class Masks:
    """Which candidates of all ranks are no negatives of this rank's queries.

    A candidate is a false negative if its text is the query's or one of the query's known positives, if it is the
    positive of a query with the same text, if both have the same label in the same source, or by the surrogate filter.
    """

    query_counts: list[int]  # of each rank
    candidate_counts: list[int]
    positive_index_B: Tensor  # column of each query's positive
    index_B: Tensor  # index of each query over all ranks
    in_batch_B: Tensor  # whether candidates of other queries may be negatives, bool
    text_BK: Tensor  # hashes of the query's text and of its known positives
    class_B: Tensor  # source and label in one number, negative without a label
    owner_C: Tensor  # index over all ranks of the query that a candidate was drawn for
    text_C: Tensor  # hash of the candidate's text
    answers_C: Tensor  # hash of the text of the query whose positive it is; a hard negative's own hash
    class_C: Tensor
    by_text: bool
    by_class: bool
    rule: SurrogateFilter | None
    surrogates: Surrogates | None

    def excluded(self, rows: slice) -> Tensor:
        """Candidates that are neither a negative nor the own positive of these queries, (r, C) bool."""
        is_foreign_rC = self.owner_C != self.index_B[rows, None]
        is_excluded_rC = self.false_negatives(rows) | (is_foreign_rC & ~self.in_batch_B[rows, None])
        return is_excluded_rC.scatter_(1, self.positive_index_B[rows, None], False)

    def false_negatives(self, rows: slice, columns: slice = slice(None)) -> Tensor:
        """Candidates that may answer these queries, (r, c) bool; the own positive may be among them."""
        text_rK, text_c = self.text_BK[rows], self.text_C[columns]
        is_false_rc = torch.zeros(len(text_rK), len(text_c), dtype=torch.bool, device=text_c.device)
        if self.by_text:
            is_false_rc |= self.answers_C[columns] == text_rK[:, :1]
            for text_r in text_rK.unbind(1):
                is_false_rc |= text_c == text_r[:, None]
        if self.by_class:
            is_false_rc |= self.class_C[columns] == self.class_B[rows, None]
        if self.rule is not None and self.surrogates is not None:
            is_own_rc = self.in_batch_B[rows, None] & (self.owner_C[columns] == self.index_B[rows, None])
            is_false_rc |= self.rule.false_negatives(self.surrogates, rows, columns, is_own_rc)
        return is_false_rc

    def of_positives(self) -> "Masks":
        """The masks of all ranks' queries against this rank's positives."""
        width = self.text_BK.shape[1]
        if len(self.query_counts) > 1:
            width = reduce_int(width, "max", self.text_BK.device)
        text_BK = torch.cat([self.text_BK, self.text_BK[:, :1].expand(-1, width - self.text_BK.shape[1])], dim=1)
        keys_BF = torch.stack([self.index_B, self.class_B, self.in_batch_B.long()], dim=1)
        keys_QF = gather_rows(torch.cat([keys_BF, text_BK], dim=1), self.query_counts)
        own_B, surrogates = self.positive_index_B, self.surrogates
        if surrogates is not None:
            query_QS, own_score_Q = (gather_rows(each, self.query_counts) for each in surrogates[:2])
            surrogates = Surrogates(query_QS, own_score_Q, surrogates.candidate_CS[own_B])
        return replace(
            self,
            index_B=keys_QF[:, 0],
            class_B=keys_QF[:, 1],
            in_batch_B=keys_QF[:, 2].bool(),
            text_BK=keys_QF[:, 3:],
            owner_C=self.owner_C[own_B],
            text_C=self.text_C[own_B],
            answers_C=self.answers_C[own_B],
            class_C=self.class_C[own_B],
            surrogates=surrogates,
        )

    def excluded_queries(self, rows: slice) -> Tensor:
        """Queries that are neither a negative nor the own query of these documents, (r, Q) bool.

        A document has no negatives if the source of its own query does not allow in-batch negatives.
        """
        own_r = self.owner_C[rows]
        is_excluded_rQ = self.false_negatives(slice(None), rows).T | ~self.in_batch_B[own_r, None]
        return is_excluded_rQ.scatter(1, own_r[:, None], False)


def _class(source_N: Tensor, label_N: Tensor, no_class: int) -> Tensor:
    return torch.where(label_N >= 0, source_N * _LABELS_PER_SOURCE + label_N, no_class)


def working_dtype(vector_ND: Tensor) -> torch.dtype:
    """The dtype of similarities and softmaxes: float64 for float64 vectors, else float32."""
    return torch.float64 if vector_ND.dtype == torch.float64 else torch.float32


def multiplies_rounded(vector_ND: Tensor) -> bool:
    """Whether a loss rounds these vectors to bfloat16 for its products: on CUDA, if they are or autocast makes them so.

    Only CUDA multiplies bfloat16 into float32: scores of 50, rounded to bfloat16, would be wrong by up to 0.125.
    """
    device = vector_ND.device.type
    if device != "cuda" or torch.version.cuda is None or vector_ND.dtype == torch.float64:
        return False
    has_autocast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.bfloat16
    return has_autocast or vector_ND.dtype == torch.bfloat16


def comparable(vector_ND: Tensor, similarity: Similarity = "cosine") -> Tensor:
    """Vectors (N, D) whose inner products are the similarities, in float32 (float64 for float64 input)."""
    vector_ND = vector_ND.to(working_dtype(vector_ND))
    if similarity == "dot":
        return vector_ND
    unit_ND: Tensor = _UnitNorm.apply(vector_ND)  # type: ignore[no-untyped-call]
    return unit_ND


class _UnitNorm(torch.autograd.Function):
    """v / |v|; a zero vector stays zero and gets no gradient."""

    @staticmethod
    def forward(ctx: Any, vector_ND: Tensor) -> Tensor:
        norm_N1 = torch.linalg.vector_norm(vector_ND, dim=-1, keepdim=True)
        inverse_N1 = torch.where(norm_N1 > 1e-12, 1 / norm_N1, 0)
        # Not the unit vectors: they would stay in memory until the backward pass.
        ctx.save_for_backward(vector_ND, inverse_N1)
        return vector_ND * inverse_N1

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_ND: Tensor) -> Tensor:
        vector_ND, inverse_N1 = ctx.saved_tensors
        unit_ND = vector_ND * inverse_N1
        along_N1 = torch.linalg.vecdot(gradient_ND, unit_ND)[:, None]
        return torch.addcmul(gradient_ND, unit_ND, along_N1, value=-1).mul_(inverse_N1)


def scores_at_once(tile_size: int | None, device: torch.device | str) -> int:
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
    excluded: Excluded | None = None,
    tile_size: int | None = None,
    rounds: bool = False,
    weight_R: Tensor | None = None,
) -> WidthScores:
    """The mean cross-entropies of scaled inner products at W widths, computed in tiles of whole rows.

    loss = mean over R of  -weight * log softmax(scale * row @ column^T)[target]. Each tile adds its share of the
    gradient before it is freed. The widths share targets and exclusions. Call it outside autocast.

    Args:
        row_WRD: (R, D) float32 or float64 for each width.
        column_WCD: (C, D) for each width, same dtype.
        scale: Factor of all products, (), same dtype; may require a gradient.
        target_R: Column of each row's target, (R,) int64.
        excluded: Excluded scores of a tile of rows, (r, C) bool, never a target's.
        tile_size: Scores in memory at once, at least 32 rows of them; None for the device's default.
        rounds: Whether float32 vectors and softmax weights are rounded to bfloat16 for the products, whose sums stay in
            float32. Each target's score and share of the gradient are not rounded, so the gradient's relative error is
            below 1e-3, unless most rows have one rival alone (4e-3 measured).
        weight_R: Weight of each row's loss, (R,) same dtype, > 0; None for 1.
    """
    vectors = [*row_WRD, *column_WCD]
    if not torch.is_grad_enabled():
        vectors, scale = [vector_ND.detach() for vector_ND in vectors], scale.detach()
    size = scores_at_once(tile_size, target_R.device)
    kind = _RoundedWidth if rounds else _Width
    outputs = _TiledCrossEntropy.apply(kind, scale, target_R, excluded, size, weight_R, *vectors)  # type: ignore[no-untyped-call]
    return WidthScores(*outputs)


class _Width:
    """The vectors of one width, and the sums over its tiles."""

    def __init__(self, row_RD: Tensor, column_CD: Tensor, needs_row: bool, needs_column: bool) -> None:
        self.row_RD, self.column_CD = row_RD, column_CD
        self.row_gradient_RD = torch.empty_like(row_RD) if needs_row else None
        self.column_gradient_CD = torch.zeros_like(column_CD) if needs_column else None
        self.loss, self.num_right, self.target_score, self.num_alone = (row_RD.new_zeros(()) for _ in range(4))

    def add_tile(
        self, rows: slice, scale: Tensor, target_r1: Tensor, is_excluded_rC: Tensor | None, weight_r1: Tensor | None
    ) -> None:
        """Add the losses and gradients of one tile of rows."""
        row_rD = self.row_RD[rows] * scale
        weight_rC = row_rD @ self.column_CD.T
        if is_excluded_rC is not None:
            weight_rC.masked_fill_(is_excluded_rC, -torch.inf)
        target_score_r1 = weight_rC.gather(1, target_r1)
        rivals = softmax_weights(weight_rC, target_score_r1, target_r1)
        others_r1, total_r1 = rivals.others_r1, self._add_losses(rivals, target_score_r1, weight_r1)
        # The target's softmax minus one, as minus the sum of the others: exact even if the softmax is close to 1.
        weight_rC.scatter_(1, target_r1, -others_r1)
        if self.row_gradient_RD is not None:
            self.row_gradient_RD[rows] = (weight_rC @ self.column_CD).div_(total_r1)
        if self.column_gradient_CD is not None:
            self.column_gradient_CD.addmm_(weight_rC.T, row_rD / total_r1)

    def _add_losses(self, rivals: Rivals, target_score_r1: Tensor, weight_r1: Tensor | None) -> Tensor:
        """Add the losses of rows; returns the divisor of their softmax weights, (r, 1)."""
        rival_r1, others_r1 = rivals
        highest_r1 = torch.maximum(rival_r1, target_score_r1)
        total_r1 = others_r1 + (target_score_r1 - highest_r1).exp()
        is_right_r1 = target_score_r1 > rival_r1
        loss_r1 = torch.where(is_right_r1, others_r1.log1p(), total_r1.log() + highest_r1 - target_score_r1)
        if weight_r1 is not None:
            loss_r1, total_r1 = loss_r1 * weight_r1, total_r1 / weight_r1
        self.loss += loss_r1.sum()
        self.num_right += is_right_r1.sum()
        self.target_score += target_score_r1.sum()
        self.num_alone += rival_r1.isneginf().sum()
        return total_r1

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


class _RoundedWidth(_Width):
    """The same with products of vectors and weights in bfloat16, except the targets': few, and most of a gradient."""

    def __init__(self, row_RD: Tensor, column_CD: Tensor, needs_row: bool, needs_column: bool) -> None:
        super().__init__(row_RD, column_CD, needs_row, needs_column)
        self.rounded_CD = column_CD.to(torch.bfloat16)

    def add_tile(
        self, rows: slice, scale: Tensor, target_r1: Tensor, is_excluded_rC: Tensor | None, weight_r1: Tensor | None
    ) -> None:
        row_rD, target_r = self.row_RD[rows] * scale, target_r1[:, 0]
        target_rD = self.column_CD[target_r]
        score_rC = _rounded_product(row_rD, self.rounded_CD.T)
        if is_excluded_rC is not None:
            score_rC.masked_fill_(is_excluded_rC, -torch.inf)
        target_score_r1 = torch.linalg.vecdot(row_rD, target_rD)[:, None]
        weight_rC, rivals = fastest_weights(score_rC.device)(score_rC, target_score_r1, target_r1)
        others_r1, total_r1 = rivals.others_r1, self._add_losses(rivals, target_score_r1, weight_r1)
        # The largest tensor: the products below reuse its memory.
        del score_rC
        if self.row_gradient_RD is not None:
            gradient_rD = _rounded_product(weight_rC, self.rounded_CD)
            self.row_gradient_RD[rows] = gradient_rD.addcmul_(target_rD, others_r1, value=-1).div_(total_r1)
        if self.column_gradient_CD is not None:
            row_rD /= total_r1
            _add_rounded_product(self.column_gradient_CD, weight_rC.T, row_rD)
            self.column_gradient_CD.index_add_(0, target_r, row_rD.mul_(others_r1), alpha=-1)


def _rounded_product(left: Tensor, right: Tensor) -> Tensor:
    """The product of matrices rounded to bfloat16, summed in float32; on a CPU by a product in float32, as exact."""
    left, right = left.to(torch.bfloat16), right.to(torch.bfloat16)
    if left.device.type == "cpu":
        return left.float() @ right.float()
    return torch.mm(left, right, out_dtype=torch.float32)


def _add_rounded_product(sum_CD: Tensor, left: Tensor, right: Tensor) -> None:
    """Add a `_rounded_product` in place, without a copy of its size."""
    left, right = left.to(torch.bfloat16), right.to(torch.bfloat16)
    if left.device.type == "cpu":
        sum_CD.addmm_(left.float(), right.float())
    else:
        torch.addmm(sum_CD, left, right, out_dtype=torch.float32, out=sum_CD)


class _TiledCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        kind: type[_Width],
        scale: Tensor,
        target_R: Tensor,
        excluded: Excluded | None,
        tile_size: int,
        weight_R: Tensor | None,
        *vectors: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        num_rows, num_widths = max(1, len(target_R)), len(vectors) // 2
        needs_scale, needs = ctx.needs_input_grad[1], ctx.needs_input_grad[6:]
        widths = [
            kind(vectors[w], vectors[num_widths + w], needs[w] or needs_scale, needs[num_widths + w])
            for w in range(num_widths)
        ]
        for rows in row_tiles(len(target_R), len(vectors[-1]), tile_size):
            is_excluded_rC = None if excluded is None else excluded(rows)
            weight_r1 = None if weight_R is None else weight_R[rows, None]
            for width in widths:
                width.add_tile(rows, scale, target_R[rows, None], is_excluded_rC, weight_r1)
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
        factors = factor_W.unbind() * 2
        scaled = (
            gradient if gradient is None else gradient * factor
            for gradient, factor in zip(gradients, factors, strict=True)
        )
        scale_gradient = None if scale_gradient_W is None else scale_gradient_W @ factor_W
        return (None, scale_gradient, None, None, None, None, *scaled)


def row_tiles(num_rows: int, num_columns: int, tile_size: int) -> Iterator[slice]:
    """Slices of whole rows, each of about `tile_size` scores and at least 32 rows."""
    height = max(_MIN_TILE_ROWS, tile_size // max(1, num_columns))
    return (slice(start, start + height) for start in range(0, num_rows, height))
