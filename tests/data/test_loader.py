"""A loader that was killed hands over the very next batch, however often and whenever."""

import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from embeddings.common import InputError, OptionError
from embeddings.data.datamodule import ResumableLoader
from embeddings.data.samplers import BlendedBatchSampler
from embeddings.data.samplers.base import PlanEntry
from tests.data.killed_runs import LIGHTNING_WARNINGS, Ledger, killed_run


class RowEcho:
    """A data set that answers with the row it was asked for."""

    def __getitem__(self, entry: PlanEntry) -> int:
        return entry.row


def make(batch_size: int = 4, num_workers: int = 0, **options: Any) -> ResumableLoader:
    sampler = BlendedBatchSampler([15, 9], batch_size, seed=1, **options)
    return ResumableLoader(RowEcho(), sampler, torch.tensor, num_workers=num_workers)


def epochs(loader: ResumableLoader, count: int) -> list[list[list[int]]]:
    return [[batch.tolist() for batch in loader] for _ in range(count)]


def flat(count: int = 4) -> list[list[int]]:
    return [batch for epoch in epochs(make(), count) for batch in epoch]


def take(loader: ResumableLoader, count: int) -> Iterator[list[int]]:
    """Some batches, going on to the next epoch where one ends."""
    while count:
        for batch in loader:
            yield batch.tolist()
            count -= 1
            if not count:
                return


class BatchEcho(RowEcho):
    """The same for a whole batch at once."""

    def __getitems__(self, entries: list[PlanEntry]) -> list[int]:
        return [-1 - entry.row for entry in entries]


def test_a_data_set_that_can_reads_a_batch_at_once() -> None:
    sampler = BlendedBatchSampler([15, 9], 4, seed=1)
    assert [batch.tolist() for batch in ResumableLoader(BatchEcho(), sampler, torch.tensor)] == [
        [-1 - row for row in batch] for batch in epochs(make(), 1)[0]
    ]


def test_iterating_again_goes_on_with_the_next_epoch() -> None:
    first, second = epochs(make(), 2)
    assert len(first) == len(second) == len(make()) == 6
    assert first != second


def test_setting_the_epoch_and_going_on_by_itself_agree() -> None:
    loader, by_hand = make(), []
    for epoch in range(3):
        loader.batch_sampler.set_epoch(epoch)
        by_hand.append([batch.tolist() for batch in loader])
    assert by_hand == epochs(make(), 3)


@pytest.mark.parametrize("stops", [[1, 2, 2], [6, 1, 5], [13, 4, 3], [5, 1, 12]])
def test_three_resumes_give_the_batches_of_one_run(stops: list[int]) -> None:
    seen, state = [], None
    for stop in stops:
        loader = make()
        if state is not None:
            loader.load_state_dict(state)
        seen += list(take(loader, stop))
        state = loader.state_dict()
    assert seen == flat()[: sum(stops)]


def test_workers_that_ran_ahead_do_not_count_and_change_nothing() -> None:
    loader = make(num_workers=2)
    seen = list(take(loader, 8))
    state = loader.state_dict()
    assert (state["epoch"], state["delivered"]) == (1, 2)
    resumed = make(num_workers=1)
    resumed.load_state_dict(state)
    assert seen + list(take(resumed, 7)) == flat()[:15]


def test_an_epoch_left_in_its_middle_is_left_for_good_when_another_is_set() -> None:
    for num_workers in (0, 1):
        loader = make(num_workers=num_workers)
        list(take(loader, 2))
        loader.batch_sampler.set_epoch(1)
        assert [batch.tolist() for batch in loader] == epochs(make(), 2)[1]


def test_a_state_loaded_after_iter_counts() -> None:
    loader = make()
    iterator = iter(loader)
    source = make()
    list(take(source, 9))
    loader.load_state_dict(source.state_dict())
    assert next(iterator).tolist() == flat()[9]


def test_the_global_random_state_is_left_alone() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    epochs(make(), 2)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_state_is_plain_and_the_same_on_every_rank() -> None:
    states = []
    for rank in (0, 1):
        loader = make(2, num_replicas=2, rank=rank)
        list(take(loader, 3))
        states.append(loader.state_dict())
    whole = make(4)
    list(take(whole, 3))
    assert states[0] == states[1] == whole.state_dict()


@pytest.mark.parametrize(
    ("options", "field"), [({"batch_size": 2}, "global_batch_size"), ({"proportions": "uniform"}, "proportions")]
)
def test_a_state_of_another_plan_is_refused_by_the_field_that_differs(options: dict[str, Any], field: str) -> None:
    with pytest.raises(OptionError, match=f"data {field} must be .* as in the checkpoint"):
        make(**options).load_state_dict(make().state_dict())


def test_a_state_of_an_older_order_is_refused_and_so_is_a_field_that_only_one_has() -> None:
    state = make().state_dict()
    older = state | {"plan": {name: value for name, value in state["plan"].items() if name != "plan_version"}}
    with pytest.raises(OptionError, match=r"data plan_version must be None .* resume by the library that"):
        make().load_state_dict(older)
    unknown = state | {"plan": state["plan"] | {"level": 3}}
    with pytest.raises(OptionError, match=r"data level must be 3 as in the checkpoint .*, got None; restore it"):
        make().load_state_dict(unknown)
    make().load_state_dict(state)


def test_a_state_under_other_weights_is_refused_and_under_the_same_ratios_taken() -> None:
    state = make(proportions="given", weights=[1, 9]).state_dict()
    with pytest.raises(OptionError, match=r"data parts must be '0\.1,0\.9' as in the checkpoint .* got '0\.9,0\.1'"):
        make(proportions="given", weights=[9, 1]).load_state_dict(state)
    make(proportions="given", weights=[2, 18]).load_state_dict(state)


@pytest.mark.filterwarnings(*LIGHTNING_WARNINGS)
@pytest.mark.parametrize(
    ("limits", "stops"),
    [
        ({"max_epochs": 4}, [3, 5, 15]),
        ({"max_epochs": 4}, [14, 16, 17]),
        ({"max_epochs": -1, "max_steps": 20}, [3, 5, 15]),
        ({"max_epochs": -1, "max_steps": 24}, [6, 12, 18]),
    ],
)
def test_a_training_killed_three_times_sees_the_plan_once(
    tmp_path: Path, limits: dict[str, int], stops: list[int]
) -> None:
    seen = killed_run(tmp_path, stops, lambda: Ledger(lambda batch: batch.tolist()), make, limits)
    assert len(seen) == limits.get("max_steps", 24)
    assert seen == flat()[: len(seen)]


@pytest.mark.filterwarnings(*LIGHTNING_WARNINGS)
def test_epochs_cut_short_by_the_trainer_begin_at_the_start_of_their_plan(tmp_path: Path) -> None:
    limits = {"max_epochs": 3, "limit_train_batches": 4}
    seen = killed_run(tmp_path, [2, 3, 9], lambda: Ledger(lambda batch: batch.tolist()), make, limits)
    assert seen == [batch for epoch in epochs(make(), 3) for batch in epoch[:4]]


class Refusing:
    """A data set with one row that cannot be used."""

    def __init__(self, row: int, error: Exception) -> None:
        self.row, self.error = row, error

    def __getitem__(self, entry: PlanEntry) -> int:
        if entry.row == self.row:
            raise self.error
        return entry.row


FAULTS = [
    InputError("train.jsonl:17", "field 'query' is missing", "add it"),
    OptionError("data.text.query_max_length", 8, "must exceed the prompt", "raise it"),
    PermissionError(13, "Permission denied", "rows.arrow"),
]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("error", FAULTS, ids=lambda error: type(error).__name__)
def test_a_fault_of_the_data_arrives_from_a_worker_as_from_the_loop_itself(error: Exception, num_workers: int) -> None:
    plan, seen = epochs(make(), 1)[0], []
    loader = ResumableLoader(
        Refusing(plan[3][1], error), BlendedBatchSampler([15, 9], 4, seed=1), torch.tensor, num_workers=num_workers
    )
    others = multiprocessing.active_children()
    with pytest.raises(type(error)) as raised:
        seen.extend(batch.tolist() for batch in loader)
    assert set(multiprocessing.active_children()) <= set(others)
    assert type(raised.value) is type(error)
    assert str(raised.value) == str(error)
    assert seen == plan[:3]
    assert loader.state_dict()["delivered"] == 3
