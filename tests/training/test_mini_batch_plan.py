"""Mini-batches of a GradCache step: their plan, their random states, and a context that both towers read."""

from contextlib import suppress
from dataclasses import replace

import pytest
import torch

from embeddings.common import ContrastiveBatch
from embeddings.training.gradcache import (
    CANDIDATE,
    CONTEXT,
    QUERY,
    MiniBatch,
    RandomState,
    extend_plan,
    plain_step,
    plan_stages,
    tower_tokens,
)
from tests.helpers.contrastive import Record, TinyContextualStep, TinyStep, batch_of, random_batch, with_context
from tests.helpers.tiny import tiny_bert


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


@pytest.mark.parametrize("missing", [0, 1, 5])
def test_a_plan_is_extended_by_halving_its_largest_mini_batches(missing: int) -> None:
    batch = random_batch(9, 2)
    (plan,) = plan_stages(batch, 30, None)
    check(plan, batch)
    assert all(part.num_tokens <= 30 for part in plan)
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


def test_an_empty_context_is_no_stage() -> None:
    batch = with_context(random_batch(3, 1), 0)
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


def test_an_error_inside_a_replayed_state_restores_the_one_outside() -> None:
    state = RandomState.capture(torch.device("cpu"))
    torch.manual_seed(5)
    before = torch.get_rng_state()
    with suppress(KeyError), state.replayed():
        torch.rand(3)
        raise KeyError
    assert torch.equal(torch.get_rng_state(), before)


def test_both_towers_read_one_context_that_is_embedded_once() -> None:
    plain, batch = TinyStep(tiny_bert()), random_batch(4, 1)
    assert torch.equal(plain_step(plain, batch).loss, plain.plain_loss(batch).loss)
    with pytest.raises(AssertionError, match="a step that embeds it"):
        plain_step(plain, with_context(batch, 3))
    step, batch, calls = TinyContextualStep(tiny_bert(1), tiny_bert(2)), with_context(batch, 3), []
    step.first.register_forward_hook(lambda *_: calls.append(None))
    loss = plain_step(step, batch).loss
    assert len(calls) == 1
    assert torch.equal(loss, step.plain_loss(batch).loss)
    assert not torch.equal(loss, plain_step(step, with_context(batch, 0)).loss)
