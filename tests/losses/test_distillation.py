"""Distillation losses against loops, and their gradients under GradCache and on two ranks."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from embeddings.common import ContrastiveBatch, OptionError
from embeddings.losses import InfoNCE, MarginMSE, SimilarityDistillation
from embeddings.losses.distillation import Distillation
from embeddings.losses.surrogates import SurrogateFilter
from embeddings.training import GradCache
from embeddings.training.gradcache import plain_step
from tests.helpers.contrastive import TinyStep, batch_of, gradient_vector, random_batch, random_records, relative_error
from tests.helpers.ranks import run_on_two_ranks
from tests.helpers.tiny import tiny_bert
from tests.losses.test_info_nce import vectors
from tests.losses.test_masks import cosine, is_negative_mask, with_surrogates
from tests.training.test_gradcache import cached_gradient, direct_gradient

LOSSES: dict[str, dict[str, Any]] = {
    "similarity": {"kind": SimilarityDistillation, "teacher_temperature": 0.2, "alpha": 0.7},
    "similarity alone": {"kind": SimilarityDistillation, "contrastive_weight": 0.0, "tile_size": 1},
    "similarity, learnt temperature": {"kind": SimilarityDistillation, "learnable_temperature": True},
    "margin": {"kind": MarginMSE, "score_scale": 3.0, "alpha": 2.0},
    "margin of scores": {"kind": MarginMSE, "score_scale": 3.0, "with_scores": True},
}


def loss_of(
    kind: type[Distillation], temperature: float = 0.1, with_scores: bool = False, **options: Any
) -> Distillation:
    return kind(temperature=temperature, **options).double()


def with_scores(batch: ContrastiveBatch, seed: int = 0) -> ContrastiveBatch:
    """The batch with random scores of a cross-encoder; the first query's positive and the last candidate have none."""
    score_C = 5 * torch.randn(len(batch.candidate), generator=torch.Generator().manual_seed(seed))
    score_C[0] = score_C[-1] = math.nan
    return replace(batch, teacher_score_C=score_C)


def with_teacher(batch: ContrastiveBatch, options: dict[str, Any]) -> ContrastiveBatch:
    """The batch with the teacher data that the loss of `options` needs."""
    return with_scores(batch) if options.get("with_scores") else with_surrogates(batch)


def softmax(scores: list[float]) -> list[float]:
    return [math.exp(score) / sum(math.exp(other) for other in scores) for score in scores]


def teacher_score(batch: Any, row: int, column: int) -> float:
    if batch.teacher_score_C is not None:
        return float(batch.teacher_score_C[column])
    return cosine(batch.surrogate_query_BS[row].tolist(), batch.surrogate_candidate_CS[column].tolist())


def divergence_reference(student: list[Tensor], batch: ContrastiveBatch, t: float, teacher_t: float) -> float:
    """The formula of the docstring, a query and a candidate at a time."""
    query, candidate = (vector.tolist() for vector in student)
    negatives, total = is_negative_mask(batch).tolist(), 0.0
    for row in range(len(batch)):
        used = [c for c in range(len(candidate)) if c == row or negatives[row][c]]
        used = [c for c in used if not math.isnan(teacher_score(batch, row, c))]
        if row not in used:
            continue
        p_teacher = softmax([teacher_score(batch, row, c) / teacher_t for c in used])
        p_student = softmax([cosine(query[row], candidate[c]) / t for c in used])
        total += sum(a * (math.log(a) - math.log(b)) for a, b in zip(p_teacher, p_student, strict=True))
    return total / len(batch)


def margin_reference(student: list[Tensor], batch: ContrastiveBatch, scale: float) -> float:
    query, candidate = (vector.tolist() for vector in student)
    total = 0.0
    for row in range(len(batch)):
        errors = []
        for c in range(len(batch), len(candidate)):
            if int(batch.owner_C[c]) == row:
                margin = scale * (cosine(query[row], candidate[row]) - cosine(query[row], candidate[c]))
                own, other = (teacher_score(batch, row, column) for column in (row, c))
                errors.append((margin - (own - other)) ** 2)
        errors = [error for error in errors if not math.isnan(error)]
        total += sum(errors) / len(errors) if errors else 0.0
    return total / len(batch)


@pytest.mark.parametrize(("num_queries", "num_negatives"), [(6, 0), (7, 2), (70, 1)])
@pytest.mark.parametrize("tile_size", [1, 2**21])
def test_similarity_distillation_equals_a_loop(num_queries: int, num_negatives: int, tile_size: int) -> None:
    batch = with_surrogates(random_batch(num_queries, num_negatives))
    student = vectors(batch)
    loss = loss_of(SimilarityDistillation, teacher_temperature=0.3, alpha=0.7, tile_size=tile_size)
    loss.contrastive_weight = 0.5
    found = loss(*student, batch)
    expected = divergence_reference(student, batch, 0.1, 0.3)
    assert expected > 0.01
    assert found.terms["distillation"].item() == pytest.approx(expected, rel=1e-6)
    contrastive = InfoNCE(temperature=0.1)(*student, batch).loss
    assert found.terms["contrastive"].item() == contrastive.item()
    assert found.loss.item() == pytest.approx(0.5 * contrastive.item() + 0.7 * expected, rel=1e-6)


@pytest.mark.parametrize(("num_queries", "num_negatives"), [(6, 0), (7, 2), (70, 1)])
@pytest.mark.parametrize("add_teacher", [with_surrogates, with_scores, lambda own: with_scores(with_surrogates(own))])
def test_margin_mse_equals_a_loop(
    num_queries: int, num_negatives: int, add_teacher: Callable[[ContrastiveBatch], ContrastiveBatch]
) -> None:
    batch = add_teacher(random_batch(num_queries, num_negatives))
    student = vectors(batch)
    found = loss_of(MarginMSE, score_scale=3.0)(*student, batch)
    expected = margin_reference(student, batch, 3.0)
    assert (expected > 0.01) == (num_negatives > 0)
    assert found.terms["distillation"].item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("options", LOSSES.values(), ids=LOSSES)
def test_gradients_of_distillation_equal_finite_differences(options: dict[str, Any]) -> None:
    batch = with_teacher(random_batch(5, 2), options)
    loss = loss_of(**options)
    assert torch.autograd.gradcheck(lambda *student: loss(*student, batch).loss, vectors(batch), atol=1e-6)


@pytest.mark.parametrize("options", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("engine", [GradCache(mini_batch_texts=1), GradCache(mini_batch_tokens=30, kept_fraction=0.5)])
def test_gradcache_gives_the_gradient_of_the_plain_step(engine: GradCache, options: dict[str, Any]) -> None:
    batch = with_teacher(random_batch(6, 2), options)
    step = TinyStep(tiny_bert().double(), loss_of(**options))
    loss, expected = direct_gradient(step, batch, engine)
    found, gradient = cached_gradient(step, batch, engine)
    assert found == pytest.approx(loss, rel=1e-12)
    assert relative_error(gradient, expected) <= 1e-12


def errors_on_two_ranks(rank: int) -> dict[str, float]:
    """Relative errors of the ranks' mean gradient against that of one process with the full batch."""
    everything, results = random_records(8, 2, seed=5), {}
    queries, texts = (
        [*range(4 * rank, 4 * rank + 4)],
        [*range(4 * rank, 4 * rank + 4), *range(8 + 8 * rank, 16 + 8 * rank)],
    )
    rows = {"surrogate_query_BS": queries, "surrogate_candidate_CS": texts, "teacher_score_C": texts}
    for loss_name, options in LOSSES.items():
        whole = with_teacher(batch_of(everything), options)
        shards = {name: getattr(whole, name)[own] for name, own in rows.items() if getattr(whole, name) is not None}
        own = replace(batch_of(everything[4 * rank : 4 * rank + 4]), **shards)
        step = TinyStep(tiny_bert().double(), loss_of(**options))
        GradCache(mini_batch_tokens=30).step(step, own)
        found = gradient_vector(step)
        dist.all_reduce(found)
        reference = TinyStep(tiny_bert().double(), loss_of(**options, gather_across_devices=False))
        plain_step(reference, whole).loss.backward()
        results[loss_name] = relative_error(found / 2, gradient_vector(reference))
    return results


def test_two_ranks_give_the_gradient_of_one_process_with_the_whole_batch() -> None:
    for errors in run_on_two_ranks(errors_on_two_ranks):
        assert errors.keys() == LOSSES.keys()
        assert max(errors.values()) <= 1e-12, errors


@pytest.mark.parametrize("options", LOSSES.values(), ids=LOSSES)
def test_a_batch_without_a_teacher_is_refused(options: dict[str, Any]) -> None:
    batch = random_batch(3, 1)
    loss = loss_of(**options)
    with pytest.raises(OptionError, match="surrogate_vectors"):
        loss(*vectors(batch), batch)
    for has_scores in (None, False, True):
        loss.check_teacher(True, has_scores)
    uses_scores = options["kind"] is MarginMSE
    for has_scores, is_refused in {None: not uses_scores, False: True, True: not uses_scores}.items():
        with pytest.raises(OptionError, match="mine --reranker") if is_refused else nullcontext():
            loss.check_teacher(False, has_scores)
    with pytest.raises(OptionError, match="surrogate_vectors"):
        loss_of(**options, false_negative_filter=SurrogateFilter()).check_teacher(False, True)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (SimilarityDistillation, {"alpha": 0.0}, "alpha must be > 0"),
        (SimilarityDistillation, {"teacher_temperature": 0.0}, "teacher_temperature must be > 0"),
        (MarginMSE, {"contrastive_weight": -1.0}, "contrastive_weight must be >= 0"),
        (MarginMSE, {"score_scale": math.inf}, "score_scale must be > 0 and finite"),
    ],
)
def test_invalid_options_are_refused(kind: type[Distillation], options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        kind(**options)
