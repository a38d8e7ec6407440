"""The laws of all batch samplers: ranks, length, seed and epoch, random access, resuming, workers, and plan fields."""

from itertools import chain

import numpy as np
import pytest
from lightning.fabric.utilities.data import _set_sampler_epoch
from torch.utils.data import DataLoader

from embeddings.common import BatchNeeds, OptionError
from embeddings.data import ResumableLoader
from embeddings.data.samplers.base import BlendedBatchSampler, HomogeneousBatchSampler, RunLength, SourceIdentity
from embeddings.data.samplers.clustered import ClusteredBatchSampler
from embeddings.data.samplers.curriculum import CurriculumBatchSampler
from tests.data.cluster_folders import write_clusters
from tests.data.rows import placed
from tests.helpers.refusals import refused

SIZES = [50, 7, 27]
SAMPLERS = {
    "blended": (BlendedBatchSampler, {}),
    "homogeneous": (HomogeneousBatchSampler, {}),
    "curriculum": (CurriculumBatchSampler, {"order": "random"}),
    "clustered": (ClusteredBatchSampler, {}),
    "own blocks": (ClusteredBatchSampler, {}),
}


@pytest.fixture(scope="module")
def clusters(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clusters")
    for number, size in enumerate(SIZES):
        ids = np.random.default_rng(number).integers(0, 9, size).tolist()
        write_clusters(folder / str(number), ids, 9, f"key {number}")
    return str(folder)


@pytest.fixture(params=SAMPLERS)
def make(request, clusters):
    kind, fixed = SAMPLERS[request.param]
    fixed = fixed | ({"clusters": clusters} if kind is ClusteredBatchSampler else {})

    def maker(batch_size=6, sizes=SIZES, **options):
        sampler = kind(sizes, batch_size, **fixed | options)
        sampler.identify([SourceIdentity(str(number), f"key {number}") for number in range(len(SIZES))])
        sampler.set_needs(BatchNeeds(gathers_candidates=request.param != "own blocks"))
        sampler.set_run(RunLength(12, total_steps=24))
        return sampler

    return maker


def entries_of(sampler, epoch=0):
    sampler.set_epoch(epoch)
    return list(sampler)


class Echo:
    """A data set that returns the requested entries."""

    def __getitems__(self, entries):
        return [tuple(entry) for entry in entries]


@pytest.mark.parametrize("epoch", [0, 1, 5])
def test_ranks_are_disjoint_and_together_one_global_batch(make, epoch):
    whole, ranks = placed(make(6), 0, 3), [placed(make(6), rank, 3) for rank in range(3)]
    seen = [entries_of(sampler, epoch) for sampler in ranks]
    for step, parts in enumerate(zip(*seen, strict=True)):
        rows, draws = whole.global_batch(epoch, step), whole.draw_keys(epoch, step)
        found = list(chain(*parts))
        assert [entry.row for entry in found] == rows.tolist()
        assert [entry.draw for entry in found] == draws.tolist()
        assert len(set(rows.tolist())) == 18
        assert len({entry.rule for entry in found}) == 1
    if "blocks_per_step" not in whole.plan_fields():
        assert entries_of(make(18), epoch) == [list(chain(*parts)) for parts in zip(*seen, strict=True)]


def test_the_length_is_exact_every_batch_is_full_and_no_row_is_repeated(make):
    for size in (1, 6, 7):
        batches = entries_of(make(size), 2)
        assert len(batches) == len(make(size))
        assert {len(batch) for batch in batches} == {size}
        rows = [entry.row for batch in batches for entry in batch]
        assert len(rows) == len(set(rows))
        assert sum(SIZES) - len(rows) < size * len(SIZES)


def test_a_batch_depends_on_seed_epoch_and_step_and_not_on_earlier_batches(make):
    batches = entries_of(make(), 3)
    assert batches == entries_of(make(), 3) != entries_of(make(), 2)
    assert entries_of(make(seed=1), 3) != batches
    for step in (len(batches) - 1, 0, 4):
        sampler = make()
        sampler.resume(3, step)
        assert list(sampler) == batches[step:]
    # With the call that Lightning uses.
    loader = DataLoader(Echo(), batch_sampler=make(), collate_fn=list)
    first = list(loader)
    _set_sampler_epoch(loader, 1)
    assert first != list(loader)
    _set_sampler_epoch(loader, 0)
    assert list(loader) == first


@pytest.mark.parametrize("num_workers", [0, 2])
def test_three_resumes_and_any_number_of_workers_give_the_batches_of_one_run(make, num_workers):
    whole = [list(map(tuple, batch)) for epoch in range(3) for batch in entries_of(make(), epoch)]
    length, seen, state = len(make()), [], None
    for stop in (2, length - 1, length + 3):
        loader = ResumableLoader(Echo(), make(), list, num_workers=num_workers)
        if state is not None:
            loader.load_state_dict(state)
        while len(seen) < stop:
            for batch in loader:
                seen.append(batch)
                if len(seen) == stop:
                    break
        state = loader.state_dict()
    assert seen == whole[: len(seen)]


def test_plan_fields_are_plain_and_do_not_name_the_rank(make):
    fields = [placed(make(3), rank, 2).plan_fields() for rank in range(2)]
    assert fields[0] == fields[1] != placed(make(3, seed=1), 0, 2).plan_fields()
    assert {type(value) for value in fields[0].values()} <= {int, str}


def test_an_empty_batch_is_refused(make):
    refused(OptionError, r"data\.batch_size must be >= 1", make, batch_size=0)
