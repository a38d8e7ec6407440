"""The laws of a batch sampler, and which source each batch is of."""

import random
import time
import tracemalloc
from collections import Counter
from fractions import Fraction
from itertools import accumulate, chain
from typing import Any

import numpy as np
import pytest
from lightning.fabric.utilities.data import _set_sampler_epoch
from torch.utils.data import DataLoader

from embeddings.common import OptionError
from embeddings.data.samplers import HomogeneousBatchSampler, SourceIdentity
from embeddings.data.samplers.base import PlanEntry, source_parts

SIZES = [42, 9, 23, 4]
PLANS: dict[str, dict[str, Any]] = {
    "size": {},
    "cooled": {"temperature": 0.3},
    "uniform": {"proportions": "uniform"},
    "given": {"proportions": "given", "weights": [1, 2, 3, 0.7]},
}


def make(batch_size: int = 4, **options: Any) -> HomogeneousBatchSampler:
    return HomogeneousBatchSampler(options.pop("sizes", SIZES), batch_size, **options)


def rows_of(sampler: HomogeneousBatchSampler, epoch: int = 0) -> list[list[int]]:
    sampler.set_epoch(epoch)
    return [[entry.row for entry in batch] for batch in sampler]


def sources_of(rows: list[int], sizes: list[int] = SIZES) -> set[int]:
    return set(np.searchsorted(np.cumsum(sizes), rows, side="right").tolist())


def sequence(sampler: HomogeneousBatchSampler, epoch: int = 0) -> list[int]:
    """The source of each step."""
    return [sampler.source_batch(epoch, step)[0] for step in range(len(sampler))]


@pytest.mark.parametrize("epoch", [0, 1, 5])
@pytest.mark.parametrize("options", PLANS.values(), ids=PLANS)
def test_ranks_are_disjoint_of_one_source_and_together_the_plan_of_one_process(
    options: dict[str, Any], epoch: int
) -> None:
    sizes = [*SIZES[:3], 6]
    whole = rows_of(make(6, sizes=sizes, **options), epoch)
    ranks = [rows_of(make(2, sizes=sizes, num_replicas=3, rank=rank, **options), epoch) for rank in range(3)]
    assert len(whole) == 42 // 6 + 9 // 6 + 23 // 6 + 1
    for step, batch in enumerate(whole):
        assert batch == list(chain(*(rank[step] for rank in ranks)))
        assert len(sources_of(batch, sizes)) == 1
    seen = [set(chain(*rank)) for rank in ranks]
    assert sum(map(len, seen)) == len(set.union(*seen)) == 6 * len(whole)


@pytest.mark.parametrize("batch_size", [1, 3, 4])
@pytest.mark.parametrize("options", PLANS.values(), ids=PLANS)
def test_the_length_is_exact_and_every_batch_is_full(options: dict[str, Any], batch_size: int) -> None:
    sampler = make(batch_size, **options)
    batches = rows_of(sampler)
    assert len(sampler) == len(batches) == sum(size // batch_size for size in SIZES)
    assert all(len(batch) == batch_size for batch in batches)


@pytest.mark.parametrize("options", PLANS.values(), ids=PLANS)
def test_an_epoch_holds_no_row_twice_and_leaves_out_less_than_a_batch_of_each_source(options: dict[str, Any]) -> None:
    left_out = set()
    for epoch in range(8):
        rows = list(chain(*rows_of(make(**options), epoch)))
        assert len(rows) == len(set(rows))
        missing = frozenset(range(sum(SIZES))) - set(rows)
        counts = Counter(next(iter(sources_of([row]))) for row in missing)
        assert [counts[source] for source in range(4)] == [42 % 4, 9 % 4, 23 % 4, 4 % 4]
        left_out.add(missing)
    assert len(left_out) >= 7


@pytest.mark.parametrize("options", PLANS.values(), ids=PLANS)
def test_seed_and_epoch_decide_the_batches_and_the_order_of_the_sources(options: dict[str, Any]) -> None:
    assert list(make(seed=3, **options)) == list(make(seed=3, **options))
    assert rows_of(make(seed=3, **options)) != rows_of(make(seed=4, **options))
    assert rows_of(make(seed=3, **options), 0) != rows_of(make(seed=3, **options), 1)
    assert sequence(make(seed=3, **options)) != sequence(make(seed=4, **options))
    assert sequence(make(seed=3, **options), 0) != sequence(make(seed=3, **options), 1)


def test_the_next_epoch_differs_through_the_call_that_lightning_makes() -> None:
    sampler = make()
    loader = DataLoader(RowEcho(), batch_sampler=sampler, collate_fn=list)
    first = list(loader)
    _set_sampler_epoch(loader, 1)
    assert first != list(loader)
    _set_sampler_epoch(loader, 0)
    assert list(loader) == first


def test_any_batch_is_found_without_the_ones_before_it() -> None:
    whole = list(make(temperature=0.3, seed=1))
    for step in (len(whole) - 1, 0, 7):
        sampler = make(temperature=0.3, seed=1)
        sampler.resume(0, step)
        assert next(iter(sampler)) == whole[step]


def test_another_batch_size_is_planned_anew() -> None:
    sampler = make(2)
    assert len(rows_of(sampler)) == 38
    sampler.batch_size = 4
    assert rows_of(sampler) == rows_of(make(4))


def tick_by_tick(batches: list[int], parts: list[float]) -> list[list[int]]:
    """The stretches of an epoch by brute force: sources emptied side by side, each at the speed of its part.

    Batch k of a source is due in the middle of its time; a stretch ends where a source's time is over.
    """
    due = sorted(
        (Fraction(2 * k + 1, 2) / Fraction(part), source)
        for source, (count, part) in enumerate(zip(batches, parts, strict=True))
        for k in range(count)
    )
    ends = sorted({Fraction(count) / Fraction(part) for count, part in zip(batches, parts, strict=True)})
    starts = [Fraction(0), *ends[:-1]]
    return [[source for time, source in due if start < time <= end] for start, end in zip(starts, ends, strict=True)]


@pytest.mark.parametrize("sizes", [SIZES, [4, 4, 4], [400, 30, 10, 5], [7]])
@pytest.mark.parametrize("options", [*PLANS.values(), {"temperature": 0.0}, {"temperature": 0.7}])
def test_the_sources_are_those_of_a_simulation_batch_by_batch(sizes: list[int], options: dict[str, Any]) -> None:
    if "weights" in options:
        options = {**options, "weights": options["weights"][: len(sizes)]}
    batches = [size // 4 for size in sizes]
    stretches = tick_by_tick(batches, list(source_parts(batches, **options)))
    assert [source for stretch in stretches for source in stretch].count(0) == batches[0]
    sampler = make(sizes=sizes, **options)
    found, ends = sequence(sampler), list(accumulate(map(len, stretches)))
    assert sampler.num_steps == ends[-1]
    for start, end, stretch in zip([0, *ends], ends, stretches, strict=False):
        assert sorted(found[start:end]) == sorted(stretch)
    numbers = [sampler.source_batch(0, step) for step in range(len(sampler))]
    assert sorted(numbers) == [(source, number) for source, count in enumerate(batches) for number in range(count)]


def test_the_sources_come_about_as_often_as_in_independent_draws_from_those_that_are_left() -> None:
    batches, parts, draws = [120, 60, 30], [1.0, 1.0, 2.0], random.Random(0)
    sampler = make(1, sizes=batches, proportions="given", weights=parts)
    steps = [40, 60, 90, 150]
    found, expected = np.zeros((4, 3)), np.zeros((4, 3))
    for epoch in range(4):
        order = sequence(sampler, epoch)
        found += [[order[:step].count(source) for source in range(3)] for step in steps]
    for _ in range(200):
        left, order = list(batches), []
        while len(order) < 150:
            weights = [part * (count > 0) for part, count in zip(parts, left, strict=True)]
            (source,) = draws.choices(range(3), weights)
            left[source] -= 1
            order.append(source)
        expected += [[order[:step].count(source) for source in range(3)] for step in steps]
    assert np.abs(found / 4 - expected / 200).max() < 4


def test_with_parts_as_large_as_the_sources_all_of_them_last_until_the_end() -> None:
    order = sequence(make(1, sizes=[400, 200, 100]))
    assert min(len(order) - order[::-1].index(source) for source in range(3)) > 650
    halves = [order[:350].count(source) for source in range(3)]
    assert np.abs(np.array(halves) - [200, 100, 50]).max() < 35


def test_an_exhausted_source_leaves_until_the_epoch_ends() -> None:
    sampler = make(1, sizes=[60, 6], proportions="uniform")
    for epoch in range(3):
        order = sequence(sampler, epoch)
        assert Counter(order[:12]) == {0: 6, 1: 6}
        assert set(order[12:]) == {0}


def test_a_far_step_of_a_large_plan_costs_what_a_near_one_does_and_nothing_a_row() -> None:
    sizes = [6_000_000_000, 3_000_000_000, 1_000_000_000, *range(10_000, 20_000, 100)]
    seconds = {}
    for step in (10, 1_000_000):
        tracemalloc.start()
        sampler = HomogeneousBatchSampler(sizes, 64, temperature=0.3)
        sampler.resume(0, step)
        started = time.process_time()
        batch = next(iter(sampler))
        seconds[step] = time.process_time() - started
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert len(batch) == 64
        assert peak < 500_000
    assert max(seconds.values()) < 0.02


def test_what_the_plan_depends_on_is_plain_and_does_not_name_the_rank() -> None:
    first, second = (make(2, num_replicas=2, rank=rank).plan_fields() for rank in (0, 1))
    assert first == second == make(4).plan_fields()
    assert all(isinstance(value, int | str) for value in first.values())
    plans = [make(4, **options).plan_fields() for options in PLANS.values()]
    assert len({tuple(plan.items()) for plan in plans}) == len(PLANS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 43}, r"must not exceed the 42 rows of the largest source, got 43; lower it"),
        (
            {"batch_size": 22, "num_replicas": 2, "rank": 0},
            r"the 42 rows of the largest source \(batch_size x 2 ranks\)",
        ),
        ({"batch_size": 0}, r"data\.batch_size must be >= 1"),
        ({"sizes": []}, r"data\.sources must each have rows"),
        ({"sizes": [3, 0]}, r"data\.sources must each have rows"),
        ({"temperature": 2.0}, "must be from 0 to 1"),
        ({"temperature": 0.5, "proportions": "uniform"}, "cannot take effect with proportions 'uniform'"),
        ({"weights": [1, 2, 3, 4]}, "cannot take effect with proportions 'size'"),
        ({"weights": [1, 1]}, "one for each of the 4 sources"),
        ({"weights": [1, 1, 1, 0], "proportions": "given"}, "must be > 0 and finite"),
    ],
)
def test_impossible_options_are_refused_in_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message) as raised:
        make(**options)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("options", PLANS.values(), ids=PLANS)
def test_a_source_that_fills_no_batch_is_left_out_on_every_rank_and_the_laws_hold(options: dict[str, Any]) -> None:
    """Sources of 9 and 4 rows beside batches of 12: the plan is that of the other two alone."""
    names = [SourceIdentity(name, "key") for name in ("a", "small", "c", "smaller")]
    ranks = [make(4, num_replicas=3, rank=rank, **options) for rank in range(3)]
    for sampler in ranks:
        sampler.identify(names)
        assert sampler.remarks() == [
            "sources with fewer rows than a batch of 12 are not trained on: small (9), smaller (4)"
        ]
        assert len(sampler) == 42 // 12 + 23 // 12
    for epoch in range(4):
        whole = rows_of(make(12, **options), epoch)
        assert [list(chain(*parts)) for parts in zip(*(rows_of(rank, epoch) for rank in ranks), strict=True)] == whole
        assert {source for batch in whole for source in sources_of(batch)} == {0, 2}
        assert all(len(sources_of(batch)) == 1 for batch in whole)
        rows = list(chain(*whole))
        assert len(rows) == len(set(rows)) == 12 * 4
    large = {**options, "weights": [1, 3]} if "weights" in options else options
    alone = sequence(make(12, sizes=[42, 23], **large))
    assert sorted(alone) == sorted([0, 1][source == 2] for source in sequence(make(12, **options)))


def test_nothing_is_remarked_where_every_source_fills_a_batch() -> None:
    sampler = make(4)
    sampler.identify([SourceIdentity(name, "key") for name in "abcd"])
    assert sampler.remarks() == []


class RowEcho:
    """A data set that answers with what it was asked for."""

    def __getitems__(self, entries: list[PlanEntry]) -> list[tuple[int, int]]:
        return [tuple(entry) for entry in entries]
