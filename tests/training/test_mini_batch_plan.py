"""Mini-batches of a GradCache step: their plan, their random states, and the context that both towers read."""

from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from embeddings.common import ContrastiveBatch
from embeddings.common.random import RandomState
from embeddings.training.gradcache import (
    CANDIDATE,
    CONTEXT,
    QUERY,
    MiniBatch,
    extend_plan,
    plain_step,
    plan_stages,
    tokens_of,
)
from tests.helpers.contrastive import Record, TinyContextualStep, TinyStep, batch_of, random_batch, with_context
from tests.helpers.tiny import tiny_bert


def rows_of(plan: list[MiniBatch], tower: int) -> list[int]:
    real = [mini for mini in plan if mini.group == tower and not mini.is_extra]
    return sorted(row for mini in real for row in mini.rows_n.tolist())


def check(plan: list[MiniBatch], batch: ContrastiveBatch) -> None:
    assert rows_of(plan, 0) == list(range(len(batch.query)))
    assert rows_of(plan, 1) == list(range(len(batch.candidate)))
    for mini in plan:
        lengths_N = (batch.query, batch.candidate)[mini.group].lengths_N
        assert mini.longest == lengths_N[mini.rows_n].max()
        assert mini.num_tokens == mini.longest * len(mini.rows_n)
    assert [mini.longest for mini in plan] == sorted((mini.longest for mini in plan), reverse=True)


@pytest.mark.parametrize("missing", [0, 1, 5])
def test_a_plan_is_extended_by_halving_its_largest_mini_batches(missing: int) -> None:
    batch = random_batch(9, 2)
    (plan,) = plan_stages(batch, 30, None)
    check(plan, batch)
    assert all(mini.num_tokens <= 30 for mini in plan)
    extended = extend_plan(plan, len(plan) + missing, batch)
    assert len(extended) == len(plan) + missing
    assert not any(mini.is_extra for mini in extended)
    check(extended, batch)


def test_a_plan_of_single_texts_is_extended_by_fillers() -> None:
    batch = batch_of([Record([1, 2], [3])])
    extended = extend_plan(plan_stages(batch, 10, None)[0], 5, batch)
    assert [mini.is_extra for mini in extended] == [False, False, True, True, True]
    assert all(torch.equal(mini.rows_n, torch.tensor([0])) for mini in extended)
    check(extended, batch)


def test_the_context_is_the_first_stage_and_lengthens_the_texts_of_the_towers() -> None:
    batch = with_context(random_batch(9, 2), 4)
    context, towers = plan_stages(batch, 30, None)
    assert sorted(row for mini in context for row in mini.rows_n.tolist()) == list(range(4))
    assert {mini.group for mini in context} == {CONTEXT}
    assert rows_of(towers, QUERY) == list(range(9))
    assert rows_of(towers, CANDIDATE) == list(range(27))
    for mini in towers:
        assert mini.longest == tokens_of(batch, mini.group).lengths_N[mini.rows_n].max() + 4
    extended = extend_plan(context, len(context) + 1, batch)
    assert {mini.group for mini in extended} == {CONTEXT}


def test_an_empty_context_adds_no_stage() -> None:
    batch = with_context(random_batch(3, 1), 0)
    (towers,) = plan_stages(batch, 30, None)
    check(towers, batch)


def test_extra_tokens_lengthen_texts() -> None:
    batch = with_context(random_batch(9, 2), 3)
    longer = replace(batch, num_extra_tokens=11)
    for tower in (QUERY, CANDIDATE):
        lengths_N = tokens_of(batch, tower).lengths_N
        for changed, extra in ((batch, 3), (longer, 11), (longer.to("cpu"), 11)):
            plan = [mini for mini in plan_stages(changed, 60, None)[-1] if mini.group == tower]
            assert all(mini.longest == lengths_N[mini.rows_n].max() + extra for mini in plan)
            assert all(mini.num_tokens <= 60 or len(mini.rows_n) == 1 for mini in plan)


def test_an_error_inside_replayed_restores_the_outer_state() -> None:
    state = RandomState(torch.device("cpu"))
    torch.manual_seed(5)
    before = torch.get_rng_state()
    with suppress(KeyError), state.replayed():
        torch.rand(3)
        raise KeyError
    assert torch.equal(torch.get_rng_state(), before)


def loss_of(step: TinyStep, batch: ContrastiveBatch, context: Any = None) -> Tensor:
    towers = (step.embed(tokens, context) for tokens in (batch.query, batch.candidate))
    return step.loss_from_representations(*towers, batch).loss


def test_the_context_is_embedded_once_for_both_towers() -> None:
    plain, batch = TinyStep(tiny_bert()), random_batch(4, 1)
    assert torch.equal(plain_step(plain, batch).loss, loss_of(plain, batch))
    with pytest.raises(AssertionError, match="a step that embeds it"):
        plain_step(plain, with_context(batch, 3))
    step, batch, calls = TinyContextualStep(tiny_bert(1), tiny_bert(2)), with_context(batch, 3), []
    step.first.register_forward_hook(lambda *_: calls.append(None))
    loss = plain_step(step, batch).loss
    assert len(calls) == 1
    assert torch.equal(loss, loss_of(step, batch, step.embed_context(batch.context)))
    assert not torch.equal(loss, plain_step(step, with_context(batch, 0)).loss)
