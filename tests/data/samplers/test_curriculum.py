"""The laws of a batch sampler for a curriculum over the others."""

from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

import pytest
from lightning.fabric.utilities.data import _set_sampler_epoch
from torch.utils.data import DataLoader

from embeddings.common import BatchNeeds, InputError, OptionError
from embeddings.data import ResumableLoader
from embeddings.data.samplers import (
    BlendedBatchSampler,
    ClusteredBatchSampler,
    CurriculumBatchSampler,
    HomogeneousBatchSampler,
    SourceIdentity,
)
from embeddings.data.samplers.base import LevelRule, PlanEntry, RunLength
from tests.data.cluster_folders import write_clusters

SIZES = [40, 31]
NAMES = ["left", "right"]
Maker = Callable[..., CurriculumBatchSampler]


@pytest.fixture(scope="module")
def clusters(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("clusters")
    for name, size in zip(NAMES, SIZES, strict=True):
        write_clusters(folder / name, [row // 5 for row in range(size)], size // 5 + 1, f"key of {name}")
    return str(folder)


def test_needs_remarks_and_kinds_are_those_of_the_other_sampler(clusters: str) -> None:
    inner = partial(ClusteredBatchSampler, clusters=clusters)
    sampler = CurriculumBatchSampler(SIZES, 11, inner=inner, num_replicas=3, rank=0)
    sampler.identify([SourceIdentity(name, f"key of {name}") for name in NAMES])
    assert sampler.kinds() == {"CurriculumBatchSampler", "ClusteredBatchSampler"}
    assert sampler.num_steps == 1
    assert sampler.remarks() == ["sources with fewer rows than a batch of 33 are not trained on: right (31)"]
    sampler.set_needs(BatchNeeds(gathers_candidates=False))
    assert sampler.num_steps == (40 // 11 + 31 // 11) // 3
    assert sampler.remarks() == []


@pytest.fixture(params=["blended", "clustered", "homogeneous"])
def make(request: pytest.FixtureRequest, clusters: str) -> Maker:
    """Samplers over each of the others, three epochs long."""
    inner: Any = {
        "blended": BlendedBatchSampler,
        "clustered": partial(ClusteredBatchSampler, clusters=clusters),
        "homogeneous": partial(HomogeneousBatchSampler, temperature=0.3),
    }[request.param]

    def maker(batch_size: int = 4, **options: Any) -> CurriculumBatchSampler:
        sampler = CurriculumBatchSampler(SIZES, batch_size, **{"inner": inner, **options})
        sampler.identify([SourceIdentity(name, f"key of {name}") for name in NAMES])
        sampler.set_run(RunLength(len(sampler), total_steps=3 * len(sampler)))
        return sampler

    return maker


def entries_of(sampler: CurriculumBatchSampler | BlendedBatchSampler, epoch: int = 0) -> list[list[PlanEntry]]:
    sampler.set_epoch(epoch)
    return list(sampler)


@pytest.mark.parametrize("epoch", [0, 1, 2])
def test_ranks_are_disjoint_of_one_level_and_together_the_plan_of_one_process(make: Maker, epoch: int) -> None:
    whole = entries_of(make(6), epoch)
    ranks = [entries_of(make(2, num_replicas=3, rank=rank), epoch) for rank in range(3)]
    assert len(whole) >= 40 // 6 + 31 // 6
    for step, batch in enumerate(whole):
        assert batch == list(chain(*(rank[step] for rank in ranks)))
        assert len({entry.rule for entry in batch}) == 1
    rows = [{entry.row for batch in rank for entry in batch} for rank in ranks]
    assert sum(map(len, rows)) == len(set.union(*rows)) == 6 * len(whole)


@pytest.mark.parametrize("batch_size", [1, 3, 5, 31])
def test_the_length_is_exact_and_every_batch_is_full(make: Maker, batch_size: int) -> None:
    sampler = make(batch_size)
    batches = entries_of(sampler)
    assert len(sampler) == len(batches) == len(sampler.inner) > 0
    assert all(len(batch) == batch_size for batch in batches)


def test_the_rows_are_those_of_the_other_sampler(make: Maker) -> None:
    sampler = make(seed=3)
    for epoch in (0, 2):
        plain = entries_of(sampler.inner, epoch)
        assert [[entry._replace(rule=None) for entry in batch] for batch in entries_of(sampler, epoch)] == plain


def test_seed_and_epoch_decide_the_batches(make: Maker) -> None:
    assert entries_of(make(seed=3, order="random")) == entries_of(make(seed=3, order="random"))
    assert entries_of(make(seed=3)) != entries_of(make(seed=4))
    assert entries_of(make(seed=3), 0) != entries_of(make(seed=3), 1)


def test_the_next_epoch_differs_through_the_call_that_lightning_makes(make: Maker) -> None:
    loader = DataLoader(RowEcho(), batch_sampler=make(), collate_fn=list)
    first = list(loader)
    _set_sampler_epoch(loader, 1)
    assert first != list(loader)
    _set_sampler_epoch(loader, 0)
    assert list(loader) == first


def test_the_number_of_workers_changes_nothing(make: Maker) -> None:
    plain, forked = (
        list(DataLoader(RowEcho(), batch_sampler=make(9), collate_fn=list, num_workers=workers)) for workers in (0, 2)
    )
    assert len(plain) == 7
    assert plain == forked


@pytest.mark.parametrize("order", ["coarse_to_fine", "reverse", "random", "cumulative"])
def test_any_batch_is_found_without_the_ones_before_it(make: Maker, order: str) -> None:
    whole = entries_of(make(order=order), 2)
    for step in (len(whole) - 1, 0, 7):
        sampler = make(order=order)
        sampler.set_epoch(2)
        sampler.start = step
        assert next(iter(sampler)) == whole[step]


@pytest.mark.parametrize("stops", [[1, 2, 2], [17, 1, 5], [13, 4, 30]])
def test_three_resumes_give_the_batches_of_one_run(make: Maker, stops: list[int]) -> None:
    def loader() -> ResumableLoader:
        return ResumableLoader(RowEcho(), make(order="random"), list)

    seen, state = [], None
    for stop in stops:
        part = loader()
        if state is not None:
            part.load_state_dict(state)
        while stop:
            for batch in part:
                seen.append(batch)
                stop -= 1
                if not stop:
                    break
        state = part.state_dict()
    whole = loader()
    assert seen == [batch for _ in range(4) for batch in whole][: len(seen)]
    assert len(seen) == sum(stops)


def test_what_the_plan_depends_on_is_plain_and_does_not_name_the_rank(make: Maker) -> None:
    first, second = (make(2, num_replicas=2, rank=rank).plan_fields() for rank in (0, 1))
    assert first == second == make(4).plan_fields()
    assert all(isinstance(value, int | str) for value in first.values())
    assert first["sampler"] == f"CurriculumBatchSampler of {type(make().inner).__name__}"


@pytest.mark.parametrize(
    "change",
    [
        {"order": "reverse"},
        {"fractions": [0.4, 0.3, 0.2, 0.1]},
        {"total_steps": 99},
        {"missing_level": "coarser"},
        {"order": "fixed", "level": 2},
    ],
)
def test_a_run_under_another_curriculum_does_not_resume(make: Maker, change: dict[str, Any]) -> None:
    state = ResumableLoader(RowEcho(), make(), list).state_dict()
    with pytest.raises(OptionError, match="as in the checkpoint"):
        ResumableLoader(RowEcho(), make(**change), list).load_state_dict(state)


def test_a_run_that_counts_other_steps_does_not_resume() -> None:
    def loader(**run: Any) -> ResumableLoader:
        sampler = CurriculumBatchSampler([40], 4)
        sampler.set_run(RunLength(**{"batches_per_epoch": 10, "total_steps": 20, **run}))
        return ResumableLoader(RowEcho(), sampler, list)

    for name, value in (("accumulate_grad_batches", 2), ("total_steps", 30), ("batches_per_epoch", 8)):
        with pytest.raises(OptionError, match=f"data {name} must be .* as in the checkpoint"):
            loader(**{name: value}).load_state_dict(loader().state_dict())
    loader().load_state_dict(loader().state_dict())


def rules(run: RunLength, epochs: int, **options: Any) -> list[LevelRule]:
    sampler = CurriculumBatchSampler([40], 4, **options)
    sampler.set_run(run)
    return [sampler.level_rule(epoch, batch) for epoch in range(epochs) for batch in range(run.batches_per_epoch)]


def test_batches_of_one_update_have_one_level_and_an_epochs_last_update_may_have_fewer() -> None:
    """Ten batches in updates of four: four, four and two; six updates in all."""
    found = [rule.level for rule in rules(RunLength(10, 4, 6), 2)]
    assert found == [4] * 8 + [3] * 2 + [2] * 8 + [1] * 2


def test_only_cumulative_levels_keep_the_coarser_ones() -> None:
    run = RunLength(8, 1, 8)
    assert rules(run, 1, order="cumulative") == [LevelRule(level, True) for level in (4, 4, 3, 3, 2, 2, 1, 1)]
    assert rules(run, 1) == [LevelRule(level) for level in (4, 4, 3, 3, 2, 2, 1, 1)]
    assert set(rules(run, 1, order="fixed", level=3)) == {LevelRule(3)}
    assert not any(rule.cumulative for order in ("reverse", "random") for rule in rules(run, 1, order=order))


def test_the_levels_that_records_must_have() -> None:
    assert CurriculumBatchSampler([8], 2).levels == (1, 2, 3, 4)
    assert CurriculumBatchSampler([8], 2, fractions=[0.5, 0, 0.5, 0]).levels == (2, 4)
    assert CurriculumBatchSampler([8], 2, order="fixed", level=3).levels == (3,)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"order": "hardest_first"}, r"sampler\.order must be one of .*'reverse'.*, got 'hardest_first'"),
        ({"fractions": [0.5, 0.5]}, r"sampler\.fractions must be 4 numbers from 0 to 1, one for each level"),
        ({"fractions": [0.5, 0.2, 0.2, 0.2]}, r"sampler\.fractions must sum to 1, not 1\.1, got \[0\.5, 0\.2"),
        ({"fractions": [0.5, 0.5, 0.5, -0.5]}, r"sampler\.fractions must be 4 numbers from 0 to 1"),
        ({"fractions": [0.5, 0.5, 0.0, float("nan")]}, r"sampler\.fractions must be 4 numbers from 0 to 1"),
        ({"fractions": [0.25] * 4, "order": "fixed", "level": 1}, r"fractions cannot take effect with order fixed"),
        ({"order": "fixed"}, r"sampler\.level must be from 1 \(hardest\) to 4 .* with order fixed, got None"),
        ({"order": "fixed", "level": 5}, r"sampler\.level must be from 1 .* got 5"),
        ({"level": 2}, r"sampler\.level cannot take effect with order coarse_to_fine, got 2; set order: fixed"),
        ({"missing_level": "skip"}, r"sampler\.missing_level must be refuse or coarser, got 'skip'"),
        ({"total_steps": 0}, r"sampler\.total_steps must be >= 1, got 0"),
        ({"total_steps": 9, "order": "fixed", "level": 1}, r"total_steps cannot take effect with order fixed, got 9"),
        ({"batch_size": 41}, r"data\.batch_size must not exceed the 40 training rows"),
        ({"batch_size": 21, "num_replicas": 2, "rank": 0}, r"\(batch_size x 2 ranks\), got 21"),
        ({"batch_size": 0}, r"data\.batch_size must be >= 1"),
    ],
)
def test_impossible_options_are_refused_in_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message) as raised:
        CurriculumBatchSampler([40], **{"batch_size": 4, **options})
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("run", "options", "message"),
    [
        (RunLength(10), {}, r"sampler\.total_steps must be known .* got None; set trainer\.max_steps or max_epochs"),
        (RunLength(10, 1, 3), {}, r"sampler\.fractions gives level 2 none of the 3 optimiser steps"),
        (RunLength(10, 1, 3), {"order": "reverse"}, r"sampler\.fractions gives level 3 none of the 3 optimiser steps"),
        (RunLength(10, None, 20), {}, r"GradientAccumulationScheduler.* set trainer\.accumulate_grad_batches"),
    ],
)
def test_a_run_that_a_curriculum_does_not_fit_is_refused(run: RunLength, options: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        CurriculumBatchSampler([40], 4, **options).set_run(run)


def test_a_fixed_level_needs_no_length_and_a_trial_run_not_every_level() -> None:
    for run in (RunLength(10), RunLength(10, None, 20), RunLength(1, 1, 1)):
        sampler = CurriculumBatchSampler([40], 4, order="fixed", level=2)
        sampler.set_run(run)
        assert sampler.level_rule(3, 0) == LevelRule(2)
    CurriculumBatchSampler([40], 4).set_run(RunLength(1, 1, 1, is_trial=True))
    CurriculumBatchSampler([40], 4, total_steps=4).set_run(RunLength(10))


class RowEcho:
    """A data set that answers with what it was asked for."""

    def __getitem__(self, entry: PlanEntry) -> tuple[Any, ...]:
        return tuple(entry)


def test_the_other_samplers_files_are_checked_first_of_all(clusters: str) -> None:
    sampler = CurriculumBatchSampler(SIZES, 4, inner=partial(ClusteredBatchSampler, clusters=clusters))
    sampler.check_sources(NAMES)
    with pytest.raises(InputError, match="nowhere"):
        sampler.check_sources(["left", "nowhere"])
