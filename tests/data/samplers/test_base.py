"""Ranks, epochs and resuming with a simple sampler; shares of sources; the length of a run."""

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from embeddings.common import OptionError
from embeddings.data.samplers.base import BatchSampler, RunLength, run_steps, source_parts
from tests.data.killed_runs import LIGHTNING_WARNINGS, Ledger
from tests.helpers.refusals import refused
from tests.helpers.runs import quiet_trainer


class CountingSampler(BatchSampler):
    """Three steps per epoch; row numbers increase over steps and epochs."""

    @property
    def num_steps(self):
        return 3

    def global_batch(self, epoch, step):
        first = (epoch * 3 + step) * self.global_batch_size
        return np.arange(first, first + self.global_batch_size)


def rows_of(sampler):
    return [[entry.row for entry in batch] for batch in sampler]


def test_rank_and_number_of_ranks_come_from_the_process_group_if_there_is_one(monkeypatch):
    sampler = CountingSampler(2)
    assert sampler.rank_and_size == (0, 1)
    for name, value in (("is_initialized", True), ("get_rank", 1), ("get_world_size", 2)):
        monkeypatch.setattr(f"torch.distributed.{name}", lambda value=value: value)
    assert sampler.rank_and_size == (1, 2)
    assert rows_of(sampler)[0] == [2, 3]


def test_draw_keys_depend_on_seed_epoch_step_and_position():
    samplers = CountingSampler(64, seed=5), CountingSampler(64, seed=6)
    places = ((0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0))
    keys = np.concatenate([samplers[seed].draw_keys(epoch, step) for seed, epoch, step in places])
    assert len(np.unique(keys)) == 256
    assert keys.min() >= 0


def test_a_new_epoch_starts_at_its_first_step_and_a_resumed_plan_only_moves_forward():
    sampler = CountingSampler(2)
    sampler.start = 2
    sampler.set_epoch(0)
    assert sampler.start == 2
    sampler.set_epoch(1)
    assert rows_of(sampler)[0] == [6, 7]
    sampler.resume(2, 1)
    sampler.set_epoch(1)
    assert rows_of(sampler) == [[14, 15], [16, 17]]
    sampler.set_epoch(3)
    assert rows_of(sampler)[0] == [18, 19]


def test_the_temperature_is_the_exponent_of_the_sizes_rounded_to_twelve_digits():
    assert source_parts([100, 1], temperature=0.5) == pytest.approx([10, 1])
    large, small = source_parts([55_600, 556], temperature=0.3)
    assert large / small == pytest.approx(100**0.3) == pytest.approx(3.981, abs=1e-3)
    assert len(set(source_parts([9, 100, 3], temperature=0.0))) == 1
    (part,) = source_parts([123_456_789], temperature=0.3)
    assert part == float(f"{part:.12g}")
    assert part == pytest.approx(123_456_789**0.3, rel=1e-11)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 3.3}, r"sampler\.temperature must be from 0 to 1: it is the exponent .*, got 3\.3"),
        ({"temperature": -0.1}, "must be from 0 to 1"),
        ({"temperature": float("nan")}, "must be from 0 to 1"),
        ({"weights": [1.0, 2.0]}, "weight cannot take effect with proportions 'size'"),
        ({"temperature": 0.3, "proportions": "given"}, "temperature cannot take effect with proportions 'given'"),
    ],
)
def test_invalid_and_ineffective_options_are_refused(options, message):
    refused(OptionError, message, source_parts, [3, 4], **options)


def trainer(**changes):
    defaults = {"max_steps": -1, "max_epochs": None, "limit_train_batches": 1.0, "accumulate_grad_batches": 1}
    return SimpleNamespace(**{**defaults, **changes})


@pytest.mark.parametrize(
    ("changes", "batches", "expected"),
    [
        ({"max_steps": 7}, 10, 7),
        ({"max_epochs": 3}, 10, 30),
        ({"max_epochs": 3, "accumulate_grad_batches": 4}, 10, 9),
        ({"max_epochs": 3, "limit_train_batches": 4}, 10, 12),
        ({"max_epochs": 3, "limit_train_batches": 40}, 10, 30),
        ({"max_epochs": 3, "limit_train_batches": 0.25}, 10, 6),
        ({"max_epochs": 3, "max_steps": 7}, 10, 7),
        ({"max_epochs": 3, "max_steps": 70}, 10, 30),
        ({"max_epochs": -1, "max_steps": 70}, 10, 70),
        ({"max_epochs": -1}, 10, None),
        ({"max_epochs": 3}, None, None),
        ({"max_epochs": 3, "max_steps": 70}, None, 70),
        # An accumulation that changes is counted epoch by epoch.
        ({"max_epochs": 5, "callbacks": [GradientAccumulationScheduler({1: 2, 2: 3, 7: 5})]}, 10, 10 + 5 + 3 * 4),
    ],
)
def test_a_run_ends_at_the_first_of_its_limits(changes, batches, expected):
    assert run_steps(trainer(**changes), batches) == expected


def test_the_length_of_a_run_follows_the_options_of_the_trainer():
    found = RunLength.of(trainer(max_epochs=2, limit_train_batches=7, accumulate_grad_batches=3), 10)
    assert found == RunLength(batches_per_epoch=7, accumulate_grad_batches=3, total_steps=6)
    changing = [GradientAccumulationScheduler({1: 2})]
    assert RunLength.of(trainer(max_epochs=5, callbacks=changing), 10).accumulate_grad_batches is None


class Counting(Ledger):
    """Records epoch, batch and optimiser step of each batch."""

    def training_step(self, batch, batch_idx):
        self.rows.append((self.current_epoch, batch_idx, self.global_step))
        return self.layer(torch.ones(1)).sum()


@pytest.mark.filterwarnings(*LIGHTNING_WARNINGS)
@pytest.mark.parametrize(
    "options",
    [
        {"max_epochs": 3},
        {"max_epochs": 3, "accumulate_grad_batches": 4},
        {"max_epochs": 3, "accumulate_grad_batches": 5},
        {"max_epochs": 2, "accumulate_grad_batches": 20},
        {"max_epochs": 3, "accumulate_grad_batches": 2, "limit_train_batches": 5},
        {"max_epochs": 3, "accumulate_grad_batches": 2, "limit_train_batches": 0.5},
        {"max_epochs": 5, "accumulate_grad_batches": 4, "max_steps": 7},
    ],
)
def test_every_batch_has_the_optimiser_step_that_lightning_counts(options):
    module, fit = Counting(rows_of=None), quiet_trainer(**options)
    fit.fit(module, torch.utils.data.DataLoader(torch.arange(10)))
    run = RunLength.of(fit, 10)
    assert len(module.rows) >= 9
    assert [step for _, _, step in module.rows] == [run.step_of(epoch, batch) for epoch, batch, _ in module.rows]
    assert fit.global_step == run.total_steps
    assert all(after - before in (0, 1) for (_, _, before), (_, _, after) in pairwise(module.rows))
