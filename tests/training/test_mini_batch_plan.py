from dataclasses import replace

import pytest
import torch

from embeddings.common import ContrastiveBatch
from embeddings.training.gradcache import (
    CANDIDATE,
    CONTEXT,
    QUERY,
    MiniBatch,
    extend_plan,
    plan_stages,
    tower_tokens,
)
from tests.helpers.contrastive import Record, batch_of, random_batch, with_context


def rows_of(plan: list[MiniBatch], tower: int) -> list[int]:
    real = [part for part in plan if part.tower == tower and not part.is_filler]
    return sorted(row for part in real for row in part.rows_n.tolist())


def check(plan: list[MiniBatch], batch: ContrastiveBatch) -> None:
    assert rows_of(plan, 0) == list(range(len(batch.query)))
    assert rows_of(plan, 1) == list(range(len(batch.candidate)))
    for part in plan:
        lengths_N = (batch.query, batch.candidate)[part.tower].lengths_N
        assert part.longest == lengths_N[part.rows_n].max()
        assert part.num_tokens == part.longest * len(part.rows_n)
    assert [part.longest for part in plan] == sorted((part.longest for part in plan), reverse=True)


def test_both_towers_are_covered_from_the_longest_text_to_the_shortest() -> None:
    batch = random_batch(9, 2)
    plan = plan_stages(batch, 30, None)[0]
    check(plan, batch)
    assert {part.tower for part in plan} == {0, 1}
    assert all(part.num_tokens <= 30 for part in plan)


@pytest.mark.parametrize("missing", [0, 1, 5])
def test_a_plan_is_extended_by_halving_its_largest_mini_batches(missing: int) -> None:
    batch = random_batch(9, 2)
    plan = plan_stages(batch, 30, None)[0]
    extended = extend_plan(plan, len(plan) + missing, batch)
    assert len(extended) == len(plan) + missing
    assert not any(part.is_filler for part in extended)
    check(extended, batch)


def test_a_plan_of_single_texts_is_filled_up() -> None:
    batch = batch_of([Record([1, 2], [3])])
    extended = extend_plan(plan_stages(batch, 10, None)[0], 5, batch)
    assert [part.is_filler for part in extended] == [False, False, True, True, True]
    assert all(torch.equal(part.rows_n, torch.tensor([0])) for part in extended)
    check(extended, batch)


def test_a_context_is_a_stage_before_the_towers_and_lengthens_their_texts() -> None:
    batch = with_context(random_batch(9, 2), 4)
    context, towers = plan_stages(batch, 30, None)
    assert sorted(row for part in context for row in part.rows_n.tolist()) == list(range(4))
    assert {part.tower for part in context} == {CONTEXT}
    assert rows_of(towers, QUERY) == list(range(9))
    assert rows_of(towers, CANDIDATE) == list(range(27))
    for part in towers:
        assert part.longest == tower_tokens(batch, part.tower).lengths_N[part.rows_n].max() + 4
    extended = extend_plan(context, len(context) + 1, batch)
    assert {part.tower for part in extended} == {CONTEXT}


@pytest.mark.parametrize("num_context", [None, 0])
def test_without_a_context_there_is_one_stage(num_context: int | None) -> None:
    batch = random_batch(3, 1)
    batch = batch if num_context is None else with_context(batch, num_context)
    (towers,) = plan_stages(batch, 30, None)
    check(towers, batch)


def test_empty_slots_and_soft_prompts_lengthen_texts_too() -> None:
    batch = with_context(random_batch(9, 2), 3)
    longer = replace(batch, num_extra_tokens=11)
    for tower in (QUERY, CANDIDATE):
        lengths_N = tower_tokens(batch, tower).lengths_N
        for changed, extra in ((batch, 3), (longer, 11), (longer.to("cpu"), 11)):
            plan = [part for part in plan_stages(changed, 60, None)[-1] if part.tower == tower]
            assert all(part.longest == lengths_N[part.rows_n].max() + extra for part in plan)
            assert all(part.num_tokens <= 60 or len(part.rows_n) == 1 for part in plan)
