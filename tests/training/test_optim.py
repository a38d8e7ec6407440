"""Parameter groups, the size of optimiser states, and learning-rate schedules."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn

from embeddings.common import OptionError
from embeddings.models.moe.experts import Experts
from embeddings.training.optim import Schedule, parameter_groups, replaced_options, scale_rates, state_per_weight


def test_vectors_have_no_weight_decay_and_frozen_parameters_are_excluded():
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    matrices, vectors = parameter_groups(model)
    assert [p.shape for p in matrices["params"]] == [(4, 3)]
    assert "weight_decay" not in matrices
    assert vectors["weight_decay"] == 0.0
    assert len(vectors["params"]) == 3
    with pytest.raises(ValueError, match="no parameter is trainable"):
        parameter_groups(model.requires_grad_(False))


def test_the_biases_of_experts_have_no_weight_decay() -> None:
    experts = Experts(hidden_size=4, intermediate_size=8, num_experts=2, inner_bias=True)
    matrices, vectors = parameter_groups(experts)
    assert matrices["params"] == [experts.w1, experts.w2]
    assert vectors["params"] == [experts.bias1, experts.bias2]


@pytest.mark.parametrize(
    ("kind", "options", "values"),
    [
        (torch.optim.SGD, {}, 0),
        (torch.optim.SGD, {"momentum": 0.9}, 1),
        (torch.optim.AdamW, {}, 2),
        (torch.optim.Adam, {"amsgrad": True}, 3),
        (torch.optim.Adafactor, {}, 0.03),
        (torch.optim.LBFGS, {}, 0),
        (torch.optim.SparseAdam, {}, 0),
    ],
)
def test_state_per_weight(kind, options, values):
    assert state_per_weight(partial(kind, lr=0.1, **options)) == values


@pytest.mark.parametrize(
    ("schedule", "total_steps", "expected"),
    [
        (Schedule(warmup_steps=4), 8, [0.25, 0.5, 0.75, 1, 1, 0.75, 0.5, 0.25, 0, 0]),
        (Schedule(warmup_steps=0, decay="cosine"), 4, [1, 0.5 + 0.125**0.5, 0.5, 0.5 - 0.125**0.5, 0]),
        (Schedule(warmup_steps=2, decay="constant"), 4, [0.5, 1, 1, 1, 1]),
    ],
)
def test_the_fraction_of_the_peak_rate_at_each_step(schedule, total_steps, expected):
    assert [schedule.factor(step, total_steps) for step in range(len(expected))] == pytest.approx(expected)


def test_the_scheduler_sets_the_rates_of_the_factor():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0)
    schedule = Schedule(warmup_steps=2)
    scheduler = schedule.scheduler(optimizer, 5)
    rates = []
    for _ in range(5):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx([2.0 * schedule.factor(step, 5) for step in range(5)])


@pytest.mark.parametrize(("total_steps", "num_warmup_steps"), [(100, 10), (36, 3), (9, 0), (1, 0)])
def test_a_warm_up_can_be_a_fraction_of_the_run(total_steps, num_warmup_steps):
    fraction, absolute = Schedule(warmup_steps=0.1), Schedule(warmup_steps=num_warmup_steps)
    assert fraction == Schedule()
    for step in range(total_steps):
        assert fraction.factor(step, total_steps) == absolute.factor(step, total_steps)
    fraction.check(total_steps)


def test_a_fraction_of_the_run_is_exact() -> None:
    assert [Schedule(percent / 100).num_warmup_steps(100) for percent in range(100)] == list(range(100))


@pytest.mark.parametrize("options", [{"warmup_steps": -1}, {"warmup_steps": 1.5}, {"total_steps": 0}])
def test_invalid_counts_are_rejected(options):
    with pytest.raises(OptionError):
        Schedule(**options)


@pytest.mark.parametrize(
    ("schedule", "steps", "message"),
    [
        (Schedule(warmup_steps=49), 50, None),
        (Schedule(warmup_steps=50), 50, "must be below the run's 50 optimiser steps"),
        (Schedule(warmup_steps=50, total_steps=60), 50, None),
        (Schedule(warmup_steps=45, total_steps=40), 50, "must be below the run's 40 optimiser steps"),
        (Schedule(), None, r"must be known to decay, got None; set trainer\.max_steps"),
        (Schedule(decay="constant"), None, "must be known for a warm-up that is a fraction of it"),
        (Schedule(warmup_steps=50, decay="constant"), None, None),
        (Schedule(total_steps=60), None, None),
    ],
)
def test_a_schedule_that_does_not_fit_the_run_is_rejected(schedule, steps, message):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    with pytest.raises(OptionError, match=message) if message else nullcontext():
        schedule.check(steps)
    if steps is None:
        with pytest.raises(OptionError, match=message) if message else nullcontext():
            schedule.scheduler(optimizer, None)


def test_a_run_that_goes_on_after_its_decay_is_rejected():
    for schedule in (Schedule(total_steps=60), Schedule(total_steps=60, decay="cosine")):
        schedule.check(60, is_exact=True)
        schedule.check(None, is_exact=True)
        assert schedule.factor(60, 60) == 0
        with pytest.raises(OptionError, match="must not be below the run's 61 optimiser steps"):
            schedule.check(61, is_exact=True)
    Schedule(total_steps=60, decay="constant").check(61, is_exact=True)
    Schedule().check(61, is_exact=True)


def test_the_rate_falls_to_zero_with_the_time_only_within_max_time():
    left = iter([1.0, 0.95, 0.9, 0.3, 0.0])
    rates = {}
    for within in (False, True):
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0)
        schedule = Schedule(warmup_steps=2, within_max_time=within)
        scheduler = schedule.scheduler(optimizer, 10, time_left=lambda: next(left))
        rates[within] = [optimizer.param_groups[0]["lr"]]
        for _ in range(4):
            optimizer.step()
            scheduler.step()
            rates[within].append(optimizer.param_groups[0]["lr"])
    assert rates[False] == [1.0, 2.0, 2.0, 2.0 * 7 / 8, 2.0 * 6 / 8]
    # Only the fourth step falls behind the time, of which 0.3 is left.
    assert rates[True] == pytest.approx([1.0, 2.0, 2.0, 2.0 * 0.3 * 10 / 8, 0.0])


def test_scale_rates_scales_all_groups_during_a_warm_up() -> None:
    weights = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = torch.optim.SGD([{"params": weights[:1]}, {"params": weights[1:], "lr": 0.5}], lr=1.0)
    scheduler = Schedule(warmup_steps=4, decay="constant").scheduler(optimizer, 8)
    optimizer.step()
    scheduler.step()
    scale_rates(scheduler, 0.2)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.1, 0.05])  # the second of four steps
    optimizer.step()
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.15, 0.075])


def test_the_options_that_a_saved_state_replaces_are_named() -> None:
    def adam(lr: float, weight_decay: float) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(parameter_groups(nn.Linear(2, 3)), lr=lr, weight_decay=weight_decay)
        Schedule(warmup_steps=4).scheduler(optimizer, 8)
        return optimizer

    saved = adam(0.1, 0.5).state_dict()
    assert replaced_options(adam(0.1, 0.5), saved) == []
    assert replaced_options(adam(0.2, 0.3), saved) == ["lr 0.1, not 0.2", "weight_decay 0.5, not 0.3"]


def test_replaced_options_need_not_be_numbers() -> None:
    weights = [nn.Parameter(torch.ones(2))]
    saved = torch.optim.AdamW(weights).state_dict()
    assert replaced_options(torch.optim.AdamW(weights), saved) == []
    changed = torch.optim.AdamW(weights, betas=(0.9, 0.95), amsgrad=True)
    assert replaced_options(changed, saved) == ["betas (0.9, 0.999), not (0.9, 0.95)", "amsgrad False, not True"]
