"""Ranks, epochs and resuming, on a sampler simple enough to check by eye."""

import numpy as np
import pytest
from lightning.fabric.utilities.data import _set_sampler_epoch
from torch.utils.data import DataLoader

from embeddings.common import OptionError
from embeddings.data.samplers.base import BatchSampler, PlanEntry, Rows


class CountingSampler(BatchSampler):
    """Three steps an epoch; rows count on through steps and epochs."""

    @property
    def num_steps(self) -> int:
        return 3

    def global_batch(self, epoch: int, step: int) -> tuple[Rows, Rows]:
        first = (epoch * 3 + step) * self.global_batch_size
        return np.arange(first, first + self.global_batch_size), self.draw_keys(epoch, step)


def rows_of(sampler: BatchSampler) -> list[list[int]]:
    return [[entry.row for entry in batch] for batch in sampler]


def test_ranks_take_consecutive_slices_of_the_same_batches() -> None:
    assert rows_of(CountingSampler(4)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert rows_of(CountingSampler(2, num_replicas=2, rank=0)) == [[0, 1], [4, 5], [8, 9]]
    assert rows_of(CountingSampler(2, num_replicas=2, rank=1)) == [[2, 3], [6, 7], [10, 11]]


def test_draw_keys_belong_to_the_position_whatever_the_number_of_ranks() -> None:
    whole = list(CountingSampler(4, seed=5))
    halves = [list(CountingSampler(2, seed=5, num_replicas=2, rank=rank)) for rank in (0, 1)]
    assert whole == [first + second for first, second in zip(*halves, strict=True)]
    assert all(isinstance(entry, PlanEntry) for entry in whole[0])


def test_draw_keys_differ_by_seed_epoch_and_position_and_are_not_negative() -> None:
    sampler, other = CountingSampler(64, seed=1), CountingSampler(64, seed=2)
    keys = np.concatenate([sampler.draw_keys(0, 0), sampler.draw_keys(0, 1), sampler.draw_keys(1, 0)])
    keys = np.concatenate([keys, other.draw_keys(0, 0)])
    assert len(np.unique(keys)) == 256
    assert keys.min() >= 0


def test_iteration_begins_at_the_start_and_the_length_stays_that_of_the_epoch() -> None:
    sampler = CountingSampler(2)
    sampler.start = 2
    assert rows_of(sampler) == [[4, 5]]
    assert len(sampler) == 3


def test_another_epoch_begins_at_its_first_step_and_the_same_epoch_keeps_its_place() -> None:
    sampler = CountingSampler(2)
    sampler.start = 2
    sampler.set_epoch(0)
    assert sampler.start == 2
    sampler.set_epoch(1)
    assert rows_of(sampler)[0] == [6, 7]


def test_a_resumed_plan_goes_forward_only() -> None:
    sampler = CountingSampler(2)
    sampler.resume(2, 1)
    sampler.set_epoch(1)
    assert rows_of(sampler) == [[14, 15], [16, 17]]
    sampler.set_epoch(3)
    assert rows_of(sampler)[0] == [18, 19]


def test_the_epoch_is_set_by_the_call_that_lightning_makes() -> None:
    sampler = CountingSampler(2)
    loader = DataLoader(range(100), batch_sampler=sampler, collate_fn=list)
    _set_sampler_epoch(loader, 4)
    assert sampler.epoch == 4


def test_the_place_is_that_of_the_process_group_once_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = CountingSampler(2)
    assert sampler.place == (0, 1)
    for name, value in (("is_initialized", True), ("get_rank", 1), ("get_world_size", 2)):
        monkeypatch.setattr(f"torch.distributed.{name}", lambda value=value: value)
    assert sampler.place == (1, 2)
    assert rows_of(sampler)[0] == [2, 3]


def test_impossible_numbers_are_refused_in_one_line() -> None:
    with pytest.raises(OptionError, match=r"data\.batch_size must be >= 1, got 0"):
        CountingSampler(0)
    with pytest.raises(OptionError, match="goes with num_replicas"):
        CountingSampler(1, rank=0)


def test_whole_batches_are_counted_and_refused_where_no_source_fills_one() -> None:
    sampler = CountingSampler(2, num_replicas=2, rank=1)
    assert sampler.whole_batches([4, 7, 3, 8], 4) == [1, 1, 0, 2]
    with pytest.raises(OptionError, match=r"the 3 rows of the largest source \(batch_size x 2 ranks\), got 2; lower"):
        sampler.whole_batches([1, 3], 4)
    with pytest.raises(OptionError, match="the 1 rows of the largest source, got 2"):
        sampler.whole_batches([1], 2)


def test_sources_that_fill_no_batch_are_named_in_one_line() -> None:
    sampler = CountingSampler(2)
    assert sampler.left_out([4, 5], ["a", "b"], 4) == sampler.remarks() == []
    (line,) = sampler.left_out([4, 3, 9, 1], ["a", "b", "c", "d"], 4)
    assert line == "sources with fewer rows than a batch of 4 are not trained on: b (3), d (1)"


def test_a_sampler_that_keeps_nothing_beside_the_sources_suits_any() -> None:
    assert CountingSampler(4).check_sources(["a", "b"]) is None


def test_a_saved_plan_is_the_same_or_refused_by_the_first_field_that_differs() -> None:
    saved = CountingSampler(4, seed=5).plan_fields()
    CountingSampler(2, seed=5, num_replicas=2, rank=1).check_same_plan(saved)
    with pytest.raises(OptionError, match=r"data seed must be 5 as in the checkpoint .*, got 6; restore it"):
        CountingSampler(2, seed=6).check_same_plan(saved)
    with pytest.raises(OptionError, match=r"data plan_version must be 1 .*; resume by the library that saved it"):
        CountingSampler(4, seed=5).check_same_plan({**saved, "plan_version": 1})
