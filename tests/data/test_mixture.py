import pickle

import pytest
from torch.utils.data import DataLoader

from embeddings.common import OptionError
from embeddings.data import Mixture, PlanEntry
from embeddings.data.samplers.base import LevelRule
from embeddings.data.table import Table
from tests.data.rows import dataset, graded, labelled, pairs


@pytest.fixture
def mixture(tmp_path):
    return Mixture(
        [
            dataset(tmp_path, pairs(3), name="one", weight=2.0),
            dataset(tmp_path, labelled(4, 4), name="two", conversion="class_by_example", in_batch_negatives=False),
            dataset(tmp_path, pairs(1, "three "), name="three"),
        ]
    )


def test_rows_of_all_sources_lie_one_after_another(mixture):
    assert len(mixture) == 12
    assert (mixture.names, mixture.sizes, mixture.weights) == (("one", "two", "three"), (3, 8, 1), (2.0, 1.0, 1.0))
    assert [mixture.source_of(row) for row in range(12)] == [0] * 3 + [1] * 8 + [2]


def test_an_example_is_its_sources_own_with_row_and_source_of_the_mixture(mixture):
    for row in range(12):
        example = mixture[PlanEntry(row, 7)]
        source = mixture.source_of(row)
        local = mixture.sources[source][PlanEntry(row - (0, 3, 11)[source], 7)]
        assert (example.row, example.source, example.draw) == (row, source, 7)
        assert (example.query, example.positives, example.negatives) == (local.query, local.positives, local.negatives)
        assert example.in_batch_negatives == (source != 1)


def test_a_batch_is_its_entries_one_by_one_in_their_order(mixture, monkeypatch):
    entries = [PlanEntry(row, 100 + place) for place, row in enumerate((11, 3, 0, 10, 3, 2, 0, 7))]
    expected = [mixture[entry] for entry in entries]
    monkeypatch.setattr(Table, "row", None)
    calls, rows = [], Table.rows
    monkeypatch.setattr(Table, "rows", lambda table, indices: calls.append(len(indices)) or rows(table, indices))
    assert mixture.__getitems__(entries) == expected
    assert sorted(calls) == [1, 3, 4]


@pytest.mark.parametrize("row", [-1, 12])
def test_a_row_outside_the_mixture_is_refused(mixture, row):
    with pytest.raises(IndexError, match=f"row {row} of 12"):
        mixture[PlanEntry(row, 0)]


def test_no_source_and_two_of_one_name_are_refused(mixture):
    with pytest.raises(OptionError, match=r"data\.sources must not be empty"):
        Mixture([])
    with pytest.raises(OptionError, match=r"data\.sources must have different names, got 'one'"):
        Mixture([mixture.sources[0], mixture.sources[0]])


def test_workers_give_the_examples_that_the_main_process_gives(mixture):
    entries = [PlanEntry(row, 100 + row) for row in range(12)]
    expected = [mixture[entry] for entry in entries]
    loader = DataLoader(
        mixture,
        batch_sampler=[entries[:5], entries[5:]],
        num_workers=2,
        collate_fn=list,
    )
    assert [example for batch in loader for example in batch] == expected


def test_a_mixture_is_pickled_without_its_data(mixture):
    assert pickle.loads(pickle.dumps(mixture))[PlanEntry(5, 1)] == mixture[PlanEntry(5, 1)]


def test_the_rule_of_levels_reaches_the_row(tmp_path):
    mixture = Mixture([dataset(tmp_path, pairs(2), name="plain"), dataset(tmp_path, graded(2), name="graded")])
    example = mixture[PlanEntry(3, 7, LevelRule(2))]
    assert (example.level, [negative.level for negative in example.negatives]) == (2, [2])
    assert len(mixture[PlanEntry(3, 7)].negatives) == 4
