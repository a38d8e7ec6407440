"""Losses that follow a teacher's scores: in-batch similarities by divergence, margins of hard negatives by squares.

Each adds its term to `InfoNCE`. The teacher's scores are inner products of vectors that the batch carries, made once by
`cluster` or `mine` (`data.sources[].surrogate_vectors`), or in each step by the model that `teacher` names. Margins
also follow the records' own `scores` (made once by `mine --reranker`).
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from embeddings.common import ContrastiveBatch, LossOutput, OptionError
from embeddings.common.distributed import gather_candidates, gather_rows
from embeddings.losses.info_nce import InfoNCE
from embeddings.losses.masks import surrogate_vectors, without_teacher
from embeddings.losses.tiles import comparable, row_tiles, scores_at_once


class Distillation(InfoNCE):
    """The base of losses that follow a teacher: loss = w · InfoNCE + alpha · divergence from the teacher.

    Args:
        alpha: Weight of the teacher's term, > 0.
        contrastive_weight: Weight w of InfoNCE, >= 0; 0 learns from the teacher alone.
        teacher: A model directory or Hub id whose vectors are followed, of any width and tokenizer. It runs in each
            step, without a graph, by its own prompts and lengths. None for the vectors or scores that the data carry.
        options: What `InfoNCE` takes.

    Raises:
        OptionError: If a weight is impossible, or an option of `InfoNCE` is.
    """

    has_teacher = True

    def __init__(
        self, alpha: float = 1.0, contrastive_weight: float = 1.0, teacher: str | None = None, **options: Any
    ) -> None:
        super().__init__(**options)
        if not 0 < alpha < math.inf:
            raise OptionError("alpha", alpha, "must be > 0 and finite", "1 weighs the teacher as much as InfoNCE")
        if not 0 <= contrastive_weight < math.inf:
            raise OptionError("contrastive_weight", contrastive_weight, "must be >= 0 and finite", "0 leaves it out")
        self.alpha, self.contrastive_weight, self.teacher = alpha, contrastive_weight, teacher

    def check_teacher(self, has_surrogates: bool, has_scores: bool | None) -> None:
        """Check that there is exactly one teacher to follow; arguments as in `InfoNCE`."""
        if self.teacher is None:
            super().check_teacher(has_surrogates, has_scores)
        elif has_surrogates or (self.takes_scores and has_scores):
            given = "surrogate_vectors" if has_surrogates else "`scores` in its records"
            rule = f"cannot be followed where a source has {given}"
            raise OptionError("model.loss.teacher", self.teacher, rule, "leave one of them out")

    def forward(self, query_BD: Tensor, candidate_CD: Tensor, batch: ContrastiveBatch) -> LossOutput:
        """The loss of this rank's queries, as in `InfoNCE`; terms `contrastive` and `distillation` are its parts."""
        contrastive, terms = super().forward(query_BD, candidate_CD, batch)
        with torch.autocast(query_BD.device.type, enabled=False):
            distillation = self.divergence(query_BD, candidate_CD, batch)
            loss = self.contrastive_weight * contrastive + self.alpha * distillation
        terms |= {"contrastive": contrastive.detach(), "distillation": distillation.detach()}
        return LossOutput(loss, terms)

    def divergence(self, query_BD: Tensor, candidate_CD: Tensor, batch: ContrastiveBatch) -> Tensor:
        """How far the student is from its teacher, mean over the queries, () float32; called outside autocast."""
        raise NotImplementedError


class SimilarityDistillation(Distillation):
    """InfoNCE and the Kullback-Leibler divergence of the student's row of in-batch scores from the teacher's.

    divergence = mean over B of  sum over c of p_t(c) · (log p_t(c) - log p_s(c)), with p_s = softmax(s(q, c) / t) over
    the candidates that compete for the query, t the temperature of InfoNCE, and p_t = softmax(f(q, c) / t_t) of the
    teacher's cosines f. Candidates that InfoNCE masks are in neither softmax. A query without a teacher's vector adds
    nothing; a candidate without one does not compete.

    Args:
        teacher_temperature: Temperature t_t of the teacher's scores, > 0. Lower is closer to the teacher's order alone.
        options: What `Distillation` takes.

    Precision: scores and softmaxes in float32 (float64 where the input is), in tiles of rows that the backward pass
        makes again, so that memory grows with B + C.
    Distributed: as `InfoNCE`; the teacher's vectors of all ranks' candidates are gathered too.
    Raises:
        OptionError: If an option is impossible, or the batch carries no vectors of a teacher.
    Source: Hinton et al. 2015, arXiv:1503.02531, Eq. 1 and §2; over in-batch candidates as RocketQAv2, Ren et al. 2021,
        arXiv:2110.07367, Eq. 6 does. Differs: no factor t², since both temperatures are of the order of InfoNCE's.
    """

    def __init__(self, teacher_temperature: float = 0.05, alpha: float = 1.0, **options: Any) -> None:
        super().__init__(alpha, **options)
        if not 0 < teacher_temperature < math.inf:
            raise OptionError("teacher_temperature", teacher_temperature, "must be > 0 and finite", "0.05 is usual")
        self.teacher_temperature = teacher_temperature

    def divergence(self, query_BD: Tensor, candidate_CD: Tensor, batch: ContrastiveBatch) -> Tensor:
        """The mean divergence over this rank's queries."""
        query_BD, candidate_CD = comparable(query_BD, self.similarity), comparable(candidate_CD, self.similarity)
        masking, scale = self._masking(batch), self._scale(query_BD)
        all_CD = gather_candidates(candidate_CD, masking.candidate_counts)
        teacher, own_CS = surrogate_vectors(batch)
        teacher_QS = teacher.vector_QS.to(query_BD.dtype)
        teacher_CS = gather_rows(own_CS, masking.candidate_counts).to(query_BD.dtype)

        def of_tile(tile_rD: Tensor, all_CD: Tensor, scale: Tensor, rows: slice) -> Tensor:
            """The sum of the divergences of some rows."""
            student_rC = scale * tile_rD @ all_CD.T
            # A candidate without a teacher's vector is NaN here, and so is the whole row of such a query.
            teacher_rC = teacher_QS[rows] @ teacher_CS.T / self.teacher_temperature
            masking.exclude_candidates_(teacher_rC, rows)
            competes_rC = teacher_rC.isfinite()
            is_known_r1 = competes_rC.gather(1, masking.positive_index_B[rows, None])
            competes_rC |= ~is_known_r1
            log_teacher_rC = teacher_rC.where(is_known_r1, 0).masked_fill(~competes_rC, -torch.inf).log_softmax(1)
            log_student_rC = student_rC.masked_fill(~competes_rC, -torch.inf).log_softmax(1)
            # Where neither competes the difference of two infinities has no weight.
            gap_rC = (log_teacher_rC - log_student_rC).masked_fill(~competes_rC, 0)
            return (log_teacher_rC.exp() * gap_rC).where(is_known_r1, 0).sum()

        total = query_BD.new_zeros(())
        for rows in row_tiles(len(query_BD), len(all_CD), scores_at_once(self.tile_size, all_CD.device)):
            total = total + checkpoint(of_tile, query_BD[rows], all_CD, scale, rows, use_reentrant=False)
        return total / len(query_BD)


class MarginMSE(Distillation):
    """InfoNCE and the squared error of the margins between a query's positive and each of its hard negatives.

    divergence = mean over B of the mean over the query's hard negatives n of
        ( k·(s(q, d+) - s(q, n)) - (f(q, d+) - f(q, n)) )²,
    with s the student's similarity, k its scale and f the teacher's score: the records' `scores` where a source of the
    run has any, else the cosine of the surrogate's vectors. A query without hard negatives adds nothing; a text without
    a score is left out, and so is a query whose positive has none.

    Args:
        score_scale: Factor k of the student's similarities: 1 for a teacher of cosines; for logits of a cross-encoder
            about 20, or `similarity: dot`.
        options: What `Distillation` takes.

    Precision: float32 (float64 where the input is).
    Distributed: own candidates only; the mean over ranks is the mean over all queries.
    Raises:
        OptionError: If an option is impossible, or the batch carries no scores of a teacher.
    Source: Hofstätter et al. 2020, arXiv:2010.02666, Eq. 5.
    """

    takes_scores = True

    def __init__(self, score_scale: float = 1.0, alpha: float = 1.0, **options: Any) -> None:
        super().__init__(alpha, **options)
        if not 0 < score_scale < math.inf:
            raise OptionError("score_scale", score_scale, "must be > 0 and finite", "1 fits a teacher of cosines")
        self.score_scale = score_scale

    def divergence(self, query_BD: Tensor, candidate_CD: Tensor, batch: ContrastiveBatch) -> Tensor:
        """The mean squared error of margins over this rank's queries."""
        query_BD, candidate_CD = comparable(query_BD, self.similarity), comparable(candidate_CD, self.similarity)
        owner_C, positive_B = batch.owner_C, batch.positive_index_B
        student_C = self.score_scale * torch.linalg.vecdot(query_BD[owner_C], candidate_CD)
        teacher_C = batch.teacher_score_C
        if teacher_C is None:
            if batch.surrogate_query_BS is None and batch.surrogate_candidate_CS is None:
                raise without_teacher()
            teacher, own_CS = surrogate_vectors(batch)
            teacher_QS, teacher_CS = teacher.vector_QS.to(student_C.dtype), own_CS.to(student_C.dtype)
            teacher_C = torch.linalg.vecdot(teacher_QS[owner_C], teacher_CS)
        teacher_C = teacher_C.to(student_C.dtype)
        error_C = (student_C[positive_B][owner_C] - student_C) - (teacher_C[positive_B][owner_C] - teacher_C)
        counts_C = torch.ones_like(owner_C, dtype=torch.bool)
        counts_C[positive_B] = False
        counts_C &= error_C.isfinite()
        square_C = error_C.where(counts_C, 0).square()
        number_B = torch.zeros_like(query_BD[:, 0]).index_add(0, owner_C, counts_C.to(square_C.dtype))
        mean: Tensor = (square_C / number_B.clamp(min=1)[owner_C]).sum() / len(query_BD)
        return mean
