"""The loader alone: epochs, resuming, workers, and errors of the data."""

import multiprocessing

import pytest
import torch

from embeddings.common import InputError, OptionError
from embeddings.data import BlendedBatchSampler, ResumableLoader
from tests.helpers.refusals import refused


class RowEcho:
    """A data set that returns the requested row numbers, and raises an error at one of them."""

    def __init__(self, row: int = -1, error: Exception | None = None) -> None:
        self.row, self.error = row, error

    def __getitems__(self, entries):
        rows = [entry.row for entry in entries]
        if self.error is not None and self.row in rows:
            raise self.error
        return rows


def make(batch_size=4, num_workers=0, rows=None, **options):
    sampler = BlendedBatchSampler([15, 9], batch_size, seed=1, **options)
    return ResumableLoader(rows or RowEcho(), sampler, torch.tensor, num_workers=num_workers)


def epochs(loader, count):
    return [[batch.tolist() for batch in loader] for _ in range(count)]


def flat(count=4):
    return [batch for epoch in epochs(make(), count) for batch in epoch]


def take(loader, count):
    """The next `count` batches, also across epochs."""
    while count:
        for batch in loader:
            yield batch.tolist()
            count -= 1
            if not count:
                return


def test_iterating_again_gives_the_next_epoch_with_or_without_set_epoch():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    first, second, third = epochs(make(), 3)
    assert torch.equal(torch.get_rng_state(), before)
    assert len(first) == len(second) == len(make()) == 6
    assert first != second
    loader, set_by_hand = make(), []
    for epoch in range(3):
        loader.batch_sampler.set_epoch(epoch)
        set_by_hand += epochs(loader, 1)
    assert set_by_hand == [first, second, third]


def test_setting_an_epoch_or_loading_a_state_ends_the_current_epoch():
    for num_workers in (0, 1):
        loader = make(num_workers=num_workers)
        list(take(loader, 2))
        loader.batch_sampler.set_epoch(1)
        assert epochs(loader, 1) == epochs(make(), 2)[1:]
    loader, source = make(), make()
    iterator = iter(loader)
    list(take(source, 9))
    loader.load_state_dict(source.state_dict())
    assert next(iterator).tolist() == flat()[9]


@pytest.mark.parametrize(
    ("options", "saved", "message"),
    [
        ({"batch_size": 2}, {}, "data global_batch_size must be 4 as in the checkpoint"),
        ({"proportions": "uniform"}, {}, "data proportions must be 'size' as in the checkpoint"),
        ({}, {"plan_version": None}, r"data plan_version must be None .* resume with the library version that"),
        (
            {"proportions": "given", "weights": [9, 1]},
            {"proportions": "given", "parts": "0.1,0.9"},
            r"data parts must be '0\.1,0\.9' as in the checkpoint .* got '0\.9,0\.1'",
        ),
        ({}, {"level": 3}, r"data level must be 3 as in the checkpoint .*, got None; restore it"),
    ],
)
def test_a_state_of_another_plan_is_refused_by_the_field_that_differs(options, saved, message):
    state = make().state_dict() | {"delivered": 3}
    state["plan"] = {name: value for name, value in (state["plan"] | saved).items() if value is not None}
    refused(OptionError, message, make(**options).load_state_dict, state)
    # At the start of a run, any plan may follow.
    make(batch_size=2).load_state_dict(make().state_dict())
    # Only the ratios of the weights matter.
    given = make(proportions="given", weights=[1, 9]).state_dict() | {"delivered": 3}
    make(proportions="given", weights=[2, 18]).load_state_dict(given)


ERRORS = [
    InputError("train.jsonl:17", "field 'query' is missing", "add it"),
    OptionError("data.text.query_max_length", 8, "must exceed the prompt", "raise it"),
    PermissionError(13, "Permission denied", "rows.arrow"),
]


@pytest.mark.parametrize(("error", "num_workers"), [(ERRORS[0], 0), *((error, 2) for error in ERRORS)])
def test_an_error_of_the_data_is_the_same_from_a_worker_and_from_the_main_process(error, num_workers):
    plan, seen = epochs(make(), 1)[0], []
    loader = make(num_workers=num_workers, rows=RowEcho(plan[3][1], error))
    others = multiprocessing.active_children()
    with pytest.raises(type(error)) as raised:
        seen.extend(batch.tolist() for batch in loader)
    assert set(multiprocessing.active_children()) <= set(others)
    assert type(raised.value) is type(error)
    assert str(raised.value) == str(error)
    assert seen == plan[:3]
    assert loader.state_dict()["delivered"] == 3
