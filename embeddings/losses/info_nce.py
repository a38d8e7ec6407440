"""InfoNCE in tiles: the B x C matrix of scores is never whole in memory."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from embeddings.common import ContrastiveBatch, LossOutput, OptionError
from embeddings.common.distributed import gather_candidates, gather_counts, gather_rows, rank
from embeddings.losses.masks import CandidateFacts, QueryFacts, exclude_candidates_, exclude_queries_, query_index
from embeddings.losses.similarity import Similarity, comparable
from embeddings.losses.surrogate_filter import (
    SurrogateFilter,
    SurrogateQueries,
    surrogate_false_negatives,
    surrogate_vectors,
)

# Fills in a tile's scores what does not compete: (tile of scores, its rows) -> None, in place.
ExcludeInPlace = Callable[[Tensor, slice], None]

# Fewer rows than this make slow matrix products.
_MIN_TILE_ROWS = 32


class InfoNCE(nn.Module):
    """The contrastive loss: each query's positive against its negatives.

    loss = mean over B of  -log( exp(s(q, d+)/t) / (exp(s(q, d+)/t) + sum over negatives exp(s(q, d)/t)) ), with s the
    similarity and t the temperature. Negatives are the hard negatives drawn for the query and, where its source
    allows them, the candidates of all other queries of all ranks; candidates that may answer the query are masked
    (see `masks.false_negatives`). Scores are made in tiles of whole rows, each tile giving its share of the gradient
    before the next one is made, so nothing is computed twice and memory grows with B + C.

    Args:
        temperature: Softmax temperature, > 0, no unit (scale = 1 / temperature). NV-Embed does not state one; 0.02 is
            what most recipes of its family use.
        learnable_temperature: Whether the logarithm of the temperature is a parameter.
        in_batch_negatives: `source` follows each query's source; `on` and `off` force it for all.
        directions: `query_to_document`, or `both` for the mean with documents contrasted against queries.
        gather_across_devices: Whether the candidates of all ranks compete.
        similarity: `cosine` or `dot`.
        tile_size: Scores held at once, at least 32 rows of them. 2^21 are 8 MB; a GPU likes 2^26.
        false_negative_filter: Masks candidates that another model scores too high, by vectors that the batch carries;
            None for no filter. It makes a second product of the size of the scores, and as large a tile.

    Precision: scores, softmax and gradients of it in float32 (float64 where the input is), autocast or not.
    Distributed: see `gather_candidates`: each rank its own queries, gradients cross ranks, no world-size factor.
    Raises:
        OptionError: If the temperature is not > 0, or the tile size not >= 1.
    Source: van den Oord 2018, arXiv:1807.03748, Eq. 4; in-batch negatives switched per source: Lee 2024 (NV-Embed),
        arXiv:2405.17428, section 4.1.
    """

    def __init__(
        self,
        temperature: float = 0.02,
        learnable_temperature: bool = False,
        in_batch_negatives: Literal["source", "on", "off"] = "source",
        directions: Literal["query_to_document", "both"] = "query_to_document",
        gather_across_devices: bool = True,
        similarity: Similarity = "cosine",
        tile_size: int = 2**21,
        false_negative_filter: SurrogateFilter | None = None,
    ) -> None:
        super().__init__()
        if not 0 < temperature < math.inf:
            fix = "see lightning_configs/methods/nv_embed_stage1.yaml for a value that trains"
            raise OptionError("temperature", temperature, "must be > 0", fix)
        if tile_size < 1:
            raise OptionError("tile_size", tile_size, "must be >= 1", "leave it out for the default")
        self.in_batch_negatives = in_batch_negatives
        self.directions = directions
        self.gather_across_devices = gather_across_devices
        self.similarity: Similarity = similarity
        self.tile_size = tile_size
        self.false_negative_filter = false_negative_filter
        self.log_temperature = nn.Parameter(torch.tensor(math.log(temperature))) if learnable_temperature else None
        self.temperature = temperature

    def forward(self, query_BD: Tensor, candidate_CD: Tensor, batch: ContrastiveBatch) -> LossOutput:
        """The loss of this rank's queries.

        Args:
            query_BD: Query embeddings, (B, D) float.
            candidate_CD: Candidate embeddings, (C, D) float, in the batch's order.
            batch: What is known of each text.

        Returns:
            LossOutput: `loss` () fp32 mean over B; terms `accuracy` (share of queries whose positive scores higher
            than all that competes; a tie is a miss),
            `positive_score` (mean similarity of query and positive) and, where it is learnt, `temperature`.
        """
        with torch.autocast(query_BD.device.type, enabled=False):
            query_BD, candidate_CD = comparable(query_BD, self.similarity), comparable(candidate_CD, self.similarity)
            scale = self._scale(query_BD)
            facts = self._facts(batch)
            all_CD = gather_candidates(candidate_CD, facts.candidate_counts)
            loss, accuracy, positive_score = tiled_cross_entropy(
                query_BD, all_CD, scale, facts.positive_index_B, facts.exclude_candidates_, self.tile_size
            )
            if self.directions == "both":
                all_QD = gather_candidates(query_BD, facts.query_counts)
                positive_BD = candidate_CD[batch.positive_index_B]
                exclude_ = facts.queries_excluder(batch)
                document_loss, _, _ = tiled_cross_entropy(
                    positive_BD, all_QD, scale, facts.query.index_Q, exclude_, self.tile_size
                )
                loss = (loss + document_loss) / 2
        terms = {"accuracy": accuracy, "positive_score": positive_score}
        if self.log_temperature is not None:
            terms["temperature"] = self.log_temperature.detach().exp()
        return LossOutput(loss, terms)

    def _scale(self, like: Tensor) -> Tensor:
        """1 / temperature, () in the working dtype."""
        if self.log_temperature is None:
            return like.new_tensor(1.0 / self.temperature)
        return torch.exp(-self.log_temperature.to(like.dtype))

    def _facts(self, batch: ContrastiveBatch) -> "_Facts":
        """What the masks need, gathered where candidates are."""
        gather = self.gather_across_devices and self.in_batch_negatives != "off"
        device = batch.in_batch_B.device
        query_counts = gather_counts(len(batch), device) if gather else [len(batch)]
        candidate_counts = gather_counts(len(batch.candidate), device) if gather else [len(batch.candidate)]
        place = rank() if gather else 0
        query = QueryFacts.of(batch, query_index(batch, query_counts, place))
        if self.in_batch_negatives != "source":
            query = replace(query, in_batch_Q=torch.full_like(batch.in_batch_B, self.in_batch_negatives == "on"))
        own_candidate = CandidateFacts.of(batch, query.index_Q)
        positive_index_B = batch.positive_index_B + sum(candidate_counts[:place])
        candidate = own_candidate.gathered(candidate_counts)
        surrogate = None
        if self.false_negative_filter is not None:
            queries, own_CS = surrogate_vectors(batch)
            surrogate = _Surrogate(self.false_negative_filter, queries, own_CS, gather_rows(own_CS, candidate_counts))
        return _Facts(query_counts, candidate_counts, positive_index_B, query, own_candidate, candidate, surrogate)


@dataclass(frozen=True, slots=True, eq=False)
class _Surrogate:
    rule: SurrogateFilter
    query: SurrogateQueries
    own_candidate_CS: Tensor
    candidate_CS: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class _Facts:
    query_counts: list[int]
    candidate_counts: list[int]
    positive_index_B: Tensor
    query: QueryFacts
    own_candidate: CandidateFacts
    candidate: CandidateFacts
    surrogate: _Surrogate | None

    def exclude_candidates_(self, score_rC: Tensor, rows: slice) -> None:
        """Set the scores of candidates that may answer these queries to -inf."""
        query, positive_index_r = self.query[rows], self.positive_index_B[rows]
        exclude_candidates_(score_rC, query, self.candidate, positive_index_r)
        if self.surrogate is not None:
            vectors, all_CS = self.surrogate.query[rows], self.surrogate.candidate_CS
            is_false_rC = surrogate_false_negatives(self.surrogate.rule, query, self.candidate, vectors, all_CS)
            score_rC.masked_fill_(is_false_rC.scatter_(1, positive_index_r[:, None], False), -torch.inf)

    def queries_excluder(self, batch: ContrastiveBatch) -> ExcludeInPlace:
        """The same for the tiles of positives against the queries of all ranks."""
        all_queries, positive = self.query.gathered(self.query_counts), self.own_candidate[batch.positive_index_B]
        own_index_B, surrogate = self.query.index_Q, self.surrogate
        all_surrogates = None if surrogate is None else surrogate.query.gathered(self.query_counts)

        def exclude_(score_rQ: Tensor, rows: slice) -> None:
            """Set the scores of queries that these positives may answer to -inf."""
            exclude_queries_(score_rQ, positive[rows], all_queries, own_index_B[rows])
            if surrogate is not None and all_surrogates is not None:
                vector_rS = surrogate.own_candidate_CS[batch.positive_index_B[rows]]
                is_false_rQ = surrogate_false_negatives(
                    surrogate.rule, all_queries, positive[rows], all_surrogates, vector_rS
                ).T.contiguous()
                score_rQ.masked_fill_(is_false_rQ.scatter_(1, own_index_B[rows, None], False), -torch.inf)

        return exclude_


def tiled_cross_entropy(
    row_RD: Tensor,
    column_CD: Tensor,
    scale: Tensor,
    target_R: Tensor,
    exclude_: ExcludeInPlace | None = None,
    tile_size: int = 2**21,
) -> tuple[Tensor, Tensor, Tensor]:
    """The mean cross-entropy of scaled inner products, made in tiles of whole rows.

    loss = mean over R of  -log softmax(scale * row @ column^T)[target]. The loss is one number, so a tile's gradient is
    known up to a factor as soon as its softmax is: each tile adds its share while it is there, three matrix products in
    all, as many as the dense path. Nothing is kept of a tile.

    Args:
        row_RD: (R, D) float32 or float64.
        column_CD: (C, D), same dtype.
        scale: Factor of all products, (), same dtype; may need a gradient.
        target_R: Column of each row's right answer, (R,) int64.
        exclude_: Sets scores of a tile to minus infinity in place, never a right answer's; None excludes nothing.
        tile_size: Scores held at once; at least 32 rows of them are.

    Returns:
        The loss (), and without a gradient the share of rows whose right answer scores above all others () and the
        mean unscaled score of right answers ().

    Precision: the dtype of the inputs; call it outside autocast.
    """
    if not torch.is_grad_enabled():
        row_RD, column_CD, scale = row_RD.detach(), column_CD.detach(), scale.detach()
    outputs: tuple[Tensor, Tensor, Tensor] = _TiledCrossEntropy.apply(  # type: ignore[no-untyped-call]
        row_RD, column_CD, scale, target_R, exclude_, tile_size
    )
    return outputs


class _TiledCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        row_RD: Tensor,
        column_CD: Tensor,
        scale: Tensor,
        target_R: Tensor,
        exclude_: ExcludeInPlace | None,
        tile_size: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Loss, accuracy and mean score; the gradients too, tile by tile, while the scores are at hand."""
        wants_row, wants_column, wants_scale = ctx.needs_input_grad[:3]
        row_gradient_RD = torch.empty_like(row_RD) if wants_row or wants_scale else None
        column_gradient_CD = torch.zeros_like(column_CD) if wants_column else None
        loss, num_right, target_score = (torch.zeros_like(scale) for _ in range(3))
        for rows in _tiles(len(row_RD), len(column_CD), tile_size):
            row_rD, target_r1 = row_RD[rows] * scale, target_R[rows, None]
            weight_rC = row_rD @ column_CD.T
            if exclude_ is not None:
                exclude_(weight_rC, rows)
            target_score_r1 = weight_rC.gather(1, target_r1)
            rival_r1 = weight_rC.scatter_(1, target_r1, -torch.inf).amax(1, keepdim=True)
            highest_r1 = torch.maximum(rival_r1, target_score_r1)
            others_r1 = weight_rC.sub_(highest_r1).exp_().sum(1, keepdim=True)
            total_r1 = others_r1 + (target_score_r1 - highest_r1).exp()
            # Softmax minus one, as minus the others' share: exact where a query is all but solved.
            weight_rC.scatter_(1, target_r1, -others_r1)
            is_right_r1 = target_score_r1 > rival_r1
            loss_r1 = torch.where(is_right_r1, others_r1.log1p(), total_r1.log() + highest_r1 - target_score_r1)
            loss += loss_r1.sum()
            num_right += is_right_r1.sum()
            target_score += target_score_r1.sum()
            if row_gradient_RD is not None:
                row_gradient_RD[rows] = (weight_rC @ column_CD).div_(total_r1)
            if column_gradient_CD is not None:
                column_gradient_CD.addmm_(weight_rC.T, row_rD / total_r1)
        num_rows = max(1, len(row_RD))
        of_scale = None
        if row_gradient_RD is not None:
            # d(scale * x)/d(scale) summed over all scores is the gradient of the unscaled rows met with the rows.
            of_scale = torch.linalg.vecdot(row_RD, row_gradient_RD).sum() / num_rows if wants_scale else None
            row_gradient_RD *= scale / num_rows
        if column_gradient_CD is not None:
            column_gradient_CD /= num_rows
        ctx.save_for_backward(row_gradient_RD if wants_row else None, column_gradient_CD, of_scale)
        accuracy, mean_score = num_right / num_rows, target_score / (scale * num_rows)
        ctx.mark_non_differentiable(accuracy, mean_score)
        return loss / num_rows, accuracy, mean_score

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of the forward pass times `factor`."""
        gradients = ctx.saved_tensors
        # GradCache and a plain backward pass 1: the gradients are handed on without a second copy.
        if factor.item() != 1.0:
            gradients = tuple(None if gradient is None else gradient * factor for gradient in gradients)
        return (*gradients, None, None, None)


def _tiles(num_rows: int, num_columns: int, tile_size: int) -> Iterator[slice]:
    height = max(_MIN_TILE_ROWS, tile_size // max(1, num_columns))
    return (slice(start, start + height) for start in range(0, num_rows, height))
