"""Distillation losses: the divergence of in-batch similarities, and the squared error of hard negatives' margins.

Each loss adds its term to `InfoNCE`. The teacher's scores are inner products of vectors. Either `cluster` or `mine`
computed these once (`data.sources[].surrogate_vectors`), or the model that `teacher` names computes them in each step.
`MarginMSE` also accepts the `scores` of the records, which `mine --reranker` writes.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from embeddings.common import ContrastiveBatch, LossOutput, OptionError
from embeddings.common.distributed import gather_candidates, gather_rows
from embeddings.losses.info_nce import InfoNCE, comparable, row_tiles, scores_at_once
from embeddings.losses.surrogates import surrogate_vectors


class Distillation(InfoNCE):
    """Base class of the distillation losses: loss = w · InfoNCE + alpha · divergence from the teacher.

    Args:
        alpha: Weight of the teacher's term, > 0.
        contrastive_weight: Weight w of InfoNCE, >= 0; 0 trains on the teacher's term alone.
        teacher: Model directory or Hub id of the teacher, with its own tokenizer, prompts and maximum lengths. It runs
            in each step without gradients. None to use the vectors or scores in the data.
        options: Options of `InfoNCE`.
    """

    has_teacher = True

    def __init__(
        self, alpha: float = 1.0, contrastive_weight: float = 1.0, teacher: str | None = None, **options: Any
    ) -> None:
        super().__init__(**options)
        if not 0 < alpha < math.inf:
            raise OptionError("alpha", alpha, "must be > 0 and finite", "1 weights both terms equally")
        if not 0 <= contrastive_weight < math.inf:
            raise OptionError("contrastive_weight", contrastive_weight, "must be >= 0 and finite", "0 disables it")
        self.alpha, self.contrastive_weight, self.teacher = alpha, contrastive_weight, teacher

    def check_teacher(self, has_surrogates: bool, has_scores: bool | None) -> None:
        """Check that there is exactly one teacher."""
        if self.teacher is None:
            super().check_teacher(has_surrogates, has_scores)
        elif has_surrogates or (self.takes_scores and has_scores):
            other = "surrogate_vectors" if has_surrogates else "`scores` in its records"
            rule = f"cannot be combined with a source that has {other}"
            raise OptionError("model.loss.teacher", self.teacher, rule, "leave one of them out")

    def forward(self, query_BD: Tensor, candidate_CD: Tensor, batch: ContrastiveBatch) -> LossOutput:
        """The loss of this rank's queries, with the terms `contrastive` and `distillation`."""
        contrastive, terms = super().forward(query_BD, candidate_CD, batch)
        with torch.autocast(query_BD.device.type, enabled=False):
            distillation = self.divergence(query_BD, candidate_CD, batch)
            loss = self.contrastive_weight * contrastive + self.alpha * distillation
        terms |= {"contrastive": contrastive.detach(), "distillation": distillation.detach()}
        return LossOutput(loss, terms)

    def divergence(self, query_BD: Tensor, candidate_CD: Tensor, batch: ContrastiveBatch) -> Tensor:
        """The mean divergence over this rank's queries, () float32; called outside autocast."""
        raise NotImplementedError


class SimilarityDistillation(Distillation):
    """InfoNCE plus the Kullback-Leibler divergence between the teacher's and the student's in-batch distributions.

    divergence = mean over B of  sum over c of p_t(c) · (log p_t(c) - log p_s(c))
    p_s = softmax(s(q, c) / t) of the student's similarities s, with t the temperature of InfoNCE
    p_t = softmax(f(q, c) / t_t) of the teacher's cosines f

    Both softmaxes are over the candidates c that InfoNCE does not mask for the query q. A query contributes 0 if it or
    its positive has no teacher vector. Other candidates without one are excluded from both softmaxes.

    Args:
        teacher_temperature: Temperature t_t of the teacher's scores, > 0. The lower, the sharper its distribution.
        alpha: Weight of the divergence, > 0.
        options: Options of `Distillation`.

    Source: Hinton et al. 2015, arXiv:1503.02531, Eq. 1 and §2; over in-batch candidates as in RocketQAv2, Ren et al.
        2021, arXiv:2110.07367, Eq. 6. Differs: no factor t², since both temperatures are close to InfoNCE's.
    """

    def __init__(self, teacher_temperature: float = 0.05, alpha: float = 1.0, **options: Any) -> None:
        super().__init__(alpha, **options)
        if not 0 < teacher_temperature < math.inf:
            raise OptionError("teacher_temperature", teacher_temperature, "must be > 0 and finite", "0.05 is usual")
        self.teacher_temperature = teacher_temperature

    def divergence(self, query_BD: Tensor, candidate_CD: Tensor, batch: ContrastiveBatch) -> Tensor:
        """See `Distillation`; a tile of queries at a time, whose scores are computed again in the backward pass."""
        query_BD, candidate_CD = comparable(query_BD, self.similarity), comparable(candidate_CD, self.similarity)
        masks, scale = self.masks(batch), self._scale(query_BD)
        all_CD = gather_candidates(candidate_CD, masks.candidate_counts)
        teacher = surrogate_vectors(batch, type(self).__name__)
        teacher_QS = teacher.query_QS.to(query_BD.dtype)
        teacher_CS = gather_rows(teacher.candidate_CS, masks.candidate_counts).to(query_BD.dtype)

        def of_tile(tile_rD: Tensor, all_CD: Tensor, scale: Tensor, rows: slice) -> Tensor:
            student_rC = scale * tile_rD @ all_CD.T
            # NaN for a candidate without a teacher vector, and in the whole row of a query without one.
            teacher_rC = teacher_QS[rows] @ teacher_CS.T / self.teacher_temperature
            competes_rC = teacher_rC.isfinite() & ~masks.excluded(rows)
            is_known_r1 = competes_rC.gather(1, masks.positive_index_B[rows, None])
            competes_rC |= ~is_known_r1
            log_teacher_rC = teacher_rC.where(is_known_r1, 0).masked_fill(~competes_rC, -torch.inf).log_softmax(1)
            log_student_rC = student_rC.masked_fill(~competes_rC, -torch.inf).log_softmax(1)
            # For excluded candidates the difference of two infinities would be NaN.
            gap_rC = (log_teacher_rC - log_student_rC).masked_fill(~competes_rC, 0)
            return (log_teacher_rC.exp() * gap_rC).where(is_known_r1, 0).sum()

        total = query_BD.new_zeros(())
        for rows in row_tiles(len(query_BD), len(all_CD), scores_at_once(self.tile_size, all_CD.device)):
            total = total + checkpoint(of_tile, query_BD[rows], all_CD, scale, rows, use_reentrant=False)
        return total / len(query_BD)


class MarginMSE(Distillation):
    """InfoNCE plus the squared error of the margins between a query's positive and each of its hard negatives.

    divergence = mean over B of the mean over the query's hard negatives n of
        ( k·(s(q, d+) - s(q, n)) - (f(q, d+) - f(q, n)) )²,
    with s the student's similarity, k its scale and f the teacher's score: the records' `scores` if any source of the
    run has them, else the cosine of the teacher's vectors. A query without hard negatives, or whose positive has no
    teacher score, contributes 0. A negative without a teacher score is ignored.

    Args:
        score_scale: Factor k of the student's similarities: 1 if the teacher's scores are cosines. For logits of a
            cross-encoder use about 20, or `similarity: dot`.
        alpha: Weight of the squared error, > 0.
        options: Options of `Distillation`.

    Source: Hofstätter et al. 2020, arXiv:2010.02666, Eq. 5.
    """

    takes_scores = True

    @property
    def only_hard_negatives(self) -> bool:  # type: ignore[override]
        return self.contrastive_weight == 0

    def __init__(self, score_scale: float = 1.0, alpha: float = 1.0, **options: Any) -> None:
        super().__init__(alpha, **options)
        if not 0 < score_scale < math.inf:
            raise OptionError("score_scale", score_scale, "must be > 0 and finite", "use 1 for a teacher's cosines")
        self.score_scale = score_scale

    def divergence(self, query_BD: Tensor, candidate_CD: Tensor, batch: ContrastiveBatch) -> Tensor:
        """See `Distillation`; only the products of a query with its own candidates are computed."""
        query_BD, candidate_CD = comparable(query_BD, self.similarity), comparable(candidate_CD, self.similarity)
        owner_C, positive_B = batch.owner_C, batch.positive_index_B
        student_C = self.score_scale * torch.linalg.vecdot(query_BD[owner_C], candidate_CD)
        teacher_C = batch.teacher_score_C
        if teacher_C is None:
            teacher = surrogate_vectors(batch, type(self).__name__)
            teacher_QS, teacher_CS = teacher.query_QS.to(student_C.dtype), teacher.candidate_CS.to(student_C.dtype)
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
